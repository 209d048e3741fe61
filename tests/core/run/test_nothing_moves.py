"""A model that stays on the device: autograd saves its weights themselves, and forwards inside the
root's need no frame of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from inside import parts_of
from models import seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.params.parameter import ResidentParameter, StoredParameter
from infinity.torch_private import top_hooks

HOMES = ["device", "host"]


class Block(nn.Module):
    """Tells what it sees as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.see: Callable[[Block], None] = lambda block: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.see(self)
        return x + self.second(F.gelu(self.first(x)))


class Net(nn.Module):
    """Blocks, and ways to use them that a list of blocks has not."""

    def __init__(self, way: str = "in turn") -> None:
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, *, depth: int = 0) -> torch.Tensor:
        self.kept.clear()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.way == "checkpoints" else block(x)
            self.kept.append(x)
        if self.way == "root inside root" and not depth:
            x = self(x, depth=1)
        if self.way == "weight of another":
            x = F.linear(x, self.blocks[0].first.weight, self.head.bias)
        if self.way == "weight of a later one":
            return F.linear(x, self.head.weight)
        return self.head(x)


def wrap(home: str | None, way: str = "in turn", dtype=torch.float32, **settings):
    model = seeded(3, lambda: Net(way)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    if home is None:
        return model, optimizer
    config = {"params": home, "optimizer": home} | settings
    return infinity.wrap_model(model, optimizer, config)


def sample(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def look(model: Net, at: Callable[[Block], object]) -> list:
    """Returns what ``at`` sees in each block of one forward."""
    seen: list = []
    for block in model.blocks:
        block.see = lambda block: seen.append(at(block))
    model(sample().to(model.head.weight.dtype))
    return seen


# --- what a forward has ---


@pytest.mark.parametrize("home", HOMES)
def test_autograd_saves_weights_themselves(home):
    """Twins: weights at home on the host are saved as references, and so are those with masters,
    and those that a budget may have to count."""
    model, _ = wrap(home)
    assert [hooks is None for hooks in look(model, lambda _: top_hooks(True))] == [
        home == "device"
    ] * 3
    for settings in ({"dtype": torch.bfloat16}, {"device_memory": "1 MiB"}):
        model, _ = wrap("device", **settings)
        assert None not in look(model, lambda _: top_hooks(True))


@pytest.mark.parametrize("home", HOMES)
def test_forwards_inside_the_root_have_no_frame(home):
    """Twins: with its home on the host, or called by itself, a block has one."""
    model, _ = wrap(home)
    running = parts_of(model).job.running
    inside = 0 if home == "device" else 1
    assert look(model, lambda _: len(running.frames)) == [1 + inside] * 3
    model.blocks[0](sample())
    block = model.blocks[0]
    seen = []
    block.see = lambda _: seen.append([frame.module for frame in running.frames])
    block(sample())
    assert seen == [[block]] and not running.frames and not running.holds


def test_a_block_is_at_rest_until_it_is_called():
    """An update of a later block may still run, so a use of its weight has to wait for that. Twin:
    the blocks that were called are ordinary ones until the root's forward ends."""
    model, _ = wrap("device")
    kinds = look(model, lambda _: [type(each.first.weight) for each in model.blocks])
    there, rests = ResidentParameter, StoredParameter
    assert kinds == [[there, rests, rests], [there, there, rests], [there, there, there]]
    assert {type(param) for param in model.parameters()} == {rests}


def test_a_failed_forward_lets_go_of_all_blocks():
    model, optimizer = wrap("device")

    def fail(_block: Block) -> None:
        raise RuntimeError("no")

    model.blocks[2].see = fail
    with pytest.raises(RuntimeError, match="no"):
        model(sample())
    model.blocks[2].see = lambda _: None
    running = parts_of(model).job.running
    model(sample()).sum().backward()
    optimizer.step()
    assert not running.frames and not running.holds


class Result:
    """An output that does not show its tensor to the engine."""

    __slots__ = ("value",)


def test_a_backward_holds_each_block_that_it_reaches():
    """Whatever the root returns: each block's own output tells. Twin: before, and once the block
    is behind it, its weights are at rest."""
    model, _ = wrap("device")
    kinds: list[list[type]] = []

    def see() -> None:
        kinds.append([type(block.first.weight) for block in model.blocks])

    def inside(block: Block, args: tuple) -> None:
        args[0].requires_grad and args[0].register_hook(lambda grad: see())

    def wrapped(module: nn.Module, args: tuple, output: torch.Tensor) -> Result:
        result = Result()
        result.value = output
        return result

    model.blocks[1].second.register_forward_pre_hook(inside)
    model.register_forward_hook(wrapped)
    y = model(sample()).value
    see()
    y.sum().backward()
    see()
    rests, there = [StoredParameter] * 3, ResidentParameter
    before, during, after = kinds
    assert before == after == rests
    assert during[1] is there and during[0] is StoredParameter


# --- bits ---


def trained(home: str | None, way: str, dtype=torch.float32) -> list[torch.Tensor]:
    """Returns the losses and the weights of four steps."""
    model, optimizer = wrap(home, way, dtype)
    losses = []
    for step in range(4):
        y = model(sample(step).to(dtype))
        if way == "kept outputs alone":
            y = model.kept[0] * model.kept[2]
        if way == "a block by itself":
            y = y + model.blocks[1](sample(9).to(dtype))
        loss = y.square().mean()
        if way == "stats and reads between":
            infinity.stats(model) if home else None
            loss = loss + sum(param.detach().sum() for param in model.parameters())
        if way == "a second derivative":
            params = [*model.blocks.parameters()]
            grads = torch.autograd.grad(loss, params, create_graph=True)
            loss = loss + sum(grad.square().sum() for grad in grads)
        if way == "two backwards":
            loss.backward(retain_graph=True)
        loss.backward()
        if way == "evaluation between":
            with torch.no_grad():
                losses.append(model(sample(7).to(dtype)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + [param.detach().clone() for param in model.parameters()]


WAYS = [
    "in turn",
    "checkpoints",
    "root inside root",
    "weight of another",
    "weight of a later one",
    "kept outputs alone",
    "a block by itself",
    "stats and reads between",
    "a second derivative",
    "two backwards",
    "evaluation between",
]


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_the_plain_model(way):
    assert all(map(torch.equal, trained("device", way), trained(None, way)))


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_masters_are_those_of_the_host(way):
    ours, host = (trained(home, way, torch.bfloat16) for home in HOMES)
    assert all(map(torch.equal, ours, host))


# --- what is refused ---


@pytest.mark.parametrize(
    ("dtype", "error"),
    [
        (torch.float32, "modified by an inplace operation"),  # torch's own: it counts the step
        (torch.bfloat16, "they were changed since"),
    ],
)
def test_a_backward_through_stepped_weights_is_refused(dtype, error):
    """Twin: before the step it runs twice."""
    model, optimizer = wrap("device", dtype=dtype)
    loss = model(sample().to(dtype)).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=error):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_inside_a_forward_is_no_edit_of_it(dtype):
    """Twin: a change by the user is one, which a master cannot follow."""
    model, optimizer = wrap("device", dtype=dtype)
    model(sample().to(dtype)).sum().backward()
    model.blocks[1].see = lambda _: optimizer.step()
    model(sample().to(dtype))

    def change(block: Block) -> None:
        with torch.no_grad():
            block.first.weight.mul_(2)

    model.blocks[1].see = change
    if dtype is torch.float32:
        model(sample())
        return
    with pytest.raises(infinity.UsageError, match="its master cannot follow"):
        model(sample().to(dtype))
