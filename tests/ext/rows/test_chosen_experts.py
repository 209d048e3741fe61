"""ChosenExperts: the rows that a forward reads, those that are there, and what is missing.

Twins: modules that only look alike bring all rows; an expert that was not chosen is missing.
"""

from __future__ import annotations

import pytest
import torch
from lazily import Lazily
from torch import nn

from infinity.core.units.flat_layout import FlatLayout
from infinity.ext.rows import chosen_experts
from infinity.ext.rows.chosen_experts import ChosenExperts
from infinity.ext.rows.experts import has_experts, is_frozen_table

modeling = Lazily("transformers.models.qwen3_moe.modeling_qwen3_moe")


def experts(implementation: str = "eager") -> nn.Module:
    config = modeling.Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=128, num_experts=4)
    config._experts_implementation = implementation
    return modeling.Qwen3MoeExperts(config)


def chosen_of(module: nn.Module) -> ChosenExperts:
    params = list(module.parameters(recurse=False))
    return ChosenExperts(module, [FlatLayout.of(params)])


class Look(nn.Module):
    """An own module with the interface of transformers' experts."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.ones(4, 256, 64))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states * self.weight.sum()


def test_known_classes_alone_are_brought_by_rows():
    small = modeling.Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=16, num_experts=4)
    assert has_experts(experts())
    assert not has_experts(Look()) and not has_experts(nn.Linear(4, 4))
    assert not has_experts(modeling.Qwen3MoeExperts(small)), "reading them together is faster"


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_routers_choice_is_wanted(implementation):
    module = experts(implementation)
    chosen, index = chosen_of(module), torch.tensor([[0, 2], [2, 4], [2, -1]])
    for args, kwargs in (((None, index, None), {}), ((None,), {"top_k_index": index})):
        chosen.want_for(module, args, kwargs)
        assert chosen.expected == {0, 2}, "numbers outside are other ranks'"


def test_what_is_not_known_is_brought_whole():
    """Claim: another kernel, another class since the wrap, and no index bring all."""
    module, index = experts(), torch.tensor([[1]])
    chosen = chosen_of(module)
    chosen.want_for(module, (None, None), None)
    assert chosen.expected is None
    module.config._experts_implementation = "deepgemm"
    chosen.want_for(module, (None, index), None)
    assert chosen.expected is None
    module.config._experts_implementation = "eager"
    nn.utils.parametrize.register_parametrization(module, "down_proj", nn.Identity())
    chosen.want_for(module, (None, index), None)
    assert chosen.expected is None


def test_of_a_part_of_experts_nothing_comes_before_their_tokens(monkeypatch):
    """Claim: their own forward has the choice; numbers outside are other ranks'. Twins: other
    ranks' tokens that are computed too find the last one; replaced code finds all rows, and all
    ranks bring the same ahead."""
    module = experts()
    monkeypatch.setattr(chosen_experts, "exchanges_of", lambda module: [object()])
    chosen, index = chosen_of(module), torch.tensor([[0, 2], [2, 4]])
    chosen.want_for(module, (None, index, None), None)
    assert chosen.expected == frozenset() and not chosen.come_ahead
    chosen.want_arrived(module, (None, index, None), None)
    assert chosen.expected == {0, 2}
    monkeypatch.setattr(chosen_experts, "clamps_choice", lambda module: True)
    chosen.want_arrived(module, (None, index, None), None)
    assert chosen.expected == {0, 2, 3}
    monkeypatch.setattr(type(module), "forward", lambda self, *args: None)
    chosen.want_for(module, (None, index, None), None)
    assert chosen.expected is None and not chosen.come_ahead


def test_missing_rows_are_taken_once():
    chosen = chosen_of(experts())
    chosen.want(frozenset([1]))
    chosen.choose()
    assert chosen.take_missing() == set()
    chosen.want(frozenset([1, 3]))
    assert chosen.take_missing() == {3} and chosen.there == {1, 3}
    assert chosen.take_missing() == {0, 2}, "without a word, a use needs all"
    assert chosen.there is None and chosen.take_missing() == set()


def test_neighbours_are_one_span():
    module = experts()
    gate, down = (param[0].numel() for param in module.parameters())
    spans = chosen_of(module).places(frozenset([0, 1, 3]))
    assert spans == [
        [
            (0, 2 * gate),
            (3 * gate, 4 * gate),
            (4 * gate, 4 * gate + 2 * down),
            (4 * gate + 3 * down, 4 * gate + 4 * down),
        ]
    ]
    assert chosen_of(module).places(None) is None


def test_large_frozen_embeddings_send_their_tokens_rows():
    """Twins: trained, small, or renormalised ones are whole, and own classes."""

    def table(rows: int = 8192, **options) -> nn.Embedding:
        return nn.Embedding(rows, 64, **options).requires_grad_(False)

    class Own(nn.Embedding):
        def forward(self, mask):
            return super().forward(mask.cumsum(-1))

    assert is_frozen_table(table())
    assert not is_frozen_table(nn.Embedding(8192, 64)) and not is_frozen_table(table(64))
    assert not is_frozen_table(table(max_norm=1.0))
    assert not is_frozen_table(Own(8192, 64).requires_grad_(False))
    module = table()
    chosen = chosen_of(module)
    chosen.want_for(module, (torch.tensor([[7, 7, 8191]]),), None)
    assert chosen.expected == {7, 8191}


def test_other_forms_of_known_classes_are_whole():
    """Claim: weights that are computed, cut across, of another class or of another count are no
    rows; nor those of a class that only derives from a known one."""
    parametrized = experts()
    nn.utils.parametrize.register_parametrization(parametrized, "down_proj", nn.Identity())
    across = experts()
    across.down_proj = nn.Parameter(across.down_proj.data.transpose(1, 2))
    more = experts()
    more.scale = nn.Parameter(torch.ones(3, 5))
    flat = experts()
    flat.scale = nn.Parameter(torch.ones(4))
    fewer = experts()
    fewer.num_experts = 2

    class Derived(modeling.Qwen3MoeExperts):
        """An own class."""

    class Carried(nn.Parameter):
        """An own class of parameters."""

    carried = experts()
    carried.down_proj = Carried(carried.down_proj.data)
    for module in (parametrized, across, more, flat, fewer, Derived(experts().config), carried):
        assert not has_experts(module)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "olmoe", "glm4_moe"])
def test_families_are_known(family):
    """Claim: the fused experts of transformers' mixtures are found. Twin: no other module is."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "intermediate_size": 128,
        "moe_intermediate_size": 128, "num_local_experts": 4, "n_routed_experts": 4,
        "num_experts": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "head_dim": 16,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    found = [name.split(".")[-1] for name, module in model.named_modules() if has_experts(module)]
    assert found == ["experts", "experts"]
