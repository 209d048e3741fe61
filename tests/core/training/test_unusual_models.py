"""Models and modes of torch that are used less often."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from models import (
    at_home,
    differing,
    in_child,
    loss_of,
    seeded,
    tokens,
    transformer,
)
from runs import adamw
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from training_cases import (
    LR,
    SEED,
    a_model,
    assert_trains_alike,
    both_ends,
    hardest,
    simple_step,
    well_conditioned,
)

import infinity


class Recurrent(nn.Module):
    """Modules that use their children's weights themselves: an LSTM, multi-head attention,
    parametrized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2
        )
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.orthogonal = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x)
        return self.orthogonal(torch.relu(self.normed(self.encoder(x))))


@both_ends
def test_modules_that_use_their_childrens_weights(home, tmp_path):
    """Method: torch's own modules that bypass their children's forward, in training and in their
    fast path."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen += [loss.detach(), model(x)]
            model.train()
        return seen

    assert_trains_alike(loop, seeded(SEED, Recurrent), home, tmp_path)


class Padded(nn.Module):
    """A head over torch's encoder, which is told what of its input is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 3), nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
        return self.head(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@both_ends
def test_an_encoder_of_torch_takes_its_fast_path(home, tmp_path):
    """Claim: in evaluation torch's encoder takes nested tensors, with zeros where the input was
    padding. It does so only where its first layer's weights are plain tensors, before it has called
    that layer. Method: between steps, under the least budgets; then with a forward that an
    exception ends, and frozen, where gradients are on. Twin: the steps.
    """

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step))
            out = model(x)
            assert out[0, 3:].abs().min() > 0, "in training padding is computed with"
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with pytest.raises(RuntimeError), torch.no_grad():
                model(x[..., :8])
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    seen += [model(x).clone()]
                assert not seen[-1][0, 3:].any()
            for param in model.parameters():
                param.requires_grad_(False)
            seen += [model(x)]
            for param in model.parameters():
                param.requires_grad_(True)
            seen += [model(x).detach()]
            model.train()
        return seen

    assert_trains_alike(loop, seeded(SEED, Padded), home, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_share_storage_without_being_one(tmp_path):
    """Method: tie two parameters by their data, not by identity: torch updates the shared bytes
    twice. The engine must do the same or refuse; training them apart would be another model."""

    def build():
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        model[2].weight.data = model[0].weight.data
        return model

    def loop(model, optimizer):
        for step in range(2):
            model(
                torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
            ).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, model = seeded(SEED, build), seeded(SEED, build)
    plain_optimizer = well_conditioned(plain)
    loop(plain, plain_optimizer)
    try:
        model, optimizer = infinity.wrap_model(
            model, well_conditioned(model), at_home("host", "host", tmp_path)
        )
    except infinity.ConfigError:
        return
    loop(model, optimizer)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)


@both_ends
def test_a_worker_process_that_ends_leaves_the_job_alone(home, tmp_path):
    """Method: a data loader with forked workers, and a forked child that exits by itself (so
    that its exit handlers run), while a wrapped model trains; it trains on, with its swap file
    in place."""
    import os

    def work():
        model, optimizer = a_model()
        model, optimizer = infinity.wrap_model(
            model, optimizer, hardest(home, model, optimizer, tmp_path)
        )
        simple_step(model, optimizer, 0)
        before = sorted(os.listdir(tmp_path))
        loader = torch.utils.data.DataLoader(
            torch.arange(8), batch_size=2, num_workers=2, multiprocessing_context="fork"
        )
        for step, _ in enumerate(loader):
            simple_step(model, optimizer, step)
        child = os.fork()
        if not child:
            import atexit

            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
        assert sorted(os.listdir(tmp_path)) == before, "the child removed its parent's swap folder"
        simple_step(model, optimizer, 9)
        return None

    in_child(work)


Pair = collections.namedtuple("Pair", "x state")


@dataclasses.dataclass
class Output:
    x: torch.Tensor
    state: list


@pytest.mark.parametrize(
    "kind", ["tuple", "list", "dict", "namedtuple", "dataclass", "odict", "object"]
)
@both_ends
def test_what_a_forward_returns_is_handed_on_as_it_is(kind, home, tmp_path):
    """Method: modules that return containers, with a list in them that the module and its caller
    both keep and change, as caches are; types and identities are those that the module returned."""

    class Thing:
        def __init__(self, x, state):
            self.x, self.state = x, state

    make = {
        "tuple": lambda x, s: (x, s),
        "list": lambda x, s: [x, s],
        "dict": lambda x, s: {"x": x, "state": s},
        "namedtuple": Pair,
        "dataclass": Output,
        "odict": lambda x, s: collections.OrderedDict(x=x, state=s),
        "object": Thing,
    }[kind]

    class Layer(nn.Linear):
        def forward(self, x, state):
            state.append(x.sum().item())
            self.returned = make(super().forward(x), state)
            return self.returned

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(64, 64) for _ in range(4))

        def forward(self, x):
            state: list = []
            for layer in self.layers:
                out = layer(x, state)
                assert out is layer.returned and type(out) is type(make(x, state))
                if isinstance(out, dict):
                    x, kept = out["x"], out["state"]
                elif isinstance(out, (tuple, list)):
                    x, kept = out
                else:
                    x, kept = out.x, out.state
                assert kept is state
            assert len(state) == 4
            return x

    def loop(model, optimizer):
        for step in range(2):
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_alike(loop, seeded(SEED, Stack), home, tmp_path)


class Wandering(nn.Module):
    """Blocks that are skipped, repeated and called in changing order, and one that calls itself."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            x = x + torch.tanh(self.linear(self.norm(x)))
            return self(x, depth - 1) if depth else x

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(self.Step() for _ in range(8))
        self.path: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.path:
            x = self.steps[index](x, depth=index % 3)
        return x


@both_ends
def test_another_way_through_the_model_every_time(home, tmp_path):
    """Method: a seeded path through eight blocks, another one each step, with repeats, skips and
    recursion."""
    paths = [
        torch.randint(8, (6,), generator=torch.Generator().manual_seed(SEED + i)).tolist()
        for i in range(8)
    ]

    def loop(model, optimizer):
        seen = []
        for path in paths:
            model.path = path
            loss = model(torch.ones(2, 64)).square().mean()
            loss.backward()
            seen.append(torch.tensor([p.grad is None for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    model, _ = assert_trains_alike(loop, seeded(SEED, Wandering), home, tmp_path)
    device = infinity.stats(model).tiers["device"]
    assert device.peak_nbytes <= device.planned_nbytes


@both_ends
def test_a_wrapped_part_of_a_larger_model(home, tmp_path):
    """Method: wrap the backbone only; a plain head and a plain input layer around it train with an
    optimizer of their own, in the same backward."""
    plain, model = transformer(SEED), transformer(SEED)
    heads = [seeded(1, lambda: nn.Linear(67, 3)) for _ in range(2)]
    plain_optimizer, optimizer = well_conditioned(plain), well_conditioned(model)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path)
    )
    losses = []
    for one, its, head in ((plain, plain_optimizer, heads[0]), (model, optimizer, heads[1])):
        whole = nn.Sequential(one, head)
        others = torch.optim.AdamW(head.parameters(), lr=LR, eps=1e-3)
        torch.manual_seed(SEED)
        for step in range(3):
            loss = whole(tokens(step)).square().mean()
            loss.backward()
            losses.append(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
            its.step()
            others.step()
            whole.zero_grad()
    torch.testing.assert_close(losses[3:], losses[:3], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(heads[1].state_dict(), heads[0].state_dict(), rtol=1e-5, atol=2e-6)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "anomaly detection": torch.autograd.set_detect_anomaly,
    "deterministic algorithms": deterministic,
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("cpu"),
    "default device meta": lambda: torch.device("meta"),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@both_ends
def test_modes_of_torch_change_nothing(mode, home, tmp_path):
    """Method: wrap and train inside a mode of torch that has nothing to do with it; the bits of a
    run outside."""
    states = []
    ids = [tokens(SEED + step) for step in range(2)]
    for inside in (False, True):
        model = transformer(SEED, dropout=0.0)
        optimizer = adamw(model, LR)
        config = hardest(home, model, optimizer, tmp_path)
        enter = MODES[mode] if inside else contextlib.nullcontext
        with enter(*([True] if enter is torch.autograd.set_detect_anomaly else [])):
            model, optimizer = infinity.wrap_model(model, optimizer, config)
            for batch in ids:
                loss_of(model, batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            states.append(dict(model.state_dict()))
            state = optimizer.state_dict()["state"]
            states[-1] |= {
                f"{i} {k}": v for i, entry in state.items() for k, v in entry.items() if k != "step"
            }
            # torch itself counts in fp64 where that is the default dtype.
            assert {float(entry["step"]) for entry in state.values()} == {2.0}
            assert {entry["step"].dtype for entry in state.values()} <= {
                torch.float32,
                torch.float64,
            }
        del model, optimizer
    assert differing(*states) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_ends
def test_wrapping_inside_a_mode_without_gradients(home, mode, tmp_path):
    """Method: call wrap_model under no_grad and inference_mode, train outside; the bits of a wrap
    outside, or a typed error at the wrap."""
    states = []
    for enter in (contextlib.nullcontext, mode):
        model = transformer(SEED, dropout=0.0)
        optimizer = adamw(model, LR)
        config = hardest(home, model, optimizer, tmp_path)
        try:
            with enter():
                model, optimizer = infinity.wrap_model(model, optimizer, config)
        except infinity.InfinityError:
            return
        for step in range(2):
            loss_of(model, tokens(SEED + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
        del model, optimizer
    assert differing(*states) == []


@both_ends
def test_an_embedding_that_renormalises_itself(home, tmp_path):
    """Method: nn.Embedding with max_norm and padding_idx changes its own weight in every
    forward."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(67, 64, max_norm=0.5, padding_idx=0)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def loop(model, optimizer):
        losses = []
        for step in range(3):
            loss = model(tokens(SEED + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    assert_trains_alike(loop, seeded(SEED, Bag), home, tmp_path)


@both_ends
def test_functional_call_with_other_tensors(home, tmp_path):
    """Method: torch.func.functional_call replaces the parameters for one call; output and gradients
    are those of the tensors that were given, and the model is untouched."""
    plain, model = transformer(SEED, dropout=0.0), transformer(SEED, dropout=0.0)
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), at_home(home, home, tmp_path))
    before = dict(model.state_dict())
    found = []
    for one in (plain, model):
        given = {
            name: (2 * value).detach().requires_grad_() for name, value in plain.named_parameters()
        }
        out = torch.func.functional_call(one, given, (tokens(SEED),)).square().mean()
        found.append(
            [out.detach(), *torch.autograd.grad(out, list(given.values()), allow_unused=True)]
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
    assert differing(dict(model.state_dict()), before) == []
    simple_step(model, optimizer, 0)


TRANSFORMS: dict[str, Callable] = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).sum())(x),
    "linearize": lambda model, x: torch.func.linearize(model, x),
    "functionalize": lambda model, x: torch.func.functionalize(model)(x),
    "of parameters": lambda model, x: torch.func.grad(
        lambda given: torch.func.functional_call(model, given, (x,)).sum()
    )({name: torch.zeros(param.shape) for name, param in model.named_parameters()}),
    "trace": lambda model, x: torch.jit.trace(model, x),
    "script": lambda model, x: torch.jit.script(model),
    "make_fx": lambda model, x: make_fx(model)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@both_ends
def test_a_transform_of_torch_is_refused_before_anything_changed(transform, home, tmp_path):
    """Method: torch.func, torch.jit and fx over a wrapped model that has landed gradients; the step
    behind applies them. Twin: the same on the plain model runs."""
    plain, model = (
        seeded(SEED, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
        for _ in range(2)
    )
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), at_home(home, home, tmp_path)
    )
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(SEED))
    for each in (plain, model):
        each(x).square().sum().backward()
    expected = TRANSFORMS[transform](plain, x)
    if transform == "functionalize":  # which has bytes, and works
        assert torch.equal(TRANSFORMS[transform](model, x), expected)
    else:
        with pytest.raises(
            infinity.UsageError,
            match="transform of torch.func|cannot be traced|a tracer|torch.jit.trace",
        ):
            TRANSFORMS[transform](model, x)
    for each in (plain_optimizer, optimizer):
        each.step()
    assert differing(model.state_dict(), plain.state_dict()) == []
