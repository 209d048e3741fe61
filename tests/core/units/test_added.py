"""Added tensors: modules list them beside their parameters, and marked ones rest always."""

from __future__ import annotations

import torch
from torch import nn

from infinity.core.units.added import (
    ADDED,
    RESTS,
    always_rests,
    named_tensors,
    own_tensors,
    tensors_of,
)


def layers() -> tuple[nn.Sequential, nn.Parameter]:
    """A model whose second layer has an added tensor."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    added = nn.Parameter(torch.ones(3), requires_grad=False)
    setattr(added, RESTS, True)
    model[1].__dict__[ADDED] = {"weight.scales": added}
    return model, added


def test_added_tensors_are_listed_after_the_parameters_of_their_module():
    """By hand, for a module, a model and a model with the layer twice. Twin: a module without."""
    model, added = layers()
    assert own_tensors(model[1]) == [model[1].weight, added] and own_tensors(model) == []
    assert own_tensors(model[0]) == [*model[0].parameters()]
    assert tensors_of(model) == [*model.parameters(), added]
    assert tensors_of(nn.Sequential(model, model[1])) == [*model.parameters(), added]


def test_added_tensors_have_names_below_their_modules():
    """Claim: under all names. Twin: torch's own list has none of them."""
    model, added = layers()
    both = nn.Sequential(model, model[1])
    names = [name for name, tensor in named_tensors(both) if tensor is added]
    assert names == ["0.1.weight.scales", "1.weight.scales"]
    assert [name for name, _ in named_tensors(model[1])] == ["weight", "weight.scales"]
    assert all(tensor is not added for _, tensor in both.named_parameters())


def test_only_a_marked_tensor_always_rests():
    """Twins: a parameter of the same module, a plain tensor, and the tensor without its mark."""
    model, added = layers()
    assert always_rests(added)
    assert not always_rests(model[1].weight) and not always_rests(torch.ones(1))
    del added.__dict__[RESTS]
    assert not always_rests(added)
