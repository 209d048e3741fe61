"""Versions: keeps a unit's weights as they were before the last update beside those of now, each to be computed with.

newest    the weights that the last update made: what is saved, read and stepped
older     those that it was made from: what the micro-batches compute with that began with them

Masters and moments are of the newest weights only. The newest ones are the unit; the older ones are a unit of their own over the same
parameters, with buffers of its own, so that both can be on the device. With an update they change places.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError
from ..storage.arrays import StateArray
from ..storage.store import ShardStore
from .journal import Journal
from .shard import ParamShard
from .unit import ParamUnit


class OlderShard:
    """A shard, as a unit sees it that gathers its older weights. No update is ever on its way to those."""

    update = None

    def __init__(self, newest: ParamShard):
        self._newest = newest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._newest, name)

    @property
    def weight(self) -> StateArray:
        return self._newest.older

    def wait(self) -> None:
        """Does not wait for the update that is made from these weights."""


class OlderUnit(ParamUnit):
    """The older weights of the unit ``newest``."""

    def __init__(self, newest: ParamUnit, index: int):
        shards: list[Any] = [OlderShard(shard) for shard in newest.shards]
        super().__init__(index, f"{newest.name}, older", shards, newest._device)

    @property
    def has_second_slice(self) -> bool:
        """No memory was planned for that: they come from all ranks each time."""
        return False

    def allocate(self) -> None:
        """Makes the device buffers as any unit does, and no second slices."""
        super().allocate()
        self._second.clear()

    def _align(self, *, shows: bool = False) -> None:
        """The parameters are views of the newest weights, once those are settled."""
        super()._align(shows=shows)

    @property
    def _can_be_compared(self) -> bool:
        """What is at home may be a part: each rank compares with a copy of the whole, and all find the same."""
        return False

    def write_edits(self, store: ShardStore, journal: Journal) -> None:
        """Raises UsageError where a forward changed its own parameters: they are not what the next update begins with."""
        if self._edits.find():
            raise UsageError(
                f"a forward changed parameters of unit {self.name} in place, which are one update old while a pipeline runs without flush: the "
                "change would be lost. Run the pipeline with a flush between batches (schedule.step)."
            )


class UnitVersions:
    """The newest weights of one unit and the older ones, and which of them its parameters are. Used while nothing holds the unit."""

    def __init__(self, unit: ParamUnit, index: int):
        self.unit, self.older = unit, OlderUnit(unit, index)
        self.older.allocate()
        unit.older = self.older

    @staticmethod
    def has(unit: ParamUnit) -> bool:
        """Tells whether a unit's weights change with updates."""
        return any(shard.spec.stepped for shard in unit.shards)

    def compute_with(self, *, older: bool) -> None:
        """Has what computes from now on have the older weights, or the newest."""
        if self.unit.uses_older is not older:
            self.unit.uses_older = older
            self._show()

    def _show(self) -> None:
        """Makes the parameters views of what computes from now on."""
        torch.clear_autocast_cache()  # it has casts of the other values, by parameter
        for buffer in self.unit.in_use.buffers:
            buffer.show()

    def begin_update(self) -> None:
        """Makes the newest weights the older ones, with what of them is on the device; the newest are the ones that an update is about to make. A
        graph that has saved them goes on with them: their buffers go along."""
        self.older.version, self.unit.version = self.unit.version, self.unit.version + 1
        self._swap()

    def settle(self) -> None:
        """Puts right what an exception left of :meth:`begin_update` and the update behind it, and computes with the newest weights."""
        if self.unit.stays and any(flat is not shard.weight.flat for flat, shard in zip(self.unit.flats, self.unit.shards)):
            self._swap()
        self.unit.uses_older = False
        self._show()

    def _swap(self) -> None:
        self.unit.change_places(self.older)
        self._show()
