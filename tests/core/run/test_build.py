"""Build: a job whose parts work with each other's objects, and an engine that it does not keep."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pair
import pytest
import torch
from lone import lone_group

import infinity
from infinity import native
from infinity.core.grads.bank import GradientBank
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.device import Device
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.params.borrowed_state import BorrowedState
from infinity.core.params.value_edits import ValueEdits
from infinity.core.plan.memory_plan import MemoryPlan
from infinity.core.run.build import Later, build_engine
from infinity.core.run.journal import Journal
from infinity.core.run.one_thread import wait_for_others
from infinity.core.run.pass_state import Pass
from infinity.core.run.prefetch import Prefetcher
from infinity.core.run.schedule import Schedule
from infinity.core.run.step_counter import StepCounter
from infinity.errors import CapacityError
from infinity.ranks.collectives import Collectives
from infinity.ranks.parallel_dims import ParallelDims

BLOCK, MIB = native.BLOCK_NBYTES, 1 << 20
PLAN = MemoryPlan(
    tiers=dict.fromkeys(("weight", "grad", "master", "exp_avg", "exp_avg_sq"), Tier.HOST),
    units_ahead=3,
    staging_nbytes=0,
    grad_staging_nbytes=16 * BLOCK,
    activation_staging_nbytes=8 * BLOCK,
    slot_count=2,
    slot_nbytes=4 * BLOCK,
    service_nbytes=MIB,
    device_window_nbytes=1000,
    landing_nbytes=77,
    terms={Tier.DEVICE: {}, Tier.HOST: {"weights": 5}, Tier.NVME: {"weights": 9}},
)


class Ranks(Collectives):
    """With a note of its end. The other rank is not there: nothing is collected of it."""

    ends = 0

    def collect(self, mine: Any, what: str, among: Any = None) -> list[Any]:
        return [mine]

    def close(self) -> None:
        self.ends += 1


class Homes:
    """Notes what happens to the arrays of a flat param."""

    is_full = False

    def __init__(self) -> None:
        self.seen = []

    def allocate(self, *_: Any, **__: Any) -> None:
        self.seen.append("allocate")
        if self.is_full:
            self.refuse()

    def refuse(self, *_: Any) -> None:
        raise CapacityError("full")

    def settle(self) -> None:
        self.seen.append("settle")

    def clear(self) -> None:
        self.seen.append("clear")


class Unit:
    """With one flat param, which is stepped unless told otherwise."""

    def __init__(self, index: int, *, stepped: bool = True):
        self.index, self.name, self.weight_nbytes, self.lies_on_disk = index, f"u{index}", 4, False
        self.homes, spec = Homes(), SimpleNamespace(stepped=stepped)
        self.flat_params = [SimpleNamespace(homes=self.homes, params=[], spec=spec)]
        self.handles = []


class Built:
    """An engine with two units, the second of them frozen, and what it was made of."""

    def __init__(
        self,
        *,
        stepping: bool = True,
        plan: MemoryPlan = PLAN,
        ranks: ParallelDims | None = None,
        **config: Any,
    ):
        config.setdefault("share_homes", False)  # the other rank is not there
        self.config, self.plan, self.sizes = infinity.Config(**config), plan, [object(), object()]
        self.units = [Unit(0), Unit(1, stepped=False)]
        self.collectives = Ranks(ranks or ParallelDims())
        self.device = Device(torch.device("cpu"), self.collectives.traffic)
        self.stepping = stepping

    def build(self) -> Built:
        self.engine = build_engine(
            self.config,
            self.plan,
            self.units,
            self.sizes,
            stepping=self.stepping,
            device=self.device,
            collectives=self.collectives,
            explain=lambda error, *nbytes: error,
        )
        self.job = self.engine.job
        return self


@pytest.fixture
def second_of_two() -> Iterator[ParallelDims]:
    with lone_group(rank=1, size=2):
        yield ParallelDims(rank=1, size=2, shard_group=pair.PairChannel(pair.Pair(), 1))


# --- the parts ---

SHARED = (
    Journal,
    StepCounter,
    Pass,
    Schedule,
    Ledger,
    ArrayStore,
    Device,
    GradientBank,
    BorrowedState,
    ValueEdits,
    Prefetcher,
    ParallelDims,
)


def parts_in(found: Any, depth: int = 4) -> Iterator[Any]:
    """Yields the objects of SHARED that ``found`` holds, in attributes of attributes."""
    if isinstance(found, SHARED):
        yield found
    if depth and type(found).__module__.startswith("infinity."):
        for each in getattr(found, "__dict__", {}).values():
            yield from parts_in(each, depth - 1)


@pytest.mark.parametrize("several", [False, True])
def test_all_parts_work_with_the_same_objects(several, second_of_two):
    """Of each kind there is one in the whole job."""
    built = Built(ranks=second_of_two if several else None).build()
    for kind in SHARED:
        found = {
            id(each)
            for field in dataclasses.fields(built.job)
            for each in parts_in(getattr(built.job, field.name))
            if isinstance(each, kind)
        }
        assert len(found) == 1, kind


def test_a_job_has_what_it_was_built_of():
    """Twin: nothing is trained until parameters are attached."""
    built = Built().build()
    job, collectives = built.job, built.collectives
    assert job.config is built.config and job.units is built.units and job.device is built.device
    assert job.planned.plan is built.plan and job.planned.sizes is built.sizes
    assert job.collectives is collectives and job.ranks is collectives.ranks
    assert job.traffic is collectives.traffic and job.store.ledger is job.ledger
    assert job.updates.names == ["u0", "u1"] and job.trained == []
    assert job.uses.scopes is job.scopes and job.events.moved is job.traffic.moved
    assert [unit.homes.seen for unit in built.units] == [["allocate"]] * 2


def test_every_tier_has_its_budget_and_its_part_of_the_plan():
    config = {"device_memory": 30 * MIB, "host_memory": 20 * MIB, "nvme_capacity": 10 * MIB}
    accounts = Built(**config).build().job.ledger.accounts
    assert [accounts[tier].budget_nbytes for tier in Tier] == [30 * MIB, 20 * MIB, 10 * MIB]
    planned = [PLAN.planned_nbytes(tier) for tier in Tier]
    assert [accounts[tier].planned_nbytes for tier in Tier] == planned and len({*planned}) == 3


def test_transfers_have_the_room_that_the_plan_has_for_them():
    built = Built(activations="host").build()
    job = built.job
    assert job.prefetcher._window.nbytes == 1000 and job.prefetcher.look_ahead.depth == 3
    assert job.prefetcher.units is built.units
    assert job.gradients.homes.queue._in_flight._limit == 77
    assert job.gradients.homes._opened._staging.capacity_nbytes == 16 * BLOCK
    assert job.activations is not None and Built().build().job.activations is None


def test_what_an_optimizer_steps_has_an_updater():
    """Twin: without an optimizer there is none, and nothing to average."""
    assert Built().build().job.updates.updater is not None
    assert Built(stepping=False).build().job.updates.updater is None


def test_the_device_that_steps_has_the_slots_of_the_plan():
    built = Built(plan=dataclasses.replace(PLAN, device_slot_nbytes=128))
    built.device.kernels = object()
    slots = built.build().job.updates.stepper._slots
    assert slots and {slot.memory.nbytes for slot in slots} == {128}


def test_gradients_are_averaged_where_ranks_have_parts_of_the_batch(second_of_two):
    """Those of units that are stepped. Twins: alone, and without an optimizer, they are not."""
    built = Built(ranks=second_of_two).build()
    reducer = built.job.reducer
    assert reducer._units == built.units[:1] and built.job.gradients._add_whole == reducer.add
    assert Built(ranks=second_of_two, stepping=False).build().job.reducer is None
    alone = Built().build().job
    assert alone.reducer is None and alone.gradients._add_whole is None


def test_ranks_are_told_of_steps_and_backwards():
    built = Built().build()
    built.job.steps.count_backwards(3)
    built.job.steps.finish(7)
    built.job.steps.count_backwards(2)
    assert built.job.steps is built.collectives.steps
    assert "after 7 steps and 2 backwards" in str(built.collectives._progress)


def test_saved_tensor_hooks_are_those_of_autograd():
    """Twin: once they are taken off, autograd keeps tensors itself."""
    scopes, packed = Built().build().job.scopes, []
    with scopes.scope(lambda x: packed.append(x) or x, lambda x: x):
        torch.ones(2, requires_grad=True).sin()
    assert len(packed) == 1
    torch.ones(2, requires_grad=True).sin()
    assert len(packed) == 1


# --- what parts call of the engine ---


class Called:
    """Stands for the engine's backward."""

    def __init__(self) -> None:
        self.asked = []

    def give_way(self) -> str:
        return "gave way"

    def notify_if_final(self, unit: Unit) -> None:
        self.asked.append(unit)


def test_parts_call_the_engine_that_was_built_after_them(second_of_two):
    """Each use prepares the engine and settles state dicts; the prefetcher asks the backward to
    give way, and the reducer tells it what landed."""
    built, asked = Built(ranks=second_of_two).build(), []
    engine, job = built.engine, built.job
    engine.backward = called = Called()
    assert job.prefetcher._give_way() == "gave way"
    job.reducer._on_reduced(built.units[0])
    assert called.asked == built.units[:1]
    engine.prepare, job.lents.settle = asked.append, lambda: asked.append("settle")
    reads = infinity.core.run.operations.Operation.STATE_DICT
    for operation in (None, reads):
        with job.uses.begin(operation):
            pass
    job.uses.check(reads)
    assert asked == [None, reads, reads, "settle"]
    assert job.uses._check_process == job.store.check_process
    assert (job.uses._wait.func, job.uses._wait.args) == (wait_for_others, (job.scopes,))


def test_averages_are_decided_early_where_updates_are_made_in_the_backward(second_of_two):
    """Twin: outside of step_in_backward they are not."""
    plain = Built(ranks=second_of_two).build().job
    assert not plain.reducer._decides_early()
    plain.steps.streaming = True
    assert plain.reducer._decides_early()


def test_a_part_that_is_called_later_does_not_keep_the_engine():
    later, engine = Later(), Called()
    later.set(engine)
    assert later.engine is engine
    gone = weakref.ref(engine)
    del engine
    assert gone() is None is later.engine
