"""NUMA: which processors are near which memory, and keeping a rank on one node's.

node   processors with memory of their own; memory is taken from the node of the thread that touches it first
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

SYSFS = "/sys/devices/system/node"


def nodes(root: str | os.PathLike = SYSFS) -> list[set[int]]:
    """Lists the processors of every node that has any, in order; empty where the system does not tell."""
    found = []
    for path in sorted(Path(root).glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        try:
            listed = (path / "cpulist").read_text().strip()
        except OSError:
            continue
        if listed:
            found.append(_parse(listed))
    return found


def _parse(listed: str) -> set[int]:
    """``"0-3,8"`` -> {0, 1, 2, 3, 8}."""
    processors: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        processors |= set(range(int(first), int(last or first) + 1))
    return processors


def share(of_nodes: Sequence[set[int]], allowed: set[int], rank: int, count: int) -> set[int] | None:
    """Chooses the processors for the ``rank``-th of ``count`` processes on a machine: those of one node, among the ``allowed``.
    None where there is nothing to choose."""
    usable = [node & allowed for node in of_nodes if node & allowed]
    if len(usable) < 2 or count < 2:
        return None
    return usable[rank * len(usable) // count]


def bind(rank: int, count: int, root: str | os.PathLike = SYSFS) -> set[int] | None:
    """Keeps this thread, and those it starts from here on, on the node of the ``rank``-th of ``count`` processes of this
    machine; pools that they touch are then near. Returns the processors that were allowed before, None where nothing was
    changed: one node, or a process that was bound already (by torchrun's ``--numa-binding``, say)."""
    allowed = os.sched_getaffinity(0)
    chosen = share(nodes(root), allowed, rank, count)
    if chosen is None:
        return None
    os.sched_setaffinity(0, chosen)
    return allowed
