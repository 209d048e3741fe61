"""HandedOut: sends home the values that users write to the tensors of state dicts.

In torch those are the live tensors, so ``for v in model.state_dict().values(): v.mul_(0.5)`` halves
the weights. Here they are copies, so a write to one is sent home at the next use of the engine.

handed out   a tensor of a state dict, for as long as anything holds its memory
stamp        the version of the value at home that a tensor equals; if home has a newer one, the
             tensor is a snapshot

A tensor that is never written to costs nothing after its own life: it is dropped when its last user
frees it, in any thread. Only one that was exported to NumPy, or has views, waits for the next use.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...errors import UsageError
from ...ranks.parallel_dims import ParallelDims
from ..homes.store import ArrayStore
from ..machine import storage_guard
from ..run.operations import Operation, State
from ..run.step_counter import StepCounter
from ..run.uses import Uses
from ..units.forms import like, local_of
from ..units.handle import ParamHandle
from ..units.unit import ParamUnit
from .borrowed_state import STEP, BorrowedState, checked_step
from .handed_tensor import VALUE, HandedTensor
from .optimizer_state import MASTER
from .value_edits import ValueEdits


class HandedOut:
    """The tensors of state dicts of one engine. Given and settled inside a use of the engine; a
    tensor may die at any time."""

    def __init__(
        self,
        store: ArrayStore,
        steps: StepCounter,
        ranks: ParallelDims,
        borrowed: BorrowedState,
        uses: Uses,
        edits: ValueEdits,
    ):
        self._steps, self._ranks = steps, ranks
        self._borrowed, self._uses, self._edits = borrowed, uses, edits
        self._entries: dict[int, HandedTensor] = {}  # by their storages, which they keep alive
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

    def watch(self, handle: ParamHandle, array: str, tensor: torch.Tensor) -> None:
        """Watches ``tensor``, a copy of ``array`` at home that is about to be given to a user."""
        if tensor.is_inference() or not local_of(tensor).numel():
            return
        key, me = storage_guard.identity(local_of(tensor)), weakref.ref(self)
        entry = HandedTensor(handle, array, tensor, partial(_died, me, key))
        entry.note(self._stamp(entry), self._steps.index)
        self._entries[key] = entry
        self._keys.setdefault(handle, set()).add(key)

    def _drop(self, key: int, entry: HandedTensor) -> None:
        self._entries.pop(key, None)
        if (keys := self._keys.get(entry.handle)) is not None:
            keys.discard(key)

    def _of(self, handle: ParamHandle) -> list[HandedTensor]:
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
        if not (entry.is_held(dying=True) or entry.is_written()):
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
                entry.note(self._stamp(entry), self._steps.index)

    def begin_use(self, *, repairing: bool) -> None:
        """Sends writes home at the beginning of a use. With several ranks :meth:`settle_on_ranks`
        does."""
        if self._entries and self._ranks.alone and not repairing:
            self.settle()

    def settle_on_ranks(self) -> None:
        """Sends writes home if there are several ranks; every rank calls this. A lone rank did so
        in begin_use."""
        if not self._ranks.alone:
            self.settle()

    def settle_with_borrowed(self) -> None:
        """Sends home the writes to state dicts and to the optimizer's state."""
        self.settle()
        self._borrowed.settle()

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
        written: list[HandedTensor] = []
        for key, entry in self._entries.copy().items():
            # A snapshot once in a step.
            if entry.is_written(self._steps.index if self._is_stale(entry) else -1):
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
            if entry.array == VALUE and not self._is_stale(entry) and entry.is_written():
                raise UsageError(
                    f"this backward needs {entry.handle.name} as it was in its forward, but the"
                    " state_dict() value was written to since. Run backward before that."
                )

    def _stamp(self, entry: HandedTensor) -> Any:
        handle = entry.handle
        if entry.array in (VALUE, MASTER):
            return handle.version, handle.forward_edits
        return self._steps.index, self._borrowed.changes_of(handle, entry.array)

    def _is_stale(self, entry: HandedTensor) -> bool:
        if entry.stamp is not None and entry.stamp != self._stamp(entry):
            entry.stamp = None  # once a snapshot, always one
        return entry.stamp is None

    def _without_taken(self, written: list[HandedTensor]) -> list[HandedTensor]:
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

    def _send(self, written: list[HandedTensor]) -> None:
        self._uses.check(
            Operation.WRITE_STATE_DICT
        )  # refused, the write goes home when that is over
        if moments := [entry for entry in written if entry.array not in (VALUE, MASTER)]:
            self._borrowed.settle()  # writes through optimizer.state make these entries stale
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

    def _check(self, written: list[HandedTensor]) -> None:
        """Raises UsageError if one of ``written`` cannot go home."""
        seen: dict[tuple[ParamHandle, str], HandedTensor] = {}
        for entry in written:
            name = entry.handle.name
            what = f"{entry.array} of {name}" if entry.array != VALUE else name
            if self._is_stale(entry):
                steps = self._steps.index - entry.index
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
            if entry.is_elsewhere:
                self._drop(storage_guard.identity(entry.bytes), entry)
                raise UsageError(
                    f"{what} in optimizer.state_dict() was given other memory (set_, .data =); the"
                    " engine does not read that. Nothing was changed: use copy_(), or assign to"
                    " optimizer.state[parameter][key]."
                )
            if entry.is_seen_here_alone and not self._ranks.alone:
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

    def _alike(self, entry: HandedTensor) -> list[HandedTensor]:
        """Lists the current tensors that show the same value."""
        return [
            each
            for each in self._of(entry.handle)
            if each.array == entry.array and not self._is_stale(each)
        ]

    def _send_values(self, written: list[HandedTensor]) -> None:
        if not written:
            return
        of_each = [(self._alike(entry), entry.look()) for entry in written]

        def then() -> None:  # may run in a later use, when more was written
            for entry, (alike, looked) in zip(written, of_each):
                self._follow(entry, alike, looked)

        edited = [(entry.handle, entry.bytes) for entry in written]
        self._edits.write_changes(edited, "taking over state_dict() values", then)

    def _send_moment(self, entry: HandedTensor) -> None:
        alike, looked = self._alike(entry), entry.look()
        value = (
            checked_step(entry.bytes, entry.handle.name)
            if entry.array == STEP
            else entry.bytes.clone()
        )
        whole = value if entry.array == STEP else like(entry.handle.param, value)

        def then() -> None:
            self._borrowed.follow(entry.handle, entry.array, value)
            self._follow(entry, alike, looked)

        self._borrowed.write(entry.handle, {entry.array: whole}, then)

    def _follow(
        self, entry: HandedTensor, alike: list[HandedTensor], looked: tuple[list[int], int]
    ) -> None:
        """Notes that ``entry`` equals home, and copies it to the other state dicts' tensors of that
        value."""
        for each in alike:
            if each is not entry:
                each.bytes.copy_(entry.bytes)
            each.note(self._stamp(each), self._steps.index, looked if each is entry else None)


def _died(
    owner: weakref.ref[HandedOut],
    key: int,
    reference: weakref.ref,
    *,
    is_over: Callable = sys.is_finalizing,
) -> None:
    if not is_over() and (handed := owner()) is not None:  # modules are torn down by then
        handed.died(key, reference)
