"""Versions: keeps a unit's weights from before earlier updates beside the newest, to compute with
any of them.

newest    the weights of the last update, which are saved, read and stepped
stale     weights from before an update, still used by micro-batches that started before it
slot      the place of one stale version: a reader of the home with bytes of its own, and a unit

Masters and moments belong to the newest weights only. The newest weights are the unit. Stale ones
are units of their own over the same parameters, with their own buffers, so all can be on the
device. Before an update a slot's reader holds the newest weights, and the update writes to the
bytes that it had: so the unit and the slot change places.
"""

from __future__ import annotations

import torch

from ...core.homes.store import ArrayStore
from ...core.machine.device import Device
from ...core.units.home_arrays import HomeArrays, Reader
from ...core.units.unit import ParamUnit

CHANGED = (
    "a forward changed parameters of unit {} in place, which are older than the last update while a"
    " pipeline runs without flush: the change would be lost. Run the pipeline with a flush between"
    " batches (schedule.step)."
)
PIECE = 1 << 20  # elements that are extrapolated at once


def add_slot(homes: HomeArrays, store: ArrayStore, slot: int, what: str) -> None:
    """Allocates ``slot`` of stale weights at home. Raises CapacityError without room."""
    weight = homes.weight
    array = store.allocator.allocate_later(
        weight.tier, weight.dtype, weight.numel, f"stale weight of {what}"
    )
    homes.readers[slot] = Reader(array=array)


def drop_slot(homes: HomeArrays, store: ArrayStore, slot: int) -> None:
    """Frees ``slot``, before any update has used it. Idempotent."""
    if (reader := homes.readers.pop(slot, None)) is not None:
        store.allocator.free_more(reader.array)


def make_stale(unit: ParamUnit, index: int, device: Device) -> ParamUnit:
    """Makes the unit ``index`` of the weights in one more slot, with their buffers. Raises
    CapacityError if the device has no room."""
    stale = ParamUnit(
        index,
        f"{unit.name}, stale",
        unit.flat_params,
        device,
        reader=len(unit.older),
        refusal=CHANGED.format(unit.name),
    )
    stale.allocate()
    unit.older = [*unit.older, stale]
    return stale


def extrapolate(homes: HomeArrays, store: ArrayStore, slot: int, ahead: float | None) -> None:
    """Replaces the weights in ``slot``, which the last update started from, by the newest ones and
    ``ahead`` times their difference. None: by the newest ones. Blocks on the update."""
    homes.wait()
    newest, stale = homes.weight, homes.weight_of(slot)
    for begin in range(0, newest.numel, PIECE):
        end = min(begin + PIECE, newest.numel)
        # On the host wherever the home is, for the same bits.
        weights = store.read(newest, begin, end)
        if ahead is not None:
            now, before = weights.float(), store.read(stale, begin, end).float()
            weights = now.sub(before).mul_(ahead).add_(now).to(newest.dtype)
        store.write(stale, begin, weights, version=0)


class UnitVersions:
    """The newest and the stale weights of one unit, and the version that its parameters are. Used
    while nothing holds the unit."""

    def __init__(self, unit: ParamUnit):
        self.unit = unit
        self._slot = 0  # of the last update

    @staticmethod
    def has(unit: ParamUnit) -> bool:
        """Tells whether updates change a unit's weights."""
        return any(flat.spec.stepped for flat in unit.flat_params)

    def compute_with(self, slot: int | None) -> None:
        """Makes later compute use the stale weights in ``slot``, or the newest."""
        unit = None if slot is None else self.unit.older[slot]
        if self.unit.in_use is not unit:
            self.unit.in_use = unit
            self._show()

    def _show(self) -> None:
        """Makes the parameters views of the version in use."""
        torch.clear_autocast_cache()  # it caches casts of the other version, by parameter
        (self.unit.in_use or self.unit).buffers.show()

    def begin_update(self, slot: int) -> None:
        """Moves the newest weights to ``slot``, with their device buffers, before an update writes
        new ones. A graph that saved them keeps their buffers."""
        stale, self._slot = self.unit.older[slot], slot
        for flat_param in self.unit.flat_params:
            if slot in flat_param.homes.readers:
                flat_param.homes.hold(slot)
        stale.version, self.unit.version = self.unit.version, self.unit.version + 1
        self._swap()

    def extrapolate(self, store: ArrayStore, slot: int, ahead: float | None) -> None:
        """Replaces the weights in ``slot`` as :func:`extrapolate` does."""
        for flat_param in self.unit.flat_params:
            if slot in flat_param.homes.readers:
                extrapolate(flat_param.homes, store, slot, ahead)

    def settle(self) -> None:
        """Restores the buffers of device homes after an interrupted update, and computes with the
        newest weights."""
        for flat_param in self.unit.flat_params:
            flat_param.homes.drop_drafts()
        if self.unit.computes_at_home and any(
            flat is not flat_param.weight.flat
            for flat, flat_param in zip(self.unit.buffers.flats, self.unit.flat_params)
        ):
            self._swap()
        self.unit.in_use = None
        self._show()

    def _swap(self) -> None:
        self.unit.change_places(self.unit.older[self._slot])
        self._show()
