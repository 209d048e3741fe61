"""Build: a job whose parts work with each other's objects, and an engine that it does not keep."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
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
from infinity.core.machine.rates import memory_rate
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.params.borrowed_state import BorrowedState
from infinity.core.params.value_edits import ValueEdits
from infinity.core.plan.memory_plan import MemoryPlan
from infinity.core.run import build
from infinity.core.run.build import LINK_RATE, Later, build_engine
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
    """With a note of its end."""

    ends = 0

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
    progress = built.collectives._progress
    assert (progress.steps, progress.backwards) == (7, 2)


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
    engine.prepare, job.handed.settle = asked.append, lambda: asked.append("settle")
    for repairing in (True, False):
        with job.uses.begin(repairing=repairing):
            pass
    job.uses.check(infinity.core.run.operations.Operation.STATE_DICT)
    assert asked == [True, False, False, "settle"]
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


# --- activations ---


@pytest.mark.parametrize(
    ("config", "several", "planned"),
    [
        ({"activations": "auto", "device_memory": MIB}, False, True),
        ({"activations": "auto", "device_memory": MIB, "recompute": True}, False, True),
        ({"activations": "auto"}, False, False),
        ({"activations": "host", "device_memory": MIB}, False, False),
        ({"activations": "auto", "device_memory": MIB, "micro_batch": 2}, False, False),
        ({"activations": "auto", "device_memory": MIB}, True, False),
    ],
)
def test_a_device_budget_is_spent_on_activations(config, several, planned, second_of_two):
    """Twins: without one, where they all go home, in parts of a batch, and with several ranks,
    which measure different times."""
    built = Built(ranks=second_of_two if several else None, **config).build()
    planner = built.job.activations._planner if built.job.activations is not None else None
    assert (planner is not None) == planned
    if planned:
        assert (
            planner.find_context().owner is built.engine
            and planner._send_rate() == memory_rate() / 4
        )
        assert planner.recomputes == config.get("recompute", False)


@pytest.mark.parametrize(
    ("out", "into", "expected"),
    [((10, 1.0), (30, 1.0), 7.5), (None, None, LINK_RATE / 2), ((10, 0.0), None, LINK_RATE / 2)],
)
def test_sending_is_priced_by_what_the_link_has_moved(out, into, expected):
    """Both ways of a round trip, by copies that are over. Twins: a link that nothing was moved by,
    and one whose clock stood still."""
    traffic = Traffic()
    for edge, moved in (("device->host", out), ("host->device", into)):
        traffic.edges[edge].nbytes += 1000  # launched
        if moved is not None:
            traffic.copied(edge, moved[0], "by hand", 0.0, moved[1], is_counted=True)
    job = SimpleNamespace(device=SimpleNamespace(is_host=False), traffic=traffic)
    assert build._send_rate(job) == pytest.approx(expected)


# --- the end ---


def has_ended(built: Built) -> bool:
    """Whether all is freed, once: homes after transfers, then ranks."""
    assert all(unit.homes.seen == ["allocate", "settle", "clear"] for unit in built.units)
    return built.collectives.ends == 1


def test_everything_ends_with_the_engine_and_not_before():
    """Whoever has the job still. Twin: before that nothing has."""
    built = Built().build()
    charged = built.job.ledger.accounts[Tier.HOST]
    assert built.collectives.ends == 0 and charged.charged_nbytes > MIB
    gone = weakref.ref(built.engine)
    del built.engine
    gc.collect()
    assert gone() is None and has_ended(built)
    assert built.job.store.io is None and charged.charged_nbytes == 0


@pytest.mark.parametrize("fails", ["homes", "staging", "late"])
def test_a_failure_frees_what_there_is_and_is_told(fails):
    """Method: a home that cannot be allocated, a budget that is too small for staging, and slots of
    the device."""
    built = Built(host_memory=2 * MIB if fails == "staging" else None)
    if fails == "staging":
        built.plan = dataclasses.replace(PLAN, grad_staging_nbytes=4 * MIB)
    elif fails == "homes":
        built.units[1].homes.is_full = True
    else:
        built.plan = dataclasses.replace(PLAN, device_slot_nbytes=128)
        built.device.kernels, built.device.zeros = object(), built.units[0].homes.refuse
    with pytest.raises(CapacityError):
        built.build()
    assert has_ended(built)


def test_a_timeline_is_written_to_the_file_of_this_rank(tmp_path, second_of_two):
    """Twin: without one there is none."""
    built = Built(ranks=second_of_two, trace=tmp_path / "trace.json").build()
    built.job.traffic.tell("step", "a step", 0.0, 1.0)
    assert built.job.updates.recorded == [built.job.updates.updater]
    del built.engine, built.job
    gc.collect()
    assert "a step" in json.dumps(json.loads((tmp_path / "trace-rank1.json").read_text()))
    assert Built().build().job.events.closed == []
    assert [each.name for each in Path(tmp_path).iterdir()] == ["trace-rank1.json"]
