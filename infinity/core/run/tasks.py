"""AutogradTasks: tracks which runs of autograd are under way, and calls back as the outermost
ends.

task        one run of autograd; a reentrant checkpoint nests them
token       an object per task that only autograd holds; if it is gone before the task's end was
            recorded, the task was interrupted
outermost   the task inside which the others run
failed      ended by an exception. Torch keeps the nodes that were ready to run, and so all that the
            rest of their graph has saved, in a queue of the thread until its next task.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ... import native
from ...torch_private import current_task
from ..params.outside_modes import makes_hooks, outside_modes
from .one_thread import begin_task
from .pass_state import Pass


@outside_modes
def drop_failed() -> None:
    """Frees what torch keeps of failed tasks of this thread, by a task that computes nothing."""
    with torch.inference_mode(False):
        torch.zeros((), requires_grad=True, device="cpu").backward()


class AutogradTasks:
    """The running tasks that are tracked."""

    def __init__(self, scopes: native.Scopes, running: Pass):
        self._scopes, self._pass = scopes, running

    def __bool__(self) -> bool:
        """Whether a task began and has not ended: it is running, or was interrupted."""
        return bool(self._pass.tokens)

    @makes_hooks
    def track(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Calls ``begin`` now if the running task is the outermost one, and ``end`` at its end.
        Once per task. Does nothing outside of tasks.

        ``begin`` is called outside any use of the engine: the last task may have been interrupted.
        ``end``: a method, whose object is held weakly.

        Raises UsageError if another thread uses the engine and makes no progress.
        """
        task = current_task()
        if task == -1 or task in self._pass.tokens:
            return
        token = begin_task(self._scopes)
        if not self._scopes.running and all(
            other() is None for other in self._pass.tokens.values()
        ):
            begin()
        me, weak_end = weakref.ref(self), weakref.WeakMethod(end)

        def leave() -> None:
            if (tasks := me()) is not None and (alive := weak_end()) is not None:
                tasks._leave(task, alive)

        self._pass.tokens[task] = weakref.ref(token)
        for callback in (token, leave):
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _leave(self, task: int, end: Callable[[], None]) -> None:
        for nested in [
            other for other, token in self._pass.tokens.items() if other != task and token() is None
        ]:
            del self._pass.tokens[nested]  # it failed inside this task, which went on
        if len(self._pass.tokens) == 1:
            end()
            # The task ended well. An exception inside may be harmless: checkpoints end
            # recomputation by one.
            self._scopes.interrupted = False
        del self._pass.tokens[task]
