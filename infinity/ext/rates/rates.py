"""Rates: measures the bytes per second of this machine's memory, checksums and disks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ... import native
from ...core.machine import disk_profile
from ...core.machine.limits import memory_left

PROBE_NBYTES, LEAST_PROBE_NBYTES = 64 * 1024 * 1024, 1024 * 1024
PROBE_SHARE = 1 / 16  # of the memory left or of a budget, where that is less
CHECKSUMS = "checksums"


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
    def measure(
        cls,
        nvme_paths: Sequence[str],
        device: torch.device | str | None = None,
        *,
        room: int | str | None = None,
    ) -> Rates:
        """Measures this machine, and the memory of the compute ``device``. The disks' rates come
        from their stored profiles. ``room``: see :func:`memory_rate`."""
        of_disks = disk_rates(nvme_paths) if nvme_paths else (None, None, None)
        where = torch.device(device if device is not None else "cpu")
        return cls(
            memory_rate(room=room),
            checksum_rate(room=room),
            *of_disks,
            memory_rate(str(where)) if where.type != "cpu" else None,
        )


_known: dict[str, float] = {}  # what was measured -> its rate


def memory_rate(device: str = "cpu", *, room: int | str | None = None) -> float:
    """Measures the bytes per second that a copy reads and writes in a device's memory, once.
    ``room``: the job's budget of the host in bytes, of which a probe takes a part (None: none)."""
    if device not in _known:
        is_host = torch.device(device).type == "cpu"
        nbytes = _probe_nbytes(room) if is_host else PROBE_NBYTES
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)
            if not is_host:
                torch.accelerator.synchronize(source.device)

        _known[device] = 2 * nbytes / _best(copy)
    return _known[device]


def checksum_rate(*, room: int | str | None = None) -> float:
    """Measures the bytes per second that one thread checksums, once. ``room``: see
    :func:`memory_rate`."""
    if CHECKSUMS not in _known:
        source = torch.ones(_probe_nbytes(room), dtype=torch.uint8)
        _known[CHECKSUMS] = source.nbytes / _best(lambda: native.crc32c(source))
    return _known[CHECKSUMS]


def _probe_nbytes(room: int | str | None) -> int:
    """Returns the bytes of a probe of the host's memory: more than caches hold, unless a job under
    way has left too little, or has too small a budget, which a probe must not use up."""
    most = PROBE_NBYTES if room is None else min(PROBE_NBYTES, int(int(room) * PROBE_SHARE))
    return max(LEAST_PROBE_NBYTES, min(most, int(memory_left() * PROBE_SHARE)))


def _best(work) -> float:
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def disk_rates(folders: Sequence[str]) -> tuple[float, float, float]:
    """Sums the bytes per second (read, written, both at once) over all ``folders``, once per
    device."""
    devices = {
        disk_profile.Disk(folder).disks: disk_profile.disk_profile(folder)
        for folder in reversed(folders)
    }
    return tuple(
        sum(getattr(one, name) for one in devices.values())
        for name in ("read_rate", "write_rate", "mixed_rate")
    )


def disk_seconds(folders: Sequence[str], read: float, written: float) -> float:
    """Returns the minimum seconds for so many bytes in both directions at once."""
    read_rate, write_rate, mixed_rate = disk_rates(folders)
    return max(read / read_rate, written / write_rate, (read + written) / mixed_rate)
