"""HandedOut: sends home the values that users write to the tensors of state dicts.

In torch those are the live tensors, so ``for v in model.state_dict().values(): v.mul_(0.5)`` halves
the weights. Here they are copies, so a write to one is sent home at the next use of the engine.

handed out   a tensor of a state dict, for as long as anything holds its memory
stamp        the version of the value at home that a tensor equals; if home has a newer one, the
             tensor is a snapshot
probes       some of a tensor's bytes, and all of a small one's: torch does not count writes through
             ``.data``, NumPy or DLPack

A tensor that is never written to costs nothing after its own life: it is dropped when its last user
frees it, in any thread. Only one that was exported to NumPy, or has views, waits for the next use.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..distributed.data_ranks import DataRanks
from ..errors import UsageError
from ..machine import storage_guard
from ..optim.lent_state import STEP, LentState, checked_step
from ..optim.optimizer_state import MASTER
from ..state.dtensors import is_distributed, like, local_of
from ..state.encoding import same_bits
from ..state.handle import ParamHandle
from ..state.operations import Operation, State
from ..state.step_counter import StepCounter
from ..state.unit import ParamUnit
from ..state.uses import Uses
from ..storage.store import ShardStore
from .value_edits import ValueEdits

VALUE = "value"  # of a parameter; the other names are MASTER, STEP and the moments' arrays
PROBED_NBYTES, PROBES = 4096, 128  # compared whole up to this size; probes of a larger tensor


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


class _Handed:
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

    def is_written(self, homes: HandedOut, *, is_stale: bool) -> bool:
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

    def _differs(self, homes: HandedOut, *, is_stale: bool) -> bool:
        """Compares all bits: first with those at home, later with those of the last comparison."""
        known, self._digest = self._digest, self._hash()
        if known is not None:
            return known != self._digest
        if is_stale or self.array in (STEP, MASTER):
            return False
        if self.array == VALUE:
            return bool(self.handle.shard.changes(homes.store, self.handle.index, self.bytes))
        shard, index = self.handle.shard, self.handle.index
        if homes.ranks.alone:
            home = shard.flattened(shard.read_moment(homes.store, self.array, index), index)
            return not bool(same_bits(shard.flattened(self.bytes, index), home).all())
        begin, end = shard.layout.part_of_param(self.array, index)
        home, here = (
            shard.parts.read_own(homes.store, self.array, index),
            shard.flattened(self.bytes, index)[begin:end],
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


class HandedOut:
    """The tensors of state dicts of one engine. Given and settled inside a use of the engine; a
    tensor may die at any time."""

    def __init__(
        self,
        store: ShardStore,
        steps: StepCounter,
        ranks: DataRanks,
        lent: LentState,
        uses: Uses,
        edits: ValueEdits,
    ):
        self.store, self.steps, self.ranks = store, steps, ranks
        self._lent, self._uses, self._edits = lent, uses, edits
        self._entries: dict[int, _Handed] = {}  # by their storages, which they keep alive
        self._keys: dict[ParamHandle, set[int]] = {}  # keys of each parameter's entries
        self._filled: weakref.ref[dict] | None = None  # the state dict that was filled last
        self._is_filling = False

    @contextmanager
    def filling(self, state: dict) -> Iterator[None]:
        """Surrounds code that puts one module's values into ``state``, so that the values already
        in it are not compared again for each module."""
        filled = self._filled() if self._filled is not None else None
        self._is_filling = filled is state
        try:
            yield
            self._filled = weakref.ref(state) if type(state) is not dict else None
        finally:
            self._is_filling = False

    def give(self, handle: ParamHandle, array: str, tensor: torch.Tensor) -> None:
        """Watches ``tensor``, a copy of ``array`` at home that is about to be given to a user."""
        if tensor.is_inference() or not local_of(tensor).numel():
            return
        key, me = storage_guard.identity(local_of(tensor)), weakref.ref(self)
        entry = _Handed(handle, array, tensor, partial(_died, me, key))
        entry.note(self._stamp(entry), self.steps.index)
        self._entries[key] = entry
        self._keys.setdefault(handle, set()).add(key)

    def _drop(self, key: int, entry: _Handed) -> None:
        self._entries.pop(key, None)
        if (keys := self._keys.get(entry.handle)) is not None:
            keys.discard(key)

    def _of(self, handle: ParamHandle) -> list[_Handed]:
        keys = self._keys.get(handle)
        return (
            [entry for key in keys.copy() if (entry := self._entries.get(key)) is not None]
            if keys
            else []
        )

    def died(self, key: int, reference: weakref.ref) -> None:
        """Drops a tensor that was never written to. Called at any time, in any thread."""
        entry = self._entries.get(key)
        if entry is None or entry.tensor is not reference:
            return
        if not (entry.is_counted or entry.is_exported or entry.is_held(dying=True)):
            self._drop(key, entry)

    @contextmanager
    def loading(self, handle: ParamHandle, value: torch.Tensor) -> Iterator[None]:
        """Surrounds code that sets the parameter to ``value``: if ``value`` was handed out, it is
        current afterwards."""
        self.settle()
        yield
        if (
            self._entries
            and not local_of(value).is_meta
            and local_of(value).layout is torch.strided
        ):
            entry = self._entries.get(storage_guard.identity(local_of(value)))
            if entry is not None and entry.handle is handle and entry.array == VALUE:
                entry.note(self._stamp(entry), self.steps.index)

    def begin_use(self, *, repairing: bool) -> None:
        """Sends writes home at the beginning of a use. With several ranks :meth:`settle_on_ranks`
        does."""
        if self._entries and self.ranks.alone and not repairing:
            self.settle()

    def settle_on_ranks(self) -> None:
        """Sends writes home if there are several ranks; every rank calls this. A lone rank did so
        in begin_use."""
        if not self.ranks.alone:
            self.settle()

    def settle_with_lent(self) -> None:
        """Sends home the writes to state dicts and to the optimizer's state."""
        self.settle()
        self._lent.settle()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Surrounds code that reads the newest values."""
        self.settle()
        yield

    def settle(self) -> None:
        """Sends home the writes since the last call. Every rank calls this. Raises UsageError, with
        nothing changed, for a write that cannot go home: once for each write."""
        if not self._entries or self._is_filling or self._uses.is_in(State.UNWRAPPED):
            return
        written: list[_Handed] = []
        for key, entry in self._entries.copy().items():
            if entry.is_written(self, is_stale=self._is_stale(entry)):
                written.append(entry)
            elif not entry.is_held():
                self._drop(key, entry)
        if written and (left := self._without_taken(written)):
            self._send(left)

    def refuse_in_backward(self, unit: ParamUnit) -> None:
        """Raises UsageError if values of ``unit`` that the running backward needs were written to
        since the forward."""
        for entry in (
            [each for handle in unit.handles for each in self._of(handle)] if self._entries else ()
        ):
            if entry.array == VALUE and not self._is_stale(entry) and entry.is_counted:
                raise UsageError(
                    f"this backward needs {entry.handle.name} as it was in its forward, but the"
                    " state_dict() value was written to since. Run backward before that."
                )

    def _stamp(self, entry: _Handed) -> Any:
        handle = entry.handle
        if entry.array in (VALUE, MASTER):
            return handle.version, handle.forward_edits
        return self.steps.index, self._lent.changes_of(handle, entry.array)

    def _is_stale(self, entry: _Handed) -> bool:
        if entry.stamp is not None and entry.stamp != self._stamp(entry):
            entry.stamp = None  # once a snapshot, always one
        return entry.stamp is None

    def _without_taken(self, written: list[_Handed]) -> list[_Handed]:
        """Leaves out state that another optimizer took over (its load_state_dict() copies nothing):
        its steps write to that state, but not for us."""
        of_others: set[int] = set()
        if any(entry.array != VALUE and entry.tensor() is not None for entry in written):
            for each in gc.get_objects():
                # Infinity's own optimizers have another class of state.
                if issubclass(type(each), torch.optim.Optimizer) and type(
                    state := each.__dict__.get("state")
                ) in (
                    dict,
                    defaultdict,
                ):
                    entries = [entry for entry in state.values() if isinstance(entry, dict)]
                    of_others |= {id(value) for entry in entries for value in entry.values()}
        left = []
        for entry in written:
            if entry.array != VALUE and id(entry.tensor()) in of_others:
                self._drop(storage_guard.identity(entry.bytes), entry)
            else:
                left.append(entry)
        return left

    def _send(self, written: list[_Handed]) -> None:
        self._uses.check(
            Operation.WRITE_STATE_DICT
        )  # refused, the write goes home when that is over
        if moments := [entry for entry in written if entry.array not in (VALUE, MASTER)]:
            self._lent.settle()  # writes through optimizer.state make these entries stale
        try:
            self._check(written)
        except UsageError:
            for entry in written:  # raise once: these tensors are snapshots from here on
                entry.note(None, entry.index)
            raise
        with torch.inference_mode(False), torch.no_grad():
            self._send_values([entry for entry in written if entry.array == VALUE])
            for entry in moments:
                self._send_moment(entry)
        for key, entry in self._entries.copy().items():
            if not entry.is_held():
                self._drop(key, entry)

    def _check(self, written: list[_Handed]) -> None:
        """Raises UsageError if one of ``written`` cannot go home."""
        seen: dict[tuple[ParamHandle, str], _Handed] = {}
        for entry in written:
            name = entry.handle.name
            what = f"{entry.array} of {name}" if entry.array != VALUE else name
            if self._is_stale(entry):
                steps = self.steps.index - entry.index
                since = (
                    f"{steps} further steps"
                    if steps
                    else "a load or an edit that changed it meanwhile"
                )
                raise UsageError(
                    f"{what}: a state_dict() value was written to after {since}: it is a snapshot,"
                    " and the write would put old values back. Nothing was changed: take"
                    " state_dict() anew, or clone() what is to be kept."
                )
            if entry.is_seen_here_alone and not self.ranks.alone:
                raise UsageError(
                    f"{what}: a state_dict() value was written to through NumPy, of which other"
                    " ranks cannot tell. Nothing was changed: with several ranks write through"
                    " torch, on all of them."
                )
            if entry.array == MASTER:
                raise UsageError(
                    f"{what} in optimizer.state_dict() was written to: it has the bits of the"
                    " weight below its precision, which torch's state has not. Change the weight,"
                    " through model.state_dict() or full_params."
                )
            if entry.array == STEP:
                checked_step(entry.bytes, name)
            if seen.setdefault((entry.handle, entry.array), entry) is not entry:
                raise UsageError(
                    f"{what} was written to through two state dicts, without a use of the model"
                    " between. Nothing was changed: take state_dict() once, and write through"
                    " that."
                )

    def _alike(self, entry: _Handed) -> list[_Handed]:
        """Lists the current tensors that show the same value."""
        return [
            each
            for each in self._of(entry.handle)
            if each.array == entry.array and not self._is_stale(each)
        ]

    def _send_values(self, written: list[_Handed]) -> None:
        if not written:
            return
        of_each = [(self._alike(entry), entry.look()) for entry in written]

        def then() -> None:  # may run in a later use, when more was written
            for entry, (alike, looked) in zip(written, of_each):
                self._follow(entry, alike, looked)

        edited = [(entry.handle, entry.bytes) for entry in written]
        self._edits.write_changes(edited, "taking over state_dict() values", then)

    def _send_moment(self, entry: _Handed) -> None:
        alike, looked = self._alike(entry), entry.look()
        value = (
            checked_step(entry.bytes, entry.handle.name)
            if entry.array == STEP
            else entry.bytes.clone()
        )
        whole = value if entry.array == STEP else like(entry.handle.param, value)

        def then() -> None:
            self._lent.follow(entry.handle, entry.array, value)
            self._follow(entry, alike, looked)

        self._lent.write(entry.handle, {entry.array: whole}, then)

    def _follow(
        self, entry: _Handed, alike: list[_Handed], looked: tuple[list[int], bytes]
    ) -> None:
        """Notes that ``entry`` equals home, and copies it to the other state dicts' tensors of that
        value."""
        for each in alike:
            if each is not entry:
                each.bytes.copy_(entry.bytes)
            each.note(self._stamp(each), self.steps.index, looked if each is entry else None)


def _died(
    owner: weakref.ref[HandedOut],
    key: int,
    reference: weakref.ref,
    *,
    is_over: Callable = sys.is_finalizing,
) -> None:
    if not is_over() and (handed := owner()) is not None:  # modules are torn down by then
        handed.died(key, reference)
