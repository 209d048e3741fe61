"""pool: leasing a buffer and giving it back, and making the memory in the first place."""

from __future__ import annotations

import time

from infinity import native
from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.settings import Settings

MIB = 1024 * 1024
LEASES = 20_000
POOL_NBYTES = 256 * MIB
LEASE_NBYTES = (MIB, 4 * MIB, 12 * MIB)


def measure(settings: Settings) -> Measured:
    """Measures rows pool.lease (microseconds of one lease and its release, Python's call included)
    and pool.make (GB/s)."""
    return Measured([_lease(settings), _make(settings)])


def _lease(settings: Settings) -> Row:
    pool = native.PinnedPool(native.Region(POOL_NBYTES, True, settings.threads))
    held = [
        pool.try_lease(nbytes) for nbytes in LEASE_NBYTES
    ]  # a pool in use is not one free block
    microseconds = []
    for _ in range(settings.rounds):
        start = time.perf_counter()
        for _ in range(LEASES):
            pool.try_lease(MIB).release()
        microseconds.append((time.perf_counter() - start) / LEASES * 1e6)
    for lease in held:
        lease.release()
    return row("pool.lease", "us", microseconds)


def _make(settings: Settings) -> Row:
    rates = []
    for _ in range(settings.rounds):
        start = time.perf_counter()
        native.Region(POOL_NBYTES, True, settings.threads)
        rates.append(POOL_NBYTES / (time.perf_counter() - start) / 1e9)
    return row("pool.make", "GB/s", rates)
