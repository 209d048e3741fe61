"""NUMA: which processors are near which memory, and how to keep a rank on one node.

node   processors with their own memory; memory comes from the node of the first thread that
       touches it
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

SYSFS = "/sys/devices/system/node"


def nodes(root: str | os.PathLike = SYSFS) -> list[set[int]]:
    """Lists the processors of every node that has any, in order; empty if unknown."""
    processors = []
    for path in sorted(
        Path(root).glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))
    ):
        try:
            listed = (path / "cpulist").read_text().strip()
        except OSError:
            continue
        if listed:
            processors.append(parse(listed))
    return processors


def parse(listed: str) -> set[int]:
    """Parses ``"0-3,8"`` to {0, 1, 2, 3, 8}."""
    processors: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        processors |= set(range(int(first), int(last or first) + 1))
    return processors


def choose(
    of_nodes: Sequence[set[int]], allowed: set[int], rank: int, count: int
) -> set[int] | None:
    """Chooses the processors for process ``rank`` of ``count`` on a machine: those of one node,
    among the ``allowed``. None if there is no choice."""
    usable = [node & allowed for node in of_nodes if node & allowed]
    if len(usable) < 2 or count < 2:
        return None
    return usable[rank * len(usable) // count]


def bind(rank: int, count: int, root: str | os.PathLike = SYSFS) -> set[int] | None:
    """Binds this thread, and those it starts later, to the node of process ``rank`` of ``count`` on
    this machine. Pools that they touch are then near.

    Returns the processors allowed before. None if nothing was changed: one node, or a process
    already bound (for example by torchrun's ``--numa-binding``).
    """
    allowed = os.sched_getaffinity(0)
    chosen = choose(nodes(root), allowed, rank, count)
    if chosen is None:
        return None
    os.sched_setaffinity(0, chosen)
    return allowed
