"""The memory of GPUs that their driver lends to the system, as on a GH200: the kernel counts it in
the machine's, as nodes without processors. It is the GPU's part of a plan, not the host's."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

NODES, IOMEM = Path("/sys/devices/system/node"), Path("/proc/iomem")
MARK = "System RAM (NVIDIA)"  # what the driver calls it there


@functools.cache
def nodes_of_gpus(root: Path = NODES, iomem: Path = IOMEM) -> tuple[Path, ...]:
    """Returns the folders of nodes that are a GPU's memory; none if nothing is lent."""
    try:
        if MARK not in iomem.read_text():
            return ()
        nodes = sorted(root.glob("node[0-9]*"))
        return tuple(each for each in nodes if not (each / "cpulist").read_text().strip())
    except OSError:
        return ()


def lent_nbytes(nodes: Sequence[Path]) -> int:
    """Returns the bytes of ``nodes`` that are free."""
    texts = ((each / "meminfo").read_text() for each in nodes)
    return sum(
        int(match[1]) << 10 for text in texts if (match := re.search(r"MemFree: +(\d+)", text))
    )


def without_gpus() -> tuple[int, str]:
    """Finds the free memory of a machine without that of its GPUs; no limit if it has none such."""
    if not (nodes := nodes_of_gpus()):
        return sys.maxsize, ""
    left = psutil.virtual_memory().available - lent_nbytes(nodes)
    return left, "the machine's free memory without that of its GPUs"
