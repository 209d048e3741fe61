"""Rates: measures the bytes per second of this machine's memory, checksums and disks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from .. import native
from . import disk_profile
from .limits import memory_left

PROBE_NBYTES, LEAST_PROBE_NBYTES = 64 * 1024 * 1024, 1024 * 1024
PROBE_SHARE = 1 / 16  # of the memory left, where that is less


@dataclass(frozen=True)
class Rates:
    """Bytes per second. ``disk_*`` are None without a disk, ``device_memory`` if the processor
    computes."""

    memory: float  # read and written by a copy
    checksum: float
    disk_read: float | None = None
    disk_write: float | None = None
    disk_mixed: float | None = None
    device_memory: float | None = None

    @classmethod
    def measure(cls, nvme_paths: Sequence[str], device: torch.device | str | None = None) -> Rates:
        """Measures this machine, and the memory of the compute ``device``. The disks' rates come
        from their stored profiles."""
        found = disk_profile.rates(nvme_paths) if nvme_paths else (None, None, None)
        where = torch.device(device if device is not None else "cpu")
        return cls(
            memory_rate(),
            checksum_rate(),
            *found,
            memory_rate(str(where)) if where.type != "cpu" else None,
        )


@cache
def memory_rate(device: str = "cpu") -> float:
    """Measures the bytes per second that a copy reads and writes in a device's memory. Cached."""
    nbytes = _probe_nbytes() if torch.device(device).type == "cpu" else PROBE_NBYTES
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if source.device.type != "cpu":
            torch.accelerator.synchronize(source.device)

    return 2 * nbytes / _best(copy)


@cache
def checksum_rate() -> float:
    """Measures the bytes per second that one thread checksums. Cached."""
    source = torch.ones(_probe_nbytes(), dtype=torch.uint8)
    return source.nbytes / _best(lambda: native.crc32c(source))


def _probe_nbytes() -> int:
    """Returns the bytes of a probe of the host's memory: more than caches hold, unless a job under
    way has left too little, which a probe must not use up."""
    return max(LEAST_PROBE_NBYTES, min(PROBE_NBYTES, int(memory_left() * PROBE_SHARE)))


def _best(work) -> float:
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
