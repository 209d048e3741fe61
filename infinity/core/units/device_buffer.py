"""DeviceBuffer: holds the weights of one flat param on the device, and makes its parameters views
of them.

The storage of a buffer is resized to zero and back, not replaced, so that views kept by a graph or
a module stay valid.

held    something beside the engine refers to the storage: a NumPy array, a DLPack export, a view
        that a module has kept
fixed   torch cannot resize the storage any more: NumPy had it, or it was moved to shared memory
left    the unit is at home, but its memory stays because it is held

Held memory is never freed. A fixed storage that is not held is replaced by another one, which
nothing can notice. So no use of weights in a forward can keep the engine from releasing a unit.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ... import native
from ...errors import UsageError
from ..homes.arrays import StateArray
from ..machine import storage_guard
from ..machine.device import Device, Event
from ..machine.sizes import format_nbytes
from ..params.tensors import fingerprint
from .flat_param import FlatParam
from .forms import form_of, local_of
from .handle import DisableTorchFunction
from .weight_storages import WeightStorages, untyped_storage

logger = logging.getLogger(__name__)


class DeviceBuffer:
    """The device memory of one flat param. ``flat`` is the whole of it, and stays the same object.
    Properties of its storage are read only while that is accessible."""

    _has_warned = False  # whether the warning about left memory was logged

    def __init__(self, flat_param: FlatParam, flat: torch.Tensor, device: Device):
        self.flat_param, self.flat, self._device = flat_param, flat, device
        self._views = [
            placement.view(flat) for placement in flat_param.layout.placements
        ]  # of the parameters
        self._storages: WeightStorages | None = None  # the registry of its storage
        self._left_print: int | None = None  # fingerprint of left memory

    def list_in(self, storages: WeightStorages, unit: object) -> None:
        """Registers its storage, now and after each replacement, in ``storages`` as one of
        ``unit``."""
        self._storages = storages
        storages.enter(unit, self.flat)

    def show(self) -> None:
        """Makes the parameters views of this buffer. They are at rest, or not managed yet."""
        with DisableTorchFunction():
            for param, view in zip(self.flat_param.params, self._views):
                form_of(param).show(param, view)

    @property
    def _is_shown(self) -> bool:
        """Whether the parameters are views of this buffer, not of another version of the
        weights."""
        with DisableTorchFunction():
            shown = untyped_storage(local_of(self.flat_param.params[0]))._cdata
        return shown == untyped_storage(self.flat)._cdata

    @property
    def is_held(self) -> bool:
        """Whether anything beside the engine refers to its storage, or may: in a torch that does
        not tell, :meth:`empty` finds out."""
        ours = 1 + len(self._views) + (len(self.flat_param.params) if self._is_shown else 0)
        references = storage_guard.references(self.flat, ours)
        return references is None or references > ours

    @property
    def is_fixed(self) -> bool:
        """Whether torch cannot resize its storage."""
        storage = untyped_storage(self.flat)
        return not storage.resizable() or storage_guard.is_moved(storage)

    @property
    def is_exported(self) -> bool:
        """Whether its values can be, or were, changed in a way that torch does not count."""
        return self.is_fixed or self.is_held

    @property
    def is_moved(self) -> bool:
        """Whether its values were moved to memory that processes share."""
        return storage_guard.is_moved(self.flat.untyped_storage())

    # --- memory ---

    def fill(self) -> None:
        """Allocates its memory. Called inside work of the queue ``in``."""
        self._device.resize(self.flat.untyped_storage(), self.flat_param.weight_nbytes)
        self._left_print = None

    def empty(self, after: Sequence[Event]) -> None:
        """Frees its memory after the events ``after``. If the memory is held, makes it
        inaccessible to torch instead."""
        storage_guard.open(self.flat.untyped_storage())
        if self.is_held and not self.is_moved and not self._was_freed(after):
            self._leave(after)
            return
        if self.is_fixed:
            self._move_to(
                torch.UntypedStorage(self.flat_param.weight_nbytes, device=self.flat.device)
            )
        self._left_print = None
        self._device.resize(self.flat.untyped_storage(), 0, after=after)

    def _was_freed(self, after: Sequence[Event]) -> bool:
        """Frees memory that nothing holds, in a torch that does not count its users."""
        nbytes = self.flat.untyped_storage().nbytes()
        if storage_guard.references(self.flat) is not None or not nbytes:
            return not nbytes
        for event in after:
            event.wait()
        return not self._has_holder(torch.UntypedStorage(nbytes, device=self.flat.device))

    def finds_holder(self) -> bool:
        """Tells whether anything holds its memory, which is accessible. May move it to another."""
        if not self.is_held or storage_guard.references(self.flat) is not None:
            return self.is_held
        return self._has_holder(self.flat.untyped_storage().clone())

    def _has_holder(self, other: torch.UntypedStorage) -> bool:
        """Moves to ``other``, and back if something keeps the storage alive."""
        storage = StorageWeakRef(self.flat.untyped_storage())
        self._move_to(other)
        if storage.expired():
            return False
        self._move_to(torch.UntypedStorage._new_with_weak_ptr(storage.cdata))
        return True

    def _leave(self, after: Sequence[Event]) -> None:
        """Leaves the memory to its holders, as if it were their copy. The next fill reuses it in
        place."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() and self._left_print is None:
            self._left_print = fingerprint(self.flat)
            # An exception holds the weights of its frames: nobody has to change anything.
            if not (DeviceBuffer._has_warned or sys.exc_info()[0]):
                DeviceBuffer._has_warned = True
                logger.warning(
                    "%s of weights (%s, ...) stay in memory after their forward, beside the budget:"
                    " an array of NumPy, an export by DLPack or a view of a weight outside of it"
                    " holds them. Keep a copy instead: weight.detach().clone(). This is said once.",
                    format_nbytes(self.flat_param.weight_nbytes),
                    self.flat_param.names[0],
                )
        self._device.close_storage(storage, after=after)

    def check_left(self) -> None:
        """Raises UsageError, once, if left memory was written to since: home does not have that
        change."""
        if self._left_print is None:
            return
        storage = self.flat.untyped_storage()
        storage_guard.open(storage)
        is_written, self._left_print = fingerprint(self.flat) != self._left_print, None
        storage_guard.close(storage)
        if is_written:
            raise UsageError(
                f"weights of {self.flat_param.names[0]}, ... were written to outside of a forward,"
                " through an array or an export that was made inside one. The change is lost, and"
                " the values at home stand: edit weights in `with infinity.full_params(model,"
                " names, writeback=True)`."
            )

    # --- replacement of the storage ---

    def _move_to(self, other: torch.UntypedStorage) -> None:
        """Moves all views to ``other``. If interrupted, :meth:`align` undoes it: it decides by
        ``flat``, set last."""
        is_shown = self._is_shown
        if self._storages is not None:
            self._storages.replace(self.flat, other)
        self._put_views(other)
        if is_shown:
            self.show()
        with torch.no_grad():
            self.flat.set_(other, 0, self.flat.size(), self.flat.stride())

    def _put_views(self, storage: torch.UntypedStorage) -> None:
        with torch.no_grad():
            for view in self._views:
                view.set_(storage, view.storage_offset(), view.size(), view.stride())

    def align(self, *, shows: bool) -> None:
        """Undoes an interrupted move to another storage. ``shows``: makes the parameters views of
        this buffer."""
        if any(
            storage_guard.identity(view) != storage_guard.identity(self.flat)
            for view in self._views
        ):
            self._put_views(self.flat.untyped_storage())
        if shows and not self._is_shown:
            self.show()

    def return_to(self, home: StateArray) -> None:
        """Moves a buffer that is ``home`` itself back to the home's memory."""
        if self.is_moved and home.region is not None:
            self._move_to(
                native.tensor_at(
                    home.region, home.region.address, home.numel, home.dtype
                ).untyped_storage()
            )
