"""Versions: keeps a unit's weights from before the last update beside the newest, to compute with
either.

newest    the weights of the last update, which are saved, read and stepped
stale     the weights that it was made from, which the micro-batches of that time compute with

Masters and moments belong to the newest weights only. The newest weights are the unit. The stale
ones are a unit of their own over the same parameters, with their own buffers, so both can be on the
device. An update swaps them.
"""

from __future__ import annotations

import torch

from .unit import ParamUnit


class UnitVersions:
    """The newest and the stale weights of one unit, and the version that its parameters are. Used
    while nothing holds the unit."""

    def __init__(self, unit: ParamUnit, index: int):
        self.unit, self.stale = unit, unit.make_stale(index)

    @staticmethod
    def has(unit: ParamUnit) -> bool:
        """Tells whether updates change a unit's weights."""
        return any(flat.spec.stepped for flat in unit.flat_params)

    def compute_with(self, *, stale: bool) -> None:
        """Makes later compute use the stale weights, or the newest."""
        if self.unit.uses_stale is not stale:
            self.unit.uses_stale = stale
            self._show()

    def _show(self) -> None:
        """Makes the parameters views of the version in use."""
        torch.clear_autocast_cache()  # it caches casts of the other version, by parameter
        self.unit.in_use.buffers.show()

    def begin_update(self) -> None:
        """Makes the newest weights the stale ones, with their device buffers, before an update
        writes new ones. A graph that saved them keeps their buffers."""
        self.stale.version, self.unit.version = self.unit.version, self.unit.version + 1
        self._swap()

    def settle(self) -> None:
        """Restores the buffers of device homes after an interrupted update, and computes with the
        newest weights."""
        if self.unit.stays and any(
            flat is not flat_param.weight.flat
            for flat, flat_param in zip(self.unit.buffers.flats, self.unit.flat_params)
        ):
            self._swap()
        self.unit.uses_stale = False
        self._show()

    def _swap(self) -> None:
        self.unit.change_places(self.stale)
        self._show()
