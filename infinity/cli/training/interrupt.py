"""The interrupt of `infinity train`: a signal that asks the loop to end, noted until a step is complete."""

from __future__ import annotations

import signal
import threading


class Interrupt:
    """Context: the first SIGINT or SIGTERM is noted and the loop ends after its step; a second one acts at once."""

    def __init__(self):
        self.signum = None
        self._previous = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
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
