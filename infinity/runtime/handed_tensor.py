"""HandedTensor: detects what a user does with one tensor of a state dict.

probes       some of a tensor's bytes, and all of a small one's: torch does not count writes through
             ``.data``, NumPy or DLPack
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ..distributed.parallel_dims import ParallelDims
from ..machine import storage_guard
from ..optim.borrowed_state import STEP
from ..optim.optimizer_state import MASTER
from ..state.dtensors import is_distributed, local_of
from ..state.encoding import same_bits
from ..state.handle import ParamHandle
from ..state.step_counter import StepCounter
from ..storage.store import ArrayStore

VALUE = "value"  # of a parameter; the other names are MASTER, STEP and the moments' arrays
PROBED_NBYTES, PROBES = 4096, 128  # compared whole up to this size; probes of a larger tensor


@dataclass(frozen=True)
class Homes:
    """The parts of a job that read the values at home."""

    store: ArrayStore
    steps: StepCounter
    ranks: ParallelDims


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Returns the bytes of a storage, which stays resizable. Avoids torch's dispatcher: this runs
    in any thread that frees a tensor."""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr()))


def _probes(storage: torch.UntypedStorage) -> bytes:
    """Reads the probes of a storage."""
    nbytes = storage.nbytes()
    if nbytes <= PROBED_NBYTES:
        return ctypes.string_at(storage.data_ptr(), nbytes) if nbytes else b""
    # An odd stride: each byte of a number in turn.
    return _bytes_of(storage)[:: nbytes // PROBES | 1].tobytes()


class HandedTensor:
    """One tensor that was handed out, and that only its receiver holds so far. ``bytes``: our own
    view of its local part, with the same version counter."""

    def __init__(self, handle: ParamHandle, array: str, tensor: torch.Tensor, on_death: Any):
        self.handle, self.array, self.bytes = handle, array, local_of(tensor).detach()
        self._counted = [self.bytes]
        # torch counts changes of the whole or of the local part, by the call.
        if is_distributed(tensor):
            self._counted.append(tensor.detach())
        self._storage = self.bytes.untyped_storage()
        self._can_be_looked_at = self.bytes.is_cpu
        self._own_references = storage_guard.references(self.bytes) - 1  # beside the tensor's
        self.tensor = weakref.ref(tensor, on_death)
        self.stamp: Any = None
        # Step of the last note, and of the last comparison of bytes.
        self.index = self._looked_at = -1
        self._digest: bytes | None = None  # of a tensor that NumPy may change
        # Only this rank saw a write: each rank compares with its own home.
        self.is_seen_here_alone = False

    def look(self) -> tuple[list[int], bytes]:
        """Returns the version counters and the probes, which show whether the tensor was written
        to."""
        return self._count(), self._probe()

    def note(self, stamp: Any, index: int, looked: tuple[list[int], bytes] | None = None) -> None:
        """Notes that the tensor equals home now, or did at ``looked``, an earlier result of
        :meth:`look`."""
        self.stamp, self.index = stamp, index
        self._versions, self._bytes = looked if looked is not None else self.look()
        self._digest = self._hash() if self._digest is not None else None

    def _count(self) -> list[int]:
        return [each._version for each in self._counted]

    def _probe(self) -> bytes:
        return _probes(self._storage) if self._can_be_looked_at else b""

    def _hash(self) -> bytes:
        return hashlib.blake2b(_bytes_of(self._storage), digest_size=16).digest()

    @property
    def was_freed(self) -> bool:
        """Whether its memory was freed although the tensor exists."""
        return self._storage.nbytes() == 0

    @property
    def is_counted(self) -> bool:
        """Whether torch counted a change, or the probes differ."""
        return not self.was_freed and (
            self._count() != self._versions or self._probe() != self._bytes
        )

    @property
    def is_exported(self) -> bool:
        """Whether NumPy, or another process, may have changed it unnoticed."""
        return not self.was_freed and storage_guard.is_fixed(self._storage)

    def is_written(self, homes: Homes, *, is_stale: bool) -> bool:
        """Tells whether the tensor was changed. The probes of a snapshot are compared once per
        step."""
        if self._count() != self._versions:
            return not self.was_freed
        if self.was_freed or (is_stale and self._looked_at == homes.steps.index):
            return False
        self._looked_at = homes.steps.index
        if self._probe() != self._bytes:
            return True
        self.is_seen_here_alone = self.is_exported and self._differs(homes, is_stale=is_stale)
        return self.is_seen_here_alone

    def _differs(self, homes: Homes, *, is_stale: bool) -> bool:
        """Compares all bits: first with those at home, later with those of the last comparison."""
        known, self._digest = self._digest, self._hash()
        if known is not None:
            return known != self._digest
        if is_stale or self.array in (STEP, MASTER):
            return False
        if self.array == VALUE:
            return bool(self.handle.flat_param.changes(homes.store, self.handle.index, self.bytes))
        flat_param, index = self.handle.flat_param, self.handle.index
        if homes.ranks.alone:
            home = flat_param.flattened(
                flat_param.read_moment(homes.store, self.array, index), index
            )
            return not bool(same_bits(flat_param.flattened(self.bytes, index), home).all())
        begin, end = flat_param.layout.part_of_param(self.array, index)
        home, here = (
            flat_param.parts.read_own(homes.store, self.array, index),
            flat_param.flattened(self.bytes, index)[begin:end],
        )
        return home.dtype == here.dtype and not bool(same_bits(here, home).all())

    def is_held(self, *, dying: bool = False) -> bool:
        """Tells whether anything else holds the memory. ``dying``: torch is freeing the tensor, and
        still refers to it."""
        if dying:
            return storage_guard.references(self.bytes) > self._own_references + 1
        return (
            self.tensor() is not None or storage_guard.references(self.bytes) > self._own_references
        )
