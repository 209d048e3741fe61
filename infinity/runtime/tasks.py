"""AutogradTasks: knows which runs of autograd are under way, and hears when the outermost ends.

task        one run of autograd; a reentrant checkpoint nests them
token       an object that only autograd holds, of each task: one whose token is gone without its end having been told was cut short
outermost   the task inside which the others run
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from .. import native
from .one_thread import begin_task
from .pass_state import Pass


class TaskListener(Protocol):
    """Hears of the outermost task."""

    def begin_task(self) -> None:
        """Begins the outermost task, where no use of the engine is under way: what came before may have been cut short."""

    def end_task(self) -> None:
        """Ends the outermost task."""


class AutogradTasks:
    """The running tasks that were joined."""

    def __init__(self, scopes: native.Scopes, running: Pass):
        self._scopes, self._pass = scopes, running

    def __bool__(self) -> bool:
        """Whether any was begun and not ended. Where none is running: whether one was cut short."""
        return bool(self._pass.tokens)

    def join(self, listener: TaskListener) -> None:
        """Has autograd call ``listener`` when the task that is running ends; once. Outside of tasks it does nothing.

        Raises UsageError where another thread uses the engine and does not come further.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._pass.tokens:
            return
        token = begin_task(self._scopes)
        if not self._scopes.running and all(other() is None for other in self._pass.tokens.values()):
            listener.begin_task()  # this is the outermost one
        me, told = weakref.ref(self), weakref.ref(listener)

        def end() -> None:
            if (tasks := me()) is not None and (alive := told()) is not None:
                tasks._leave(task, alive)

        self._pass.tokens[task] = weakref.ref(token)
        for callback in (token, end):
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _leave(self, task: int, listener: TaskListener) -> None:
        for nested in [other for other, token in self._pass.tokens.items() if other != task and token() is None]:
            del self._pass.tokens[nested]  # it failed inside this one, which went on all the same
        if len(self._pass.tokens) == 1:
            listener.end_task()
            # Everything is as it should be. A checkpoint ends its recomputations by an exception, say.
            self._scopes.interrupted = False
        del self._pass.tokens[task]
