"""Megatron-LM's own numbers hold: parameter counts, and what passes between the ranks of a layer.

Source: Shoeybi et al., Megatron-LM (2019), table 1 and section 3. The communication is counted by
torch's CommDebugMode on two ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import infinity

VOCABULARY, LENGTH = 51_200, 1_024
SIZES = {(1536, 40): 1.213e9, (1920, 54): 2.490e9, (2304, 64): 4.199e9, (3072, 72): 8.317e9}


class Layer(nn.Module):
    """A GPT-2 layer with layers of its own for queries, keys and values, as they are cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)


@pytest.mark.parametrize(("size", "count"), SIZES.items(), ids=str)
def test_parameter_counts_of_the_paper(size, count):
    """A vocabulary of 51,200 (padded to a multiple of 128 x 8) and 1,024 positions, input and
    output embedding tied."""
    with torch.device("meta"):
        model = GPT(*size)
    found = sum(param.numel() for param in model.parameters())
    assert round(found / 1e9, 3) == round(count / 1e9, 3)
    plan = infinity.parallel.find_plan(model)
    cut = sum(
        p.numel()
        for name in ("q", "k", "v", "o", "up", "down")
        for layer in model.layers
        for p in layer.get_submodule(name).parameters()
    )
    assert {name for name, style in plan.items() if style == "rowwise"} == {
        "layers.*.o",
        "layers.*.down",
    }
    assert plan["tokens"] == "embedding_rowwise" and "positions" not in plan
    assert (cut + model.tokens.weight.numel()) / found > 0.99


@pytest.fixture(scope="module")
def counted(standing_ranks) -> dict:
    return standing_ranks(2).run("parallel_jobs", "communication", {"layers": 3})[0]


def test_megatron_has_two_all_reduces_forward_and_two_backward_in_a_layer(counted):
    """Of b x s x h elements each, and none else, whether the weights are on the device or at
    home."""
    for where in ("torch", "ours"):
        forward, backward = counted[where]["forward"], counted[where]["backward"]
        assert forward == [counted["bsh"]] * (2 * 3 + 1), where  # and the vocabulary's
        assert backward == [counted["bsh"]] * (2 * 3 + 1), where  # and the head's


def test_the_loss_moves_three_scalars_a_token_and_never_the_logits(counted):
    """loss_parallel: the largest logit, the sum of exponentials, the target's logit; the gradient
    needs nothing more."""
    for where in ("torch", "ours"):
        assert sorted(counted[where]["loss"]) == [counted["bs"]] * 3, where
        assert max(counted[where]["loss"]) < counted["bsv"]
