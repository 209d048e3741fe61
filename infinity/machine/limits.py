"""Limits: how much more memory this process may take: the least that the machine, its control groups and its ulimits leave."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from . import cgroups, processors
from .sizes import format_nbytes

GIB = 1024**3
SHARE_LEFT, LARGEST_LEFT, LEAST_SHARE_LEFT = 1 / 3, 4 * GIB, 1 / 10

# Of address space, which `ulimit -v` counts as if it were used: the C library's arena and the stack of each thread to come.
ARENA_NBYTES = (64 + 8) * 1024**2
OWN_THREADS = 4  # beside those that compute or step: I/O, autograd's, pages being made present


def memory_left(root: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Counts the bytes that this process may still take. Cached files of a group give way, and do not count as used."""
    return tightest(root, own)[0]


def tightest(root: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> tuple[int, str]:
    """Finds the limit that leaves this process least: the bytes that it may still take, and the words for what limits them."""
    machine = (psutil.virtual_memory().available, "the machine's free memory")
    left, what = min([machine, *_of_groups(root, own), *_of_ulimits()])
    return max(0, left), what


def is_by_ulimit() -> bool:
    """Tells whether a ulimit of this process may be its tightest limit: ulimits count address space, used or not."""
    return next(_of_ulimits(), None) is not None


def for_the_engine(left: int) -> int:
    """Returns how many of ``left`` bytes the engine plans with. The rest is for what it does not hold: activations, what torch needs to
    compute, gradients on their way. A third of a small machine, a tenth of a large one."""
    return int(left - max(left * LEAST_SHARE_LEFT, min(left * SHARE_LEFT, LARGEST_LEFT)))


def _of_groups(root: Path, own: Path) -> Iterator[tuple[int, str]]:
    first, second = cgroups.folders("memory", root, own)
    for folder in first:
        limit, used = cgroups.number(folder / "memory.limit_in_bytes"), cgroups.number(folder / "memory.usage_in_bytes")
        counts = cgroups.table(folder / "memory.stat")
        if limit is not None and used is not None:
            left = limit - used + counts.get("total_cache", 0) - counts.get("total_shmem", 0)
            yield left, f"a control group's limit of {format_nbytes(limit)}"
    for folder in second:
        used, counts = cgroups.number(folder / "memory.current"), cgroups.table(folder / "memory.stat")
        for name in ("memory.max", "memory.high"):
            if (limit := cgroups.number(folder / name)) is not None and used is not None:
                left = limit - used + counts.get("file", 0) - counts.get("shmem", 0)
                yield left, f"a control group's {name} of {format_nbytes(limit)}"


def _of_ulimits() -> Iterator[tuple[int, str]]:
    try:
        sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    except OSError:
        return
    for limit, name, option in ((resource.RLIMIT_AS, "VmSize", "-v"), (resource.RLIMIT_DATA, "VmData", "-d")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and name in sizes:
            unused = ARENA_NBYTES * (OWN_THREADS + processors.available()) if limit == resource.RLIMIT_AS else 0
            yield most - int(sizes[name].split()[0]) * 1024 - unused, f"ulimit {option} of {format_nbytes(most)}"
