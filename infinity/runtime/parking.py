"""Parking: moves all of an engine's arrays in memory to disk for a while, to free the memory.

parked   of an array: its bytes are in a swap file, and its memory was returned to the system; its
         address stays

An array is written out before its memory is freed. It is on the list from then until its bytes are
back. So :meth:`Parking.resume` restores it, even after an interrupt.
"""

from __future__ import annotations

import torch

from .. import native
from ..gradients.record import GradState
from ..machine.tiers import Tier
from ..state.flat_param import FlatParam
from ..state.unit import ParamUnit
from ..storage.arrays import StateArray
from ..storage.store import ArrayStore

PIECE_NBYTES = 8 * 1024 * 1024  # in memory at once


class Parking:
    """The parked arrays of one engine. Used from one thread, inside a use of the engine."""

    def __init__(self, store: ArrayStore):
        self._store = store
        self._parked: list[tuple[StateArray, StateArray]] = []  # each array, and its copy on disk

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are parked."""
        return sum(array.nbytes for array, _ in self._parked)

    def park(self, arrays: list[StateArray], folder: str) -> None:
        """Writes ``arrays`` to a swap file in ``folder`` and frees their memory. Blocks on the
        disk. Raises CapacityError or StorageError if the disk has no room; arrays parked by then
        stay parked."""
        if arrays:
            self._store.need_service()
        for array in arrays:
            place = self._store.arrays.allocate_more(
                Tier.NVME, array.nbytes, "parked state", folder=folder
            )
            flat = array.flat.view(torch.uint8)
            for at in range(0, array.nbytes, PIECE_NBYTES):
                self._store.write(
                    place, at, flat[at : at + PIECE_NBYTES].cpu(), version=array.extent.version
                )
            self._parked.append((array, place))
            self._store.arrays.empty(array)

    def resume(self) -> None:
        """Reads all parked arrays back, if any. Blocks on the disk. After an interrupt, call it
        again."""
        while self._parked:
            array, place = self._parked[-1]
            self._store.arrays.refill(array)
            flat = array.flat.view(torch.uint8)
            for at in range(0, array.nbytes, PIECE_NBYTES):
                end = min(array.nbytes, at + PIECE_NBYTES)
                flat[at:end].copy_(self._store.read(place, at, end))
            self._parked.pop()
            self._store.arrays.free_more(place)


def arrays_in_memory(units: list[ParamUnit]) -> list[StateArray]:
    """Lists the arrays of all units that are not on a disk, without gradient arrays that hold no
    gradient."""
    flat_params = [flat for unit in units for flat in unit.flat_params]
    there = {
        handle.flat_param
        for unit in units
        for handle in unit.handles
        if handle.grad and handle.grad.state is not GradState.ABSENT
    }
    return [
        array
        for flat in flat_params
        for name, array in _arrays(flat)
        if array.tier is not Tier.NVME and (name != "grad" or flat in there)
    ]


def _arrays(flat_param: FlatParam) -> list[tuple[str, StateArray]]:
    return [
        (name, array)
        for name, array in (*flat_param.arrays.items(), *flat_param.homes.beside.items())
        if array.flat is not None
    ]


def give_back_heap() -> None:
    """Returns the freed memory that torch and the C library cache to the system."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    native.trim_heap()
