"""A wrapped model keeps its modules and parameters: what replaces one without keeping it is
refused, before anything has changed. After unwrap_model all of it is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import infinity
from infinity.core.run.fixed_form import FixedModules

HOST = {"params": "host", "optimizer": "host"}


class Around(nn.Module):
    """Keeps a module inside, as adapters do."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


REPLACED: dict[str, Callable[[nn.Module], object]] = {
    "a weight": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(8, 8))),
    "no weight": lambda model: setattr(model[0], "weight", None),
    "a registered weight": lambda model: model[0].register_parameter(
        "weight", nn.Parameter(torch.ones(8, 8))
    ),
    "a layer": lambda model: model.__setitem__(0, nn.Linear(8, 8)),
    "an added layer": lambda model: model.add_module("0", nn.Linear(8, 8)),
    "a layer for an identity": lambda model: setattr(model, "0", nn.Identity()),
    "a removed layer": lambda model: model.__delitem__(0),
}


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), HOST)


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_trained_is_not_replaced(what, pair):
    """Twin: after unwrap_model it is."""
    model, optimizer = pair
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(infinity.UsageError, match=r"0\.weight.*cannot be.*unwrap_model"):
        REPLACED[what](model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    model, _ = infinity.unwrap_model(model, optimizer)
    REPLACED[what](model)
    assert not isinstance(model._modules, FixedModules)


def test_a_module_that_keeps_the_one_it_replaces_is_taken(pair):
    """Twin: new modules beside the old ones are, too."""
    model, optimizer = pair
    model[1] = Around(model[1])
    model.append(nn.ReLU())
    before = model[1].inside.weight.detach().clone()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[1].inside.weight.detach())


def test_values_for_a_call_are_taken(pair):
    """torch.func.functional_call, which puts the parameters back."""
    model, _ = pair
    x = torch.ones(2, 8)
    zeros = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    assert not torch.func.functional_call(model, zeros, (x,)).any()
    assert model(x).any()
