"""Experts: which parameters are parts of divided experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lazily import Lazily
from lone import lone_group
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import infinity
from infinity.ext.coded.packed_experts import experts_to_pack
from infinity.ext.rows.experts import (
    clamps_choice,
    divided_parameters,
    divides_experts,
    exchanges_of,
    has_experts,
    mark_divided,
    runs_known_code,
)

modeling = Lazily("transformers.models.qwen3_moe.modeling_qwen3_moe")


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


@pytest.fixture
def divided(mesh) -> nn.Module:
    """Two of four experts of transformers, with their exchange of tokens."""
    pytest.importorskip("transformers", minversion="5.23")  # which applies plans
    config = modeling.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = modeling.Qwen3MoeForCausalLM(config)
    infinity.parallel.expert_parallel(model, mesh["ep"], quiet=True)
    return model.model.layers[0].mlp.experts


def test_this_ranks_part_of_experts_is_known_with_its_exchange(divided):
    """Twins: an own forward around it, and a part without an exchange, are not."""
    (exchange,) = exchanges_of(divided)
    assert "AllReduceEP" in {kind.__name__ for kind in type(exchange).__mro__}
    assert has_experts(divided) and runs_known_code(divided)
    theirs = divided.forward
    divided.forward = lambda *args: theirs(*args)
    assert exchanges_of(divided) == [] and not has_experts(divided)
    del divided.forward
    assert not has_experts(divided)


def test_an_exchange_that_calls_another_forward_is_not_known(divided):
    (exchange,) = exchanges_of(divided)
    exchange.experts_forward = lambda *args: None
    assert not has_experts(divided)


def test_an_exchange_that_chooses_between_others_is_known_with_them(divided):
    """Claim: each of them calls the forward of the class, so each is listed. Twin: another
    attribute."""
    (exchange,) = exchanges_of(divided)
    inner = type(exchange).__new__(type(exchange))
    inner.experts_forward = exchange.experts_forward
    exchange.all_to_all, exchange.other = inner, object()
    assert exchanges_of(divided) == [exchange, inner] and has_experts(divided)


def test_replaced_code_of_the_exchange_is_not_known(divided, monkeypatch):
    (exchange,) = exchanges_of(divided)
    assert runs_known_code(divided)
    monkeypatch.setattr(type(exchange), "__call__", lambda self, *args: None)
    assert not runs_known_code(divided)


def test_batched_products_of_a_part_clamp_the_choice(divided):
    """Twins: another product, and experts that one rank has all of."""
    divided.config._experts_implementation = "batched_mm"
    whole = modeling.Qwen3MoeExperts(divided.config)
    assert clamps_choice(divided) and not clamps_choice(whole)
    divided.config._experts_implementation = "grouped_mm"
    assert not clamps_choice(divided)


@pytest.mark.parametrize("exchange", ["tokens", "outputs"])
def test_divided_experts_are_not_packed_and_that_is_said(mesh, exchange, caplog):
    """Failing twin: before they are divided they are packed."""
    pytest.importorskip("torchao")
    pytest.importorskip("transformers", minversion="5.23")  # which applies plans
    config = modeling.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = modeling.Qwen3MoeForCausalLM(config).requires_grad_(requires_grad=False)
    assert len(experts_to_pack(model, None, "int8")) == 2 and not caplog.messages
    infinity.parallel.expert_parallel(model, mesh["ep"], exchange=exchange, quiet=True)
    assert experts_to_pack(model, None, "int8") == {}
    assert caplog.messages == ["quantize='int8': experts that are divided over ranks stay dense"]
