"""NUMA: a rank stays on one node's processors, and only where there is something to choose."""

from __future__ import annotations

import os

import models
import pytest

from infinity.core.machine import numa
from infinity.ext.shared_homes.own_processors import bind_to_gpu


def system(tmp_path, *lists: str):
    """A folder like the kernel's, with these processors in its nodes."""
    for i, listed in enumerate(lists):
        (tmp_path / f"node{i}").mkdir()
        (tmp_path / f"node{i}" / "cpulist").write_text(listed + "\n")
    return tmp_path


def test_nodes_are_read_as_the_kernel_lists_them(tmp_path):
    """Ranges, single ones, a node without processors (memory only), and more than ten nodes in
    their order."""
    root = system(tmp_path, "0-3,8", "", "4-7", *[str(16 + i) for i in range(9)])
    assert numa.nodes(root) == [{0, 1, 2, 3, 8}, {4, 5, 6, 7}, *({16 + i} for i in range(9))]
    assert numa.nodes(tmp_path / "nowhere") == []


@pytest.mark.parametrize(("count", "expected"), [(2, [0, 1]), (4, [0, 0, 1, 1]), (3, [0, 0, 1])])
def test_ranks_are_spread_over_the_nodes(count, expected):
    of_nodes = [{0, 1}, {2, 3}]
    assert [numa.choose(of_nodes, {0, 1, 2, 3}, rank, count) for rank in range(count)] == [
        of_nodes[i] for i in expected
    ]


@pytest.mark.parametrize(
    ("of_nodes", "allowed", "count"),
    [
        ([{0, 1, 2, 3}], {0, 1, 2, 3}, 4),
        ([], {0, 1}, 2),
        ([{0, 1}, {2, 3}], {2, 3}, 2),
        ([{0}, {1}], {0, 1}, 1),
    ],
)
def test_nothing_is_bound_where_there_is_nothing_to_choose(of_nodes, allowed, count):
    """One node, none told, bound to one already, alone on the machine."""
    assert numa.choose(of_nodes, allowed, 0, count) is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_binding_holds_for_this_thread_and_tells_what_was_before(tmp_path):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    root = system(tmp_path, str(first), str(second))

    def bound() -> tuple:
        before = os.sched_getaffinity(0)
        return numa.bind(1, 2, root) == before, os.sched_getaffinity(0), numa.bind(1, 2, root)

    assert models.in_child(bound) == (True, {second}, None)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("told, known", [("1", True), ("-1", False), ("7", False), (None, False)])
def test_a_rank_is_bound_to_the_node_of_its_gpu(told, known, tmp_path):
    """Twins: the firmware does not tell, tells a node that is not there, and no such device."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    root = system(tmp_path, str(first), str(second))
    gpu = tmp_path / "devices" / "0000:1b:00.0"
    gpu.mkdir(parents=True)
    if told is not None:
        (gpu / "numa_node").write_text(f"{told}\n")

    def bound() -> tuple:
        before = os.sched_getaffinity(0)
        found = bind_to_gpu(gpu.name, before, root, gpu.parent)
        return found, os.sched_getaffinity(0) == ({second} if known else before)

    assert models.in_child(bound) == (known, True)
