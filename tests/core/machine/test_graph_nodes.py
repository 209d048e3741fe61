"""Graph nodes: what leads to a parameter's node of autograd's graph is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from infinity.core.machine import graph_nodes

USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sum": torch.Tensor.sum,
    "rows by their ids": lambda param: F.embedding(torch.tensor([1]), param),
    "a view": lambda param: param[1:].t(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_each_use_of_a_parameter_that_is_alive_is_counted(use):
    """Uses a parameter twice, and frees one graph. Twin: without a graph nothing is counted."""
    param = torch.nn.Parameter(torch.ones(3, 3))
    node = torch.autograd.graph.get_gradient_edge(param).node
    first, second = use(param), use(param)
    assert graph_nodes.references(node) == 2
    del first
    assert graph_nodes.references(node) == 1
    del second
    with torch.no_grad():
        use(param)
    assert graph_nodes.references(node) == 0


def test_nothing_is_counted_in_a_torch_that_differs(monkeypatch):
    """Gives the Python object of a node another size. Twin: this torch's own."""
    node = torch.autograd.graph.get_gradient_edge(torch.ones(1, requires_grad=True)).node
    assert graph_nodes.references(node) == 0
    graph_nodes._works.cache_clear()
    for size in ("_INTRUSIVE", "_SHARED"):
        monkeypatch.setattr(graph_nodes, size, 1)
    try:
        assert graph_nodes.references(node) is None
    finally:
        graph_nodes._works.cache_clear()
