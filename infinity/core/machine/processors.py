"""Processors: how many threads this process can use, given affinity, container and machine."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

from . import cgroups

logger = logging.getLogger(__name__)

MOST_FOR_PAGES = 8  # threads that populate pages: kernel locks allow no more


def available(root: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Returns how many processors this process may use at once: its affinity, capped by every
    control group's quota (v1 and v2). ``root``, ``own``: where the kernel shows control groups, and
    this process's."""
    return max(1, min([len(allowed()), *(math.ceil(quota) for quota in _quotas(root, own))]))


_ranks: list[set[int]] = []  # of this machine, this one first: its allowed processors


def share_with(others: Sequence[set[int]]) -> None:
    """Sets which processors each other rank on this machine may use at the same time."""
    _ranks[:] = [allowed(), *others] if others else []


def allowed() -> set[int]:
    """Returns the processors that the system allows for this process."""
    return os.sched_getaffinity(0)


def own_part() -> int:
    """Counts this rank's share of the processors: those allowed for several ranks are divided.
    Alone, all that are available."""
    if not _ranks:
        return available()
    ours, *others = _ranks
    part = sum(1 / (1 + sum(processor in other for other in others)) for processor in ours)
    most = available()
    if most < len(ours):  # a quota is below this process's affinity: the ranks share that, too
        most //= len(_ranks)
    return max(1, min(int(part + 1e-9), most))


def for_updates(torch_threads: int) -> int:
    """Returns the number of threads that step: this rank's share of the processors, at most torch's
    threads.

    torchrun sets one thread for every process, without the user's request. So that value is
    ignored, with a warning on the first rank.
    """
    part = own_part()
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("OMP_NUM_THREADS") != "1":
        return min(torch_threads, part)
    if part > 1 and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "torchrun has set OMP_NUM_THREADS=1: torch computes with one thread, updates run in %d"
            " on each rank all the same, its part of the processors (Config(update_threads=1) for"
            " one)",
            part,
        )
    return part


def for_pages() -> int:
    """Returns the number of threads that populate pages."""
    return min(own_part(), MOST_FOR_PAGES)


def for_checksums() -> int:
    """Returns the number of threads that compute checksums of transfers to and from disk."""
    return own_part()


def _quotas(root: Path, own: Path) -> list[float]:
    """Returns the quota of each control group above this process, in processors."""
    first, second = cgroups.folders("cpu", root, own)
    quotas = [quota for folder in second if (quota := _ratio(folder / "cpu.max"))]
    for folder in first:
        quota, period = (
            cgroups.number(folder / "cpu.cfs_quota_us"),
            cgroups.number(folder / "cpu.cfs_period_us"),
        )
        if quota and period and quota > 0:
            quotas.append(quota / period)
    return quotas


def _ratio(file: Path) -> float | None:
    """Parses "150000 100000" to 1.5; None for "max", or if there is no such file."""
    try:
        quota, period = cgroups.read(file).split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
