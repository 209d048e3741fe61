"""One thread: keeps the uses of an engine by several threads apart.

use    a scope of the engine, or a run of autograd that reached it

What passes is one thing: frames, holds, units on the device. So one thread uses the engine at a time, and another waits at the
beginning of its own use, a forward say, where nothing has changed yet.
"""

from __future__ import annotations

import threading
import time
from functools import partial

from .. import native
from ..errors import UsageError

PATIENCE = 60.0  # seconds in which other threads neither begin nor end anything: they may be waiting for this one
PAUSE = 0.0002  # seconds between two looks


def wait_for_others(scopes: native.Scopes) -> None:
    """Waits until no other thread uses the engine of ``scopes`` and none came before. Raises UsageError when others do not come further. Scopes
    and tasks call it as they are entered, look again, and are counted in the same step."""
    changes, since = scopes.changes, time.monotonic()
    while scopes.has_to_wait:
        time.sleep(PAUSE)
        if scopes.changes != changes:
            changes, since = scopes.changes, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            raise UsageError(
                f"thread {threading.current_thread().name} has waited {PATIENCE:g} s for another thread, which is in a forward, a backward or "
                "another use of this model: one thread uses a wrapped model at a time. Call it from one thread, or from another one only when "
                "the first has returned."
            )


def begin_task(scopes: native.Scopes) -> native.Task:
    """Returns what counts a run of autograd for as long as autograd holds it, once no other thread uses the engine. Raises UsageError
    as :func:`wait_for_others` does."""
    # Autograd's own threads, one for each accelerator, work for whoever called backward, maybe inside a scope of theirs.
    of_python = threading.get_ident() in {thread.ident for thread in threading.enumerate()}
    return scopes.task(partial(wait_for_others, scopes) if of_python else None)


def refuse_at_the_end() -> None:
    """Raises UsageError in a daemon thread while the process ends: the homes are about to go. The
    process waits for every other thread."""
    main = threading.main_thread()
    if threading.current_thread().daemon and not main.is_alive():
        raise UsageError(
            f"thread {threading.current_thread().name} uses a wrapped model, and the process ends: join it before that"
        )
