"""The late device of simulated programs: a device of torch whose streams run late, at random, and
whose memory may run out.

Nothing of it may be used before the fork of a child.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import late_device

MOST_US = 1500


@contextlib.contextmanager
def late(share: float) -> Iterator[None]:
    """Has a ``share`` of the device's jobs come late in the block."""
    with late_device.delayed(late_device.install(), MOST_US, share):
        yield


@contextlib.contextmanager
def scarcity(kib: int) -> Iterator[None]:
    """Leaves so much of the device's memory in the block."""
    with late_device.with_room(late_device.install(), kib * 1024):
        yield
