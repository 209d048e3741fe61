"""Limits: how much more memory this process may use: the minimum over machine, control groups and
ulimits."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from .. import seams
from . import cgroups, processors
from .sizes import format_nbytes

GIB = 1024**3
FRACTION_LEFT, LARGEST_LEFT, LEAST_FRACTION_LEFT = 1 / 3, 4 * GIB, 1 / 10

# Of address space, which `ulimit -v` counts as if used: the C library's arena and the stack of each
# future thread.
ARENA_NBYTES = (64 + 8) * 1024**2
OWN_THREADS = 4  # besides compute and step threads: I/O, autograd's, populating pages


def memory_left(root: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """Returns the bytes that this process may still use. A group's file cache is reclaimable, and
    does not count as used."""
    return tightest(root, own)[0]


def tightest(root: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> tuple[int, str]:
    """Finds the tightest limit: the bytes that this process may still use, and a description."""
    machine = (psutil.virtual_memory().available, "the machine's free memory")
    more = (find() for find in seams.classes_of(seams.LIMITS))
    left, description = min([machine, *_of_cgroups(root, own), *_of_ulimits(), *more])
    return max(0, left), description


def is_by_ulimit() -> bool:
    """Returns whether a ulimit may be the tightest limit: ulimits count address space, used or
    not."""
    return next(_of_ulimits(), None) is not None


def for_the_engine(left: int) -> int:
    """Returns how many of ``left`` bytes the engine plans with. The rest is for activations,
    torch's workspace and gradients in flight: a third of a small machine, a tenth of a large one.
    """
    return int(left - max(left * LEAST_FRACTION_LEFT, min(left * FRACTION_LEFT, LARGEST_LEFT)))


def _of_cgroups(root: Path, own: Path) -> Iterator[tuple[int, str]]:
    first, second = cgroups.folders("memory", root, own)
    kinds = [(first, "limit_in_bytes", "usage_in_bytes", "total_cache", "total_shmem", "limit")]
    for name in ("max", "high"):
        kinds.append((second, name, "current", "file", "shmem", f"memory.{name}"))
    for folders, name, usage, cache, shmem, kind in kinds:
        for folder in folders:
            limit, used = (cgroups.number(folder / f"memory.{file}") for file in (name, usage))
            if limit is not None and used is not None:
                counts = cgroups.table(folder / "memory.stat")
                left = limit - used + counts.get(cache, 0) - counts.get(shmem, 0)
                yield left, f"a control group's {kind} of {format_nbytes(limit)}"


def _of_ulimits() -> Iterator[tuple[int, str]]:
    try:
        sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    except OSError:
        return
    for limit, name, option in (
        (resource.RLIMIT_AS, "VmSize", "-v"),
        (resource.RLIMIT_DATA, "VmData", "-d"),
    ):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and name in sizes:
            unused = (
                ARENA_NBYTES * (OWN_THREADS + processors.available())
                if limit == resource.RLIMIT_AS
                else 0
            )
            yield (
                most - int(sizes[name]) * 1024 - unused,
                f"ulimit {option} of {format_nbytes(most)}",
            )
