"""Versions: keeps a unit's weights from before the last update beside the newest, to compute with
either.

newest    the weights of the last update, which are saved, read and stepped
older     the weights that it was made from, which the micro-batches of that time compute with

Masters and moments belong to the newest weights only. The newest weights are the unit. The older
ones are a unit of their own over the same parameters, with their own buffers, so both can be on the
device. An update swaps them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError
from ..storage.arrays import StateArray
from ..storage.store import ShardStore
from .home_arrays import HomeArrays
from .journal import Journal
from .shard import ParamShard
from .unit import ParamUnit


class OlderHomes:
    """Arrays with the older weights as the weights. No update ever writes those."""

    update = None

    def __init__(self, newest: HomeArrays):
        self._newest = newest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._newest, name)

    @property
    def weight(self) -> StateArray:
        return self._newest.older

    def wait(self) -> None:
        """Does not wait for the update that is made from these weights."""


class OlderShard:
    """A shard with its older weights as the weights."""

    def __init__(self, newest: ParamShard):
        self._newest, self.homes = newest, OlderHomes(newest.homes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._newest, name)

    @property
    def weight(self) -> StateArray:
        return self.homes.weight


class OlderUnit(ParamUnit):
    """The older weights of the unit ``newest``."""

    def __init__(self, newest: ParamUnit, index: int):
        shards: list[Any] = [OlderShard(shard) for shard in newest.shards]
        super().__init__(index, f"{newest.name}, older", shards, newest._device)

    @property
    def has_second_slice(self) -> bool:
        """Always false: no memory was planned for it, so all ranks gather each time."""
        return False

    def allocate(self) -> None:
        """Makes the device buffers of any unit, without second slices."""
        super().allocate()
        self._second.clear()

    def _align(self, *, shows: bool = False) -> None:
        """Aligns the buffers. By default the parameters stay views of the newest weights."""
        super()._align(shows=shows)

    @property
    def _can_be_compared(self) -> bool:
        """Always false: home may have a slice only. Each rank compares with a whole copy, so that
        all find the same."""
        return False

    def write_edits(self, store: ShardStore, journal: Journal) -> None:
        """Raises UsageError if a forward changed its own parameters: the next update does not start
        from them."""
        if self._edits.find():
            raise UsageError(
                f"a forward changed parameters of unit {self.name} in place, which are one update"
                " old while a pipeline runs without flush: the change would be lost. Run the"
                " pipeline with a flush between batches (schedule.step)."
            )


class UnitVersions:
    """The newest and the older weights of one unit, and the version that its parameters are. Used
    while nothing holds the unit."""

    def __init__(self, unit: ParamUnit, index: int):
        self.unit, self.older = unit, OlderUnit(unit, index)
        self.older.allocate()
        unit.older = self.older

    @staticmethod
    def has(unit: ParamUnit) -> bool:
        """Tells whether updates change a unit's weights."""
        return any(shard.spec.stepped for shard in unit.shards)

    def compute_with(self, *, older: bool) -> None:
        """Makes later compute use the older weights, or the newest."""
        if self.unit.uses_older is not older:
            self.unit.uses_older = older
            self._show()

    def _show(self) -> None:
        """Makes the parameters views of the version in use."""
        torch.clear_autocast_cache()  # it caches casts of the other version, by parameter
        for buffer in self.unit.in_use.buffers:
            buffer.show()

    def begin_update(self) -> None:
        """Makes the newest weights the older ones, with their device buffers, before an update
        writes new ones. A graph that saved them keeps their buffers."""
        self.older.version, self.unit.version = self.unit.version, self.unit.version + 1
        self._swap()

    def settle(self) -> None:
        """Restores the buffers of device homes after an interrupted update, and computes with the
        newest weights."""
        if self.unit.stays and any(
            flat is not shard.weight.flat for flat, shard in zip(self.unit.flats, self.unit.shards)
        ):
            self._swap()
        self.unit.uses_older = False
        self._show()

    def _swap(self) -> None:
        self.unit.change_places(self.older)
        self._show()
