"""Experts: which parameters are parts of divided experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lone import lone_group
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from infinity.state.experts import divided_parameters, divides_experts, mark_divided


@pytest.fixture
def mesh():
    with lone_group(rank=1, size=2):
        yield dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))


class Experts(nn.Module):
    """Weights of experts over the mesh, and a bias that every rank has whole."""

    def __init__(self, mesh):
        super().__init__()
        whole = torch.ones(4, 2)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        self.bias = nn.Parameter(torch.ones(2))


def test_the_distributed_parameters_of_a_marked_module_are_divided(mesh):
    """Of the module itself. Twins: before it is marked none, and its plain ones never."""
    experts = Experts(mesh)
    assert divided_parameters(experts) == [] and not divides_experts(experts)
    mark_divided(experts)
    (found,) = divided_parameters(experts)
    assert found is experts.weight and divides_experts(experts)


def test_a_mark_is_of_one_module_and_its_own_parameters(mesh):
    """Twins: of the module around it, and of others of its class, none is divided."""
    experts, other = Experts(mesh), Experts(mesh)
    model = nn.Sequential(other, nn.Sequential(experts))
    mark_divided(model)
    assert divided_parameters(model) == [] and not divides_experts(model)
    mark_divided(experts)
    assert divides_experts(model) and divided_parameters(other) == []
    assert not divides_experts(other) and [*experts.state_dict()] == ["weight", "bias"]


def test_what_is_no_module_or_has_plain_experts_divides_none():
    plain = nn.Linear(2, 2)
    mark_divided(plain)
    assert divided_parameters(plain) == [] and not divides_experts(plain)
    assert not divides_experts(None) and not divides_experts([plain])
