"""Interrupt: signals that end the loop of `infinity train`, or save, once the running step is
complete."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...ext.checkpoint.signals import ONE_REQUEST_SECONDS


@contextmanager
def before_first_step(checkpoint: Path | None, *, goes_on: bool) -> Iterator[None]:
    """Names what a Ctrl-C inside the block, before a job's first step, leaves. ``goes_on``: from a
    ``checkpoint`` that is there."""
    try:
        yield
    except KeyboardInterrupt:
        left, again = "nothing was saved", ", without --resume" if checkpoint else ""
        if goes_on:
            left, again = f"{checkpoint} is as it was", ""
        raise KeyboardInterrupt(
            f"interrupted before the first step: {left}; start with the same command{again}"
        ) from None


class Interrupt:
    """Context: notes the first SIGINT or SIGTERM, so that the loop ends after its step. A second
    one acts at once; a second SIGTERM does if it is not a part of the same request. SIGUSR1 asks
    for a save, and the loop goes on."""

    def __init__(self):
        self.signum, self.saves = None, False
        self._previous, self._first = {}, 0.0

    def __enter__(self):
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exc_info):
        self._restore()

    def is_told(self, ranks: Any) -> bool:
        """Tells whether any rank got a signal to end, so that all end after the same step. Every
        rank calls this."""
        self.signum = ranks.largest(self.signum or 0) or None
        return self.signum is not None

    def taken_save(self) -> bool:
        """Tells whether this rank was asked for a save, and forgets it."""
        asked, self.saves = self.saves, False
        return asked

    def _note(self, signum, frame):
        if signum == signal.SIGUSR1:
            self.saves = True
            return
        is_new, now = self.signum is None, time.monotonic()
        self.signum = self.signum or signum
        self._first = now if is_new else self._first
        if signum == signal.SIGINT or now - self._first > ONE_REQUEST_SECONDS:
            self._restore()
            if not is_new:
                signal.raise_signal(signum)

    def _restore(self):
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}
