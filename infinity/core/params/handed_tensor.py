"""HandedTensor: detects what a user does with one tensor of a state dict.

armed   a tensor whose storage torch would copy on a write, from before its receiver has it: a
        write, or an export, takes the mark away, however it is made. Torch counts no writes
        through ``.data``, NumPy or DLPack
print   a number of all of a tensor's bits: compared when a tensor is not armed any more, for its
        address may be kept
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...torch_private import arm, is_armed
from ..machine import storage_guard
from ..units.forms import is_plain, local_of
from ..units.handle import ParamHandle
from .tensors import fingerprint

VALUE = "value"  # of a parameter; the other names are MASTER, STEP and the moments' arrays


class HandedTensor:
    """One tensor that was handed out, and that only its receiver holds so far. ``bytes``: our own
    view of its local part, with the same version counter."""

    def __init__(self, handle: ParamHandle, array: str, tensor: torch.Tensor, on_death: Any):
        self.handle, self.array, self.bytes = handle, array, local_of(tensor).detach()
        self._counted = [self.bytes]
        # torch counts changes of the whole or of the local part, by the call.
        if not is_plain(tensor):
            self._counted.append(tensor.detach())
        self._storage = self.bytes.untyped_storage()
        self._versions, self._print = self._count(), fingerprint(self.bytes)
        arm(self.bytes)  # arms it, after the last use of its address by us
        # Beside the tensor's; None: torch does not tell.
        references = storage_guard.references(self.bytes)
        self._own_references = None if references is None else references - 1
        self.tensor = weakref.ref(tensor, on_death)
        self.stamp: Any = None
        self._died_elsewhere = False
        # Step of the last note, and of the last comparison of bits.
        self.index = self._compared_at = -1
        # Only this rank saw a write, so that other ranks cannot tell.
        self.is_seen_here_alone = False

    def look(self) -> tuple[list[int], int]:
        """Returns the version counters and the print, which show whether the tensor was written
        to."""
        return self._count(), fingerprint(self.bytes) if self.is_touched else self._print

    def note(self, stamp: Any, index: int, looked: tuple[list[int], int] | None = None) -> None:
        """Notes that the tensor equals home now, or did at ``looked``, an earlier result of
        :meth:`look`."""
        self.stamp, self.index = stamp, index
        self._versions, self._print = looked if looked is not None else self.look()

    def _count(self) -> list[int]:
        return [each._version for each in self._counted]

    @property
    def is_touched(self) -> bool:
        """Whether the tensor may have been written to since it was marked."""
        return not self.was_freed and (self._count() != self._versions or not is_armed(self.bytes))

    @property
    def is_elsewhere(self) -> bool:
        """Whether a tensor of optimizer state was given other memory (``set_``, ``.data =``), which
        torch's optimizer would have from then on. A parameter's value would not."""
        if self.array == VALUE:
            return False
        if (tensor := self.tensor()) is None:
            return self._died_elsewhere
        return storage_guard.identity(local_of(tensor)) != storage_guard.identity(self.bytes)

    @property
    def was_freed(self) -> bool:
        """Whether its memory was freed although the tensor exists."""
        return self._storage.nbytes() == 0

    @property
    def is_exported(self) -> bool:
        """Whether NumPy, or another process, may have changed it unnoticed."""
        return not self.was_freed and storage_guard.is_fixed(self._storage)

    def is_written(self, index: int = -1) -> bool:
        """Tells whether the tensor was changed. ``index``: the step, if a tensor that is not armed
        is compared only once in it."""
        if self.is_elsewhere:
            return True
        if not self.is_touched:
            return False
        if self._count() != self._versions:
            return True
        if index != -1 and self._compared_at == index:
            return False
        self._compared_at = index
        self.is_seen_here_alone = fingerprint(self.bytes) != self._print
        return self.is_seen_here_alone

    def is_held(self, *, dying: bool = False) -> bool:
        """Tells whether anything else holds the memory. ``dying``: torch is freeing the tensor, and
        still refers to it."""
        if self._own_references is None:
            return dying or self.tensor() is not None or self._is_held_beside()
        references = storage_guard.references(self.bytes)
        if dying:
            self._died_elsewhere = references == self._own_references
            return references > self._own_references + 1
        return self.tensor() is not None or references > self._own_references

    def _is_held_beside(self) -> bool:
        del self._storage
        held = storage_guard.is_held_beside([local_of(each) for each in self._counted])
        self._storage = self.bytes.untyped_storage()
        return held
