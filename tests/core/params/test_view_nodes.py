"""ViewNodes: autograd knows a tensor at rest by its place in the graph."""

from __future__ import annotations

import pytest
import torch

from infinity.core.params.view_chain import ViewStep
from infinity.core.params.view_nodes import View, ask_for_edges, edge_of, with_node


def test_the_node_of_a_view_has_the_gradient_of_the_view():
    """Method: an expansion, whose gradient is a sum; and the gradient of that. Twin: torch's."""
    found = []
    for kind in ("node", "torch"):
        param, weights = torch.arange(1.0, 4.0, requires_grad=True), torch.arange(6.0).view(2, 3)
        if kind == "node":
            step = ViewStep.of_call(torch.Tensor.expand, (param, 2, 3), {}, param, 0)
            view = View.apply(param, step, lambda: param.detach().expand(2, 3).clone())
        else:
            view = param.expand(2, 3)
        loss = (view.pow(3) * weights).sum()
        (grad,) = torch.autograd.grad(loss, param, create_graph=True)
        found.append((grad.detach(), *torch.autograd.grad(grad.sum(), param)))
    assert all(map(torch.equal, *found))


def test_bytes_have_a_node_behind_the_tensor_where_autograd_records():
    """Twins: under no_grad, and for a tensor that requires no gradient, they are plain."""
    rest, value = torch.empty(3, requires_grad=True), torch.arange(3.0)
    (with_node(rest, value) * value).sum().backward()
    assert torch.equal(rest.grad, value)
    with torch.no_grad():
        assert with_node(rest, value) is value
    assert with_node(torch.empty(3), value) is value


class AtRest(torch.Tensor):
    """A tensor that is asked for by its place."""


@pytest.mark.parametrize("computed", [True, False])
def test_gradients_are_asked_for_by_the_place(computed):
    """Method: of a leaf and of a computed tensor, alone and in a list. Twin: one that requires no
    gradient has no place."""
    leaf = torch.ones(3, requires_grad=True)
    rest = (leaf * 2 if computed else leaf.detach().requires_grad_()).as_subclass(AtRest)
    rest = rest if computed else rest.detach().requires_grad_()
    loss = with_node(rest, torch.arange(3.0)).pow(2).sum()
    for inputs in (rest, [rest], (rest,)):
        given = (loss,), {"inputs": inputs, "retain_graph": True}
        (grad,) = ask_for_edges(torch.autograd.grad, *given, AtRest)
        assert torch.equal(grad.as_subclass(torch.Tensor), 2 * torch.arange(3.0))
    with pytest.raises(RuntimeError, match="does not require grad"):
        edge_of(torch.ones(3))
