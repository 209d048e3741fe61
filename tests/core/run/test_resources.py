"""Resources: what a job allocates and charges for good, and what grows when parameters come
later."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity import native
from infinity.core.homes.staging import ThroughHost
from infinity.core.machine import limits
from infinity.core.machine.device import Device
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.plan.memory_plan import BUFFERS, LADDER, MemoryPlan
from infinity.core.plan.memory_terms import OF_LATER_ARRAYS
from infinity.core.plan.unit_sizes import FlatParamSize, UnitSize
from infinity.core.run.resources import Resources
from infinity.core.step.slots import optimizer_slot_nbytes
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec
from infinity.errors import CapacityError
from infinity.ranks.collectives import Collectives

F32 = torch.float32
BLOCK, MIB = native.BLOCK_NBYTES, 1 << 20
SIZES = {"slot": 4 * BLOCK, "weights": 8 * BLOCK, "grads": 16 * BLOCK, "activations": 32 * BLOCK}


def plan_of(tier: Tier = Tier.NVME, **more: Any) -> MemoryPlan:
    names = ("weight", "grad", "master", "exp_avg", "exp_avg_sq")
    return dataclasses.replace(
        MemoryPlan(
            tiers=dict.fromkeys(names, tier),
            units_ahead=1,
            staging_nbytes=SIZES["weights"],
            grad_staging_nbytes=SIZES["grads"],
            activation_staging_nbytes=SIZES["activations"],
            slot_count=2,
            slot_nbytes=SIZES["slot"],
            service_nbytes=MIB,
            device_window_nbytes=0,
            terms={each: {} for each in Tier},
        ),
        **more,
    )


class Made:
    """A store, its ledger, and resources of units whose homes note how they are allocated."""

    def __init__(self, folder: Path, plan: MemoryPlan, host: int | None, **config: Any):
        config = {"nvme_paths": [str(folder)], **config}
        self.config, self.ledger, self.allocated = infinity.Config(**config), Ledger(), []
        for tier in Tier:
            budget = host if tier is Tier.HOST else None
            self.ledger.limit(tier, budget_nbytes=budget, planned_nbytes=0)
        self.charges, reserve = [], self.ledger.reserve

        def reserving(tier: Tier, nbytes: int, what: str, **more: Any) -> native.Charge:
            charge = reserve(tier, nbytes, what, **more)
            self.charges.append((tier, what, nbytes))
            return charge

        self.ledger.reserve = reserving
        traffic = Traffic()
        device = Device(torch.device("cpu"), traffic)
        self.resources = Resources(self.config, plan, self.ledger, device, Collectives())
        self.store = self.resources.store
        self.opened, self.regions = {}, {}
        make_region, opening = self.store.allocator.make_region, self.store.open

        def making(nbytes: int, *, copied: bool) -> native.Region:
            region = make_region(nbytes, copied=copied)
            self.regions[region.address] = nbytes, copied
            return region

        def open_(regions: Any, **more: Any) -> None:
            self.opened = {"regions": [self.regions[region.address] for region in regions], **more}
            opening(regions, **more)

        self.store.allocator.make_region, self.store.open = making, open_
        self.resources.allocate([self.unit(0), self.unit(1)])

    def unit(self, index: int) -> Any:
        def allocate(store: Any, tiers: Any, what: str, *, cached: Any) -> None:
            assert store is self.store
            self.allocated.append((what, dict(tiers), set(cached)))

        homes = SimpleNamespace(allocate=allocate)
        flat_params = [SimpleNamespace(homes=homes)] * (index + 1)
        return SimpleNamespace(index=index, name=f"u{index}", flat_params=flat_params)


@pytest.fixture
def make(swap) -> Iterator[Any]:
    made = []

    def build(plan: MemoryPlan | None = None, host: int | None = None, **config: Any) -> Made:
        made.append(Made(swap, plan or plan_of(), host, **config))
        return made[-1]

    yield build
    for each in made:
        each.store.close()


def test_every_shard_is_allocated_where_the_plan_has_its_unit(make):
    """With what is cached on the host."""
    plan = plan_of(placed={"grad": {1: Tier.HOST}}, cached={"weight": frozenset({0})})
    first, *others = make(plan).allocated
    assert first == ("unit u0", plan.tiers, {"weight"})
    assert others == [("unit u1", {**plan.tiers, "grad": Tier.HOST}, set())] * 2


def test_transfer_memory_is_allocated_and_charged_as_planned(make):
    """And the terms of the device, of checksums and of buffers. Twin: what a plan lacks is not
    allocated."""
    on_device = ("gradients on their way", "optimizer slots", "staged weights")
    terms = {
        Tier.DEVICE: {name: 10 + at for at, name in enumerate(on_device)} | {BUFFERS: 3},
        Tier.HOST: {"checksums": 7, OF_LATER_ARRAYS: 11, BUFFERS: 5},
        Tier.NVME: {"checksums": 9},
    }
    refused = SimpleNamespace(open_pool=lambda *_, **__: None)
    made = make(plan_of(terms=terms, staging_backend=refused))
    found = {(tier, what): nbytes for tier, what, nbytes in made.charges if nbytes}
    host = {
        "staged weights": SIZES["weights"],
        "staged gradients": SIZES["grads"],
        "staged activations": SIZES["activations"],
        "optimizer slots": 2 * SIZES["slot"],
        "checksums": 7,
        OF_LATER_ARRAYS: 11,
        BUFFERS: 5,
    }
    assert made.store.space.covered_nbytes == 11
    for tier, of_tier in (terms | {Tier.HOST: host}).items():
        for what, nbytes in of_tier.items():
            assert found.pop((tier, what)) == nbytes
    assert list(found) == [(Tier.HOST, "the store's service buffer")]
    charged = made.ledger.accounts[Tier.DEVICE].charged_nbytes
    assert charged == sum(terms[Tier.DEVICE].values())  # as long as the resources are there
    resources = made.resources
    assert resources.grad_staging.capacity_nbytes == SIZES["grads"]
    assert resources.activation_staging.capacity_nbytes == SIZES["activations"]
    copied = [(SIZES[name], True) for name in ("weights", "grads", "activations")]
    assert made.opened["regions"] == [*copied, (2 * SIZES["slot"], False)]
    assert made.opened["staging"].capacity_nbytes == SIZES["weights"]
    assert made.opened["backend"] is refused


def test_a_plan_without_transfers_takes_no_memory_for_them(make):
    none = {
        name: 0
        for name in (
            "staging_nbytes",
            "grad_staging_nbytes",
            "activation_staging_nbytes",
            "slot_nbytes",
        )
    }
    made = make(plan_of(Tier.HOST, **none))
    assert made.resources.grad_staging is None is made.resources.activation_staging
    assert made.opened == {"regions": [], "staging": None, "backend": ThroughHost}
    assert isinstance(made.resources.make_updater(), native.Updater)


def test_only_a_plan_that_uses_disks_has_folders_for_them(make):
    """For state or for activations. Twin: with both in memory none."""
    for tier, activations, folders in (
        (Tier.HOST, "device", 0),
        (Tier.NVME, "device", 1),
        (Tier.HOST, "nvme", 1),
    ):
        made = make(plan_of(tier), activations=activations)
        assert len(made.store.space._folders.folders) == folders


def test_a_store_is_made_as_the_config_and_the_ranks_say(swap):
    """With checksums or without; a failed disk is told to the other ranks."""
    told, traffic = [], Traffic()
    collectives = SimpleNamespace(
        ranks=SimpleNamespace(world_rank=5, local_size=4), fail=told.append, traffic=traffic
    )
    for checksums, is_checked in ((True, True), (False, False), ("sampled", True)):
        config = infinity.Config(nvme_paths=[str(swap)], checksums=checksums)
        device = Device(torch.device("cpu"), traffic)
        store = Resources(config, plan_of(), Ledger(), device, collectives).store
        assert store.checksums is is_checked and store.device is device
        assert store.traffic is traffic and store.staging._sampled == (checksums == "sampled")
        store.guard.on_failure(error := OSError())
        assert told.pop() is error
        store.close()


# --- growth ---


def unit_of(numel: int) -> UnitSize:
    spec = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, MOMENTS, stepped=True)
    return UnitSize("u", (FlatParamSize(spec, numel),))


def slots_of(made: Made, numel: int, chunk: int) -> int:
    return 2 * optimizer_slot_nbytes(unit_of(numel).flat_params, plan_of().tiers, chunk)


@pytest.mark.parametrize("numel", [1 << 20, 1 << 16])
def test_slots_and_staging_grow_to_the_largest_size_that_fits(make, numel):
    """The sizes of the best rung, and of the largest gradients at once; once. Twin: the old ones
    hold until then."""
    made = make()
    before = made.resources.grad_staging
    sizes = [unit_of(numel) for _ in range(5)]
    planned = made.ledger.accounts[Tier.HOST].planned_nbytes
    assert made.resources.refit(sizes)
    staging = made.resources.grad_staging
    assert staging is not before and staging.capacity_nbytes == 3 * 4 * numel
    slots = slots_of(made, numel, LADDER[0].chunk)
    assert made.charges[-2:] == [
        (Tier.HOST, "staged gradients", 3 * 4 * numel),
        (Tier.HOST, "optimizer slots", slots),
    ]
    assert made.ledger.accounts[Tier.HOST].planned_nbytes - planned == slots + 3 * 4 * numel
    assert isinstance(made.resources.make_updater(), native.Updater)
    count = len(made.charges)
    assert not made.resources.refit(sizes)
    assert len(made.charges) == count and made.resources.grad_staging is staging


def test_without_room_for_the_best_size_a_smaller_one_is_taken(make):
    """Twin: if not even the least fits it is told, and nothing has changed."""
    numel = 1 << 20
    least = slots_of(None, numel, LADDER[-1].chunk)
    before = 2 * SIZES["slot"] + SIZES["weights"] + SIZES["grads"] + SIZES["activations"] + MIB
    # the old ones are there until the new ones are
    made = make(host=before + 4 * numel + least)
    assert made.resources.refit([unit_of(numel)] * 5)
    assert made.resources.grad_staging.capacity_nbytes == 4 * numel
    assert made.charges[-1] == (Tier.HOST, "optimizer slots", least)
    assert made.ledger.accounts[Tier.HOST].charged_nbytes == (
        before - 2 * SIZES["slot"] - SIZES["grads"] + 4 * numel + least
    )
    for room, what in ((8, "staged gradients"), (4 * numel + least - BLOCK, "optimizer slots")):
        made = make(host=before + room)
        account, staging = made.ledger.accounts[Tier.HOST], made.resources.grad_staging
        charged, planned = account.charged_nbytes, account.planned_nbytes
        with pytest.raises(CapacityError, match=what):
            made.resources.refit([unit_of(numel)] * 5)
        assert made.resources.grad_staging is staging
        assert (account.charged_nbytes, account.planned_nbytes) == (charged, planned)


def test_an_interrupt_while_memory_is_registered_leaves_a_refit_to_be_repeated(make, monkeypatch):
    """Nothing has grown by then. Twin: the next one grows slots and staging."""
    made = make()
    account, staging = made.ledger.accounts[Tier.HOST], made.resources.grad_staging
    before = account.charged_nbytes, account.planned_nbytes

    def interrupted(regions: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made.store, "register", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.resources.refit([unit_of(1 << 18)] * 5)
    assert made.resources.grad_staging is staging
    assert (account.charged_nbytes, account.planned_nbytes) == before
    assert made.resources.refit([unit_of(1 << 18)] * 5)
    assert made.resources.grad_staging.capacity_nbytes == 3 * 4 * (1 << 18)


def test_what_has_grown_grows_again_for_larger_parameters(make):
    """The staging is for the largest gradients. Twin: smaller ones change nothing."""
    made = make()
    assert made.resources.refit([unit_of(1 << 16)])
    assert made.resources.refit([unit_of(1 << 16), unit_of(1 << 18), *[unit_of(1 << 17)] * 3])
    assert made.resources.grad_staging.capacity_nbytes == 4 * ((1 << 18) + 2 * (1 << 17))
    assert not made.resources.refit([unit_of(1 << 17)])


def test_gradients_in_memory_need_no_staging(make):
    """Nor do the slots grow for state in memory."""
    made = make(plan_of(Tier.HOST))
    staging, count = made.resources.grad_staging, len(made.charges)
    assert not made.resources.refit([unit_of(1 << 20)])
    assert made.resources.grad_staging is staging and len(made.charges) == count


# --- what is made of them ---


@pytest.mark.parametrize("threads", [None, 3])
def test_the_updater_works_in_the_slots_with_the_threads_of_the_config(make, monkeypatch, threads):
    """It measures how many it needs if none are given. Twin: without slots it has no memory."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(
        native, "Updater", lambda *args, **more: told.update({"args": args, **more})
    )
    made = make(update_threads=threads, checksums=False)
    made.resources.make_updater()
    io, address, nbytes, count, thread_count = told["args"]
    assert io is made.store.io and made.regions[address] == (nbytes, False)
    assert (nbytes, count) == (2 * SIZES["slot"], 2) and told["owner"].address == address
    assert thread_count == (threads or thread_count) and thread_count > 0
    assert told["measured"] == (threads is None) and not told["checksums"]
    make(plan_of(slot_nbytes=0)).resources.make_updater()
    assert told["args"][1:4] == (0, 0, 0) and told["owner"] is None and told["checksums"]


def test_the_store_of_activations_is_where_the_config_has_them(make):
    """Twins: torch keeps them on the device, or where a budget of the device was not given."""
    for home in ("host", "nvme"):
        activations = make(activations=home).resources.make_activations(placed=True)
        assert activations.spare_nbytes is None
        assert activations.home._tier is Tier(home)
        assert activations.home._disk is not None
    kept = {"activations": "device", "device_memory": 1 << 20}
    assert make(**kept).resources.make_activations(placed=True) is None
    assert make(activations="auto").resources.make_activations(placed=True) is None
    terms = {each: {} for each in Tier} | {Tier.DEVICE: {"weights": 100}}
    for budget, spare in ((1 << 20, (1 << 20) - 100), (64, 0)):
        made = make(plan_of(terms=terms), activations="auto", device_memory=budget)
        assert made.resources.make_activations(placed=True).spare_nbytes == spare
        made.store.device.is_host = False
        assert made.resources.make_activations(placed=True) is None


@pytest.mark.parametrize("home", ["host", "auto"])
def test_activations_have_what_the_plan_leaves_of_a_host_without_a_budget(make, home, monkeypatch):
    """The processor computes, so that the device's budget is of the same memory. Twins: a budget
    is the limit itself, and ranks of one machine divide what is left."""
    monkeypatch.setattr(limits, "memory_left", lambda: 3 << 30)
    config = {"activations": home, "device_memory": 1 << 20}
    terms = {each: {} for each in Tier} | {Tier.HOST: {"weights": 100}}
    resources = make(plan_of(terms=terms), **config).resources
    left = 2 << 30
    for ranks in (1, 2):
        activations = resources.make_activations(placed=True, local_size=ranks)
        assert activations.home.room_nbytes() == left // ranks - 100 - (1 << 20)
    budget = make(plan_of(terms=terms), **config, host_memory=1 << 30).resources
    assert budget.make_activations(placed=True).home._most_nbytes is None
