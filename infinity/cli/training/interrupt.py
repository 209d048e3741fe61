"""Interrupt: a signal that ends the loop of `infinity train` once the running step is complete."""

from __future__ import annotations

import signal
import threading


class Interrupt:
    """Context: notes the first SIGINT or SIGTERM, so that the loop ends after its step. A second
    one acts at once."""

    def __init__(self):
        self.signum = None
        self._previous = {}

    def __enter__(self):
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exc_info):
        self._restore()

    def _note(self, signum, frame):
        self.signum = signum
        self._restore()

    def _restore(self):
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}
