"""NUMA: which processors are near which memory, and how to keep a rank on one node.

node   processors with their own memory; memory comes from the node of the first thread that
       touches it
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

SYSFS = "/sys/devices/system/node"
DEVICES = "/sys/bus/pci/devices"


def nodes(root: str | os.PathLike = SYSFS) -> list[set[int]]:
    """Lists the processors of every node that has any, in order; empty if unknown."""
    found = []
    for path in sorted(
        Path(root).glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))
    ):
        try:
            listed = (path / "cpulist").read_text().strip()
        except OSError:
            continue
        if listed:
            found.append(_parse(listed))
    return found


def _parse(listed: str) -> set[int]:
    """Parses ``"0-3,8"`` to {0, 1, 2, 3, 8}."""
    processors: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        processors |= set(range(int(first), int(last or first) + 1))
    return processors


def share(
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
    chosen = share(nodes(root), allowed, rank, count)
    if chosen is None:
        return None
    os.sched_setaffinity(0, chosen)
    return allowed


def bind_to_gpu(
    address: str,
    allowed: Collection[int],
    root: str | os.PathLike = SYSFS,
    devices: str | os.PathLike = DEVICES,
) -> bool:
    """Binds this thread, and those it starts later, to the ``allowed`` processors of the node that
    the GPU at PCI ``address`` is on: a copy from another node's memory is slower. Returns whether
    that is known."""
    try:
        node = int(Path(devices, address, "numa_node").read_text())
        near = _parse(Path(root, f"node{node}", "cpulist").read_text().strip()) & set(allowed)
    except (OSError, ValueError):  # no such device or node; -1: the firmware does not tell
        return False
    if near:
        os.sched_setaffinity(0, near)
    return bool(near)
