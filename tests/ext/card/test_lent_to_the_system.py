"""Memory of GPUs that the kernel counts in the machine's is not planned with as the host's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from infinity.core.machine import limits
from infinity.ext.card import lent

GIB = 1 << 30
PLAIN = "00000000-7fffffff : System RAM\n"
LENT = "00000000-00000000 : System RAM (NVIDIA)\n"


def machine(folder: Path, *nodes: tuple[str, int]) -> Path:
    """Nodes with these processors and KiB that are free."""
    for number, (processors, free) in enumerate(nodes):
        place = folder / f"node{number}"
        place.mkdir()
        (place / "cpulist").write_text(processors + "\n")
        (place / "meminfo").write_text(
            f"Node {number} MemTotal:       999999999 kB\nNode {number} MemFree: {free:>13} kB\n"
        )
    return folder


@pytest.mark.parametrize(("iomem", "found"), [(PLAIN + LENT, ["node1", "node2"]), (PLAIN, [])])
def test_nodes_without_processors_are_a_gpus_where_its_driver_says_so(iomem, found, tmp_path):
    """Twin: without that they are memory of the host's own, as behind CXL."""
    root = machine(tmp_path, ("0-71", 8), ("", 96 << 20), ("", 1 << 20))
    (tmp_path / "iomem").write_text(iomem)
    nodes = lent.nodes_of_gpus(root, tmp_path / "iomem")
    assert [each.name for each in nodes] == found
    assert lent.lent_nbytes(nodes) == (97 * GIB if found else 0)
    assert lent.nodes_of_gpus(root, tmp_path / "nowhere") == ()


def test_a_plan_counts_the_machines_memory_without_its_gpus(tmp_path, monkeypatch):
    """Method: 96 of 500 GiB that are free are a GPU's. Twin: a machine that lends none has all."""
    root = machine(tmp_path, ("0-71", 8), ("", 96 << 20))
    free = SimpleNamespace(available=500 * GIB)
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(limits, "_of_cgroups", lambda *_: iter(()))
    monkeypatch.setattr(limits, "_of_ulimits", lambda: iter(()))
    monkeypatch.setattr(lent, "nodes_of_gpus", lambda: ())
    assert limits.tightest() == (500 * GIB, "the machine's free memory")
    monkeypatch.setattr(lent, "nodes_of_gpus", lambda: (root / "node1",))
    assert limits.tightest() == (404 * GIB, "the machine's free memory without that of its GPUs")
