"""Layers cut by columns share their input: its gradient, and that of the norms beside them, has one
all-reduce over the ranks, for models that people train.

Source: Shoeybi et al., Megatron-LM (2019), section 3. Counted by torch's CommDebugMode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ranks import Jobs

ALL = ("llama", "mistral", "qwen3", "gemma3", "opt", "bert", "mixtral", "qwen3_moe")
NORMS = [("qwen3", "plain"), ("qwen3", "small units"), ("qwen3", "reentrant")]
NORMS += [("qwen3_moe", "plain"), ("qwen3_moe", "reentrant"), ("gemma3", "plain")]
NORMS += [(name, "checkpointed") for name in ("llama", "qwen3", "opt", "mixtral")]


@pytest.fixture(scope="module")
def two(launch_folder, standing_ranks) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    pytest.importorskip("transformers", minversion="5.23")
    jobs: dict[str, dict] = {}
    for name in (*ALL, "gpt2"):
        for engine in (False, True):
            jobs[f"all_reduces:{name}-{engine}"] = {"name": name, "engine": engine}
    for name in ("llama", "opt"):
        jobs[f"all_reduces:{name}-apart"] = {"name": name, "engine": False, "apart": True}
    jobs |= {f"two_batches:{name}-{how}": {"name": name, "how": how} for name, how in NORMS}
    jobs["input_sum_bits"] = {}
    return Jobs(standing_ranks(2), "parallel_families", jobs)


@pytest.mark.parametrize("engine", [False, True], ids=["torch", "infinity"])
@pytest.mark.parametrize("name", ALL)
def test_megatron_models_have_two_all_reduces_each_way_in_a_layer(two, name, engine):
    """Attention's and the MLP's, or the experts', with norms of the heads and routing weights."""
    for rank in two[f"all_reduces:{name}-{engine}"]:
        assert rank == {"forward": 2, "backward": 2}


def test_attention_that_stays_whole_has_none(two):
    """GPT-2's queries, keys and values come from one product, which is left whole."""
    assert two["all_reduces:gpt2-True"] == [{"forward": 1, "backward": 1}] * 2


@pytest.mark.parametrize(("name", "count"), [("llama", 5), ("opt", 4)])
def test_layers_that_do_not_share_have_one_each(two, name, count):
    """The twin: without the sharing."""
    for rank in two[f"all_reduces:{name}-apart"]:
        assert rank == {"forward": 2, "backward": count}


def test_the_sum_is_that_of_what_each_rank_adds_up_by_itself(two):
    """The bits of an all-reduce of each rank's own gradient, in fp32. Twin: the sum of each layer's
    all-reduce has others."""
    for rank in two["input_sum_bits"]:
        for ours, expected in zip(rank["ours"], rank["added up"]):
            assert torch.equal(ours, expected)
        assert torch.allclose(rank["apart"], rank["ours"][0], rtol=1e-4)
        assert not torch.equal(rank["apart"], rank["ours"][0])


def test_a_norm_without_its_layers_has_a_sum_of_its_own(two):
    """Both ranks gave it the same input, so that its gradient is twice one rank's."""
    one = torch.nn.LayerNorm(8, bias=False)
    one(torch.arange(24.0).view(3, 8)).square().sum().backward()
    for rank in two["input_sum_bits"]:
        assert torch.equal(rank["outside"], 2 * one.weight.grad) and one.weight.grad.any()
        assert rank["hides"]


@pytest.mark.parametrize(("name", "how"), NORMS)
def test_gradients_of_two_batches_are_those_of_one_process(two, name, how):
    """Each batch's are summed over the ranks once. By transformers' own hook, which sums what is
    there already with what came, those of q_norm and k_norm are not. Checkpointed: a layer's
    recomputation calls its forward alone, beside the engine, and saves the same DTensors."""
    for rank in two[f"two_batches:{name}-{how}"]:
        assert rank["off"] < 1e-5 and rank["norms off"] < 1e-5
