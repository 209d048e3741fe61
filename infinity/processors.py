"""How many threads this process can use: what its affinity, its container and the machine leave it."""

from __future__ import annotations

import math
import os
from pathlib import Path

MOST_FOR_PAGES = 8  # threads that make pages present: the kernel's own locks let no more through
CGROUPS = Path("/sys/fs/cgroup")


def available(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Processors this process may run on at once: those of its affinity, but no more than the quota of any cgroup above it
    (v1 and v2) pays for. ``root`` and ``own``: where the kernel shows cgroups, and which are this process's."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(quota) for quota in _quotas(root, own))]))


def for_pages() -> int:
    """Threads that make pages present."""
    return min(available(), MOST_FOR_PAGES)


def _quotas(root: Path, own: Path) -> list[float]:
    """Processors that each cgroup above this process may use."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            folders = _upward(root, path)
            found += [quota for folder in folders if (quota := _ratio(folder / "cpu.max"))]
        elif "cpu" in controllers.split(","):
            for folder in _upward(root / "cpu", path):
                quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
                if quota and period and quota > 0:
                    found.append(quota / period)
    return found


def _upward(root: Path, path: str) -> list[Path]:
    """The folder of a cgroup, and of all above it."""
    folder = root / path.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(root)]


def _ratio(file: Path) -> float | None:
    """"150000 100000" -> 1.5; None for "max", or where there is no such file."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
