"""Counts what this process holds open."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

# Of the kernel's own threads for a ring, which end by themselves some time after it is closed.
KERNEL_THREADS = "iou-"
LINGER_SECONDS = 10  # in which a thread that was joined leaves /proc, on a busy machine


class Opened(NamedTuple):
    """What a process holds open."""

    descriptors: int
    threads: int


def opened() -> Opened:
    """Counts the descriptors and the threads of this process."""
    return Opened(len(os.listdir("/proc/self/fd")), _threads())


def left_open(before: Opened) -> Opened:
    """Counts what is open and was not ``before``. Waits for threads that are about to end."""
    end = time.monotonic() + LINGER_SECONDS
    while _threads() > before.threads and time.monotonic() < end:
        time.sleep(0.001)
    now = opened()
    return Opened(*(max(0, more - less) for more, less in zip(now, before)))


def _threads() -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return sum(not name.startswith(KERNEL_THREADS) for name in names)
