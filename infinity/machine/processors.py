"""How many threads this process can use: what its affinity, its container and the machine leave it."""

from __future__ import annotations

import math
import os
from pathlib import Path

from . import cgroups

MOST_FOR_PAGES = 8  # threads that make pages present: the kernel's own locks let no more through


def available(root: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Counts the processors this process may run on at once: those of its affinity, but no more than the quota of any cgroup above
    it (v1 and v2) pays for. ``root`` and ``own``: where the kernel shows cgroups, and which are this process's."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(quota) for quota in _quotas(root, own))]))


def for_pages() -> int:
    """Counts the threads that make pages present."""
    return min(available(), MOST_FOR_PAGES)


def _quotas(root: Path, own: Path) -> list[float]:
    """Processors that each cgroup above this process may use."""
    first, second = cgroups.folders("cpu", root, own)
    found = [quota for folder in second if (quota := _ratio(folder / "cpu.max"))]
    for folder in first:
        quota, period = cgroups.number(folder / "cpu.cfs_quota_us"), cgroups.number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            found.append(quota / period)
    return found


def _ratio(file: Path) -> float | None:
    """ "150000 100000" -> 1.5; None for "max", or where there is no such file."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
