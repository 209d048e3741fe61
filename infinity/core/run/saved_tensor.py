"""Saved tensors: what autograd's graph holds in place of an activation's bytes.

SavedTensor    the tensor itself, held by the graph
WithinBudget   the same, charged to the device's budget
Saved          a storage that is at home on the host or on NVMe, once for all its saved views
SavedLocal     any of the others, for the local part of a tensor
SavingOrder    all of those, in the order of saving
View           one view of a Saved: the dtype, size, stride and offset to restore
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ... import native
from ...torch_private import neg_view
from ..homes.arrays import StateArray
from ..machine.device import PAST, Event
from ..machine.sizes import round_up
from ..units.forms import Form

READ_AHEAD = 2  # storages that are read before the backward asks for them
LARGEST_EXCESS = 4  # a storage moves whole unless it is larger than the view's span by this factor
ALIGNMENT = 64  # bytes: the start of a part keeps the alignment of its elements


def blocks(nbytes: int) -> int:
    """Rounds ``nbytes`` up to whole checksum blocks, any range of which can be written."""
    return round_up(nbytes, native.CHECKSUM_NBYTES)


def raw_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storage_span(tensor: torch.Tensor, storage_nbytes: int) -> tuple[int, int]:
    """Computes the first byte and the number of bytes of the storage to save for ``tensor``."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.storage_offset() * tensor.itemsize // ALIGNMENT * ALIGNMENT
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize
    return (
        (begin, end - begin)
        if storage_nbytes > LARGEST_EXCESS * (end - begin)
        else (0, storage_nbytes)
    )


class SavedTensor(SimpleNamespace):  # whose fields are set in C: a step makes thousands
    """A saved tensor that stays in place, with torch's check for in-place changes, which hooks
    disable."""

    value: torch.Tensor  # detached: the tensor itself would form a cycle with its graph
    version: int  # torch's count of in-place changes
    param: weakref.ref[torch.nn.Parameter] | None  # as in a SavedWeight

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedTensor:
        """Saves ``tensor``."""
        return cls(value=tensor.detach(), version=tensor._version, param=None)

    def tensor(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError, as torch does, if it was changed since."""
        if self.value._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: [{self.value.type()} {list(self.value.shape)}] is at"
                f" version {self.value._version}; expected version {self.version} instead."
            )
        return self.value


@dataclass(frozen=True)
class SavedLocal:
    """A saved tensor that is not plain: its local part as that was saved, and what it is beside."""

    packed: Any
    form: Form
    spec: Any


@dataclass(frozen=True)
class WithinBudget:
    """A saved tensor within the device's budget, charged as long as it is saved. ``packed`` is its
    saved form."""

    packed: Any
    charge: native.Charge


class Saved:
    """Bytes of one storage at home: all of it, or the part that one view needs."""

    def __init__(self, array: StateArray, begin: int, nbytes: int):
        self.read: tuple[native.Ticket, native.Lease] | None = None  # a running read into staging
        self.writes: list[native.Ticket] = []
        self.sent: Event = PAST  # when the bytes are at home
        # Until then: the tensor that is sent, and its version counter.
        self.source: tuple[torch.Tensor, int] | None = None
        self.changed = False  # whether it was changed in that time
        self.coming: tuple[torch.UntypedStorage, Event] | None = None  # on their way back
        self.arrived: Event = PAST  # when they last were back
        self.begin, self.nbytes = begin, nbytes
        self.checksum = 0  # of bytes on disk: shows whether a host storage still has them
        self._there: StorageWeakRef | None = None  # the device storage that has the bytes again
        self.array = array  # at home

    def bytes_on_device(self) -> torch.UntypedStorage | None:
        """Returns the storage that has the bytes again, while anything holds it."""
        if self._there is None or self._there.expired():
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self._there.cdata)

    def was_changed(self) -> bool:
        """Tells whether the tensor was changed while it was sent, so the bytes at home may be old
        or new."""
        self.changed |= self.source is not None and self.source[0]._version != self.source[1]
        return self.changed

    def check_source(self) -> None:
        """Raises RuntimeError, as torch does, if the tensor was changed while it was sent."""
        if self.was_changed():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                " inplace operation while it was sent home: leave it as it is until the backward,"
                " or set Config(activations='device')"
            )

    def came_back(self, storage: torch.UntypedStorage) -> None:
        """Notes that ``storage`` has the bytes."""
        self._there = StorageWeakRef(storage)


class SavingOrder:
    """Saved storages in the order of saving; the backward needs the last ones first."""

    def __init__(self) -> None:
        self._order: list[weakref.ref[Saved]] = []

    def __iter__(self) -> Iterator[Saved]:
        return (saved for ref in self._order if (saved := ref()) is not None)

    def append(self, saved: Saved) -> None:
        """Adds ``saved`` as the last one."""
        self._order.append(weakref.ref(saved))

    def forget_freed(self) -> None:
        """Drops those that autograd has freed."""
        self._order = [ref for ref in self._order if ref() is not None]

    def before(self, saved: Saved, *, nbytes: int = 0) -> Iterator[Saved]:
        """Yields the storages saved just before ``saved`` that are still in use: the backward needs
        them next. Yields two, and more up to ``nbytes`` in all."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        index = next(
            (i for i in range(len(self._order) - 1, -1, -1) if self._order[i]() is saved), 0
        )
        for count, ref in enumerate(self._order[:index][::-1]):
            other = ref()
            nbytes -= 0 if other is None else other.nbytes
            if count >= READ_AHEAD and nbytes < 0:
                return
            if other is not None:
                yield other


@dataclass(frozen=True)
class View:
    """One view of saved bytes: its dtype and layout."""

    saved: Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements, in the storage that was saved
    conj: bool
    neg: bool

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Makes the tensor, over ``storage`` that has its bytes again."""
        offset = self.offset - self.saved.begin // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, offset, self.size, self.stride
        )
        tensor = tensor.conj() if self.conj else tensor
        return neg_view(tensor) if self.neg else tensor


def release_saved(saved: weakref.ref[Saved]) -> None:
    """Releases the tensor after its bytes arrived at home: it may be changed."""
    if (there := saved()) is not None:
        there.was_changed()
        there.source = None
