"""Activations at home: the same bits for every model and loop."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from activations_cases import (  # noqa: F401
    LR,
    ROWS,
    SEED,
    WIDTH,
    Between,
    Loop,
    Scenario,
    a_backward_in_parts,
    a_graph_that_is_dropped,
    a_transformer,
    both_homes,
    configuration,
    language,
    language_loop,
    no_hooks_left,
    right,
    rows_of,
    stepped,
    trained,
    two_live_graphs,
    wrapped,
)
from models import (
    differing,
    leftovers,
    loss_of,
    seeded,
)
from runs import adamw
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.run import activation_store, saved_tensor

AT_HOME = ("host", "nvme", "auto")

pytestmark = pytest.mark.timeout(120)  # a hang is a failure, too
every_home = pytest.mark.parametrize("home", AT_HOME)


@pytest.fixture
def small_ones_too(monkeypatch) -> None:
    monkeypatch.setattr(activation_store, "SMALLEST_NBYTES", 1)


def assert_same_bits(scenario: Scenario, home: str, folder: Path, **more: Any) -> None:
    """The scenario with activations at home has the bits of the same on the device, and moved more
    to get there."""
    right, least_moved = trained(scenario, configuration("device", scenario[0], folder))
    found, has_moved = trained(scenario, configuration(home, scenario[0], folder, **more))
    assert all(value.isfinite().all() for value in right.values()), (
        "NaN and infinity hide what is different"
    )
    assert differing(found, right) == []
    assert has_moved > least_moved, "no activation left the device: this test says nothing"
    assert leftovers(folder) == []


def simply(make_input: Callable[[int], torch.Tensor], steps: int = 3) -> Loop:
    def loop(model, optimizer):
        for step in range(steps):
            yield stepped(optimizer, model(make_input(step)).square().mean())

    return loop


def between(middle: Callable[[torch.Tensor], torch.Tensor]) -> Scenario:
    return lambda: Between(middle), simply(lambda step: rows_of(step, ROWS, WIDTH))


KINDS = {"saved": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
RECOMPUTE = {"plain": {}} | {
    f"{kind} {where}": {name: settings for name in places}
    for kind, settings in KINDS.items()
    for where, places in {
        "around": ["around"],
        "inside": ["inside"],
        "both": ["around", "inside"],
    }.items()
}


@pytest.mark.parametrize("recompute", RECOMPUTE.values(), ids=RECOMPUTE)
@every_home
def test_a_transformer_with_dropout_and_recomputation(home, recompute, tmp_path):
    """Method: three steps with dropout and with torch.utils.checkpoint of either kind, each block,
    inside it, and both; what is smaller than 64 KiB stays, as for users."""
    assert_same_bits((a_transformer(**recompute), language_loop), home, tmp_path)


def test_other_noise_is_seen(tmp_path):
    """Method: the twin; with one loss from other tokens the same comparison raises."""

    def other_loop(model, optimizer):
        for step in (0, 1, 3):
            yield stepped(optimizer, loss_of(model, language(step)))

    right, _ = trained(
        (a_transformer(), language_loop), configuration("device", a_transformer(), tmp_path)
    )
    found, _ = trained(
        (a_transformer(), other_loop), configuration("host", a_transformer(), tmp_path)
    )
    assert "yield 2" in differing(found, right)


def attention(h: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        t.unflatten(-1, (2, -1)).transpose(0, 1)
        for t in torch.cat([h, h.sin(), h.cos()], -1).chunk(3, -1)
    )
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
    """Views that begin and end inside the storage, with strides of their own, of a size below a
    quarter of it."""
    y = h.exp()
    return (
        h * y[1:2, 3:4].sin()
        + y[::3, ::5].square().sum()
        + y.t()[5:, 1:].cos().mean()
        + y[-1].prod()
    )


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
    """One storage saved twice with other values between; what was saved first is never asked
    for."""
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
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t * 1).numpy(), lambda a: torch.from_numpy(a)
    ):
        y = h.tanh() * h.sin()
    with torch.autograd.graph.save_on_cpu():
        return y * h.exp()


def recomputed_by_hand(h: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: F.dropout(t.sin(), 0.4) * t, h, use_reentrant=False) * h


MIDDLES = {
    middle.__name__: middle
    for middle in (
        attention,
        expanded,
        without_elements,
        overlapping,
        corners,
        saved_twice,
        other_dtypes,
        complex_numbers,
        conjugated,
        negated,
        changed_then_saved,
        changed_in_place,
        custom_functions,
        hooks_inside,
        recomputed_by_hand,
    )
}


@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
@every_home
def test_every_kind_of_saved_tensor_comes_back(home, middle, small_ones_too, tmp_path):
    """Method: small ones too. Functions that save views of every kind, one storage several times,
    before and after a change, and by autograd functions and hooks of the user's own, between two
    layers that train."""
    assert_same_bits(between(middle), home, tmp_path)


def test_a_wrong_stride_is_seen(small_ones_too, tmp_path, monkeypatch):
    """Method: the twin; square activations that come back transposed give other bits in the same
    comparison."""

    class Transposed(saved_tensor.View):
        def __init__(self, saved, dtype, size, stride, *rest) -> None:
            super().__init__(
                saved, dtype, size, stride[::-1] if size == (WIDTH, WIDTH) else stride, *rest
            )

    monkeypatch.setattr(activation_store, "View", Transposed)
    with pytest.raises(AssertionError, match="blocks"):
        assert_same_bits(
            between(lambda h: (h.t() @ h.cos() * 0.1).sin().sum(0) + h), "host", tmp_path
        )


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_conjugated_weight_comes_back(home, tmp_path):
    """Method: a frozen complex weight is conjugated in the forward, which is a view with a flag of
    its own; the gradient is plain torch's."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.filter = nn.Parameter(
                torch.randn(ROWS, WIDTH, dtype=torch.complex64), requires_grad=False
            )

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
    """Method: a strided nested tensor of more than 64 KiB between two layers; torch trains through
    it."""

    def middle(h):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.as_nested_tensor([h[:300], h[300:]])
        return torch.cat(F.dropout(nested, 0.2).unbind())

    scenario = lambda: Between(middle), simply(lambda step: rows_of(step, 1000, WIDTH), steps=1)
    assert_same_bits(scenario, "host", tmp_path)


def convolutions(memory_format: torch.memory_format) -> Scenario:
    def build():
        parts = [
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ]
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
    """Method: small ones too. Convolutions of both memory formats with batch norm (whose statistics
    are part of what is compared), in training and eval mode; embeddings, an LSTM and attention."""
    assert_same_bits(make(), home, tmp_path)


def two_backwards(model, optimizer):
    for step in range(2):
        loss = loss_of(model, language(step))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        yield from (p.grad.norm() for p in (model.tokens.weight, model.norm.bias))
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
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.clone(), 1), lambda packed: packed[0]
        ):
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


LOOPS = {
    loop.__name__: loop
    for loop in (
        two_backwards,
        two_live_graphs,
        a_graph_that_is_dropped,
        gradients_asked_for,
        forwards_without_gradients_between,
        on_the_cpu_by_the_user,
        under_autocast,
        batches_of_all_sizes,
        a_backward_in_parts,
    )
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@every_home
def test_loops(home, loop, tmp_path):
    """Method: the ways in which a loop may use its graphs, with a transformer and dropout."""
    assert_same_bits((a_transformer(), loop), home, tmp_path)


@both_homes
def test_gradient_penalty_of_second_order(home, tmp_path):
    """Method: the norm of a gradient is part of the loss; the weights stay on the device."""
    build = lambda: Between(torch.tanh)

    def loop(model, optimizer):
        for step in range(2):
            x = rows_of(step, 800, WIDTH).requires_grad_()
            loss = model(x).square().mean()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            yield stepped(optimizer, loss + 10 * grad.square().sum())

    right, least_moved = trained((build, loop), configuration("device", build, tmp_path))
    config = {
        "params": "device",
        "optimizer": "device",
        "activations": home,
        "nvme_paths": [str(tmp_path)],
    }
    found, has_moved = trained((build, loop), config)
    assert differing(found, right) == []
    assert has_moved > least_moved


@pytest.mark.parametrize("where", ["forward", "backward", "in the loss", "in recomputation"])
@both_homes
def test_a_failed_pass_leaves_no_trace(home, where, tmp_path):
    """Method: the second of three steps is first tried with an exception in its middle, twice; then
    losses and weights have the bits of a run without the failure, and no more space is taken than
    three steps in a row take.
    """

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
            "backward": (
                lambda: block.feed[1].register_forward_hook(lambda m, args, out: Failing.apply(out))
            ),
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
        model, optimizer = infinity.wrap_model(
            model, adamw(model, LR), configuration(kind, build, tmp_path)
        )
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
    """Method: KeyboardInterrupt in the middle of a forward, as Ctrl-C in a notebook, and the next
    forwards: torch's stack of hooks is as it was, no unit is held, and the next steps have the bits
    of a run without."""

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
        found = {
            f"loss {i}": loss.detach() for i, loss in enumerate(language_loop(model, optimizer))
        }
        peaks = {tier: account.peak_nbytes for tier, account in infinity.stats(model).tiers.items()}
        left = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return found | model.state_dict(), peaks | {"hooks left": left}

    right, right_peaks = run(False)
    found, peaks = run(True)
    assert differing(found, right) == []
    assert peaks == right_peaks


def test_a_change_in_place_of_a_saved_tensor_gives_no_wrong_gradient(tmp_path):
    """Method: what autograd saved is changed in place before the backward, which torch refuses. The
    engine refuses it too, or computes with the values as they were, whichever their size and home:
    never with the changed ones.
    """

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
            if not isinstance(found, str) and not torch.allclose(
                found, right, rtol=1e-4, atol=1e-6
            ):
                wrong.append((home, rows))
    assert not wrong, f"silently wrong gradients with activations on {wrong}"


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_a_change_that_torch_does_not_count_is_saved_as_it_is_then(home, small_ones_too, tmp_path):
    """Method: small ones too. A storage is saved, changed through .data (or NumPy), and saved
    again: what was saved second is the changed value, as on the device; what was saved first is not
    asked for."""

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
