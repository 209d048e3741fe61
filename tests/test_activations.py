"""Activations at home on the host or on NVMe: the bits of a run that leaves them on the device, and nothing left behind.

Words used here: **home**, **least**, **child** as in `models.py`. **at home**: with `Config(activations=...)` as "host" or
"nvme", or as "auto" with so little device memory that most leave it. **scenario**: a model and a loop over it; what it
yields are the losses (or whatever else has to be the same). **moved**: bytes over the edge "device->host".
**small ones too**: with the size below which activations stay set to one byte, so that awkward tensors can be small.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    at_home,
    differing,
    environment,
    in_child,
    least_host_memory,
    leftovers,
    loss_of,
    seeded,
    tokens,
    transformer,
)
from runs import adamw
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import native
from infinity.runtime import activation_store, saved_tensor

SEED = 70
LR = 1e-2
KIB, MIB = 1024, 1024 * 1024
AT_HOME = ("host", "nvme", "auto")
TYPED = (infinity.StorageError, infinity.CorruptionError)

pytestmark = pytest.mark.timeout(120)  # a hang is a failure, too

every_home = pytest.mark.parametrize("home", AT_HOME)
both_homes = pytest.mark.parametrize("home", ("host", "nvme"))

Loop = Callable[[nn.Module, torch.optim.Optimizer], Iterator[torch.Tensor]]
Scenario = tuple[Callable[[], nn.Module], Loop]


@pytest.fixture(autouse=True)
def no_hooks_left() -> Iterator[None]:
    """Whatever happened, torch's stack of saved-tensor hooks is as it was. What a failure left is collected here."""
    yield
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture
def small_ones_too(monkeypatch) -> None:
    monkeypatch.setattr(activation_store, "SMALLEST_NBYTES", 1)


def configuration(home: str, build: Callable[[], nn.Module], folder: Path, **more: Any) -> dict[str, Any]:
    """Everything at the tier that ``home`` names, under the least host memory; "auto" spills from the device."""

    def a_pair():
        model = build()
        return model, adamw(model, LR)

    if home == "device":
        return {"params": "device", "optimizer": "device", "activations": "device", **more}
    if home == "host":
        return {"params": "host", "optimizer": "host", "activations": "host", **more}
    if home == "auto":
        config = {"params": "device", "optimizer": "device", "activations": "auto", **more}
        model, _ = infinity.wrap_model(*a_pair(), config)
        return {"device_memory": infinity.stats(model).tiers["device"].planned_nbytes + spare(), **config}
    config = at_home("nvme", "nvme", folder, activations="nvme", **more)
    return {"host_memory": least_host_memory(*a_pair(), config), **config}


def spare() -> int:
    """Device memory that "auto" has for activations: for one or two of them."""
    return max(2 * KIB, 2 * activation_store.SMALLEST_NBYTES)


def moved(model: nn.Module) -> int:
    return infinity.stats(model).edges["device->host"].nbytes


def moved_in_a_forward(model: nn.Module, *args: Any) -> int:
    before = moved(model)
    model(*args)
    return moved(model) - before


def trained(scenario: Scenario, config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """What a scenario yields and leaves, with how much it moved. Peaks are held to the plan on the way."""
    build, loop = scenario
    model = seeded(SEED, build)
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), config)
    torch.manual_seed(SEED)
    found = {f"yield {i}": value.detach().clone() for i, value in enumerate(loop(model, optimizer))}
    for tier, account in infinity.stats(model).tiers.items():
        assert account.peak_nbytes <= account.planned_nbytes, f"{tier}: {account}"
        assert account.budget_nbytes is None or account.peak_nbytes <= account.budget_nbytes, f"{tier}: {account}"
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    return found, moved(model)


def assert_same_bits(scenario: Scenario, home: str, folder: Path, **more: Any) -> None:
    """The scenario with activations at home has the bits of the same on the device, and moved more to get there."""
    right, least_moved = trained(scenario, configuration("device", scenario[0], folder))
    found, has_moved = trained(scenario, configuration(home, scenario[0], folder, **more))
    assert all(value.isfinite().all() for value in right.values()), "NaN and infinity hide what is different"
    assert differing(found, right) == []
    assert has_moved > least_moved, "no activation left the device: this test says nothing"
    assert leftovers(folder) == []


def stepped(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def rows_of(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + step))


# ---------------------------------------------------------------------------------------------------------------------
# Models and loops
# ---------------------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 12, 24


class Between(nn.Module):
    """Two blocks, each a Linear, then ``middle``, then a Linear."""

    class Block(nn.Module):
        def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.first, self.second, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), middle

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.middle(self.first(x)))

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(middle) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def simply(make_input: Callable[[int], torch.Tensor], steps: int = 3) -> Loop:
    def loop(model, optimizer):
        for step in range(steps):
            yield stepped(optimizer, model(make_input(step)).square().mean())

    return loop


def between(middle: Callable[[torch.Tensor], torch.Tensor]) -> Scenario:
    return lambda: Between(middle), simply(lambda step: rows_of(step, ROWS, WIDTH))


def language(step: int, rows: int = 32) -> torch.Tensor:
    return tokens(SEED + step, rows=rows)


def a_transformer(**recompute: Any) -> Callable[[], nn.Module]:
    def build():
        model = transformer(SEED, blocks=2)
        model.around = recompute.get("around")
        for block in model.blocks:
            block.inside = recompute.get("inside")
        return model

    return build


def language_loop(model, optimizer):
    for step in range(3):
        yield stepped(optimizer, loss_of(model, language(step)))


KINDS = {"saved": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
RECOMPUTE = {"plain": {}} | {
    f"{kind} {where}": {name: settings for name in places}
    for kind, settings in KINDS.items()
    for where, places in {"around": ["around"], "inside": ["inside"], "both": ["around", "inside"]}.items()
}


@pytest.mark.parametrize("recompute", RECOMPUTE.values(), ids=RECOMPUTE)
@every_home
def test_a_transformer_with_dropout_and_recomputation(home, recompute, tmp_path):
    """Method: three steps with dropout and with torch.utils.checkpoint of either kind, each block, inside it, and both;
    what is smaller than 64 KiB stays, as for users."""
    assert_same_bits((a_transformer(**recompute), language_loop), home, tmp_path)


def test_other_noise_is_seen(tmp_path):
    """Method: the twin; with one loss from other tokens the same comparison raises."""

    def other_loop(model, optimizer):
        for step in (0, 1, 3):
            yield stepped(optimizer, loss_of(model, language(step)))

    right, _ = trained((a_transformer(), language_loop), configuration("device", a_transformer(), tmp_path))
    found, _ = trained((a_transformer(), other_loop), configuration("host", a_transformer(), tmp_path))
    assert "yield 2" in differing(found, right)


# --- what autograd saves ---


def attention(h: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(0, 1) for t in torch.cat([h, h.sin(), h.cos()], -1).chunk(3, -1))
    return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(0, 1).flatten(1)


def expanded(h: torch.Tensor) -> torch.Tensor:
    factor = h.sum(0, keepdim=True).expand(ROWS, WIDTH)
    column = h[:, :1].expand(-1, WIDTH)
    return h * factor + column.sin() * column


def without_elements(h: torch.Tensor) -> torch.Tensor:
    nothing = h[:0].sin() * h[:0]
    return torch.cat([h.tanh(), nothing @ h.t()[:, :0].new_zeros(WIDTH, WIDTH)]) + nothing.sum()


def overlapping(h: torch.Tensor) -> torch.Tensor:
    windows = h.exp().unfold(1, 5, 2)  # 10 windows of 5, overlapping
    return h + (windows * windows.sin()).sum((1, 2)).unsqueeze(1)


def corners(h: torch.Tensor) -> torch.Tensor:
    """Views that begin and end inside the storage, with strides of their own, of a size below a quarter of it."""
    y = h.exp()
    return h * y[1:2, 3:4].sin() + y[::3, ::5].square().sum() + y.t()[5:, 1:].cos().mean() + y[-1].prod()


def saved_twice(h: torch.Tensor) -> torch.Tensor:
    y = h.tanh()
    return y * y + y.sin() * y.cos() + (y @ y.t()) @ y


def other_dtypes(h: torch.Tensor) -> torch.Tensor:
    half = (h.to(torch.bfloat16) * h.to(torch.bfloat16).sin()).float()
    double = (h.double().exp() * h.double()).float()
    chosen = h.gather(1, h.argsort(1)) * torch.where(h > 0, h, h.sin())
    return half + double + chosen + h.max(0).values


def complex_numbers(h: torch.Tensor) -> torch.Tensor:
    z = torch.fft.fft(h)
    return torch.fft.ifft(z * torch.fft.fft(h.tanh())).real + torch.view_as_real(z).square().sum(-1)


def conjugated(h: torch.Tensor) -> torch.Tensor:
    z = torch.fft.fft(h)
    return (z.conj() * torch.fft.fft(h.tanh())).real + (z.sgn().conj() * z).imag


def negated(h: torch.Tensor) -> torch.Tensor:
    return h * torch.fft.fft(h).conj().imag


def changed_then_saved(h: torch.Tensor) -> torch.Tensor:
    """One storage saved twice with other values between; what was saved first is never asked for."""
    y = h * 1
    y.sin()
    y.mul_(2)
    z = y.cos()
    y.detach().sin_()
    return z.detach() + y.exp()


def changed_in_place(h: torch.Tensor) -> torch.Tensor:
    y = F.relu(h * 2, inplace=True)
    y = F.dropout(y + 1, 0.3, inplace=True)
    y = F.hardtanh(y * h, inplace=True)
    z = torch.zeros(ROWS, WIDTH)
    z[: ROWS // 2] = y[: ROWS // 2].exp()
    z[ROWS // 2 :] += h[ROWS // 2 :]
    return z.sigmoid_() + torch.ones(ROWS, WIDTH).addcmul_(h, h)


class SavesInputsAndOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, scale):
        product = x * y
        ratio = x / (y.square() + 1)
        ctx.save_for_backward(x, None, y, product, ratio)
        ctx.scale = scale
        ctx.mark_non_differentiable(ratio)
        return product, ratio

    @staticmethod
    def backward(ctx, grad, _):
        x, nothing, y, product, ratio = ctx.saved_tensors
        assert nothing is None
        return grad * (y + product) * ctx.scale, grad * (x + ratio), None


class ChangesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def custom_functions(h: torch.Tensor) -> torch.Tensor:
    product, ratio = SavesInputsAndOutputs.apply(h.tanh(), h.t().contiguous().t(), 0.5)
    return ChangesItsInput.apply(product * 1) + ratio * h


def hooks_inside(h: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 1).numpy(), lambda a: torch.from_numpy(a)):
        y = h.tanh() * h.sin()
    with torch.autograd.graph.save_on_cpu():
        return y * h.exp()


def recomputed_by_hand(h: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: F.dropout(t.sin(), 0.4) * t, h, use_reentrant=False) * h


MIDDLES = {
    middle.__name__: middle
    for middle in (
        attention, expanded, without_elements, overlapping, corners, saved_twice, other_dtypes, complex_numbers,
        conjugated, negated, changed_then_saved, changed_in_place, custom_functions, hooks_inside, recomputed_by_hand,
    )
}  # fmt: skip


@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
@every_home
def test_every_kind_of_saved_tensor_comes_back(home, middle, small_ones_too, tmp_path):
    """Method: small ones too. Functions that save views of every kind, one storage several times, before and after a
    change, and by autograd functions and hooks of the user's own, between two layers that train."""
    assert_same_bits(between(middle), home, tmp_path)


def test_a_wrong_stride_is_seen(small_ones_too, tmp_path, monkeypatch):
    """Method: the twin; square activations that come back transposed give other bits in the same comparison."""

    class Transposed(saved_tensor.View):
        def __init__(self, saved, dtype, size, stride, *rest) -> None:
            super().__init__(saved, dtype, size, stride[::-1] if size == (WIDTH, WIDTH) else stride, *rest)

    monkeypatch.setattr(activation_store, "View", Transposed)
    with pytest.raises(AssertionError, match="blocks"):
        assert_same_bits(between(lambda h: (h.t() @ h.cos() * 0.1).sin().sum(0) + h), "host", tmp_path)


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_conjugated_weight_comes_back(home, tmp_path):
    """Method: a frozen complex weight is conjugated in the forward, which is a view with a flag of its own; the gradient
    is plain torch's."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.filter = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.complex64), requires_grad=False)

        def forward(self, x):
            return (torch.fft.fft(self.first(x)) * self.filter.conj()).real

    def gradient(config: dict[str, Any] | None) -> torch.Tensor:
        model = seeded(SEED, Filter)
        optimizer = adamw(model, LR)
        if config is not None:
            model, optimizer = infinity.wrap_model(model, optimizer, config)
        model(rows_of(0, ROWS, WIDTH)).square().mean().backward()
        return model.first.weight.grad.clone()

    found = gradient({"params": home, "optimizer": home, "activations": "device"})
    torch.testing.assert_close(found, gradient(None), rtol=1e-5, atol=1e-6)


def test_nested_tensors_come_back(tmp_path):
    """Method: a strided nested tensor of more than 64 KiB between two layers; torch trains through it."""

    def middle(h):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.as_nested_tensor([h[:300], h[300:]])
        return torch.cat(F.dropout(nested, 0.2).unbind())

    scenario = lambda: Between(middle), simply(lambda step: rows_of(step, 1000, WIDTH), steps=1)
    assert_same_bits(scenario, "host", tmp_path)


# --- architectures ---


def convolutions(memory_format: torch.memory_format) -> Scenario:
    def build():
        parts = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        parts += [nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.SiLU(inplace=True)]
        return nn.Sequential(*parts, nn.Conv2d(8, 4, 1)).to(memory_format=memory_format)

    def loop(model, optimizer):
        for step in range(3):
            images = rows_of(step, 8, 3, 16, 16).to(memory_format=memory_format)
            images = images[:, :, ::2, 1:] if step == 1 else images
            yield stepped(optimizer, model(images).square().mean())
            model.eval()
            with torch.no_grad():
                yield model(images)
            yield stepped(optimizer, model(images).square().mean())
            model.train()

    return build, loop


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.bag = nn.EmbeddingBag(50, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.2)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embed(ids))
        x, weights = self.mix(x, x, x)
        return x + weights.mean() + self.bag(ids).unsqueeze(1)


def recurrent() -> Scenario:
    return Recurrent, simply(lambda step: (rows_of(step, 4, 9).abs() * 20).long().clamp(max=49))


ARCHITECTURES = {
    "convolutions": lambda: convolutions(torch.contiguous_format),
    "channels last": lambda: convolutions(torch.channels_last),
    "recurrent": recurrent,
}


@pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
@every_home
def test_architectures(home, make, small_ones_too, tmp_path):
    """Method: small ones too. Convolutions of both memory formats with batch norm (whose statistics are part of what is
    compared), in training and eval mode; embeddings, an LSTM and attention."""
    assert_same_bits(make(), home, tmp_path)


# --- loops ---


def two_backwards(model, optimizer):
    for step in range(2):
        loss = loss_of(model, language(step))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        yield from (p.grad.norm() for p in (model.tokens.weight, model.norm.bias))
        yield stepped(optimizer, loss)


def two_live_graphs(model, optimizer):
    for step in range(2):
        one, other = loss_of(model, language(step)), loss_of(model, language(step + 10))
        one.backward()
        third = loss_of(model, language(step + 20, rows=8))
        other.backward()
        yield stepped(optimizer, third)
        yield one + other


def a_graph_that_is_dropped(model, optimizer):
    for step in range(3):
        loss_of(model, language(step + 10))
        dropped = loss_of(model, language(step + 20))
        yield dropped.detach()
        loss = loss_of(model, language(step))
        del dropped
        yield stepped(optimizer, loss)


def gradients_asked_for(model, optimizer):
    embedded = []
    model.dropout.register_forward_hook(lambda module, args, out: embedded.append(out))
    for step in range(2):
        loss = loss_of(model, language(step))
        (grad,) = torch.autograd.grad(loss, embedded[-1], retain_graph=True)
        yield grad
        yield stepped(optimizer, loss)


def forwards_without_gradients_between(model, optimizer):
    for step in range(2):
        loss = loss_of(model, language(step))
        with torch.no_grad():
            yield loss_of(model, language(step + 10))
        model.eval()
        with torch.inference_mode():
            yield model(language(step + 20, rows=3)).clone().sum()
        model.train()
        yield model.blocks[0](rows_of(step, 32, 12, 64)).sum()
        yield stepped(optimizer, loss)


def on_the_cpu_by_the_user(model, optimizer):
    for step in range(2):
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(model, language(step))
        yield stepped(optimizer, loss)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(), 1), lambda packed: packed[0]):
            loss = loss_of(model, language(step + 10))
        yield stepped(optimizer, loss)


def under_autocast(model, optimizer):
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, language(step))
        yield stepped(optimizer, loss)


def batches_of_all_sizes(model, optimizer):
    for step, rows in enumerate((32, 20, 40, 1, 32)):
        yield stepped(optimizer, loss_of(model, language(step, rows)))


def a_backward_in_parts(model, optimizer):
    """Only the last block's activations are asked for first, then all."""
    for step in range(2):
        kept = []
        handle = model.blocks[0].register_forward_hook(lambda module, args, out: kept.append(out))
        loss = loss_of(model, language(step))
        handle.remove()
        (grad,) = torch.autograd.grad(loss, kept[0], retain_graph=True)
        yield grad
        kept[0].backward(grad, retain_graph=True)
        yield stepped(optimizer, loss)


LOOPS = {
    loop.__name__: loop
    for loop in (
        two_backwards, two_live_graphs, a_graph_that_is_dropped, gradients_asked_for, forwards_without_gradients_between,
        on_the_cpu_by_the_user, under_autocast, batches_of_all_sizes, a_backward_in_parts,
    )
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@every_home
def test_loops(home, loop, tmp_path):
    """Method: the ways in which a loop may use its graphs, with a transformer and dropout."""
    assert_same_bits((a_transformer(), loop), home, tmp_path)


@both_homes
def test_gradient_penalty_of_second_order(home, tmp_path):
    """Method: the norm of a gradient is part of the loss; the weights stay on the device, as they must for this."""
    build = lambda: Between(torch.tanh)

    def loop(model, optimizer):
        for step in range(2):
            x = rows_of(step, 800, WIDTH).requires_grad_()
            loss = model(x).square().mean()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            yield stepped(optimizer, loss + 10 * grad.square().sum())

    right, least_moved = trained((build, loop), configuration("device", build, tmp_path))
    config = {"params": "device", "optimizer": "device", "activations": home, "nvme_paths": [str(tmp_path)]}
    found, has_moved = trained((build, loop), config)
    assert differing(found, right) == []
    assert has_moved > least_moved


@pytest.mark.parametrize("where", ["forward", "backward", "in the loss", "in recomputation"])
@both_homes
def test_a_failed_pass_leaves_no_trace(home, where, tmp_path):
    """Method: the second of three steps is first tried with an exception in its middle, twice; then losses and weights
    have the bits of a run without the failure, and no more space is taken than three steps in a row take."""

    class Fault(Exception):
        pass

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            raise Fault

    def fault(*_: Any) -> None:
        if where == "forward" or torch._C._current_graph_task_id() != -1:
            raise Fault

    def fail(model) -> None:
        block = model.blocks[1]
        handle = {
            "forward": lambda: block.feed[1].register_forward_pre_hook(fault),
            "backward": lambda: block.feed[1].register_forward_hook(lambda m, args, out: Failing.apply(out)),
            "in the loss": lambda: block.register_forward_hook(lambda m, args, out: None),
            "in recomputation": lambda: block.register_forward_pre_hook(fault),
        }[where]()
        with pytest.raises(Fault):
            loss = loss_of(model, language(50))
            if where == "in the loss":
                raise Fault
            loss.backward()
        handle.remove()

    def run(kind: str, with_failure: bool):
        build = a_transformer(around=KINDS["saved"] if where == "in recomputation" else None)
        model = build()
        model, optimizer = infinity.wrap_model(model, adamw(model, LR), configuration(kind, build, tmp_path))
        found = {}
        for step in range(3):
            if with_failure and step == 1:
                fail(model)
                fail(model)
                gc.collect()
                optimizer.zero_grad()
            torch.manual_seed(step)
            found[f"loss {step}"] = stepped(optimizer, loss_of(model, language(step))).detach()
        peaks = {tier: account.peak_nbytes for tier, account in infinity.stats(model).tiers.items()}
        return found | model.state_dict(), peaks

    right, _ = run("device", with_failure=False)
    _, right_peaks = run(home, with_failure=False)
    found, peaks = run(home, with_failure=True)
    assert differing(found, right) == []
    assert peaks == right_peaks


@pytest.mark.parametrize("home", ["device", "host"])
def test_an_interrupt_in_a_forward_leaves_no_trace(home, tmp_path):
    """Method: KeyboardInterrupt in the middle of a forward, as Ctrl-C in a notebook, and the next forwards: torch's stack of hooks is
    as it was, no unit is held, and the next steps have the bits of a run without."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def run(with_interrupt: bool) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        config = {"params": "host", "optimizer": "host", "activations": home}
        model, optimizer = wrapped(a_transformer(), config)
        if with_interrupt:
            handle = model.blocks[1].feed[1].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, language(9))
            handle.remove()
            gc.collect()
        torch.manual_seed(0)
        found = {f"loss {i}": loss.detach() for i, loss in enumerate(language_loop(model, optimizer))}
        peaks = {tier: account.peak_nbytes for tier, account in infinity.stats(model).tiers.items()}
        left = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return found | model.state_dict(), peaks | {"hooks left": left}

    right, right_peaks = run(False)
    found, peaks = run(True)
    assert differing(found, right) == []
    assert peaks == right_peaks


def test_a_change_in_place_of_a_saved_tensor_gives_no_wrong_gradient(tmp_path):
    """Method: what autograd saved is changed in place before the backward, which torch refuses. The engine refuses it
    too, or computes with the values as they were, whichever their size and home: never with the changed ones."""

    def gradient(rows: int, config: dict[str, Any] | None, change: bool) -> torch.Tensor | str:
        def middle(h):
            y = h.exp()
            z = y.sin()
            return z + (y.mul_(2) if change else y * 2)

        model = seeded(SEED, lambda: Between(middle))
        optimizer = adamw(model, LR)
        if config is not None:
            model, optimizer = infinity.wrap_model(model, optimizer, config)
        try:
            model(rows_of(0, rows, WIDTH)).square().mean().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return "refused"
        return model.blocks[0].first.weight.grad.clone()

    wrong = []
    for rows in (ROWS, 1000):
        assert gradient(rows, None, True) == "refused"
        right = gradient(rows, None, False)
        for home in ("device", "host"):
            found = gradient(rows, configuration(home, lambda: Between(torch.tanh), tmp_path), True)
            if not isinstance(found, str) and not torch.allclose(found, right, rtol=1e-4, atol=1e-6):
                wrong.append((home, rows))
    assert not wrong, f"silently wrong gradients with activations on {wrong}"


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_a_change_that_torch_does_not_count_is_saved_as_it_is_then(home, small_ones_too, tmp_path):
    """Method: small ones too. A storage is saved, changed through .data (or NumPy), and saved again: what was saved
    second is the changed value, as on the device; what was saved first is not asked for."""

    def middle(h):
        y = h * 1
        y.sin()
        kept = y.sin()  # keeps the first copy at home alive
        y.data.mul_(2)
        y.detach().numpy()[0] = 0.5
        return y.cos() + kept.detach()

    scenario = between(middle)
    right, _ = trained(scenario, configuration("device", scenario[0], tmp_path))
    found, _ = trained(scenario, configuration(home, scenario[0], tmp_path))
    assert differing(found, right) == []


# ---------------------------------------------------------------------------------------------------------------------
# What moves, and what stays
# ---------------------------------------------------------------------------------------------------------------------


def wrapped(build: Callable[[], nn.Module], config: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(SEED, build)
    return infinity.wrap_model(model, adamw(model, LR), config)


@both_homes
def test_saved_activations_leave_the_device(home, tmp_path):
    """Method: weak references to the storages that layers return; after a forward all of more than 64 KiB are gone with
    activations at home, though the graph lives, and some live on with activations on the device."""

    def alive(kind: str) -> int:
        model, _ = wrapped(a_transformer(), configuration(kind, a_transformer(), tmp_path))
        refs = []

        def note(module, args, out):
            if out.untyped_storage().nbytes() >= 64 * KIB:
                refs.append(StorageWeakRef(out.untyped_storage()))

        for block in model.blocks:
            for module in block.modules():
                if isinstance(module, (nn.Linear, nn.GELU, nn.LayerNorm)):
                    module.register_forward_hook(note)
        loss = loss_of(model, language(0))
        assert len(refs) >= 10
        count = sum(not ref.expired() for ref in refs)
        loss.backward()
        return count

    assert alive("device") > 0
    assert alive(home) == 0


@both_homes
def test_a_storage_goes_home_once_however_often_it_is_saved(home, tmp_path):
    """Method: save one tensor by one operation and by twenty; as many bytes move."""

    def moved_by(times: int) -> int:
        build = lambda: Between(lambda h: sum(h.sin() for _ in range(times)) + h.t().cos().t())
        model, _ = wrapped(build, configuration(home, build, tmp_path))
        return moved_in_a_forward(model, rows_of(0, 1000, WIDTH))

    assert moved_by(20) == moved_by(1) > 0


@both_homes
def test_buffers_and_foreign_parameters_stay(home, tmp_path):
    """Method: a layer multiplies with a buffer and with a parameter of a class of its own, which are saved; as many
    bytes move as when it multiplies with numbers."""

    class Foreign(nn.Parameter):
        pass

    class Scaled(nn.Module):
        def __init__(self, with_tensors: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.register_buffer("factor", torch.randn(1000, WIDTH))
            self.foreign = Foreign(torch.randn(1000, WIDTH), requires_grad=False)
            self.with_tensors = with_tensors

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                x = x * self.factor * self.foreign.t().t() if self.with_tensors else x * 2.0 * 3.0
            return x

    def moved_by(with_tensors: bool) -> int:
        build = lambda: Scaled(with_tensors)
        model, _ = wrapped(build, configuration(home, build, tmp_path))
        return moved_in_a_forward(model, rows_of(0, 1000, WIDTH))

    assert moved_by(True) == moved_by(False) > 0


def test_nothing_moves_without_gradients(tmp_path):
    """Method: a forward in no_grad, inference_mode and with gradients, which alone moves something."""
    model, _ = wrapped(a_transformer(), configuration("host", a_transformer(), tmp_path))
    with torch.no_grad():
        assert moved_in_a_forward(model, language(0)) == 0
    with torch.inference_mode():
        assert moved_in_a_forward(model, language(0)) == 0
    assert moved_in_a_forward(model, language(0)) > 0


def kept_nbytes(model: nn.Module, graphs: int) -> int:
    """Bytes of distinct storages of 64 KiB and more that stay on the device in as many forwards with living graphs."""
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().nbytes() >= activation_store.SMALLEST_NBYTES and tensor.is_floating_point():
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            alive.append(tensor)  # so that no storage has the address of another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [model(language(i)) for i in range(graphs)]
    nbytes = sum(kept.values())
    sum(output.square().mean() for output in outputs).backward()
    return nbytes


@pytest.mark.parametrize("graphs", [1, 2])
def test_auto_keeps_on_the_device_what_its_budget_has_room_for_and_no_more(graphs, tmp_path):
    """Method: count what stays under budgets from nothing to plenty, with one living graph and with two; it is never
    more than the room, mostly more than half of it, and nothing moves where there is plenty."""
    config = {"params": "device", "optimizer": "device", "activations": "auto"}
    model, _ = wrapped(a_transformer(), config)
    planned = infinity.stats(model).tiers["device"].planned_nbytes
    over = {}
    for spare in (0, 512 * KIB, 2 * MIB, 512 * MIB):
        model, optimizer = wrapped(a_transformer(), config | {"device_memory": planned + spare})
        if spare == 512 * MIB:
            assert moved_in_a_forward(model, language(0)) == 0
        nbytes = kept_nbytes(model, graphs)
        if nbytes > spare:
            over[spare] = nbytes
        assert nbytes >= min(spare, 2 * MIB) // 2
    assert not over, f"room -> kept: {over}"


def test_auto_without_room_on_the_host_keeps_what_does_not_fit(tmp_path):
    """Method: "auto" with neither device nor host memory to spare: the optimizer's bits are right and no error is
    raised, as activations on the device were nobody's demand to move."""
    model, _ = wrapped(a_transformer(), {"params": "device", "optimizer": "device", "activations": "auto"})
    tiers = infinity.stats(model).tiers
    config = {"params": "device", "optimizer": "device", "activations": "auto"}
    config |= {"device_memory": tiers["device"].planned_nbytes, "host_memory": tiers["host"].planned_nbytes + 400 * KIB}
    scenario = (a_transformer(), language_loop)
    right, least_moved = trained(scenario, configuration("device", scenario[0], tmp_path))
    found, has_moved = trained(scenario, config)
    assert differing(found, right) == []
    assert has_moved > least_moved


# ---------------------------------------------------------------------------------------------------------------------
# Budgets
# ---------------------------------------------------------------------------------------------------------------------

BUDGET_OF = {"host": "host_memory", "nvme": "nvme_capacity"}


def generous(home: str, folder: Path) -> dict[str, Any]:
    """Weights and state on the device, so that the home's budget is for activations."""
    paths = {"nvme_paths": [str(folder)]} if home == "nvme" else {}
    return {"params": "device", "optimizer": "device", "activations": home, **paths}


def needed(home: str, folder: Path, rows: int) -> int:
    """Bytes of the home that a step with so many rows takes."""
    model, optimizer = wrapped(a_transformer(), generous(home, folder))
    if home == "nvme":
        return activation_nbytes(rows)
    stepped(optimizer, loss_of(model, language(0, rows)))
    return infinity.stats(model).tiers[home].peak_nbytes


def activation_nbytes(rows: int) -> int:
    """What of a step's activations is moved, by the host's account: NVMe's is taken in larger portions."""
    model, optimizer = wrapped(a_transformer(), generous("host", Path()))
    before = infinity.stats(model).tiers["host"].peak_nbytes
    stepped(optimizer, loss_of(model, language(0, rows)))
    return infinity.stats(model).tiers["host"].peak_nbytes - before


@both_homes
def test_a_budget_too_small_is_an_error_with_numbers_and_the_model_trains_on(home, tmp_path):
    """Method: a budget for 24 rows; 48 raise a CapacityError that says how much of what is needed, and what to do, and
    24 train after that as if nothing had been."""
    budget = needed(home, tmp_path, rows=24)

    def run(with_failure: bool) -> dict[str, torch.Tensor]:
        model, optimizer = wrapped(a_transformer(), generous(home, tmp_path) | {BUDGET_OF[home]: budget})
        found = {}
        for step in range(3):
            if with_failure and step != 1:
                with pytest.raises(infinity.CapacityError) as refused:
                    loss_of(model, language(9, rows=48)).backward()
                text = str(refused.value)
                del refused  # its traceback holds the graph
                assert BUDGET_OF[home] in text and "micro_batch" in text, text
                assert len(re.findall(r"\d [KM]iB", text)) >= 3, text
                optimizer.zero_grad()
            torch.manual_seed(step)
            found[f"loss {step}"] = stepped(optimizer, loss_of(model, language(step, rows=24))).detach()
        account = infinity.stats(model).tiers[home]
        assert account.peak_nbytes <= account.budget_nbytes
        return found | model.state_dict()

    assert differing(run(True), run(False)) == []


def test_a_refused_activation_raises_once_and_says_nothing_else(tmp_path, monkeypatch):
    """Method: everything that Python reports as unraisable during a CapacityError, which users see as noise."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(repr(report.exc_value)))
    model, optimizer = wrapped(a_transformer(), generous("host", tmp_path) | {"host_memory": 300 * KIB})
    with pytest.raises(infinity.CapacityError):
        loss_of(model, language(0))
    gc.collect()
    assert seen == []


@both_homes
def test_batches_of_many_lengths_need_no_more_than_the_longest(home, tmp_path):
    """Method: a budget of one and a quarter times what the longest batch takes; batches of all lengths train in it, in
    any order, as data that is not padded comes."""
    budget = needed(home, tmp_path, rows=40) * 5 // 4
    model, optimizer = wrapped(a_transformer(), generous(home, tmp_path) | {BUDGET_OF[home]: budget})
    for step, rows in enumerate((40, 24, 31, 36, 22, 27, 40, 33, 38, 40)):
        stepped(optimizer, loss_of(model, language(step, rows)))


@both_homes
def test_the_budget_that_one_step_takes_is_enough_and_less_is_not(home, tmp_path):
    """Method: exactly what a step was charged works, in every step; three quarters of that raises a CapacityError."""
    budget = needed(home, tmp_path, rows=32)
    model, optimizer = wrapped(a_transformer(), generous(home, tmp_path) | {BUDGET_OF[home]: budget})
    for step in range(3):
        stepped(optimizer, loss_of(model, language(step)))
    account = infinity.stats(model).tiers[home]
    assert account.peak_nbytes <= budget == account.budget_nbytes
    model, optimizer = wrapped(a_transformer(), generous(home, tmp_path) | {BUDGET_OF[home]: budget * 3 // 4})
    with pytest.raises(infinity.CapacityError):
        stepped(optimizer, loss_of(model, language(0)))


def test_a_disk_that_is_nearly_full_holds_what_fits(tmp_path, monkeypatch):
    """Method: shutil.disk_usage tells of 32 MiB that are free, ten times as much as the activations need; a step goes
    through. The twin: with 32 KiB there is a CapacityError."""
    import shutil
    from types import SimpleNamespace

    def run(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=free, used=0, free=free))
        model, optimizer = wrapped(a_transformer(), generous("nvme", tmp_path))
        stepped(optimizer, loss_of(model, language(0)))

    assert activation_nbytes(32) < 16 * MIB
    with pytest.raises(infinity.CapacityError, match="NVMe"):
        run(32 * KIB)
    run(32 * MIB)


@pytest.mark.parametrize("loop", [two_live_graphs, a_graph_that_is_dropped, a_backward_in_parts, language_loop])
@both_homes
def test_from_the_third_step_on_nothing_grows(home, loop, tmp_path):
    """Method: the loop three times over, then three times more; no tier is charged more, and as many descriptors are
    open. The twin: a graph that is kept does take more."""
    model, optimizer = wrapped(a_transformer(), generous(home, tmp_path))
    seen = []
    for _ in range(6):
        for _ in loop(model, optimizer):
            pass
        peaks = {tier: account.peak_nbytes for tier, account in infinity.stats(model).tiers.items()}
        seen.append((peaks, len(os.listdir("/proc/self/fd"))))
    assert seen[2:] == seen[2:3] * 4
    before = infinity.stats(model).tiers["host"].peak_nbytes
    held = [loss_of(model, language(i)) for i in range(4)]
    assert home == "nvme" or infinity.stats(model).tiers["host"].peak_nbytes > before
    sum(held).backward()


@both_homes
def test_forwards_without_a_backward_leave_nothing(home, tmp_path):
    """Method: forwards whose losses are dropped; the charge stays that of one."""
    model, _ = wrapped(a_transformer(), generous(home, tmp_path))
    loss_of(model, language(0))
    before = infinity.stats(model).tiers[home].peak_nbytes
    for step in range(6):
        loss_of(model, language(step))
    assert infinity.stats(model).tiers[home].peak_nbytes == before


@pytest.mark.parametrize("home", [None, "device", "auto", "host"])
def test_a_graph_that_nobody_holds_is_freed(home, tmp_path):
    """Method: weak references to what the layers return in a forward (with gradients, as evaluations often are) whose
    loss is dropped; none is alive afterwards. Plain torch is one of the cases."""
    model = seeded(SEED, a_transformer())
    if home is not None:
        config = configuration(home, a_transformer(), tmp_path)
        if home == "auto":
            config["device_memory"] += 2 * MIB
        model, _ = infinity.wrap_model(model, adamw(model, LR), config)
    refs: dict[str, StorageWeakRef] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, args, out, name=name: refs.update({name: StorageWeakRef(out.untyped_storage())}))
    loss = loss_of(model, language(0))
    assert home == "host" or any(not ref.expired() for ref in refs.values())
    del loss
    gc.collect()
    assert [name for name, ref in refs.items() if not ref.expired()] == []


@pytest.mark.parametrize("holding", ["nothing", "a graph", "a tensor"])
@both_homes
def test_everything_is_given_back_with_the_model(home, holding, tmp_path):
    """Method: in a child, 48 MiB of activations; when model and optimizer (and what is held of the graph) are dropped,
    descriptors, files and all but a few MiB of memory are gone."""

    def resident() -> int:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def work():
        build = lambda: Between(lambda h: h.sin().cos().tanh())

        def once(rows: int):
            model, optimizer = wrapped(build, generous(home, tmp_path))
            x = rows_of(0, rows, WIDTH).requires_grad_()
            stepped(optimizer, model(x).square().mean())
            loss = model(x).square().mean()
            engine = weakref.ref(infinity.runtime.registry.wrapped(model).engine)
            held = {"nothing": None, "a graph": loss, "a tensor": x}[holding]
            del model, optimizer, loss, x
            gc.collect()
            assert engine() is None
            return held

        once(1000)
        gc.collect()
        descriptors, before = sorted(os.listdir("/proc/self/fd")), resident()
        held = once(60_000)
        assert leftovers(tmp_path) == []
        assert sorted(os.listdir("/proc/self/fd")) == descriptors
        del held
        gc.collect()
        return (resident() - before) / MIB

    assert in_child(work) < 16


@both_homes
def test_a_backward_after_unwrapping_is_right_or_refused(home, tmp_path):
    """Method: unwrap between forward and backward. Plain torch's gradients, or an error that names what to do."""

    def gradient(kind: str | None):
        model = seeded(SEED, a_transformer())
        optimizer = adamw(model, LR)
        if kind is not None:
            model, optimizer = infinity.wrap_model(model, optimizer, generous(kind, tmp_path))
        torch.manual_seed(0)
        loss = loss_of(model, language(0))
        if kind is not None:
            model, optimizer = infinity.unwrap_model(model, optimizer)
        loss.backward()
        return model.norm.weight.grad.clone()

    try:
        found = gradient(home)
    except (infinity.InfinityError, RuntimeError) as error:
        assert "NoneType" not in str(error)
        return
    torch.testing.assert_close(found, gradient(None), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# The disk
# ---------------------------------------------------------------------------------------------------------------------


def on_disk_only(folder: Path) -> dict[str, Any]:
    """Activations on disk through the smallest staging memory there is."""
    config = {"params": "host", "optimizer": "host", "activations": "nvme", "nvme_paths": [str(folder)]}
    model = transformer(SEED, blocks=2)
    return {"host_memory": least_host_memory(model, adamw(model, LR), config), **config}


refused_uring = native.uring_refusal()
ENGINES = [
    pytest.param("uring", marks=pytest.mark.skipif(bool(refused_uring), reason=f"io_uring: {refused_uring}")),
    "threads",
]


@pytest.fixture(scope="module")
def right() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return trained((a_transformer(), language_loop), configuration("device", a_transformer(), Path()))[0]


@pytest.mark.parametrize("faults", ["", "seed=3,short_transfer=0.3,delay=0.1,reorder=0.3", "seed=4,short_transfer=0.9"])
@pytest.mark.parametrize("engine", ENGINES)
def test_io_engines_and_faults_that_heal_change_no_bit(engine, faults, right, tmp_path):
    """Method: each engine, with transfers shortened, delayed and reordered by seed, under the least host memory."""
    with environment(INFINITY_IO=engine, INFINITY_FAULTS=faults):
        found, _ = trained((a_transformer(), language_loop), on_disk_only(tmp_path))
    assert differing(found, right) == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("numel", [16_384, 16_385, 131_072, 131_073, 700_001])
def test_tensors_of_every_size_pass_through_the_smallest_staging(numel, tmp_path):
    """Method: tensors of 64 KiB to 2.7 MiB, of whole blocks and of one element more, through staging memory for half a
    MiB; several of them at once, so that reads ahead have to give way."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(1) for _ in range(4))

        def forward(self, x):
            for scale in self.scales:
                x = (x * scale).sin() * scale.exp()
            return x

    def loop(model, optimizer):
        for step in range(2):
            yield stepped(optimizer, model(rows_of(step, numel)).square().mean())

    config = {"params": "host", "optimizer": "host", "activations": "nvme", "nvme_paths": [str(tmp_path)]}
    model = Large()
    config["host_memory"] = least_host_memory(model, adamw(model, LR), config)
    right, _ = trained((Large, loop), configuration("device", Large, tmp_path))
    found, has_moved = trained((Large, loop), config)
    assert differing(found, right) == []
    assert has_moved > 2 * 4 * 4 * numel
    assert config["host_memory"] < 2 * MIB


def until_an_error(faults: str, folder: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor] | None, Exception | None]:
    """Losses of completed steps under faults, the weights where they can be had, and the error."""
    with environment(INFINITY_FAULTS=faults):
        model, optimizer = wrapped(a_transformer(), on_disk_only(folder))
        torch.manual_seed(SEED)
        losses, error = [], None
        try:
            for step in range(3):
                loss = loss_of(model, language(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        except TYPED as caught:
            error = caught.with_traceback(None)  # or it would hold the model
            with pytest.raises(TYPED):  # nor may a later step go on from here
                stepped(optimizer, loss_of(model, language(step)))
        try:
            state = {name: value.clone() for name, value in model.state_dict().items()}
        except TYPED:
            state = None
        return losses, state, error


LASTING = {"eio": infinity.StorageError, "enospc": infinity.StorageError}
LASTING |= {"bit_flip": infinity.CorruptionError, "lost_write": infinity.CorruptionError}


@pytest.mark.parametrize("first", [0, 60])
@pytest.mark.parametrize("fault", LASTING)
def test_a_lasting_fault_ends_in_a_typed_error(fault, first, right, tmp_path):
    """Method: from one transfer on all fail; there is the error of its type, and what completed before is right."""
    losses, _, error = until_an_error(f"seed=1,{fault}=1.0,first_piece={first}", tmp_path)
    assert isinstance(error, LASTING[fault]), error
    assert str(error)
    assert fault not in ("eio", "enospc") or str(tmp_path) in str(error), error
    assert all(torch.equal(loss, right[f"yield {i}"]) for i, loss in enumerate(losses))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", LASTING)
def test_a_passing_fault_never_gives_a_wrong_number(fault, seed, right, tmp_path):
    """Method: two in a hundred transfers fail; every completed step is right, and so are the weights after three."""
    losses, state, error = until_an_error(f"seed={seed},{fault}=0.02,first_piece={10 * seed}", tmp_path)
    assert all(torch.equal(loss, right[f"yield {i}"]) for i, loss in enumerate(losses))
    if error is None:
        assert differing(state, {name: value for name, value in right.items() if not name.startswith("yield")}) == []


def test_a_device_that_hangs_is_an_error(tmp_path):
    """Method: in a child, no transfer is ever answered; the step ends in a StorageError, not in a hang."""

    def work():
        with environment(INFINITY_IO_TIMEOUT="1"):
            return type(until_an_error("seed=1,hang=1.0", tmp_path)[2]).__name__

    assert in_child(work, seconds=60) == "StorageError"


def test_several_folders_hold_activations(tmp_path):
    """Method: two folders; the bits stay and both are emptied."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    config = on_disk_only(folders[0]) | {"nvme_paths": [str(folder) for folder in folders], "host_memory": None}
    right, _ = trained((a_transformer(), language_loop), configuration("device", a_transformer(), tmp_path))
    found, _ = trained((a_transformer(), language_loop), config)
    assert differing(found, right) == []
    assert [leftovers(folder) for folder in folders] == [[], []]


@pytest.mark.parametrize("checksums", [True, False])
def test_losses_are_finite_and_equal_without_checksums(checksums, right, tmp_path):
    """Method: checksums on and off; the bits are those of the device."""
    found, _ = trained((a_transformer(), language_loop), on_disk_only(tmp_path) | {"checksums": checksums, "host_memory": None})
    assert differing(found, right) == []
    assert all(math.isfinite(value.item()) for name, value in found.items() if name.startswith("yield"))
