"""ViewChain: the views of a parameter at rest are taken again at each use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.core.params.view_chain import ViewChain, ViewStep, bytes_of, chain_of, present
from infinity.errors import UsageError


def parameter() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    param._infinity = SimpleNamespace(name="a", param=param, replaced=0)
    return param


def seen(param: torch.Tensor, chain: ViewChain) -> torch.Tensor:
    """A tensor at rest that ``chain`` leads to."""
    tensor = torch.empty(0)
    tensor._infinity, tensor._chain = param._infinity, chain
    return tensor


def test_a_chain_takes_its_views_in_order():
    """Method: views that do not commute, with the viewed tensor by position and by name. Twin: the
    parameter itself has no views."""
    param = parameter()
    transposed = ViewStep.of_call(torch.transpose, (param, 0, 1), {}, param, 0)
    row = ViewStep.of_call(torch.select, (), {"input": param, "dim": 0, "index": 1}, param, 0)
    chain = chain_of(param).then(transposed).then(row)
    assert present(seen(param, chain)).tolist() == [1, 4]
    assert present(seen(param, chain_of(param).then(row).then(row))).tolist() == 4
    assert present(param) is param and chain_of(param).steps == ()


def test_one_of_several_results_is_the_view():
    param = parameter()
    steps = [ViewStep.of_call(torch.unbind, (param,), {"dim": 1}, param, n) for n in range(3)]
    values = [present(seen(param, chain_of(param).then(step))).tolist() for step in steps]
    assert values == [[0, 3], [1, 4], [2, 5]]


def test_a_view_to_write_to_is_taken_as_autograd_recorded_it():
    """Twins: one that was taken under no_grad, and one of the detached tensor, are not recorded;
    nor is one that is only read."""
    param = parameter()
    recorded = ViewStep.of_call(torch.t, (param,), {}, param, 0)
    with torch.no_grad():
        unrecorded = ViewStep.of_call(torch.t, (param,), {}, param, 0)
        rest = seen(param, chain_of(param).then(recorded))
        assert bytes_of(rest, written=True).grad_fn is not None
    assert present(rest).grad_fn is None
    rest = seen(param, chain_of(param).then(unrecorded))
    assert bytes_of(rest, written=True).grad_fn is None
    detached = ViewChain((recorded,), is_detached=True)
    assert not bytes_of(seen(param, detached), written=True).requires_grad
    assert detached.then(recorded).is_detached


def test_a_view_keeps_what_it_was_asked_for():
    """Method: the user's tensors change behind the call, by position, in a slice, as a shape."""
    param, at, like = parameter(), torch.tensor(0), torch.ones(3, 2)
    steps = [
        ViewStep.of_call(torch.Tensor.__getitem__, (param, at), {}, param, 0),
        ViewStep.of_call(torch.Tensor.__getitem__, (param, slice(at, None)), {}, param, 0),
        ViewStep.of_call(torch.Tensor.view_as, (param, like), {}, param, 0),
    ]
    at += 1
    like.resize_(6)
    values = [present(seen(param, chain_of(param).then(step))).tolist() for step in steps]
    assert values == [[0, 1, 2], [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]]]


def test_a_view_by_its_place_has_that_place():
    """Method: the parameter's memory begins elsewhere by then."""
    param, other = parameter(), torch.arange(10.0)
    view = param.detach()[1:, ::2]
    step = ViewStep.of_strides(view, param)
    assert torch.equal(present(seen(param, chain_of(param).then(step))), view)
    assert step.repeat(other[4:].view(2, 3)).tolist() == [[7, 9]]


def test_a_view_shows_the_newest_values_and_none_that_were_replaced():
    param = parameter()
    old = seen(param, chain_of(param).then(ViewStep.of_call(torch.t, (param,), {}, param, 0)))
    with torch.no_grad():
        param.fill_(7)
    assert present(old).tolist() == [[7, 7]] * 3
    param._infinity.replaced += 1
    with pytest.raises(UsageError, match="a view of parameter a shows the values before a.data"):
        present(old)
    assert present(param) is param
