"""All of a parameter at home is compared and set without a fetch to the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import infinity
from infinity.runtime.registry import wrapped
from infinity.state.residency import Residency


@pytest.fixture
def model():
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    made, _ = infinity.wrap_model(
        made, torch.optim.SGD(made.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )
    return made


def is_brought(model: nn.Module) -> bool:
    return any(unit.residency is Residency.RESIDENT for unit in wrapped(model).engine.job.units)


def test_values_are_compared_at_home(model):
    """Twins: a NaN equals nothing, not even itself; another shape differs."""
    one, other = model[0].weight, model[1].weight
    assert torch.equal(one, one) and torch.equal(one, one.detach())
    assert not torch.equal(one, other) and not torch.equal(one, model[0].bias)
    assert not is_brought(model)
    with torch.no_grad():
        one.copy_(torch.full((3, 3), float("nan")))
    assert not torch.equal(one, one)


@pytest.mark.parametrize("how", ["copy_", "data", "set_"])
def test_a_whole_value_is_set_at_home(how, model):
    """Twin: another parameter's memory is refused, unless it is copied."""
    weight, value = model[0].weight, torch.full((3, 3), 5.0)
    with torch.no_grad():
        if how == "data":
            weight.data = value
        else:
            getattr(weight, how)(value)
    assert not is_brought(model) and torch.equal(model.state_dict()["0.weight"], value)
    with torch.no_grad():
        if how == "copy_":
            weight.copy_(model[1].weight)
            assert torch.equal(weight, model[1].weight)
        else:
            with pytest.raises(infinity.UsageError, match="would not reach its home"):
                weight.set_(model[1].weight)
            with pytest.raises(infinity.UsageError, match="would not reach its home"):
                weight.data = model[1].weight.data


def test_a_leaf_is_not_set_under_autograd(model):
    """As in torch. Twin: under no_grad it is."""
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model[0].weight.copy_(torch.ones(3, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(3, 3))
