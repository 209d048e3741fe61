"""Parking: moves arrays of an engine out of memory for a while: from the device to the host, or
from both to a disk.

parked   of an array: its bytes are at its place, on the host or in a swap file, and its memory was
         returned to the system; its address stays
blank    an array for gradients that has none: parked without a place

An array's bytes are at its place before its memory is freed. It is on the list from then until they
are back. So :meth:`Parking.resume` restores it, even after an interrupt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import native
from ...core.grads.record import GradState
from ...core.homes.arrays import StateArray
from ...core.homes.store import ArrayStore
from ...core.machine.device import PAST, Copy, Device, Event
from ...core.machine.tiers import Tier
from ...core.seams import Extension
from ...core.units.flat_param import FlatParam
from ...core.units.unit import ParamUnit

WEIGHTS = ("weight",)  # of a flat param's arrays; all others are the optimizer's
PIECE_NBYTES = 8 * 1024 * 1024  # in memory at once, on the way to a disk


class _Queues:
    """The event after all that the queues of ``device`` have."""

    done = False

    def __init__(self, device: Device):
        self._device = device

    def precede(self) -> None:
        self.wait()

    def wait(self) -> None:
        self._device.drain()


@dataclass(eq=False)
class _Parked:
    array: StateArray
    place: StateArray | None = None  # None: it is blank, or has none yet
    event: Event = PAST  # of a copy between the two
    in_array: bool = True  # its bytes are in the array; else at its place


class Parking(Extension):
    """The parked arrays of one engine. Used from one thread, inside a use of the engine."""

    may_stand_aside = True

    def __init__(self, store: ArrayStore):
        self._store, self._device = store, store.device
        self._parked: list[_Parked] = []

    def install(self, job: Any, model: object) -> None:
        """Brings all back when the model is used."""
        job.events.use_begun.append(self.resume)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are parked."""
        return sum(parked.array.nbytes for parked in self._parked if not parked.in_array)

    def park(self, arrays: Sequence[StateArray], folder: str) -> None:
        """Moves ``arrays``, also those that are parked on the host, to a swap file in ``folder``.
        Blocks on the disk. Raises CapacityError or StorageError if the disk has no room; arrays
        parked by then stay parked."""
        self._settle()
        coming, asked = self._not_parked(arrays), {id(array) for array in arrays}
        on_host = [
            parked
            for parked in self._parked
            if parked.place is not None
            and parked.place.tier is Tier.HOST
            and id(parked.array) in asked
        ]
        if coming or on_host:
            self._store.need_service()
        for parked in on_host:
            before, parked.place = parked.place, self._written(parked.place, folder)
            self._store.allocator.free_more(before)
        for array in coming:
            place = self._written(array, folder)
            self._parked.append(_Parked(array, place, in_array=False))
            self._store.allocator.empty(array)

    def park_blank(self, arrays: Iterable[StateArray]) -> None:
        """Frees the memory of ``arrays``, which hold nothing."""
        for array in self._not_parked(arrays):
            self._parked.append(_Parked(array, in_array=False))
            self._store.allocator.empty(array)

    def park_on_host(self, arrays: Iterable[StateArray]) -> None:
        """Moves those of ``arrays`` whose home is the device to registered host memory, at the rate
        of the link. Raises CapacityError if the host's budget has no room; arrays parked by then
        stay parked."""
        self._settle()
        try:
            for array in self._not_parked(arrays):
                if array.tier is Tier.DEVICE:
                    # On the list before anything runs: an interrupt loses neither place nor copy
                    parked = _Parked(array, event=_Queues(self._device))
                    self._parked.append(parked)
                    # Its pages are populated while the copy before is on its way
                    parked.place = self._store.allocator.allocate_more(
                        Tier.HOST, array.nbytes, "parked state"
                    )
                    parked.event = self._copy(parked.place, array, "out")
        except BaseException:
            self._leave()
            raise
        self._leave()

    def _leave(self) -> None:
        """Frees the memory of arrays once their copies to their places are over. Takes those off
        the list whose copy an exception has kept from starting. Waits for the copies."""
        for parked in list(self._parked):
            if not parked.in_array:
                continue
            parked.event.wait()
            if isinstance(parked.event, _Queues):
                self._forget(parked)
            else:
                parked.in_array = False
                self._store.allocator.empty(parked.array)

    def _forget(self, parked: _Parked) -> None:
        """Takes an array that has its bytes off the list, and frees its place."""
        self._parked.remove(parked)
        if parked.place is not None:
            self._store.allocator.free_more(parked.place)

    def _settle(self) -> None:
        """Undoes what an exception left of a park or a resume: bytes are in arrays that are not
        listed, or at places."""
        for parked in list(self._parked):
            parked.event.wait()
            if parked.in_array:
                self._forget(parked)
            else:
                self._store.allocator.empty(parked.array)

    def resume(self, _operation: Any = None) -> None:
        """Brings all parked arrays back, if any. Blocks on the disk and the link. Raises
        CapacityError if the device has no room; all that is not back stays parked. After an
        interrupt, call it again."""
        if not self._parked:
            return
        self._settle()
        try:
            for parked in self._parked:
                self._store.allocator.refill(parked.array)
                if parked.place is None:
                    parked.array.flat.zero_()
                elif parked.place.tier is Tier.HOST:
                    parked.event = _Queues(self._device)
                    parked.event = self._copy(parked.array, parked.place, "in")
            while self._parked:
                parked = self._parked[-1]
                if parked.place is not None and parked.place.tier is Tier.NVME:
                    self._read(parked.array, parked.place)
                parked.event.wait()
                parked.in_array = True
                self._parked.pop()
                if parked.place is not None:
                    self._store.allocator.free_more(parked.place)
        except Exception:
            self._settle()
            raise

    def _read(self, array: StateArray, place: StateArray) -> None:
        """Reads the bytes of ``array`` from its place on a disk. Blocks on the disk."""
        flat = array.flat.view(torch.uint8)
        for at in range(0, array.nbytes, PIECE_NBYTES):
            end = min(array.nbytes, at + PIECE_NBYTES)
            flat[at:end].copy_(self._store.read(place, at, end))

    def _not_parked(self, arrays: Iterable[StateArray]) -> list[StateArray]:
        parked = {id(parked.array) for parked in self._parked}
        return [array for array in arrays if id(array) not in parked]

    def _copy(self, to: StateArray, source: StateArray, queue: str) -> Event:
        """Starts copying between the device and the host, behind the compute so far."""
        edge = "device->host" if queue == "out" else "host->device"

        def copy() -> None:
            to.flat.view(torch.uint8).copy_(source.flat.view(torch.uint8), non_blocking=True)

        return self._device.put(
            queue,
            copy,
            after=[self._device.now()],
            transfer=Copy(edge, source.nbytes, "parked state"),
        )

    def _written(self, array: StateArray, folder: str) -> StateArray:
        """Writes the bytes of ``array`` to a new place in ``folder``. Blocks on the disk."""
        place = self._store.allocator.allocate_more(
            Tier.NVME, array.nbytes, "parked state", folder=folder
        )
        flat = array.flat.view(torch.uint8)
        for at in range(0, array.nbytes, PIECE_NBYTES):
            self._store.write(
                place, at, flat[at : at + PIECE_NBYTES].cpu(), version=array.extent.version
            )
        return place


def arrays_in_memory(
    units: Sequence[ParamUnit], *, weights: bool = True, optimizer: bool = True
) -> tuple[list[StateArray], list[StateArray]]:
    """Lists the arrays of all units that are not on a disk, and apart from them those for gradients
    that have none. ``weights``, ``optimizer``: with the weights, with all else."""
    have_grads = {
        handle.flat_param
        for unit in units
        for handle in unit.handles
        if handle.grad and handle.grad.state is not GradState.ABSENT
    }
    arrays: tuple[list[StateArray], list[StateArray]] = [], []
    for flat_param in (flat for unit in units for flat in unit.flat_params):
        for name, array in _arrays(flat_param):
            if array.tier is not Tier.NVME and (weights if name in WEIGHTS else optimizer):
                arrays[name == "grad" and flat_param not in have_grads].append(array)
    return arrays


def _arrays(flat_param: FlatParam) -> list[tuple[str, StateArray]]:
    return [
        (name, array)
        for name, array in (*flat_param.arrays.items(), *flat_param.homes.extra_arrays)
        if array.flat is not None
    ]


def give_back_heap() -> None:
    """Returns the freed memory that torch and the C library cache to the system."""
    if torch.accelerator.is_available():
        give_back = getattr(torch.get_device_module(), "empty_cache", None)  # some cache nothing
        if give_back is not None:
            give_back()
    native.trim_heap()
