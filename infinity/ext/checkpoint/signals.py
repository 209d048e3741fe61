"""Signals: passes SIGTERM and SIGUSR1 on to the listeners of this process.

SIGTERM   save, then end
SIGUSR1   save, and go on

One handler for the process tells all listeners. When none is left, the handlers from before are
back.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A launcher and the system may each send one SIGTERM at about the same time.
ONE_REQUEST_SECONDS = 2.0


class Listener:
    """What the process was asked for. Hears nothing if it is made outside of the main thread."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}  # signal -> when it came first
        if _is_main_thread():
            if not _listeners:
                _install()
            _listeners.add(self)
            weakref.finalize(self, _restore_unheard)

    @property
    def saves(self) -> bool:
        """Whether to save."""
        return bool(self._asked)

    @property
    def ends(self) -> bool:
        """Whether to end after that."""
        return signal.SIGTERM in self._asked

    def forget(self, number: int) -> None:
        """Forgets a request that has been met."""
        self._asked.pop(number, None)

    def close(self) -> None:
        """Removes this listener. Idempotent."""
        _listeners.discard(self)
        _restore_unheard()

    def note(self, number: int) -> bool:
        """Notes a signal. Returns whether it asks once more for what was asked long before."""
        first = self._asked.setdefault(number, now := time.monotonic())
        return number == signal.SIGTERM and now - first > ONE_REQUEST_SECONDS


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_before: dict[int, Any] = {}
_process = 0


def others_end() -> bool:
    """Tells whether a listener has not met a request to end yet."""
    return any(listener.ends for listener in list(_listeners))


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _install() -> None:
    global _process
    _process = os.getpid()
    for number in SIGNALS:
        before = signal.getsignal(number)
        if (
            before is not None and before is not _heard
        ):  # None: it is not Python's, and could not be put back
            _before[number] = before
            signal.signal(number, _heard)


def _restore_unheard() -> None:
    """Restores the earlier handlers if there is no listener."""
    if _listeners or not _is_main_thread() or os.getpid() != _process:
        return
    for number, handler in _before.items():
        if signal.getsignal(number) is _heard:  # else somebody has replaced it
            signal.signal(number, handler)
    _before.clear()


def _heard(number: int, frame: FrameType | None) -> None:
    alive = list(_listeners) if os.getpid() == _process else []  # a forked child has none
    again = [listener.note(number) for listener in alive]
    if not alive or any(again):
        pass_on(number, frame)


def handler_before(number: int) -> Any:
    """Returns the handler of a signal that there was before anybody listened."""
    return _before[number] if number in _before else signal.getsignal(number)


def pass_on(number: int, frame: FrameType | None = None) -> None:
    """Does with a signal what would have been done without listeners."""
    before = _before.get(number, signal.SIG_DFL)
    if callable(before):
        before(number, frame)
    elif before == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
