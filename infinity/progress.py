"""Progress: a progress bar on a terminal for work longer than a second."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY_SECONDS = 1.0


@contextmanager
def progress(what: str, total_nbytes: int) -> Iterator[Callable[[int], object]]:
    """Yields a function that counts completed bytes. Shows a bar on the first rank, if standard
    error is a terminal and tqdm is installed."""
    bar = (
        _bar(what, total_nbytes)
        if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
        else None
    )
    if bar is None:
        yield lambda nbytes: None
        return
    try:
        yield bar.update
    finally:
        bar.close()


def _bar(what: str, total_nbytes: int):
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Bar(tqdm):
        monitor_interval = 0  # no thread

    return Bar(
        total=total_nbytes,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=DELAY_SECONDS,
        leave=False,
        file=sys.stderr,
    )
