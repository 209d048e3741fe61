"""Backward: holds a unit for as long as a backward needs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from inside import parts_of
from models import seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.grads.backward import Backward
from infinity.errors import CapacityError

CONFIG = {
    "params": "host",
    "optimizer": "host",
    "device_memory": "1MiB",
}  # a window for all units: none has to make room


class Block(nn.Module):
    """A layer, a parameter that never gets a gradient, and an argument that needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.look: Callable[[], object] = lambda: (
            None
        )  # called when the backward is behind the output, and not yet at the layer

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).tanh()
        x.register_hook(lambda _: self.look() and None)
        return x * mask


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, torch.ones(8))
        return x


def made(*, frozen: tuple[int, ...] = ()) -> tuple[Stack, torch.optim.Optimizer]:
    model = seeded(3, Stack)
    for block in frozen:
        model.blocks[block].requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    return infinity.wrap_model(model, torch.optim.SGD(params, lr=0.1), CONFIG)


def held_at_the_input(*, frozen: tuple[int, ...] = (), steps: int) -> list[list[bool]]:
    """Which units but the first are held when the backward of each step comes to the input."""
    model, optimizer = made(frozen=frozen)
    engine, seen = parts_of(model).engine, []
    for _ in range(steps):
        x = torch.ones(2, 8, requires_grad=True)
        x.register_hook(
            lambda _: seen.append(
                [parts_of(engine).prefetcher.is_held(unit) for unit in parts_of(engine).units[1:]]
            )
        )
        model(x).sum().backward()
        assert not any(map(parts_of(engine).prefetcher.is_held, parts_of(engine).units))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_a_unit_is_held_until_what_gets_gradients_has_landed():
    """Once it has been seen that a parameter gets no gradient nothing waits for it. Twin: the first
    backward waits for all."""
    assert held_at_the_input(steps=2) == [[True] * 3, [False] * 3]


def test_in_lockstep_a_unit_is_held_until_the_backward_has_come_two_further(monkeypatch):
    """As if other ranks gathered too, which may get other gradients: whether a parameter gets one
    changes nothing. Twin: above."""
    monkeypatch.setattr(Backward, "gathers_with_ranks", True)
    assert held_at_the_input(steps=2) == [[True, False, False]] * 2


def test_a_frozen_unit_is_held_until_the_backward_leaves_it():
    """It has no gradient that could land: those of its inputs tell, but for the ones that need
    none. Twin: the units beside it, which wait for theirs."""
    assert held_at_the_input(frozen=(2,), steps=1) == [[True, False, True]]


def test_a_unit_is_held_from_the_gradient_of_its_output_on():
    """A checkpoint inside its owner could ask for weights that autograd did not save in our sight.
    Twin: the unit before it, to which no gradient has come yet."""
    model, _ = made()
    prefetcher, units, seen = (
        parts_of(model).prefetcher,
        parts_of(model).units,
        [],
    )
    model.blocks[2].look = lambda: seen.append([prefetcher.is_held(unit) for unit in units])
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert [held[1:3] for held in seen] == [[False, True]]


def test_the_end_of_a_joined_pass_tells_which_units_got_gradients():
    """Two backwards in one pass; the third unit is frozen. Twin: outside of a pass each backward
    tells."""
    model, _ = made(frozen=(2,))
    told: list[int] = []
    listeners = parts_of(model).events.unit_landed
    listeners.append(lambda unit: told.append(unit.index))
    with infinity.accumulate(model):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            assert told == []
    assert told == [3, 1, 0]
    model(torch.ones(2, 8)).sum().backward()
    assert told == [3, 1, 0] * 2


def test_a_frozen_models_input_gets_its_gradient_by_autograd_grad():
    """A leaf, as a saliency map or an attack takes it, and what was computed from one, twice
    through the same tensors; torch's bits. No hook stays on the user's leaf. Twin: a non-leaf input
    has the hook that lets units go."""
    plain, model = (seeded(3, Stack).requires_grad_(False) for _ in range(2))
    infinity.wrap_model(model, None, CONFIG)
    leaf = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for x in (leaf, leaf * 2, leaf):
        found, expected = (
            torch.autograd.grad(each(x).square().sum(), x)[0] for each in (model, plain)
        )
        assert torch.equal(found, expected)
        assert bool(x._backward_hooks) == (not x.is_leaf)
    assert not any(map(parts_of(model).prefetcher.is_held, parts_of(model).units))


def test_a_node_keeps_all_weights_that_it_has_taken_out(monkeypatch):
    """Multiplies two weights, with a window for them and none for their gradients: the error names
    what is enough, which trains. Twin: if room is made of what the node has taken out, it computes
    with memory that is gone."""

    class Layer(nn.Linear):
        """One that does not run in tiles."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Layer(256, 256), Layer(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.other(self.one(x)) + x @ (self.one.weight * self.other.weight)).sum()

    def train(budget: int) -> None:
        model = seeded(3, Product)
        config = CONFIG | {"units": ["Layer"], "device_memory": budget}
        model, _ = infinity.wrap_model(model, torch.optim.SGD(model.parameters()), config)
        model(torch.ones(2, 256)).backward()

    least = 2 * 272 * 1024
    with pytest.raises(CapacityError) as refused:
        train(least)
    train(int(str(refused.value).rpartition("Config(device_memory=")[2][:-1]))
    monkeypatch.setattr(Backward, "_taken_by_node", lambda self: ())
    with pytest.raises(RuntimeError, match="Storage that is invalid"):
        train(least)


class Checkpointed(nn.Module):
    """Layers that are checkpoints of their own: the backward's first use is a forward again."""

    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("count, casts", [(1, False), (1, True), (3, True)])
def test_a_backward_may_begin_with_a_forward_that_a_checkpoint_runs_again(count, casts, swap):
    """Compares gradients with plain torch's: the checkpoint ends its forward by an exception,
    before any other use of the engine. Twin: an exception of a user's hook is recovered from."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        x = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = model(x).float().square().mean()
        loss.backward()
        return [param.grad.clone() for param in model.parameters()]

    torch.manual_seed(0)
    model = Checkpointed(count)
    right = gradients(model)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(swap)]}
    model, _ = infinity.wrap_model(model, optimizer, config)
    assert all(map(torch.equal, gradients(model), right))
    hook = model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradients(model)
    hook.remove()
    assert all(map(torch.equal, gradients(model), right))


class Pair(nn.Module):
    """Two layers of one unit, the first of which has an input without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def raise_stop(grad: torch.Tensor) -> None:
    raise ValueError("stop")


def test_a_backward_after_one_that_failed_brings_the_units_that_it_held():
    """Compares the gradient of an input with plain torch's: a hook on a weight ends a backward,
    whose unit still awaits that weight's gradient; the next backward has its graph from before."""
    found = []
    for wraps in (False, True):
        model = seeded(3, lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
        if wraps:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            infinity.wrap_model(model, optimizer, CONFIG)
        inputs = [torch.ones(2, 64, requires_grad=True) for _ in range(2)]
        failing, loss = (model(x).square().mean() for x in inputs)
        hook = model[1].weight.register_hook(raise_stop)
        with pytest.raises(ValueError, match="stop"):
            failing.backward()
        hook.remove()
        loss.backward()
        found.append(inputs[1].grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["first", "last"])
def test_a_backward_asks_for_the_versions_of_its_own_weights_alone(name):
    """Method: change a weight between forward and backward, whose neighbour in memory autograd has
    saved: the gradients are plain torch's. Twin: the saved one, which torch refuses, too."""
    found = []
    for wraps in (False, True):
        model = seeded(3, lambda: nn.Sequential(Pair()))
        if wraps:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            infinity.wrap_model(model, optimizer, CONFIG | {"units": ["Pair"]})
        loss = model(torch.ones(2, 64)).square().mean()
        with torch.no_grad():
            getattr(model[0], name).weight.add_(1)
        if name == "last":
            with pytest.raises(
                infinity.UsageError if wraps else RuntimeError, match="Run|modified"
            ):
                loss.backward()
        else:
            loss.backward()
            found.append([param.grad.clone() for param in model.parameters()])
    assert name == "last" or all(map(torch.equal, *found))
