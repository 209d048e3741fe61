"""Assigned: a tensor that ``p.grad = tensor`` gave, which is the gradient in torch from then on.

held     another reference to the tensor's memory exists: the tensor, a view, a flat buffer, a
         NumPy array; or it is the gradient of two parameters
bytes    our own view of its local part, which keeps the memory alive after its last user
stale    with several ranks: the gradient has changed since, and the tensor has not
early    a step in mid-backward has applied it, and the rest of that step has not run yet
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable

import torch

from ..machine import storage_guard
from ..units.forms import local_of
from .tensors import checksum_of


class _Memory:
    """A storage, and the offsets of our own views in it."""

    def __init__(self) -> None:
        self.own: Counter[int] = Counter()
        self.own_count = 0  # of all


# Each key is of a live storage: every entry has a view of it.
_MEMORIES: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


class Assigned:
    """One assigned tensor. ``is_copied``: the gradient is a copy of it, made by other ranks too,
    and cannot be made anew. ``is_ours``: the engine allocated it, to show the gradient."""

    def __init__(
        self, tensor: torch.Tensor, *, is_copied: bool, alone: bool, is_ours: bool = False
    ):
        self.bytes = local_of(tensor).detach()
        self.is_copied, self.is_ours, self._alone = is_copied, is_ours, alone
        self.is_stale = self.is_early = False
        self.give(tensor)
        self._begin = self.bytes.storage_offset()
        memory = _MEMORIES.setdefault(storage_guard.identity(self.bytes), _Memory())
        memory.own[self._begin] += 1
        memory.own_count += 1
        weakref.finalize(self, _forget, memory, self._begin).atexit = False
        self._memory = memory
        self.note()

    def give(self, tensor: torch.Tensor) -> None:
        """Sets the tensor that users hold."""
        self.tensor = weakref.ref(tensor)

    @property
    def is_held(self) -> bool:
        """Whether anything but the engine can change the tensor."""
        if self.tensor() is not None or self._memory.own[self._begin] > 1:
            return True
        references = storage_guard.references(self.bytes)
        if references is None or references > self._memory.own_count:
            return True
        # Memory not allocated by torch. An array of our own memory refers to the tensor.
        return not self.is_ours and storage_guard.is_fixed(self.bytes.untyped_storage())

    @property
    def is_writable(self) -> bool:
        """Whether torch would add to it in place: no two elements share memory."""
        return not any(
            step == 0 and size > 1 for step, size in zip(self.bytes.stride(), self.bytes.shape)
        )

    def begins_as(self, tensor: torch.Tensor) -> bool:
        """Returns whether ``tensor`` starts at the same address as this one."""
        return _place_of(tensor)[:2] == _place_of(self.bytes)[:2]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the tensor's memory was replaced, for example by ``tensor.data = ...``."""
        tensor = self.tensor()
        if tensor is None:
            return False
        return _place_of(local_of(tensor)) != _place_of(self.bytes)

    @property
    def is_touched(self) -> bool:
        """Whether torch has counted a change since the last :meth:`note`, perhaps through another
        view."""
        return self._count() != self._counted

    @property
    def is_changed(self) -> bool:
        """With several ranks: whether the tensor's bits differ from those at the last :meth:`note`.
        For a stale tensor any change counted by torch counts: the user took it for the gradient."""
        return (self.is_stale and self.is_touched) or checksum_of(self.bytes) != self._checksum

    def note(self) -> None:
        """Records the tensor's present values as those of the gradient at home."""
        self._counted = self._count()
        self._checksum = None if self._alone else checksum_of(self.bytes)

    def leave_behind(self) -> None:
        """Marks the tensor as stale: the gradient is about to change without it."""
        self.is_stale, self._counted = True, self._count()

    def change(self, change: Callable[[torch.Tensor], object]) -> None:
        """Runs ``change`` in place on the tensor."""
        with torch.inference_mode() if self.bytes.is_inference() else torch.no_grad():
            change(self.bytes)

    def has_bits_of(self, home: torch.Tensor) -> bool:
        """Returns whether the tensor, cast to the dtype of ``home``, has the bits of ``home``."""
        mine = self.bytes.to(home.device, home.dtype)
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[home.itemsize]
        return torch.equal(mine.view(bits), home.view(bits))

    def _count(self) -> int:
        return 0 if self.bytes.is_inference() else self.bytes._version


def _place_of(tensor: torch.Tensor) -> tuple:
    return storage_guard.identity(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _forget(memory: _Memory, begin: int) -> None:
    memory.own[begin] -= 1
    memory.own_count -= 1
