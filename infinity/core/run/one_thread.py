"""One thread: serialises uses of an engine by several threads.

use    a scope of the engine, or a run of autograd that reached it

[Note: why one thread at a time] The state of a pass (frames, holds, units on the device) exists
once. So another thread waits at the beginning of its own use, a forward for example, when nothing
has changed yet.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from traceback import walk_stack

from ... import native
from ...errors import UsageError
from ...torch_private import run_backward

PATIENCE = 60.0  # seconds without progress of other threads: they may wait for this one
PAUSE = 0.0002  # seconds between two polls


def wait_for_others(
    scopes: native.Scopes, waits: Callable[[native.Scopes], bool] = attrgetter("has_to_wait")
) -> None:
    """Waits while ``waits``: another thread uses the engine of ``scopes`` or is ahead in the queue.
    Raises UsageError if the others make no progress for PATIENCE seconds. Scopes and tasks call
    this as they are entered, and then check again and register in one atomic step."""
    changes, since = scopes.changes, time.monotonic()
    while waits(scopes):
        time.sleep(PAUSE)
        if scopes.changes != changes:
            changes, since = scopes.changes, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            raise UsageError(
                f"thread {threading.current_thread().name} has waited {PATIENCE:g} s for another"
                " thread, which is in a forward, a backward or another use of this model: one"
                " thread uses a wrapped model at a time. Call it from one thread, or from another"
                " one only when the first has returned."
            )


def begin_task(scopes: native.Scopes) -> native.Task:
    """Returns a token that counts a run of autograd as long as autograd holds it. Waits until no
    other thread uses the engine. Raises UsageError as :func:`wait_for_others` does."""
    if threading.get_ident() in {
        thread.ident
        for thread in threading.enumerate()
        # What Python makes of a foreign thread that once asked who it is: logging does
        if not isinstance(thread, threading._DummyThread)
    }:
        return scopes.task(partial(wait_for_others, scopes))
    # Autograd has its own thread for each accelerator. It works for the caller of backward, maybe
    # inside a scope of the caller's thread. Counted first, so that no other thread begins a use.
    token = scopes.task()
    wait_for_others(scopes, _is_used_outside_autograd)
    return token


def _is_used_outside_autograd(scopes: native.Scopes) -> bool:
    """Tells whether another thread uses the engine that has called no backward, which might be the
    running one."""
    # Not this thread's own frame, which would keep itself and the token alive.
    others = set(scopes.threads) - {threading.get_ident()}
    frames = [frame for thread, frame in sys._current_frames().items() if thread in others]
    return any(
        all(inner.f_code is not run_backward.__code__ for inner, _ in walk_stack(frame))
        for frame in frames
    )


def refuse_at_the_end() -> None:
    """Raises UsageError in a daemon thread while the process ends: the homes are about to go. The
    process waits for every other thread."""
    main = threading.main_thread()
    if threading.current_thread().daemon and not main.is_alive():
        raise UsageError(
            f"thread {threading.current_thread().name} uses a wrapped model, and the process ends:"
            " join it before that"
        )
