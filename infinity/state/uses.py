"""Uses: the door of a job. Every use of it begins here, one at a time, and may be refused here.

use      a block that reads or changes the job: a step, a save, a read of a gradient. The outermost
         one first puts right what an exception left of the last
halted   the state in memory is lost: every use is refused but one that loads all of it anew

[Note: who says what goes on] A state of :mod:`.operations` is known by the part that makes it, and
that part defines it here when it is made. So this file knows of none of them, and a feature that
refuses operations while it runs adds a state, a column of the table and one call of `define`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .. import native
from ..errors import InfinityError, UsageError
from .apart import is_compiling, refuse_without_bytes
from .operations import QUICK, REFUSED, Operation, State, refusal


class Uses:
    """The uses of one job.

    ``check_process`` raises UsageError in a forked child. ``wait`` is called while another thread
    uses the job. ``prepare`` puts right what the last use left, told whether this one repairs.
    ``settle`` takes what users wrote to tensors that they hold.
    """

    def __init__(
        self,
        scopes: native.Scopes,
        *,
        check_process: Callable[[], None],
        wait: Callable[[], None],
        prepare: Callable[[bool], None],
        settle: Callable[[], None],
    ):
        self.scopes = scopes
        self._check_process, self._wait, self._prepare, self._settle = check_process, wait, prepare, settle
        self._is_in: dict[State, Callable[[], bool]] = {}
        self._halted: Callable[[], InfinityError] | None = None

    def define(self, state: State, is_in: Callable[[], bool]) -> None:
        """Has ``is_in`` tell whether the job is in ``state``. It must not lead back to the job."""
        self._is_in[state] = is_in

    def is_in(self, state: State) -> bool:
        """Tells whether the job is in ``state``."""
        is_in = self._is_in.get(state)
        return is_in is not None and is_in()

    def begin(self, *, repairing: bool = False) -> native.Scope:
        """Opens the scope of a use. ``repairing``: it sets all state anew.

        Raises UsageError for a halted job, in a forked child, where tensors have no bytes, and where
        another thread uses the job and makes no progress.
        """
        if not is_compiling():  # which looks at what parameters are, under FakeTensorMode
            refuse_without_bytes("a use", transforms=False)
        self._check_process()
        if self.scopes.running_here or torch._C._current_graph_task_id() != -1:
            return self.scopes.scope()
        return self.scopes.scope(wait=self._wait, prepare=partial(self._prepare, repairing))

    def check(self, operation: Operation, what: str | None = None) -> None:
        """Raises UsageError, which calls it ``what``, where ``operation`` is refused in what goes on.
        Nothing has changed then, so that what goes on can."""
        states = REFUSED[operation]
        if operation not in QUICK and not self.is_in(State.UNWRAPPED):
            repairing = operation is Operation.LOAD_CHECKPOINT
            with self.begin(repairing=repairing):
                if not repairing:
                    self._settle()  # only an exception of that may end what goes on
        for state in states:
            if self.is_in(state):
                raise refusal(operation, state, what)

    def operation(self, operation: Operation) -> native.Scope:
        """Opens the scope of ``operation``. Raises UsageError where it is refused in what goes on."""
        self.check(operation)
        return self.begin(repairing=operation is Operation.LOAD_CHECKPOINT)

    def interrupt(self) -> None:
        """Has the next use put things right first."""
        self.scopes.interrupted = True

    # --- a state that is lost ---

    @property
    def is_halted(self) -> bool:
        """Whether nothing goes on but a load."""
        return self._halted is not None

    def halt(self, why: str) -> InfinityError:
        """Refuses everything from here on but loading a checkpoint. Returns the error that says so."""
        return self.refuse_all(f"{why}: the state in memory is neither the old one nor the new one. Load a checkpoint.")

    def refuse_all(self, message: str) -> InfinityError:
        """Raises UsageError with ``message`` on every use, until :meth:`go_on`. Returns that error."""
        self._halted = partial(UsageError, message)
        return self._halted()

    def halted_error(self) -> InfinityError | None:
        """Makes the error that every use of a halted job raises. None: the job is not halted."""
        return self._halted() if self._halted is not None else None

    def go_on(self) -> None:
        """Ends :meth:`halt` and :meth:`refuse_all`: the state is whole."""
        self._halted = None
