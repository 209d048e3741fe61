"""Recomputation: whatever is done with what a block saves, the bits are the plain run's, and
nothing runs twice unasked.

Words used here: **plain**: the same model wrapped with its activations on the device. **choice**:
what a run is brought to do with its blocks, by its device memory and by the rate at which it
believes to send. **recomputations**: forwards of a block that ran inside a backward. **effect**:
what a block computes; **call**: how the model calls it. Everything that autograd saves is counted,
however small. Two passes measure.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import pickle
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import parts_of
from models import at_home, differing, seeded
from runs import adamw
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from zoo import ZOO, make_batch, make_model, seed_everything

import infinity
from infinity import Config
from infinity.core.machine.tiers import Tier
from infinity.core.plan.memory_plan import BUFFERS
from infinity.core.run import activation_store
from infinity.core.wrap.lay_out import lay_out
from infinity.ext.blocks import checkpointed, recompute
from infinity.ext.blocks.activation_choice import ActivationChoice, Measured, choose
from infinity.ext.blocks.recompute import MeasuredRoom

SEED = 71
WIDTH, ROWS, BLOCKS, STEPS = 16, 24, 3, 6
RATES = {"kept": 1.0, "sent": 1e18, "recomputed": 1e-6}
pytestmark = pytest.mark.timeout(120)
not_kept = pytest.mark.parametrize("choice", ["sent", "recomputed"])


@pytest.fixture(autouse=True)
def recomputations(monkeypatch) -> Iterator[list]:
    """Where forwards ran a second time. Afterwards torch's stack of hooks is empty."""
    seen, compute = [], checkpointed.Checkpointed.compute

    def spy(self, spec, *leaves, **how):
        if (task := torch._C._current_graph_task_id()) != -1:
            seen.append(task)
        return compute(self, spec, *leaves, **how)

    monkeypatch.setattr(checkpointed.Checkpointed, "compute", spy)
    monkeypatch.setattr(activation_store, "SMALLEST_NBYTES", 1)
    yield seen
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def wrap(
    model: nn.Module,
    choice: str | None,
    *,
    spare: int | None = None,
    host: int | None = None,
    **more: Any,
) -> tuple:
    """``choice``: None for plain. ``spare``, ``host``: bytes of the device's and the host's budget
    for activations."""
    optimizer = adamw(model, 1e-2)
    config = {
        "params": "device",
        "optimizer": "device",
        "activations": "auto" if choice else "device",
        "recompute": True,
        **more,
    }
    if choice:
        planned, _ = lay_out(model, optimizer, Config.make(config))
        spare = (1 << 24 if choice == "kept" else 0) if spare is None else spare
        buffers = (
            planned.terms[Tier.HOST].get(BUFFERS, 0) if host is None else 0
        )  # the device's where its budget alone is given
        config["device_memory"] = planned.planned_nbytes(Tier.DEVICE) + buffers + spare
        config["host_memory"] = None if host is None else planned.planned_nbytes(Tier.HOST) + host
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    if choice:
        parts_of(model).activations.planner._send_rate = lambda: RATES[choice]
    return model, optimizer


def trained(build: Callable, loop: Callable, choice: str | None, **more: Any) -> tuple[dict, dict]:
    """What a loop yields and leaves, moments and noise too; and what was done with the blocks."""
    model, optimizer = wrap(seeded(SEED, build), choice, **more)
    seed_everything(SEED)
    found = {f"yield {i}": value.detach().clone() for i, value in enumerate(loop(model, optimizer))}
    found["noise"] = torch.cat(
        [torch.rand(1), torch.tensor([random.random(), numpy.random.rand()])]
    )
    stats = infinity.stats(model)
    for tier, account in stats.tiers.items():
        assert account.budget_nbytes is None or account.peak_nbytes <= account.budget_nbytes, (
            f"{tier}: {account}"
        )
    model, optimizer = infinity.unwrap_model(model, optimizer)
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    for i, state in enumerate(optimizer.state.values()):
        found |= {
            f"{i} {name}": value.clone()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        }
    return found, stats.blocks


PLAIN: dict[str, dict] = {}  # plain runs, by name


def assert_same_bits(
    build: Callable, loop: Callable, choice: str, *, name: str = "", **more: Any
) -> dict:
    """The run has the bits of the plain one, which is made once for a ``name``. Returns what was
    done with the blocks."""
    right = (
        PLAIN.get(name)
        or trained(
            build, loop, None, **{key: more[key] for key in more if key not in ("spare", "host")}
        )[0]
    )
    PLAIN.update({name: right} if name else {})
    found, blocks = trained(build, loop, choice, **more)
    assert differing(found, right) == []
    return blocks


def rows(step: int, count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(SEED + step))


def stepped(optimizer: torch.optim.Optimizer, loss: torch.Tensor | None) -> torch.Tensor | None:
    loss.backward() if loss is not None else None
    optimizer.step()
    optimizer.zero_grad()
    return loss


def simply(model, optimizer):
    for step in range(STEPS):
        yield stepped(optimizer, model(rows(step)))


class Block(nn.Module):
    def __init__(self, effect: Callable) -> None:
        super().__init__()
        self.up, self.down, self.drop = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Dropout(0.1),
        )
        self.norm, self.scale, self.effect = (
            nn.BatchNorm1d(WIDTH).eval(),
            nn.Parameter(torch.ones(WIDTH)),
            effect,
        )
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.count, self.log, self.table, self.ticks = 0, [], {"count": 0}, itertools.count()
        self.inside, self.generator, self.average = (
            types.SimpleNamespace(count=0),
            torch.Generator(),
            torch.zeros(WIDTH),
        )

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x)))) * self.scale

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.effect(self, x, *args, **kwargs)


def simple(block: Block, x: torch.Tensor, losses: list) -> torch.Tensor:
    return block(x)


class Model(nn.Module):
    def __init__(self, effect: Callable = Block.feed, call: Callable = simple) -> None:
        super().__init__()
        self.inner, self.head, self.call = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), call
        self.blocks = nn.ModuleList(Block(effect) for _ in range(BLOCKS))
        for block in self.blocks:
            vars(block)["others"] = (self.head,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        x = self.inner(x)
        for block in self.blocks:
            x = self.call(block, x, losses)
        return self.head(x).square().mean() + sum(losses)


# --- what is chosen ---

MEASURED = st.builds(
    Measured,
    st.integers(0, 100),
    st.sampled_from([0.0, 0.5, 1.0, 5.0, float("inf")]),
    st.booleans(),
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(MEASURED, max_size=8),
    st.integers(0, 400),
    st.integers(0, 300),
    st.sampled_from([0.1, 10.0, 1e9]),
)
def test_choices_keep_within_the_device_and_repeat_only_what_may_be(blocks, device, host, rate):
    """Any blocks, budgets and rates: kept bytes fit, beside the largest block where any is not
    kept."""
    found = choose(blocks, device_nbytes=device, host_nbytes=host, send_rate=rate)
    assert len(found) == len(blocks)
    kept = sum(
        block.nbytes for block, choice in zip(blocks, found) if choice is ActivationChoice.KEEP
    )
    whole = sum(block.nbytes for block in blocks) <= device
    assert (
        all(choice is ActivationChoice.KEEP for choice in found)
        if whole
        else kept <= max(0, device - max(b.nbytes for b in blocks))
    )
    assert all(
        block.is_repeatable
        for block, choice in zip(blocks, found)
        if choice is ActivationChoice.RECOMPUTE
    )
    assert (
        sum(
            b.nbytes
            for b, choice in zip(blocks, found)
            if choice is ActivationChoice.SEND and b.is_repeatable
        )
        <= host
    )


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(MEASURED, max_size=8), st.integers(0, 400), st.sampled_from([0.1, 1e9]))
def test_beside_a_pass_that_keeps_none_no_more_is_kept_than_there_is_room(blocks, device, rate):
    """Any blocks, room and rates: what is kept, without inputs that are there anyway, fits. Twin:
    with one more block of those that may be recomputed it does not fit."""
    found = choose(blocks, device_nbytes=device, host_nbytes=0, send_rate=rate, is_beside=True)
    of = lambda choice: [
        max(0, b.nbytes - b.input_nbytes) for b, f in zip(blocks, found) if f is choice
    ]
    kept = sum(of(ActivationChoice.KEEP))
    assert kept <= device
    assert all(kept + more > device for more in of(ActivationChoice.RECOMPUTE))


@pytest.mark.parametrize(
    "unused, growth, room",
    [(400, 1, 400), (0, 1, 400), (0, 1.5, 100), (0, 2, 0), (300, 2, 300)],
)
def test_room_that_was_measured_shrinks_as_passes_grow(unused, growth, room):
    """Method: of 1,000 bytes passes take 600 that keep no block. ``unused`` is left after others,
    with blocks that are ``growth`` times as large. Four fifths are kept, an eighth is on its way.
    Twin: the first measurement, of the same room."""
    limits: list[int] = []
    memory = SimpleNamespace(left_nbytes=lambda several_ranks: 1000, unused_nbytes=lambda: 400)
    measured = MeasuredRoom(
        memory, several_ranks=False, is_shown=lambda: True, limit_in_flight=limits.append
    )
    assert measured.measure(100, 25) == (320, True)
    memory.unused_nbytes = lambda: unused
    kept, sends = measured.measure(int(100 * growth), 25)
    assert kept == int(0.8 * room) and sends == (room >= 400) and limits == [50, room // 8]


@pytest.mark.parametrize("choice", RATES)
@pytest.mark.parametrize(
    "more", [{}, at_home("host", "host", ""), at_home("nvme", "nvme", "")], ids=str
)
def test_each_choice_has_the_bits_of_the_plain_run(choice, more, recomputations, swap):
    """The twin of what follows: all blocks are kept, sent, or run again, as often as there are
    passes for it."""
    more = {key: [swap] if key == "nvme_paths" else value for key, value in more.items()}
    assert assert_same_bits(Model, simply, choice, **more)[choice] == BLOCKS or (
        choice == "kept" and more
    )
    assert (
        len(recomputations) == (BLOCKS * (STEPS - 2) if choice == "recomputed" else 0)
        or choice == "kept"
    )


def in_parts(effect: Callable = Block.feed) -> Model:
    """A model whose blocks may run in parts of a batch."""
    model = Model(effect)
    for block in model.blocks:
        block.norm = nn.Identity()
    return model


@pytest.mark.parametrize("choice", ["kept", "sent", "recomputed", "products_kept", "products_sent"])
def test_each_choice_for_parts_has_the_bits_of_parts_that_are_recomputed(
    choice, recomputations, monkeypatch
):
    """Each part of a batch counts as a block. Until there is a choice nothing of a part is kept."""
    parts = BLOCKS * ROWS // 8
    if "products" in choice:
        wanted = lambda blocks, **how: [ActivationChoice(choice)] * len(blocks)
        monkeypatch.setattr(recompute, "choose", wanted)
    right, _ = trained(in_parts, simply, None, micro_batch=8)
    assert len(recomputations) == parts * STEPS
    recomputations.clear()
    found, blocks = trained(in_parts, simply, choice.split("_")[-1], micro_batch=8)
    assert differing(found, right) == [] and blocks[choice] == parts
    assert len(recomputations) == parts * (2 if choice in ("kept", "sent") else STEPS)
    assert (blocks["recomputed_nbytes"] > 0) == (choice not in ("kept", "sent"))


@pytest.mark.parametrize("choice", ["kept", "recomputed"])
def test_a_batch_of_one_part_is_chosen_for_like_a_block(choice, recomputations):
    """Twin: a batch of several parts, above, each of which is chosen for."""
    blocks = assert_same_bits(in_parts, simply, choice, micro_batch=ROWS)
    assert blocks[choice] == BLOCKS and bool(recomputations) == (choice == "recomputed")


def test_a_part_with_side_effects_runs_again_as_without_a_choice(recomputations):
    """Twin: parts without, above, which are kept."""

    def counts(block: Block, x: torch.Tensor) -> torch.Tensor:
        block.count += 1
        return block.feed(x)

    build = partial(in_parts, counts)
    found, blocks = trained(build, simply, "kept", micro_batch=8)
    assert blocks == {} and len(recomputations) == BLOCKS * ROWS // 8 * STEPS
    assert differing(found, trained(build, simply, None, micro_batch=8)[0]) == []


@pytest.mark.parametrize("counts", [[24, 24, 24, 40, 16, 24], [8, 24, 40, 8, 40, 40]])
@pytest.mark.parametrize("choice", ["kept", "recomputed"])
def test_passes_with_other_numbers_of_parts_have_the_bits_of_recomputed_ones(choice, counts):
    """More parts, fewer, one that runs as a whole batch, and a smaller last one."""

    def loop(model, optimizer):
        for step, count in enumerate([*counts, 20, 20, 24]):
            yield stepped(optimizer, model(rows(step, count)))

    assert_same_bits(in_parts, loop, choice, micro_batch=8, name=f"parts {counts}")


def test_a_part_is_kept_and_the_budget_holds_in_every_pass(recomputations):
    """Room for one block beside another: one stays; what is kept never exceeds the budget. Any
    budget measures the same."""

    def measured(choice: str) -> tuple[list[int], int]:
        model, optimizer = wrap(seeded(SEED, Model), choice)
        list(itertools.islice(simply(model, optimizer), 2))
        store = parts_of(model).activations
        planner = store.planner
        return [block.measured().nbytes for block in planner.blocks], planner.outside_nbytes

    def loop(model, optimizer):
        for step, count in enumerate([ROWS] * STEPS + [3 * ROWS]):
            loss, store = model(rows(step, count)), parts_of(model).activations
            assert store is None or store.kept_nbytes <= store.spare_nbytes
            yield stepped(optimizer, loss)

    (nbytes, *_), outside = measured("kept")
    assert measured("sent") == measured("kept")
    blocks = assert_same_bits(Model, loop, "recomputed", spare=2 * nbytes + outside)
    kept = blocks["kept"] + blocks["products_kept"]
    assert 0 < kept and blocks["kept"] < BLOCKS and blocks["sent"] == 0 and recomputations
    assert blocks["kept_nbytes"] > 0


@pytest.mark.parametrize("cut_short", [1, 3])
def test_a_pass_that_an_exception_ended_is_not_measured(cut_short, recomputations):
    """Method: an exception in the last block ends the first passes. Twin: passes that end."""
    model, optimizer = wrap(seeded(SEED, Model), "kept")
    planner, last = parts_of(model).activations.planner, model.blocks[-1].down

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt("stop")

    for _ in range(cut_short):
        handle = last.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt, match="stop"):
            model(rows(0))
        assert planner._inputs and planner.blocks[0].has_run
        handle.remove()
        optimizer.zero_grad()
        assert not (planner._inputs or any(block.has_run for block in planner.blocks))
    for passes in range(3):
        stepped(optimizer, model(rows(0)))
        assert all(block._passes == passes for block in planner.blocks)


def test_the_inputs_of_recomputed_blocks_leave_less_to_those_that_are_kept():
    """Room for two blocks of ten bytes beside the one that runs. Twin: inputs that cost nothing."""
    found = {}
    for inputs in (0, 6):
        blocks = [Measured(10, 1e-9, True, inputs)] * 4
        chosen = choose(blocks, device_nbytes=31, host_nbytes=0, send_rate=1e9)
        found[inputs] = chosen.count(ActivationChoice.KEEP)
        assert sum(10 if each is ActivationChoice.KEEP else inputs for each in chosen) <= 31
    assert found == {0: 2, 6: 1}


@pytest.mark.parametrize("largest", [ROWS, 4 * ROWS, 40 * ROWS])
def test_what_finds_no_room_is_recomputed_at_once_at_any_size(largest, recomputations):
    """Sizes that grow once choices are made, and a host without room: no more is kept than the
    budget, beside the inputs and the block that runs. Twin: a first pass of the same."""

    def loop(model, optimizer):
        for count in (ROWS, ROWS, ROWS, largest, largest):
            loss, store = model(rows(1, count)), parts_of(model).activations
            if store is not None:
                inputs = BLOCKS * count * WIDTH * 4 + store.planner.outside_nbytes
                assert store.kept_nbytes <= max(store.spare_nbytes, inputs + 4096)
            yield stepped(optimizer, loss)

    blocks = assert_same_bits(Model, loop, "sent", host=0, spare=4096)
    assert blocks["recomputed"] == BLOCKS and len(recomputations) >= 4 * BLOCKS


@pytest.mark.parametrize(
    "more, told",
    [
        ({"activations": "host"}, "activations='host'"),
        ({"micro_batch": 2, "device_memory": 1 << 20}, ""),
        ({}, "device_memory"),
        ({"device_memory": 1 << 20}, ""),
        ({"recompute": False}, ""),
    ],
    ids=str,
)
def test_a_wrap_in_which_nothing_is_recomputed_says_so(more, told, caplog):
    """Twins: with a budget to choose for, and without the wish, nothing is said."""
    model, config = Chain(), {"params": "host", "optimizer": "host", "recompute": True, **more}
    infinity.wrap_model(model, adamw(model, 1e-2), config)
    said = [each.message for each in caplog.records if "no effect" in each.message]
    assert len(said) == bool(told) and all(told in each for each in said)


COMPILED: dict[str, Callable] = {
    "each block": lambda model, how: [block.compile(**how) for block in model.blocks],
    "in place": lambda model, how: [
        model.blocks.__setitem__(i, torch.compile(block, **how))
        for i, block in enumerate(model.blocks)
    ],
    "each forward": lambda model, how: [
        setattr(block, "forward", torch.compile(block.forward, **how)) for block in model.blocks
    ],
    "the model": lambda model, how: model.compile(**how),
}


@not_kept
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("is_wrapped_first", [False, True])
def test_compiled_blocks_are_chosen_for_as_eager_ones(
    name, is_wrapped_first, choice, recomputations
):
    """Method: one step in two, with the graph of one block for all. Twin: eager, which has the same
    counts and recomputations."""
    torch._dynamo.reset()
    backend = "aot_eager" if name == "each block" else "eager"
    compiled = lambda model: COMPILED[name](model, {"backend": backend})

    def build() -> nn.Module:
        model = Chain()
        return model if is_wrapped_first else (compiled(model), model)[1]

    def loop(model, optimizer):
        if is_wrapped_first:
            compiled(model)
        yield from simply(model, optimizer)

    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    right, found = trained(Chain, simply, None)[0], trained(build, loop, choice)
    names = found[0].keys() & right.keys()  # other names in place
    assert (
        found[1][choice] == BLOCKS
        and differing(*({n: f[n] for n in names} for f in (found[0], right))) == []
    )
    assert len(recomputations) == (BLOCKS * (STEPS - 2) if choice == "recomputed" else 0)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert 0 < graphs <= 3  # the model has one around the blocks


class Chain(nn.Module):
    """Blocks that torch.compile takes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Link() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Link(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def test_a_host_too_tight_to_send_to_makes_blocks_recompute(recomputations):
    """Sending is free, but there is hardly any host memory: what does not fit is run again."""
    assert assert_same_bits(Model, simply, "sent", host=4096)["recomputed"] and recomputations


# --- blocks ---


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] + grad * ctx.saved_tensors[0]


def with_autocast(b, x):
    with torch.autocast("cpu", torch.bfloat16):
        return b.feed(x).float()


def with_noise_of_its_own(b, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return b.feed(x) * torch.rand(WIDTH)


def with_a_way_out(b, x):
    try:
        return b.feed(x)
    except Exception:  # noqa: BLE001 - a fast path with a slow one behind it
        return (x * b.scale).sin().exp()


def increased(container: dict, key: str) -> int:
    container[key] += 1
    return container[key]


def replaced(b, value, name="seen"):
    setattr(b, name, value)
    return value


HARMLESS: dict[str, tuple[Callable, Callable]] = {
    "tuple": (lambda b, x: (b.feed(x), None, 3), lambda b, x, losses: b(x)[0]),
    "dict": (lambda b, x: {"x": b.feed(x), "n": 1}, lambda b, x, losses: b(x)["x"]),
    "keywords": (
        lambda b, x, *, by=None, on=False: b.feed(x) * by,
        lambda b, x, losses: b(x=x, by=x.sigmoid(), on=True),
    ),
    "nested": (
        lambda b, x, pair: b.feed(x) * pair[0]["by"],
        lambda b, x, losses: b(x, ({"by": x.sigmoid()}, None)),
    ),
    "input as output": (lambda b, x: (x, b.feed(x)), lambda b, x, losses: sum(b(x))),
    "view": (lambda b, x: b.feed(x).t(), lambda b, x, losses: b(x).t()),
    "conjugated": (lambda b, x: torch.complex(b.feed(x), x).conj(), lambda b, x, losses: b(x).imag),
    "sparse": (lambda b, x: b.feed(x).to_sparse(), lambda b, x, losses: b(x).to_dense()),
    "bool, empty, nan": (
        lambda b, x: (b.feed(x), x > 0, x[:0], x * torch.nan),
        lambda b, x, losses: b(x)[0],
    ),
    "batch norm at rest": (lambda b, x: b.feed(b.norm(x)), simple),
    "own checkpoint": (lambda b, x: checkpoint(b.feed, x, use_reentrant=False), simple),
    "own reentrant checkpoint": (lambda b, x: checkpoint(b.feed, x, use_reentrant=True), simple),
    "in place inside": (lambda b, x: b.feed(x * 1).mul_(2).relu_(), simple),
    "by grad mode": (lambda b, x: b.feed(x) + (0 if torch.is_grad_enabled() else 1), simple),
    "forward called": (Block.feed, lambda b, x, losses: b.forward(x)),
    "another's weight": (lambda b, x: b.feed(x) @ b.others[0].weight, simple),
    **{f.__name__: (f, simple) for f in (with_autocast, with_noise_of_its_own)},
}
NOT_TO_BE_REPEATED = {  # as with torch's own checkpoint
    "saved tensors read twice": (lambda b, x: ReadsTwice.apply(b.feed(x)), simple),
    "input changed afterwards": (
        lambda b, x: b.feed(x * 1),
        lambda b, x, losses: (b(x), x.mul_(2))[0],
    ),
    "with_a_way_out": (with_a_way_out, simple),
}
COUNTED: dict[str, Callable[[Block], Any]] = {
    "buffer": lambda b: b.seen.add_(1).mean(),
    "buffer by data": lambda b: b.seen.data.add_(1).mean(),
    "buffer replaced": lambda b: replaced(b, b.seen + 1).mean(),
    "buffer replaced twice": lambda b: replaced(b, replaced(b, b.seen + 1) * 1).mean(),
    "tensor": lambda b: b.average.add_(1).mean(),
    "counter": lambda b: increased(vars(b), "count"),
    "list": lambda b: b.log.append(1) or len(b.log),
    "dict": lambda b: increased(b.table, "count"),
    "iterator": lambda b: next(b.ticks),
    "object": lambda b: increased(vars(b.inside), "count"),
    "python random": lambda b: random.random(),
    "python random, seldom": lambda b: random.random() < 0.1,
    "numpy random": lambda b: numpy.random.rand(),
    "own generator": lambda b: torch.rand((), generator=b.generator),
}
HARMFUL = {
    name: (lambda b, x, f=f: b.feed(x) * (1 + 0.01 * float(f(b))), simple)
    for name, f in COUNTED.items()
} | {
    "own loss": (
        lambda b, x: replaced(b, b.feed(x), "average"),
        lambda b, x, losses: (b(x), losses.append(b.average.mean()))[0],
    ),
    "list argument": (
        lambda b, x, out: out.append(x.mean()) or b.feed(x),
        lambda b, x, losses: b(x, losses),
    ),
    "dict argument": (
        lambda b, x, by: b.feed(x) * by.setdefault("n", x.detach()).mean(),
        lambda b, x, losses: b(x, by=b.table),
    ),
    "argument in place": (
        lambda b, x, by: b.feed(x) * by.add_(1),
        lambda b, x, losses: b(x, b.average),
    ),
    "input in place": (lambda b, x: x.add_(b.feed(x.clone())), simple),
    "called twice": (Block.feed, lambda b, x, losses: b(b(x))),
    "batch norm": (lambda b, x: b.feed(b.norm.train()(x)), simple),
    "object argument": (lambda b, x, by: by(b.feed(x)), lambda b, x, losses: b(x, torch.tanh)),
    "object out": (lambda b, x: types.SimpleNamespace(x=b.feed(x)), lambda b, x, losses: b(x).x),
}


@not_kept
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_block_has_the_bits_of_the_plain_run(name, choice):
    """Whatever goes in and comes out, and whatever is chosen for it; there is room for the
    inputs."""
    assert_same_bits(
        lambda: Model(*HARMLESS[name]), simply, choice, name=f"harmless {name}", spare=4096
    )


@pytest.mark.parametrize("name", NOT_TO_BE_REPEATED)
def test_a_block_that_torch_cannot_run_again_says_so(name):
    """Sent, it has the plain run's bits; run again, as the user allowed, it ends in an error, and
    in no wrong number."""
    build = lambda: Model(*NOT_TO_BE_REPEATED[name])
    assert_same_bits(build, simply, "sent", name=f"loud {name}", recompute=False)
    with pytest.raises((RuntimeError, AssertionError)):
        trained(build, simply, "recomputed", spare=4096)


@not_kept
@pytest.mark.parametrize("name", HARMFUL)
def test_a_block_with_side_effects_is_never_run_again(name, choice, recomputations):
    """Where running it once more would be seen, by its results or by the noise that follows, it is
    not; the counts say so."""
    blocks = assert_same_bits(lambda: Model(*HARMFUL[name]), simply, choice, name=name)
    assert not recomputations and not blocks.get("recomputed")


@pytest.mark.parametrize(
    ("when", "what"),
    [(0, "counter"), *itertools.product([0, 5], ["batch norm", "hook", "global hook"])],
)
def test_effects_that_begin_happen_once(what, when, recomputations):
    """A batch norm that rests, a counter that stands, and no hooks: until the first pass, or until
    blocks have been run again."""

    def effect(block, x):
        block.count += len(block.log)
        return block.feed(block.norm(x)) * (1 + block.count)

    def loop(model, optimizer):
        heard, hook = [], None
        for step in range(STEPS + 2):
            for block in model.blocks if step == when else ():
                block.norm.train(what == "batch norm")
                block.log += [1] * (what == "counter")
                (
                    block.up.register_forward_hook(lambda *_: heard.append(1))
                    if what == "hook"
                    else None
                )
            if step == when and what == "global hook":
                hook = register_module_forward_hook(
                    lambda module, *_: heard.append(1) if isinstance(module, nn.Linear) else None
                )
            yield stepped(optimizer, model(rows(step)))
        hook.remove() if hook else None
        yield torch.tensor(len(heard))

    assert_same_bits(lambda: Model(effect), loop, "recomputed")
    assert bool(recomputations) == (when > 0)


# --- loops ---

FAILING: list[
    bool
] = []  # whether a block is to fail in a forward (False) or when it runs again (True)


def fragile(block: Block, x: torch.Tensor) -> torch.Tensor:
    if FAILING == [torch._C._current_graph_task_id() != -1]:
        raise InterruptedError
    return block.feed(x) * (1 if block.training else 3)


def fails(model, optimizer, step):
    for FAILING[:] in ([False], [True]):
        with contextlib.suppress(InterruptedError):
            model(rows(step)).backward()
    FAILING.clear()
    optimizer.zero_grad()
    return [stepped(optimizer, model(rows(step)))]


def in_a_thread(model, optimizer, step):
    found = []
    thread = threading.Thread(target=lambda: found.append(stepped(optimizer, model(rows(step)))))
    thread.start()
    thread.join()
    return found


def steps_before_the_backward(model, optimizer, step):
    early, loss = model(rows(step)), stepped(optimizer, model(rows(step)))
    with pytest.raises((RuntimeError, infinity.UsageError)):
        early.backward()
    optimizer.zero_grad()
    return [loss]


def in_another_mode(model, optimizer, step):
    loss = model(rows(step))
    loss = stepped(optimizer, loss if model.eval() else loss)
    model.train()
    return [loss]


def second_gradients(model, optimizer, step):
    (grad,) = torch.autograd.grad(model(x := rows(step).requires_grad_()), [x], create_graph=True)
    return [stepped(optimizer, grad.square().sum())]


LOOPS: dict[str, Callable] = {
    "accumulates": lambda m, o, s: [
        m(rows(s)).backward(),
        stepped(o, m(rows(s, 5)) + m(rows(s, 3))),
    ],
    "evaluates": lambda m, o, s: [
        loss := m(rows(s)),
        torch.no_grad()(m.eval().__call__)(rows(s, 4)),
        torch.inference_mode()(m.__call__)(rows(s, 4)).clone(),
        m(rows(s, 4)),
        m.train() and None,
        stepped(o, loss),
    ],
    "clips": lambda m, o, s: [
        m(rows(s)).backward(),
        nn.utils.clip_grad_norm_(m.parameters(), 0.01),
        stepped(o, None),
    ],
    "other sizes": lambda m, o, s: [stepped(o, m(rows(s, (8, 8, 8, 40, 2, 100)[s])))],
    "backward twice": lambda m, o, s: [
        loss := m(rows(s)),
        loss.backward(retain_graph=True),
        stepped(o, loss),
    ],
    "autocast": lambda m, o, s: [
        stepped(o, torch.autocast("cpu", torch.bfloat16)(m.__call__)(rows(s)))
    ],
    **{
        f.__name__: f
        for f in (fails, in_a_thread, steps_before_the_backward, in_another_mode, second_gradients)
    },
}


@not_kept
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_has_the_bits_of_the_plain_run(name, choice):
    """Whatever users do around the blocks, at every step."""

    def loop(model, optimizer):
        for step in range(STEPS):
            yield from (value for value in LOOPS[name](model, optimizer, step) if value is not None)

    assert (
        assert_same_bits(lambda: Model(fragile), loop, choice, name=f"loop {name}")[choice]
        == BLOCKS
    )


@pytest.mark.slow
def test_compiled_blocks_and_models_have_the_bits_of_the_plain_run():
    """One block, one block's forward, and at every second step the whole model; without code
    generation."""

    def loop(model, optimizer):
        torch._dynamo.reset()
        model.blocks[0].compile(backend="eager")
        model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="eager")
        for step in range(STEPS):
            yield stepped(
                optimizer,
                (torch.compile(model, backend="eager") if step % 2 else model)(rows(step)),
            )

    assert_same_bits(Model, loop, "recomputed")


def parts(model, optimizer, step):
    return [stepped(optimizer, model.a(rows(step)) + model.b(rows(step)))]


def stopped_once(model, optimizer, step):
    hook = model.blocks[1].register_forward_pre_hook(
        lambda *_: FAILING.extend([False] * (step == 1))
    )
    with contextlib.suppress(InterruptedError):
        stepped(optimizer, model(rows(step)))
    hook.remove()
    FAILING.clear()
    return []


def both() -> nn.Module:
    model = nn.Module()
    model.a, model.b = Model(), Model()
    return model


@pytest.mark.parametrize(
    "build, step_of",
    [(both, parts), (lambda: Model(fragile), stopped_once)],
    ids=["parts", "stopped once"],
)
def test_every_block_is_chosen_for_however_passes_go(build, step_of):
    """Parts of a model called one by one, and a second pass that fails half-way: no block is left
    out for good."""

    def loop(model, optimizer):
        for step in range(STEPS + 2):
            yield from step_of(model, optimizer, step)

    assert assert_same_bits(build, loop, "recomputed").get("kept") == 0


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.bias).exp().tanh()


@not_kept
def test_a_backward_after_the_step_is_that_of_its_forward(choice):
    """A sum saves neither of its parts, so that torch allows it. What is run again would see the
    new bias, and says so."""

    def loop(model, optimizer):
        for step in range(STEPS):
            early = model(rows(step)).square().mean()
            yield stepped(optimizer, model(rows(step)).mean())
            yield stepped(optimizer, early)

    with (
        pytest.raises(infinity.UsageError, match="before the step")
        if choice == "recomputed"
        else contextlib.nullcontext()
    ):
        assert_same_bits(lambda: nn.Sequential(*(Shift() for _ in range(BLOCKS))), loop, choice)


# --- models ---


def changed(change: Callable[[Model], Any], effect: Callable = Block.feed) -> Callable[[], Model]:
    return lambda: (model := Model(effect), change(model))[0]


MODELS = {
    "tied": changed(lambda model: setattr(model.blocks[1].up, "weight", model.blocks[0].up.weight)),
    "frozen": changed(
        lambda model: [
            m.requires_grad_(False) for m in (model.inner, model.blocks[0], model.blocks[1].up)
        ]
    ),
    "nested": changed(
        lambda model: [
            setattr(b, "more", nn.Sequential(Block(Block.feed), Block(Block.feed)))
            for b in model.blocks
        ],
        lambda b, x: b.more(b.feed(x)),
    ),
}
LATE = {
    "llama cached": ("llama", {"use_cache": True}),
    "mixtral routed": ("mixtral", {"output_router_logits": True}),
}
NAMES = (
    "llama",
    "llama_tied",
    "llama_lora",
    "llama_checkpointed",
    "llama_checkpointed_reentrant",
    "gpt2",
    "bert",
    "bert_frozen_below",
    "t5",
    "mixtral",
)


@not_kept
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_such_blocks_has_the_bits_of_the_plain_run(name, choice, recomputations):
    """Weights that two blocks share, weights that do not train, blocks inside of blocks."""
    assert assert_same_bits(MODELS[name], simply, choice, name=f"model {name}")[choice] >= 2
    assert bool(recomputations) == (choice == "recomputed")


@not_kept
@pytest.mark.parametrize("name", [*NAMES, *LATE])
def test_models_of_transformers_have_the_bits_of_the_plain_run(name, choice):
    """Trains and generates; from the third pass on with what is asked for late: a cache, or the
    router's logits."""
    architecture, late = LATE.get(name, (name, {}))
    if lacking := ZOO[architecture].missing():
        pytest.skip(f"this machine lacks {', '.join(lacking)}")

    def loop(model, optimizer):
        for step in range(5):
            batch = make_batch(ZOO[architecture], step) | (late if step > 1 else {})
            yield stepped(optimizer, model(**batch).loss)
            if name == "llama":
                yield model.eval().generate(
                    batch["input_ids"][:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0
                )
                model.train()

    assert_same_bits(lambda: make_model(ZOO[architecture], SEED), loop, choice, name=name)


# --- the model itself ---


def test_a_dropped_model_frees_everything_at_once():
    """Without the garbage collector, once blocks have been run again: engine and blocks are
    gone."""
    model, optimizer = wrap(seeded(SEED, Model), "recomputed")
    list(simply(model, optimizer))
    gc.collect()
    gc.disable()
    try:
        engine, block = weakref.ref(parts_of(model).engine), weakref.ref(model.blocks[0])
        del model, optimizer
        assert engine() is None and block() is None
    finally:
        gc.enable()


def test_unwrapping_restores_forwards_and_copies_go_as_ever():
    """Of a class's forward and of one's own. While wrapped, a copy is refused as it is without a
    choice."""
    refusals = []
    for choice in (None, "recomputed"):
        model = seeded(SEED, Model)
        own = model.blocks[1].forward = types.MethodType(Block.feed, model.blocks[1])
        model, optimizer = wrap(model, choice)
        list(simply(model, optimizer))
        for way, what in itertools.product((copy.deepcopy, pickle.dumps), (model, model.blocks[0])):
            with pytest.raises(Exception) as refused:
                way(what)
            refusals.append((refused.type, str(refused.value)))
        model, _ = infinity.unwrap_model(model, optimizer)
        assert ["forward" in vars(block) for block in model.blocks] == [
            False,
            True,
            False,
        ] and model.blocks[1].forward is own
        assert differing(copy.deepcopy(model).state_dict(), model.state_dict()) == []
    assert refusals[:4] == refusals[4:]


def test_a_block_still_tells_its_arguments():
    """As libraries ask, which pass what a layer takes."""
    model = Model()
    signature = inspect.signature(model.blocks[0].forward)
    wrap(model, "recomputed")
    assert inspect.signature(model.blocks[0].forward) == signature


@pytest.mark.parametrize("choice, other", [("recomputed", "sent"), ("sent", "recomputed")])
def test_a_resumed_run_has_the_same_bits_though_choices_are_made_anew(choice, other, tmp_path):
    """Saves after four steps and goes on in another wrap, which chooses otherwise."""

    def loop(model, optimizer):
        for step in range(4):
            yield stepped(optimizer, model(rows(step)))
        if parts_of(model).activations is not None:
            infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
            model, optimizer = wrap(Model(), other)
            infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
        for step in range(4, STEPS + 4):
            yield stepped(optimizer, model(rows(step)))
        yield from model.state_dict().values()

    (right, _), (found, _) = (trained(Model, loop, which) for which in (None, choice))
    assert [name for name in differing(found, right) if "yield" in name or name == "noise"] == []


class TaggedProduct(torch.autograd.Function):
    """A product whose gradient depends on an attribute of the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight, x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        weight, x = ctx.saved_tensors
        return dy @ weight * getattr(weight, "tag", 1.0), dy.t() @ x


class TaggedBlock(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + TaggedProduct.apply(x, self.weight).tanh()


def test_a_recomputed_function_finds_the_attributes_of_its_weight(recomputations):
    """Trains beside plain torch, which has no checkpoint. Twin: without the tags other bits."""

    class Tagged(Chain):
        def __init__(self, tag: float = 0.5) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(TaggedBlock() for _ in range(BLOCKS))
            for block in self.blocks:
                block.weight.tag = tag

    assert_same_bits(Tagged, simply, "recomputed")
    assert recomputations
    tagged, untagged = (trained(partial(Tagged, tag), simply, None)[0] for tag in (0.5, 1.0))
    assert differing(tagged, untagged)
