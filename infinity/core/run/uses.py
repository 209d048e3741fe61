"""Uses: the entry of a job. Every use of it begins here, one at a time, and may be refused here.

use      a block that reads or changes the job: a step, a save, a read of a gradient. The outermost
         one first recovers from an exception of the last
halted   the state in memory is lost: every use is refused, except one that loads all of it

[Note: why parts define the states] The part that makes a state of :mod:`.operations` knows it, and
defines it here when it is built. So this file depends on none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ... import native
from ...errors import InfinityError, UsageError
from ...torch_private import current_task
from ..params.outside_modes import is_compiling, refuse_without_bytes
from .operations import OperationKind, Right, State, StateKind, refusal, refuses


class Uses:
    """The uses of one job.

    ``check_process`` raises UsageError in a forked child. ``wait`` waits while another thread uses
    the job. ``prepare`` recovers from an exception of the last use, before an operation, or before
    another use (None). ``settle`` sends home what users wrote to tensors that they hold.
    """

    def __init__(
        self,
        scopes: native.Scopes,
        *,
        check_process: Callable[[], None],
        wait: Callable[[], None],
        prepare: Callable[[OperationKind | None], None],
        settle: Callable[[], None],
    ):
        self.scopes = scopes
        self._check_process, self._wait, self._prepare, self._settle = (
            check_process,
            wait,
            prepare,
            settle,
        )
        self._is_in: dict[StateKind, Callable[[], bool]] = {}
        # By operation, as far as it was asked for: the states that refuse it, and what tells them.
        self._refusing: dict = {}
        self._halted: Callable[[], InfinityError] | None = None

    def define(self, states: Mapping[StateKind, Callable[[], bool]]) -> None:
        """Defines each of ``states`` by what tells whether the job is in it, and must not refer to
        the job strongly."""
        self._is_in |= states
        self._refusing.clear()

    def forget(self, states: Iterable[StateKind]) -> None:
        """Takes the definitions of ``states`` back."""
        for state in states:
            self._is_in.pop(state, None)
        self._refusing.clear()

    def takes(self, right: Right) -> bool:
        """Tells whether a state that the job is in takes ``right``."""
        states = self._is_in.items()
        return any(right in state.activity.takes and is_in() for state, is_in in states)

    def is_in(self, state: StateKind) -> bool:
        """Tells whether the job is in ``state``."""
        is_in = self._is_in.get(state)
        return is_in is not None and is_in()

    def begin(
        self,
        operation: OperationKind | None = None,
        *,
        unless: Callable[[], bool] = lambda: False,
    ) -> native.Scope:
        """Opens the scope of a use, or of a part of ``operation``. Nothing is prepared if
        ``unless()``, which is called once no other thread uses the job. May block on another
        thread.

        Raises UsageError for a halted job, in a forked child, for tensors without bytes, and if
        another thread uses the job and makes no progress.
        """
        return self._open(lambda: None if unless() else self._prepare(operation))

    def _open(self, prepare: Callable[[], None]) -> native.Scope:
        """Opens a scope. ``prepare`` runs in it, once no other thread uses the job, unless this
        thread uses it already."""
        if not is_compiling():  # compilers inspect parameters under FakeTensorMode
            refuse_without_bytes("a use", transforms=False)
        self._check_process()
        if self.scopes.running_here or current_task() != -1:
            return self.scopes.scope()
        return self.scopes.scope(wait=self._wait, prepare=prepare)

    def check(self, operation: OperationKind, name: str | None = None) -> None:
        """Raises UsageError, with ``name`` in its message, if ``operation`` is refused in the
        present states. Nothing has changed then, so a running activity can continue."""
        if not operation.call.is_quick and not self.is_in(State.UNWRAPPED):
            with self.begin(operation):
                if not operation.call.loads_all:
                    self._settle()  # only its exceptions may interrupt a running activity
        self._refuse(operation, name)

    def _refuse(self, operation: OperationKind, name: str | None) -> None:
        if (states := self._refusing.get(operation)) is None:
            states = [entry for entry in self._is_in.items() if refuses(entry[0], operation)]
            self._refusing[operation] = states
        for state, is_in in states:
            if is_in():
                raise refusal(operation, state, name)

    def operation(self, operation: OperationKind) -> native.Scope:
        """Opens the scope of ``operation``. Raises UsageError if it is refused in the present
        states."""

        def prepare() -> None:
            # Asked once more: another thread may have begun something while this one waited for it.
            self._prepare(operation)
            self._refuse(operation, None)

        self.check(operation)
        return self._open(prepare)

    def interrupt(self) -> None:
        """Makes the next use recover first."""
        self.scopes.interrupted = True

    # --- a state that is lost ---

    @property
    def is_halted(self) -> bool:
        """Whether only a load is allowed."""
        return self._halted is not None

    def halt(self, why: str) -> InfinityError:
        """Refuses every use from here on, except loading a checkpoint. Returns the error that uses
        raise."""
        return self.refuse_all(
            f"{why}: the state in memory is neither the old one nor the new one. Load a checkpoint."
        )

    def refuse_all(self, message: str) -> InfinityError:
        """Raises UsageError with ``message`` on every use, until :meth:`go_on`. Returns that
        error."""
        self._halted = partial(UsageError, message)
        return self._halted()

    def halted_error(self) -> InfinityError | None:
        """Makes the error that every use of a halted job raises. None: the job is not halted."""
        return self._halted() if self._halted is not None else None

    def go_on(self) -> None:
        """Ends :meth:`halt` and :meth:`refuse_all`: the state is whole."""
        self._halted = None
