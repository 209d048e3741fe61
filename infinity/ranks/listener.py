"""Listener: a thread that answers other ranks while the training thread waits for its device."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch

from ..errors import InfinityError
from . import failure_report

INTERVAL_SECONDS = 0.5  # between two looks
LONGEST_SECONDS = 5.0  # that the device is waited for, once ranks are lost


class Listener:
    """The thread of one channel, which calls ``look`` with an announcement. It ends with the
    channel, or with the process.

    look    a bound method. Returns the error of ranks that are gone while the device waits for them
    """

    def __init__(
        self,
        look: Callable[[str], InfinityError | None],
        device: torch.device,
        describe: Callable[[], str],
    ):
        self._look, self._device, self._describe = weakref.WeakMethod(look), device, describe
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="infinity listener")
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._ends.set()
        if self._thread is not threading.current_thread():
            self._thread.join(INTERVAL_SECONDS)

    def _run(self) -> None:
        torch.accelerator.set_device_index(self._device.index)
        lost_since = None
        while not self._ends.wait(INTERVAL_SECONDS) and threading.main_thread().is_alive():
            if (look := self._look()) is None:
                return
            error = look(self._describe())
            del look  # and the channel
            lost_since = None if error is None else lost_since or time.monotonic()
            if lost_since is not None and time.monotonic() - lost_since > LONGEST_SECONDS:
                _end_process(error)


def _end_process(error: InfinityError) -> None:
    """Ends a process whose training thread waits for its device, without an end: nothing else ends
    a collective of ranks that are gone."""
    failure_report.leave(error)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)
