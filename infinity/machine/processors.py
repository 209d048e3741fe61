"""How many threads this process can use: what its affinity, its container and the machine leave it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

from . import cgroups

logger = logging.getLogger(__name__)

MOST_FOR_PAGES = 8  # threads that make pages present: the kernel's own locks let no more through


def available(root: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Counts the processors this process may run on at once: those of its affinity, but no more than the quota of any cgroup above
    it (v1 and v2) pays for. ``root`` and ``own``: where the kernel shows cgroups, and which are this process's."""
    return max(1, min([len(allowed()), *(math.ceil(quota) for quota in _quotas(root, own))]))


_ranks: list[set[int]] = []  # of this machine, this one first: where each may run


def share_with(others: Sequence[set[int]]) -> None:
    """Notes which processors the other ranks on this machine may run on, each: they work at the same time."""
    _ranks[:] = [allowed(), *others] if others else []


def allowed() -> set[int]:
    """Lists the processors that the system lets this process run on."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def own_part() -> int:
    """Counts the processors that are this rank's: of those that several may run on each has a part. Alone, all that are available."""
    if not _ranks:
        return available()
    mine, *others = _ranks
    part = sum(1 / (1 + sum(processor in other for other in others)) for processor in mine)
    return max(1, min(int(part + 1e-9), available() // len(_ranks) if _is_limited(mine) else available()))


def _is_limited(mine: set[int]) -> bool:
    """Whether a quota pays for fewer processors than this process may run on: the ranks share that, too."""
    return available() < len(mine)


def for_updates(torch_threads: int) -> int:
    """Counts the threads that step: this rank's part of the processors, but no more than torch computes with, which may have been told so.

    torchrun tells every process of several to compute with one thread, whoever asked for it: that is not taken for a wish, which the first
    rank says.
    """
    part = own_part()
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("OMP_NUM_THREADS") != "1":
        return min(torch_threads, part)
    if part > 1 and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "torchrun has set OMP_NUM_THREADS=1: torch computes with one thread, updates run in %d on each rank all the same, its part of the "
            "processors (Config(update_threads=1) for one)", part,
        )  # fmt: skip
    return part


def for_pages() -> int:
    """Counts the threads that make pages present."""
    return min(own_part(), MOST_FOR_PAGES)


def for_checksums() -> int:
    """Counts the threads that take checksums of bytes on their way to and from a disk."""
    return own_part()


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
