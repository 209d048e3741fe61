"""Limits: how much more memory this process may take: the least that the machine, its control groups and its ulimits leave."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from . import cgroups

GIB = 1024**3
SHARE_LEFT, LARGEST_LEFT, LEAST_SHARE_LEFT = 1 / 3, 4 * GIB, 1 / 10


def memory_left(root: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Counts the bytes that this process may still take. Cached files of a group give way, and do not count as used."""
    return max(0, min([psutil.virtual_memory().available, *_of_groups(root, own), *_of_ulimits()]))


def for_the_engine(left: int) -> int:
    """Returns how many of ``left`` bytes the engine plans with. The rest is for what it does not hold: activations, what torch needs to
    compute, gradients on their way. A third of a small machine, a tenth of a large one."""
    return int(left - max(left * LEAST_SHARE_LEFT, min(left * SHARE_LEFT, LARGEST_LEFT)))


def _of_groups(root: Path, own: Path) -> Iterator[int]:
    first, second = cgroups.folders("memory", root, own)
    for folder in first:
        limit, used = cgroups.number(folder / "memory.limit_in_bytes"), cgroups.number(folder / "memory.usage_in_bytes")
        counts = cgroups.table(folder / "memory.stat")
        if limit is not None and used is not None:
            yield limit - used + counts.get("total_cache", 0) - counts.get("total_shmem", 0)
    for folder in second:
        used, counts = cgroups.number(folder / "memory.current"), cgroups.table(folder / "memory.stat")
        for name in ("memory.max", "memory.high"):
            if (limit := cgroups.number(folder / name)) is not None and used is not None:
                yield limit - used + counts.get("file", 0) - counts.get("shmem", 0)


def _of_ulimits() -> Iterator[int]:
    try:
        sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    except OSError:
        return
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and name in sizes:
            yield most - int(sizes[name].split()[0]) * 1024
