"""Lents: the tensors of values at home that users hold, and one rule for when a write counts.

In torch state dicts and ``optimizer.state`` have the live tensors, so ``for v in
model.state_dict().values(): v.mul_(0.5)`` halves the weights. Here they are copies, so a write to
one is sent home at the next use of the engine.

lent       a tensor that equals a value at home, for as long as anything holds its memory
source     the home of such values, one for each parameter
stamp      differs for every newer value at home. A tensor that equals an older one is a snapshot:
           a write to it raises, and is never applied
follower   a lent tensor that gets the newer values instead, as the tensors of ``optimizer.state``
armed      a tensor that torch would copy on a write, from before its receiver has it: a write, or
           an export, takes the mark away, however it is made
print      a number of all of a tensor's bits

[Note: when a write counts] A tensor is written to if torch's version counter says so, or if its
print is not that of the value at home. Torch counts no writes through ``.data``, NumPy or DLPack.
An armed tensor needs no print. One that was exported is compared for good, for its address may be
kept: at each settling while it equals home, and once in a step when it is a snapshot.

[Note: what is not lent] A unit's memory on the device is the engine's, and has no handle of one
parameter. It equals home until the pass ends, when forward_edits.py sends home what a forward has
changed there. Memory that users hold after that is left to them by device_buffer.py: the next
forward fills it in place, so a write to it can only be refused.

A tensor that is never written to costs nothing after its own life: it is dropped when its last user
frees it, in any thread. Only one that was exported to NumPy, or has views, waits for the next use.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...errors import UsageError
from ...ranks.parallel_dims import ParallelDims
from ...torch_private import arm, is_armed, is_kept_alive
from ..machine import storage_guard
from ..run.operations import Operation, State
from ..run.step_counter import StepCounter
from ..run.uses import Uses
from ..units.forms import is_plain, like, local_of
from ..units.handle import ParamHandle
from .tensors import fingerprint

TRIMMED_AT_COUNT, TRIMMED_AT_NBYTES = 64, 32 * 1024 * 1024
# A parameter, the value it was given, and what ends the write.
Written = tuple[ParamHandle, torch.Tensor, Callable[[], None]]


class Source:
    """The home of values that users hold tensors of, one for each parameter."""

    is_weight = False  # a backward may need it as it was
    is_state = False  # an optimizer's: in torch a state dict has the very tensor

    def name_of(self, handle: ParamHandle) -> str:
        """Names the value in messages."""
        return handle.name

    def stamp(self, handle: ParamHandle) -> Any:
        """Returns a value that differs for every newer value at home."""
        raise NotImplementedError

    def read(self, handle: ParamHandle) -> torch.Tensor:
        """Reads the local part of the newest value, for followers. Every rank calls this."""
        raise NotImplementedError

    def check(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Raises UsageError if local ``value`` cannot be written."""

    def write(self, written: Sequence[Written]) -> None:
        """Writes local values home, and ends each write. Every rank calls this."""
        raise NotImplementedError


class _Memory(list[weakref.ref["_View"]]):
    """A storage, as a list of our own views of it. Nothing beside it counts them: an exception in
    the middle would leave a wrong count."""

    @property
    def views(self) -> list[_View]:
        return [view for each in self[:] if (view := each())]  # one may die meanwhile


# Each key is of a live storage: every entry has a view of it.
_MEMORIES: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


class _View:
    """Our own view of a tensor's memory, which keeps that alive after its last user."""

    def __init__(self, tensor: torch.Tensor, *, follows: bool = True):
        # It may be a view of another one, which it keeps alive.
        self.bases = (storage_guard.references(local_of(tensor)) or 1) - 1
        self.bytes = local_of(tensor).detach()
        # torch counts changes of the whole or of the local part, by the call.
        self.counted = [self.bytes, *(() if is_plain(tensor) else [tensor.detach()])]
        self.memory = _MEMORIES.setdefault(storage_guard.identity(self.bytes), _Memory())
        self.begin = self.bytes.storage_offset() if follows else None
        self.memory.append(weakref.ref(self, self.memory.remove))  # last: a part of one is none


class Lent:
    """One tensor that users hold. ``is_ours``: the engine allocated it, and gives it to its first
    user now. ``on_death``: called with the weak reference when the tensor ends."""

    _strong: torch.Tensor | None = None

    def __init__(
        self,
        source: Source,
        handle: ParamHandle,
        tensor: torch.Tensor,
        *,
        follows: bool = False,
        is_ours: bool = True,
        on_death: Any = None,
    ):
        self.source, self.handle, self.follows, self._is_ours = source, handle, follows, is_ours
        self.stamp: Any = None  # None: a snapshot
        self.index = self._compared_at = -1  # steps of the last note, and of the last comparison
        self._died_elsewhere = False
        self._view, self.tensor = _View(tensor, follows=follows), weakref.ref(tensor, on_death)
        self._seen = self._count(), fingerprint(self.bytes)
        # Among the tensors of its parameter: a follower is the only one of its source.
        self.key: Any = source if follows else storage_guard.identity(self.bytes)
        if follows:
            self._strong = tensor
        if is_ours:
            arm(self.bytes)  # arms it, after the last use of its address by us

    @property
    def bytes(self) -> torch.Tensor:
        """Our own view of the tensor's local part, with the same version counter."""
        return self._view.bytes

    # --- writes ---

    def _count(self) -> list[int]:
        return [0 if tensor.is_inference() else tensor._version for tensor in self._view.counted]

    @property
    def is_counted(self) -> bool:
        """Whether torch has counted a write since the last :meth:`note`."""
        return self._count() != self._seen[0]

    @property
    def is_armed(self) -> bool:
        """Whether its address was never taken."""
        return self._is_ours and is_armed(self.bytes)

    @property
    def was_freed(self) -> bool:
        """Whether its memory was freed although the tensor exists."""
        return self.bytes.untyped_storage().nbytes() == 0

    @property
    def is_touched(self) -> bool:
        """Whether the tensor may have been written to since the last :meth:`note`."""
        return not self.was_freed and (self.is_counted or not self.is_armed)

    @property
    def has_other_bits(self) -> bool:
        """Whether the tensor's bits differ from those at the last :meth:`note`."""
        return self.is_touched and fingerprint(self.bytes) != self._seen[1]

    @property
    def is_elsewhere(self) -> bool:
        """Whether a tensor of optimizer state was given other memory (``set_``, ``.data =``), which
        torch's optimizer would have from then on. A parameter's value would not."""
        if (tensor := self.tensor()) is None or not self.source.is_state:
            return self._died_elsewhere and self.source.is_state
        return storage_guard.identity(local_of(tensor)) != storage_guard.identity(self.bytes)

    def is_written(self, index: int = -1) -> bool:
        """Tells whether the tensor was written to. ``index``: the step, if bits are compared only
        once in it."""
        if self.is_elsewhere or (self.is_counted and not self.was_freed):
            return True
        if not self.is_touched or (index != -1 and self._compared_at == index):
            return False
        self._compared_at = index
        return self.has_other_bits

    def look(self) -> tuple[list[int], int]:
        """Returns the version counters and the print, which show whether the tensor was written
        to."""
        return self._count(), fingerprint(self.bytes) if self.is_touched else self._seen[1]

    def note(
        self, stamp: Any = None, index: int = -1, looked: tuple[list[int], int] | None = None
    ) -> None:
        """Notes that the tensor equals home now, or did at ``looked``, an earlier result of
        :meth:`look`."""
        self.stamp, self.index = stamp, index
        self._seen = looked if looked is not None else self.look()

    def put(self, value: torch.Tensor, stamp: Any, index: int) -> None:
        """Sets the tensor to ``value``, the newest at home."""
        is_armed = self.is_armed
        with torch.inference_mode() if self.bytes.is_inference() else torch.no_grad():
            self.bytes.copy_(value)
        self.note(stamp, index)
        if is_armed:
            arm(self.bytes)

    # --- users ---

    def give(self, tensor: torch.Tensor) -> None:
        """Sets the tensor that users hold. Keeps it alive until :meth:`let_go`: users may give it
        other memory, and drop it."""
        self.tensor, self._strong = weakref.ref(tensor), tensor

    def let_go(self) -> None:
        """Stops keeping the tensor alive."""
        self._strong = None

    def user_tensor(self) -> torch.Tensor:
        """Returns the tensor, or another one of its memory if users have dropped it."""
        if (tensor := self.tensor()) is None:
            self.give(tensor := like(self.handle.param, self.bytes.detach()))
        return tensor

    def move(self) -> None:
        """Watches the memory that the tensor has now. Its values count as written if they
        differ."""
        tensor = self.tensor()
        if tensor is not None and memory_of(local_of(tensor)) != memory_of(self.bytes):
            self._view, self._is_ours = _View(tensor), False

    def is_held(self, *, dying: bool = False) -> bool:
        """Tells whether anything else holds the memory. ``dying``: torch is freeing the tensor, and
        still refers to it."""
        memory, references = self._view.memory, storage_guard.references(self.bytes)
        own = [local_of(tensor) for view in memory.views for tensor in view.counted]
        if references is not None:
            references -= len(own)
        elif not dying and self.tensor() is None and not self._is_fixed:  # torch does not tell
            del _MEMORIES[storage_guard.identity(self.bytes)]
            references = int(is_kept_alive(own))  # may move them to a copy
            _MEMORIES[storage_guard.identity(self.bytes)] = memory
        if dying:
            bases = self._view.bases
            self._died_elsewhere = references == bases
            return references is None or references > bases + 1
        return (
            self.tensor() is not None
            or (references or 0) > 0
            or self.follows
            and [view.begin for view in memory.views].count(self._view.begin) > 1
            or self._is_fixed
        )

    @property
    def _is_fixed(self) -> bool:
        # Memory not allocated by torch. An array of our own memory refers to the tensor.
        return not (self._is_ours or self.was_freed) and storage_guard.is_fixed(
            self.bytes.untyped_storage()
        )


def memory_of(tensor: torch.Tensor) -> tuple:
    """Returns what differs when the tensor is given other memory, or another form of it."""
    return (
        *(storage_guard.identity(tensor), tensor.storage_offset()),
        *(tensor.shape, tensor.stride(), tensor.dtype),
    )


class Limit:
    """How many tensors are watched before those that users have dropped are looked for."""

    def __init__(self) -> None:
        self._count, self._nbytes = TRIMMED_AT_COUNT, TRIMMED_AT_NBYTES  # left until then

    def take(self, nbytes: int, trim: Callable[[], Sequence[Lent]]) -> None:
        """Counts a tensor of ``nbytes``. ``trim`` drops those that are not held, and returns the
        rest."""
        self._count, self._nbytes = self._count - 1, self._nbytes - nbytes
        if self._count < 0 or self._nbytes < 0:
            watched = trim()
            self._count = max(TRIMMED_AT_COUNT, len(watched))
            self._nbytes = max(TRIMMED_AT_NBYTES, sum(lent.bytes.nbytes for lent in watched))


class Lents:
    """The tensors of one engine that users hold. Lent and settled inside a use of the engine; a
    tensor may die at any time."""

    def __init__(self, steps: StepCounter, ranks: ParallelDims, uses: Uses):
        self._steps, self._ranks, self._uses = steps, ranks, uses
        self._lent: dict[ParamHandle, dict[Any, Lent]] = {}  # they keep their storages alive
        self._filled: weakref.ref[dict] | None = None  # the state dict that was filled last
        self._is_filling = False
        self._limit = Limit()

    # --- lending ---

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

    def lend(self, source: Source, handle: ParamHandle, tensor: torch.Tensor) -> None:
        """Watches ``tensor``, a copy of the value at home that is about to be given to a user."""
        if tensor.is_inference() or not local_of(tensor).numel():
            return
        key = storage_guard.identity(local_of(tensor))
        self._add(
            Lent(source, handle, tensor, on_death=partial(_died, weakref.ref(self), handle, key))
        )

    def follow(
        self, source: Source, handle: ParamHandle, tensor: torch.Tensor, *, is_ours: bool = False
    ) -> None:
        """Watches ``tensor``, which equals the value at home, and is the one that follows it."""
        self._limit.take(tensor.nbytes, self._trim)
        self._add(Lent(source, handle, tensor, follows=True, is_ours=is_ours))

    def _trim(self) -> list[Lent]:
        self.settle_followers()  # which drops those that are not held
        return self._followers()

    def _add(self, lent: Lent) -> None:
        self._note(lent)
        self._lent.setdefault(lent.handle, {})[lent.key] = lent

    def _drop(self, lent: Lent) -> None:
        self._lent.get(lent.handle, {}).pop(lent.key, None)

    def _of(self, handle: ParamHandle) -> list[Lent]:
        return list(self._lent.get(handle, {}).values())

    def _all(self, *, follow: bool) -> list[Lent]:
        return [
            lent
            for handle in list(self._lent)
            for lent in self._of(handle)
            if lent.follows == follow
        ]

    @property
    def are_held(self) -> bool:
        """Whether users hold any."""
        return any(self._lent.values())

    def _followers(self) -> list[Lent]:
        return self._all(follow=True)

    def died(self, handle: ParamHandle, key: int, reference: weakref.ref) -> None:
        """Drops a tensor that was never written to. Called at any time, in any thread."""
        lent = self._lent.get(handle, {}).get(key)
        if lent is None or lent.tensor is not reference:
            return
        if not (lent.is_held(dying=True) or lent.is_written()):
            self._drop(lent)

    @contextmanager
    def loading(self, source: Source, values: Mapping[ParamHandle, torch.Tensor]) -> Iterator[None]:
        """Surrounds code that sets values of ``source`` to those ``values``. What was lent of these
        is current afterwards."""
        self.settle()
        yield
        for handle, value in values.items():
            local = local_of(value)
            if handle in self._lent and not local.is_meta and local.layout is torch.strided:
                lent = self._lent[handle].get(storage_guard.identity(local))
                if lent is not None and lent.source == source:
                    self._note(lent)

    def part(
        self,
        *,
        source: Source | None = None,
        handle: ParamHandle | None = None,
        follow: bool = True,
    ) -> None:
        """Makes followers, or the other tensors, their users' own: those of one parameter, or of
        one source, or all."""
        for lent in self._all(follow=follow):
            if source in (None, lent.source) and handle in (None, lent.handle):
                self._drop(lent)

    def tensors(self, source: Source, handle: ParamHandle) -> list[torch.Tensor]:
        """Lists the tensors of one value that users hold, in all state dicts."""
        lents = [lent.tensor() for lent in self._of(handle) if lent.source == source]
        return [tensor for tensor in lents if tensor is not None]

    # --- settling ---

    def begin_use(self, *, repairing: bool) -> None:
        """Sends writes home when a use begins. Several ranks do so in :meth:`Uses.check`."""
        if self._lent and self._ranks.alone and not repairing:
            self.settle()

    def settle_all(self) -> None:
        """Sends home the writes to state dicts and to the optimizer's state."""
        self.settle()
        self.settle_followers()

    def settle(self) -> None:
        """Sends home the writes to state dicts since the last call. Every rank calls this. Raises
        UsageError, with nothing changed, for a write that cannot go home: once for each write."""
        if not self._lent or self._is_filling or self._uses.is_in(State.UNWRAPPED):
            return
        written: list[Lent] = []
        for lent in self._all(follow=False):
            # A snapshot once in a step.
            if lent.is_written(self._steps.index if self._is_snapshot(lent) else -1):
                written.append(lent)
            elif not lent.is_held():
                self._drop(lent)
        if written and (remaining := self._without_taken(written)):
            self._send(remaining)
        for handle in [handle for handle, lents in self._lent.items() if not lents]:
            del self._lent[handle]

    def refuse_in_backward(self, unit: Any) -> None:
        """Raises UsageError if values of ``unit`` that the running backward needs were written to
        since the forward."""
        for lent in (
            [tensor for handle in unit.handles for tensor in self._of(handle)] if self._lent else ()
        ):
            if lent.source.is_weight and not self._is_snapshot(lent) and lent.is_written():
                raise UsageError(
                    f"this backward needs {lent.handle.name} as it was in its forward, but the"
                    " state_dict() value was written to since. Run backward before that."
                )

    def _note(self, lent: Lent, looked: tuple[list[int], int] | None = None) -> None:
        lent.note(lent.source.stamp(lent.handle), self._steps.index, looked)

    def _is_snapshot(self, lent: Lent) -> bool:
        if lent.stamp is not None and lent.stamp != lent.source.stamp(lent.handle):
            lent.stamp = None  # once a snapshot, always one
        return lent.stamp is None

    def _without_taken(self, written: list[Lent]) -> list[Lent]:
        """Leaves out state that another optimizer took over (its load_state_dict() copies nothing):
        its steps write to that state, but not for us."""
        of_others: set[int] = set()
        if any(lent.source.is_state and lent.tensor() is not None for lent in written):
            for candidate in gc.get_objects():
                # Infinity's own optimizers have another class of state.
                if issubclass(type(candidate), torch.optim.Optimizer) and type(
                    state := candidate.__dict__.get("state")
                ) in (dict, defaultdict):
                    entries = [entry for entry in state.values() if isinstance(entry, dict)]
                    of_others |= {id(value) for entry in entries for value in entry.values()}
        remaining = []
        for lent in written:
            if lent.source.is_state and id(lent.tensor()) in of_others:
                self._drop(lent)
            else:
                remaining.append(lent)
        return remaining

    def _send(self, written: list[Lent]) -> None:
        # If it is refused, the write goes home when that is over.
        self._uses.check(Operation.WRITE_STATE_DICT)
        if any(lent.source.is_state for lent in written):
            self.settle_followers()  # which makes these tensors snapshots
        try:
            self._check(written)
        except UsageError:
            for lent in written:  # raise once: these tensors are snapshots from here on
                lent.note(None, lent.index)
            raise
        by_source: dict[Source, list[Lent]] = {}
        for lent in sorted(written, key=lambda lent: lent.source.is_state):
            by_source.setdefault(lent.source, []).append(lent)
        for source, lents in by_source.items():
            self._write(source, lents)
        for lent in self._all(follow=False):
            if not lent.is_held():
                self._drop(lent)

    def _check(self, written: list[Lent]) -> None:
        """Raises UsageError if one of ``written`` cannot go home."""
        seen: dict[tuple[Source, ParamHandle], Lent] = {}
        for lent in written:
            name = lent.source.name_of(lent.handle)
            if self._is_snapshot(lent):
                steps = self._steps.index - lent.index
                since = (
                    f"{steps} further steps"
                    if steps
                    else "a load or an edit that changed it meanwhile"
                )
                raise UsageError(
                    f"{name}: a state_dict() value was written to after {since}: it is a snapshot,"
                    " and the write would put old values back. Nothing was changed: take"
                    " state_dict() anew, or clone() what is to be kept."
                )
            if lent.is_elsewhere:
                self._drop(lent)
                raise UsageError(
                    f"{name} in optimizer.state_dict() was given other memory (set_, .data =); the"
                    " engine does not read that. Nothing was changed: use copy_(), or assign to"
                    " optimizer.state[parameter][key]."
                )
            if not lent.is_counted and not self._ranks.alone:
                raise UsageError(
                    f"{name}: a state_dict() value was written to through NumPy, of which other"
                    " ranks cannot tell. Nothing was changed: with several ranks write through"
                    " torch, on all of them."
                )
            lent.source.check(lent.handle, lent.bytes)
            if seen.setdefault((lent.source, lent.handle), lent) is not lent:
                raise UsageError(
                    f"{name} was written to through two state dicts, without a use of the model"
                    " between. Nothing was changed: take state_dict() once, and write through"
                    " that."
                )

    def _write(self, source: Source, lents: list[Lent]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            source.write(
                [
                    (
                        lent.handle,
                        lent.bytes,
                        partial(self._wrote, lent, self._alike(lent), lent.look()),
                    )
                    for lent in lents
                ]
            )

    def _alike(self, lent: Lent) -> list[Lent]:
        """Lists the other tensors that show the same value now."""
        return [
            other
            for other in self._of(lent.handle)
            if other.source == lent.source
            and other is not lent
            and (other.follows or not (lent.follows or self._is_snapshot(other)))
        ]

    def _wrote(self, lent: Lent, alike: list[Lent], looked: tuple[list[int], int]) -> None:
        """Notes that ``lent`` equals home, and copies it to the others of that value. May run in a
        later use, when more was written."""
        stamp, index = lent.source.stamp(lent.handle), self._steps.index
        for other in alike:
            other.put(lent.bytes, stamp, index)
        lent.note(stamp, index, looked)

    # --- followers ---

    def follower(self, source: Source, handle: ParamHandle) -> torch.Tensor | None:
        """Returns the tensor that follows a value. None: there is none, or it cannot follow, since
        there are other ranks, which do not read now."""
        lent = self._lent.get(handle, {}).get(source)
        return lent.user_tensor() if lent is not None and self._refresh(lent) else None

    def refresh(self) -> None:
        """Reads the followers that are still held again, after a step."""
        for lent in self._followers():
            if not lent.is_held():
                self._drop(lent)
            else:
                self._refresh(lent)

    def _refresh(self, lent: Lent) -> bool:
        if lent.index == self._steps.index:
            return True
        if not self._ranks.alone:
            return False
        lent.put(lent.source.read(lent.handle), lent.source.stamp(lent.handle), self._steps.index)
        return True

    def settle_followers(self) -> None:
        """Sends home the writes to followers. Raises UsageError for a tensor of two parameters,
        which torch would update twice in a step, for a changed shape, or a change of older
        values."""
        followers = self._followers()
        self._refuse_overlap(followers)
        for lent in followers:
            shape = lent.bytes.shape
            lent.move()
            if lent.bytes.shape != shape:
                self._drop(lent)  # the user's own from now on: the state at home stands
                raise UsageError(
                    f"optimizer.state: {lent.source.name_of(lent.handle)} was given the shape"
                    f" {tuple(lent.bytes.shape)}, not {tuple(shape)}: assign a tensor of that shape"
                    " to optimizer.state[parameter][key]"
                )
            if lent.has_other_bits:
                if lent.index != self._steps.index and not self._ranks.alone:
                    raise UsageError(
                        f"optimizer.state: {lent.source.name_of(lent.handle)} was read at step"
                        f" {lent.index} and changed after step {self._steps.index}. With several"
                        " ranks read it again after each step."
                    )
                lent.source.check(lent.handle, lent.bytes)
                self._write(lent.source, [lent])
            lent.let_go()
            if not lent.is_held():
                self._drop(lent)

    def _refuse_overlap(self, followers: list[Lent]) -> None:
        first: dict[tuple, Lent] = {}
        for lent in followers:
            if not lent.bytes.numel():
                continue
            other = first.setdefault(memory_of(lent.bytes)[:2], lent)
            if other is not lent:
                one, two = (each.source.name_of(each.handle) for each in (other, lent))
                raise UsageError(
                    f"optimizer.state: {one} and {two} are one tensor. Assign a copy:"
                    " optimizer.state[parameter][key] = tensor.clone()."
                )


def _died(
    owner: weakref.ref[Lents],
    handle: ParamHandle,
    key: int,
    reference: weakref.ref,
    *,
    is_over: Callable = sys.is_finalizing,
) -> None:
    if not is_over() and (lents := owner()) is not None:  # modules are torn down by then
        lents.died(handle, key, reference)
