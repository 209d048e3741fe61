"""StagingSlots: which units are read ahead of their use, and who gives way in a full pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from infinity import native
from infinity.core.run.staging_slots import StagingSlots
from infinity.core.units.residency import Residency
from infinity.errors import CapacityError, StorageError

BLOCK = native.BLOCK_NBYTES


class Pool:
    """A pool of ``room`` slots; transfers that run give some back, one after the other."""

    def __init__(self, room: int):
        self.room, self.capacity_nbytes = room, room * BLOCK
        self.running: list[int] = []  # slots that each running transfer still has
        self.told: list[str] = []

    @property
    def leased_nbytes(self) -> int:
        return self.capacity_nbytes - self.room * BLOCK

    def try_lease(self, nbytes: int) -> Slot | None:
        assert nbytes == BLOCK
        return Slot(self) if self.room else None

    def wait_for_transfer(self) -> bool:
        self.told.append("transfer")
        if self.running:
            self.room += self.running.pop(0)
            return True
        return False


class Slot:
    """One that goes back when it is freed, as a lease does."""

    def __init__(self, pool: Pool):
        self.pool = pool
        pool.room -= 1

    def __del__(self) -> None:
        self.pool.room += 1


class Store:
    """One that notes what is asked of it; ``returning``: slots that copies still read."""

    def __init__(self, room: int):
        self.pool, self.returning, self.hung = Pool(room), [], False
        self.staging = self

    def collect(self, *, wait: bool = False) -> bool:
        if wait and self.returning:
            self.pool.told.append("copy")
            self.pool.room += self.returning.pop(0)
            return True
        return False

    def refuse_hung(self) -> None:
        if self.hung:
            raise StorageError(110, "hangs", "folder")


class Unit:
    """One of as many flat params as it is told."""

    lies_on_disk, weight_nbytes = True, BLOCK

    def __init__(self, name: str, flat_params: int = 1, *, staged: bool = True):
        self.index, self.name, self.residency, self.slots = int(name), name, Residency.STORED, []
        self.flat_params = [SimpleNamespace(shard_nbytes=BLOCK) for _ in range(flat_params)]
        self.is_staged_from_disk = staged
        self.arrival = SimpleNamespace(comes_ahead=True)

    def fetch(self, store: Store, slots: list[Slot], ready: float | None = None) -> None:
        assert self.residency is Residency.STORED, "it is on its way"
        self.residency, self.slots = Residency.FETCHING, slots

    def drop(self) -> None:
        self.told.append(f"drop {self.name}")
        self.residency, self.slots = Residency.STORED, []


def in_order(index: int) -> float:
    return index


def made(
    room: int, *flat_params: int, next_use: Callable[[int], float] = in_order
) -> tuple[StagingSlots, Store, list[Unit]]:
    units, store = [Unit(str(i), count) for i, count in enumerate(flat_params)], Store(room)
    for unit in units:
        unit.told = store.pool.told
    return StagingSlots(units, store, next_use), store, units


def fetched(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units if unit.residency is Residency.FETCHING]


@pytest.mark.parametrize(("depth", "expected"), [(0, []), (2, ["3", "1"]), (9, ["3", "1", "0"])])
def test_the_next_units_are_read_ahead_in_the_order_of_use(depth, expected):
    slots, _, units = made(8, 1, 1, 1, 1)
    order: list[str] = []
    for unit in units:
        unit.fetch = lambda store, taken, ready, name=unit.name: order.append(name)
    slots.fetch_ahead(iter((3, 1, 0)), depth, 0.0)
    assert order == expected


def test_a_read_says_since_when_it_could_begin():
    """Claim: when its unit was wanted, or when slots went back if there was no room before."""
    slots, store, units = made(1, 1, 1)
    asked: list[float] = []
    for unit in units:
        unit.fetch = lambda store, taken, ready: asked.append(ready)
    slots.fetch_ahead(iter((0, 1)), 2, 3.0)
    store.pool.room, slots.freed_at = 1, 5.0
    slots.fetch_ahead(iter((1,)), 2, 7.0)
    assert asked == [3.0, 5.0]


def test_each_shard_gets_a_slot():
    """Twin: where they do not all fit, none is kept, and no later unit is read instead."""
    slots, store, units = made(4, 3, 2, 1)
    slots.fetch_ahead(iter((0, 1, 2)), 3, 0.0)
    assert fetched(units) == ["0"] and len(units[0].slots) == 3 and store.pool.room == 1


@pytest.mark.parametrize(
    ("residency", "counts"),
    [
        (Residency.FETCHING, True),
        (Residency.STAGED, True),
        (Residency.GATHERING, False),
        (Residency.RESIDENT, False),
    ],
)
def test_a_unit_on_its_way_counts_as_read_ahead(residency, counts):
    """Twin: one that needs its slot no more does not."""
    slots, _, units = made(4, 1, 1)
    units[0].residency = residency
    slots.fetch_ahead(iter((0, 1)), 1, 0.0)
    assert units[1].residency is (Residency.STORED if counts else Residency.FETCHING)


def test_units_that_come_another_way_do_not_count():
    slots, _, units = made(4, 1, 1)
    units[0].is_staged_from_disk = False
    slots.fetch_ahead(iter((0, 1)), 1, 0.0)
    assert fetched(units) == ["1"]


def test_without_a_disk_nobody_is_asked_what_comes_next():
    unit = Unit("0")
    unit.lies_on_disk = False
    slots = StagingSlots([unit], Store(4), in_order)
    slots.fetch_ahead(iter((0,)), 1, 0.0)
    assert unit.residency is Residency.STORED


def test_the_search_for_units_of_a_disk_ends():
    """Claim: after 64 others. Twin: the 64th is found."""
    for place, expected in ((63, ["1"]), (64, [])):
        slots, _, units = made(4, 1, 1)
        units[0].is_staged_from_disk = False
        slots.fetch_ahead(iter([0] * place + [1]), 1, 0.0)
        assert fetched(units) == expected


def test_copies_and_reads_are_waited_for_before_a_unit_is_dropped():
    """Claim: the last unit of those ahead goes first. Method: a unit of four slots is needed. A
    copy returns one, three units ahead have one each, and a read of nobody's has another."""
    slots, store, units = made(3, 1, 1, 1, 4)
    slots.fetch_ahead(iter((0, 1, 2)), 3, 0.0)
    store.returning = [1]
    store.pool.running = [1]
    assert len(slots.take(units[3])) == 4
    assert store.pool.told == ["copy", "drop 2", "drop 1", "drop 0"]
    assert fetched(units) == []


def test_the_unit_that_is_needed_last_is_dropped_first():
    """Method: in a backward the units come in the reverse order, and one that is not expected any
    more was fetched, too. The unit needed next stays."""
    uses = {2: 1.0, 1: 2.0, 0: math.inf, 3: 0.0}
    slots, store, units = made(3, 1, 1, 1, 2, next_use=uses.__getitem__)
    slots.fetch_ahead(iter((2, 1, 0)), 3, 0.0)
    assert len(slots.take(units[3])) == 2
    assert store.pool.told == ["drop 0", "drop 1"] and fetched(units) == ["2"]


def test_a_read_of_nobodys_is_waited_for_last():
    slots, store, units = made(0, 1)
    store.pool.running = [0, 1]
    assert len(slots.take(units[0])) == 1 and store.pool.told == ["transfer"] * 2


def test_a_unit_larger_than_the_pool_is_told():
    slots, store, units = made(1, 2)
    with pytest.raises(CapacityError, match="unit 0 needs 4.0 KiB of staging memory.*0 B leased"):
        slots.take(units[0])
    assert store.pool.room == 1


def test_a_hung_disk_is_told_instead():
    slots, store, units = made(0, 1)
    store.hung, store.pool.running = True, [1]
    with pytest.raises(StorageError, match="hangs"):
        slots.take(units[0])
