"""StagingSlots: leases staging memory for units on their way from disk, one slot for each flat
param."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from ... import native
from ...errors import CapacityError
from ..homes.store import ArrayStore
from ..machine.sizes import format_nbytes
from ..units.residency import Residency
from ..units.unit import ParamUnit
from .lookahead import DEEPEST

REACH = 4 * DEEPEST  # upcoming units that are searched for the next ones from disk


class StagingSlots:
    """The slots of ``units``. Used from the thread that runs the model. ``next_use``: the distance
    to the next expected use of the unit with an index."""

    def __init__(
        self, units: Sequence[ParamUnit], store: ArrayStore, next_use: Callable[[int], float]
    ):
        self._units, self._store, self._next_use = units, store, next_use
        for unit in (unit for unit in units if unit.lies_on_disk):
            wanted = sum(flat.shard_nbytes for flat in unit.flat_params)
            pool = store.staging.pool
            unit.in_pieces = pool is None or wanted > pool.capacity_nbytes
        self._reads_disk = any(unit.lies_on_disk and not unit.in_pieces for unit in units)
        # For a timeline: a unit that found no room, and when slots went back
        self._refused: ParamUnit | None = None
        self.freed_at = 0.0

    def fetch_ahead(self, upcoming: Iterable[int], depth: int, wanted_at: float) -> None:
        """Starts reading the next ``depth`` units of ``upcoming`` that come from disk, which are
        wanted since ``wanted_at``. Stops at the first that the pool has no room for."""
        ahead = 0
        for index in islice(upcoming, REACH if self._reads_disk else 0):
            unit = self._units[index]
            if ahead >= depth:
                return
            if not unit.is_staged_from_disk or unit.residency in (
                Residency.RESIDENT,
                Residency.GATHERING,
            ):
                continue
            if unit.residency is Residency.STORED and not unit.arrival.comes_ahead:
                continue
            ahead += 1
            if unit.residency is Residency.STORED:
                slots = self.try_take(unit)
                if slots is None:
                    self._refused = unit
                    return
                unit.fetch(
                    self._store, slots, self.freed_at if unit is self._refused else wanted_at
                )
                self._refused = None

    def try_take(self, unit: ParamUnit) -> list[native.Lease] | None:
        """Takes slots for ``unit``, or returns None if the pool has no room now."""
        self._store.staging.collect()
        slots = []
        for flat_param in unit.flat_params:
            slot = self._store.staging.pool.try_lease(flat_param.shard_nbytes)
            if slot is None:
                return None  # leased slots go back with the list
            slots.append(slot)
        return slots

    def take(self, unit: ParamUnit) -> list[native.Lease]:
        """Takes slots for a unit that is needed now. Waits for transfers, then drops units fetched
        ahead, the one needed last first, until the slots are free. Raises CapacityError if that is
        not enough, StorageError if a disk hangs."""
        ahead = [
            other
            for other in sorted(self._units, key=lambda other: self._next_use(other.index))
            if other.residency in (Residency.FETCHING, Residency.STAGED)
        ]
        while (slots := self.try_take(unit)) is None:
            if self._store.staging.collect(wait=True):
                continue
            if not ahead:
                self._store.refuse_hung()
                if self._store.staging.pool.wait_for_transfer():
                    continue  # a read whose result was dropped
            if not ahead:
                pool = self._store.staging.pool
                raise CapacityError(
                    f"unit {unit.name} needs {format_nbytes(unit.weight_nbytes)} of staging memory,"
                    f" but the pool of {format_nbytes(pool.capacity_nbytes)} has"
                    f" {format_nbytes(pool.leased_nbytes)} leased"
                )
            ahead.pop().drop()
        return slots
