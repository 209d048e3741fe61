"""One thread: serialises uses of an engine by several threads.

use    a scope of the engine, or a run of autograd that reached it

[Note: why one thread at a time] The state of a pass (frames, holds, units on the device) exists
once. So another thread waits at the beginning of its own use, a forward for example, when nothing
has changed yet.
"""

from __future__ import annotations

import threading
import time
from functools import partial

from ... import native
from ...errors import UsageError

PATIENCE = 60.0  # seconds without progress of other threads: they may wait for this one
PAUSE = 0.0002  # seconds between two polls


def wait_for_others(scopes: native.Scopes) -> None:
    """Waits until no other thread uses the engine of ``scopes`` or is ahead in the queue. Raises
    UsageError if the others make no progress for PATIENCE seconds. Scopes and tasks call this as
    they are entered, and then check again and register in one atomic step."""
    changes, since = scopes.changes, time.monotonic()
    while scopes.has_to_wait:
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
    # Autograd has its own thread for each accelerator. It works for the caller of backward, maybe
    # inside a scope of the caller's thread.
    of_python = threading.get_ident() in {
        thread.ident
        for thread in threading.enumerate()
        # What Python makes of a foreign thread that once asked who it is: logging does
        if not isinstance(thread, threading._DummyThread)
    }
    return scopes.task(partial(wait_for_others, scopes) if of_python else None)


def refuse_at_the_end() -> None:
    """Raises UsageError in a daemon thread while the process ends: the homes are about to go. The
    process waits for every other thread."""
    main = threading.main_thread()
    if threading.current_thread().daemon and not main.is_alive():
        raise UsageError(
            f"thread {threading.current_thread().name} uses a wrapped model, and the process ends:"
            " join it before that"
        )
