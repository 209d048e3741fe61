"""Assigned: a tensor that ``p.grad = tensor`` gave, which is the gradient in torch from then on.

held     something beside the engine refers to the tensor's memory: the tensor, a view, a flat
         buffer, an array of NumPy; or it is the gradient of two parameters
bytes    our own view of its local part, which keeps it after its last user
stale    with several ranks: the gradient was changed since, and the tensor was not
early    a step in the backward has applied it, and the rest of that step is still to come
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable

import torch

from ..machine import storage_guard
from ..state.dtensors import local_of
from ..state.tensors import digest_of


class _Memory:
    """A storage, and where in it each of our own views begins."""

    def __init__(self) -> None:
        self.own: Counter[int] = Counter()
        self.own_count = 0  # of all


# The keys are of storages that are alive as long as their entries: each has a view.
_MEMORIES: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


class Assigned:
    """One tensor. ``is_copied``: the gradient was made from it, by other ranks too, and cannot be made anew."""

    def __init__(self, tensor: torch.Tensor, *, is_copied: bool, alone: bool):
        self.bytes = local_of(tensor).detach()
        self.is_copied, self._alone = is_copied, alone
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
        """Sets the tensor that users have."""
        self.tensor = weakref.ref(tensor)

    @property
    def is_held(self) -> bool:
        """Whether anything but the engine can change the tensor."""
        if self.tensor() is not None or self._memory.own[self._begin] > 1:
            return True
        if storage_guard.references(self.bytes) > self._memory.own_count:
            return True
        return storage_guard.is_fixed(self.bytes.untyped_storage())  # memory that torch did not take

    @property
    def is_writable(self) -> bool:
        """Whether torch would add to it: no two elements share memory."""
        return not any(step == 0 and size > 1 for step, size in zip(self.bytes.stride(), self.bytes.shape))

    def begins_as(self, tensor: torch.Tensor) -> bool:
        """Tells whether ``tensor`` begins where this one does."""
        return _place_of(tensor)[:2] == _place_of(self.bytes)[:2]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the tensor was given other memory, by ``tensor.data = ...`` say."""
        tensor = self.tensor()
        if tensor is None:
            return False
        return _place_of(local_of(tensor)) != _place_of(self.bytes)

    @property
    def is_touched(self) -> bool:
        """Whether torch has counted a change since the last note, perhaps of another view."""
        return self._count() != self._counted

    @property
    def is_changed(self) -> bool:
        """With several ranks: whether the tensor has other bits than at the last note. If it is stale, any
        change that torch has counted is one: the user took the tensor for the gradient."""
        return (self.is_stale and self.is_touched) or digest_of(self.bytes) != self._digest

    def note(self) -> None:
        """Takes what the tensor holds now for the gradient at home."""
        self._counted = self._count()
        self._digest = None if self._alone else digest_of(self.bytes)

    def leave_behind(self) -> None:
        """Notes that the gradient is about to change without the tensor, which has what is at home."""
        self.is_stale, self._counted = True, self._count()

    def change(self, change: Callable[[torch.Tensor], object]) -> None:
        """Has ``change`` work in place on the tensor."""
        with torch.inference_mode() if self.bytes.is_inference() else torch.no_grad():
            change(self.bytes)

    def has_bits_of(self, home: torch.Tensor) -> bool:
        """Tells whether the tensor has the bits of ``home``, as far as those have its dtype."""
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
