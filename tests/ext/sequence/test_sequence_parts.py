"""Sequences whose tokens are divided over two ranks train as in one process (Jacobs et al. 2023,
DeepSpeed Ulysses).

**part**: see `infinity.ext.sequence.sequence_parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
from ranks import Jobs, near
from sequence_jobs import TOKENS

MODELS = [
    "llama",  # two heads of queries for one of keys
    "windows",  # a layer with a window
    pytest.param("gpt2", marks=pytest.mark.slow),  # places that are learned
    pytest.param("mixtral", marks=pytest.mark.slow),
]
REFUSED = {
    "no language model": "ConfigError: sequence_parallel: BertForMaskedLM is not a causal language",
    "no model of transformers": "ConfigError: sequence_parallel: Linear is not a causal language",
    "state space": "Mamba2ForCausalLM",
    "heads": "num_attention_heads=3 cannot be divided among 2 ranks",
    "mesh": "ConfigError: sequence_parallel takes the cp axis of a mesh",
    "models differ": "ConfigError: sequence_parallel: the model is LlamaForCausalLM on rank 0 and",
    "balanced experts": "the loss that balances experts is not a mean over tokens",
    "flex": "flex_attention needs masks",
    "no positions": "the forward of Counts takes no position_ids",
    "unchanged": "sdpa",
    "length": "UsageError: 23 tokens cannot be divided into 2 equal parts: give 22 or 24",
    "padding": "UsageError: a padded batch cannot be divided",
    "packed": "UsageError: position_ids that are not 0, 1, 2, ... (packed samples)",
    "unknown": "UsageError: token_type_ids has no parts",
    "no tokens": "UsageError: a forward over parts of sequences needs input_ids or inputs_embeds",
    "last logits": "UsageError: logits_to_keep and output_router_logits have no parts",
    "other batches": "ConfigError: a forward over parts of sequences: input_ids is",
    "on one rank": "23 tokens cannot be divided into 2 equal parts: give 22 or 24",
    "goes on": "was taken",
    "recompute": "ConfigError: recompute: not available with parts of sequences (cp=2)",
    "generation": "To generate, load the saved model in one process",
}


RIGHT = ["dynamic", "longrope", "yarn", "frequencies"]
DEPENDENT = {
    "scaled": "what model.layers.0.self_attn (Scaled) gives a token depends on",
    "places": "what model.embed_tokens (Places) gives a token depends on",
    "learned frequencies": "what model.rotary_emb (Frequencies) gives a token depends on",
}
TWINS = ["dynamic", "longrope", "scaled", "places"]


@pytest.fixture(scope="module")
def two(launch_folder, standing_ranks) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    swap = launch_folder / "swap"
    host = models.at_home("host", "host", swap)
    on_disk = models.at_home("nvme", "nvme", swap) | {"activations": "nvme"}
    jobs: dict[str, dict] = {
        f"parts:{name}": {"name": name, "configs": [host, on_disk], "folder": str(swap / name)}
        for name in ("llama", "windows", "gpt2", "mixtral")
    }
    jobs |= {f"rotated:{name}": {"name": name} for name in (*RIGHT, *DEPENDENT)}
    jobs |= {f"rotated:{name}-twin": {"name": name, "fault": True} for name in TWINS}
    jobs |= {"adapters": {"config": host}, "refused": {}, "memory": {}}
    return Jobs(standing_ranks(2), "sequence_jobs", jobs)


@pytest.mark.parametrize("name", MODELS)
def test_ulysses_ranks_with_parts_of_a_sequence_train_as_one_process(two, name):
    """The loss on all ranks, its gradients and the logits of each part, with the same bits from the
    host and, computed again in the backward, from a disk. The twin: attention within each part
    alone has another loss."""
    for rank in two[f"parts:{name}"]:
        first, on_disk = rank["homes"]
        assert near(first["losses"][:1], rank["one process"][:1])
        assert near(first["losses"], rank["one process"], 1e-4)
        assert first["grads off"] < 1e-6 and rank["logits off"] < 1e-5
        assert on_disk["losses"] == first["losses"]
        assert not models.differing(on_disk["weights"], first["weights"])
        assert on_disk["saved"] and on_disk["tokens"] == TOKENS // 2
        assert abs(rank["apart"][0] - rank["one process"][0]) > 1e-4
    first, second = two[f"parts:{name}"]
    assert first["homes"][0]["losses"] == second["homes"][0]["losses"]
    assert not models.differing(first["homes"][0]["weights"], second["homes"][0]["weights"])


@pytest.mark.parametrize("name", RIGHT)
def test_frequencies_of_a_part_are_those_of_the_whole_sequence(two, name):
    """Though some are chosen by the largest position, at lengths that only the whole sequence
    has."""
    for said, off in two[f"rotated:{name}"]:
        assert said == "was taken" and off < 2e-5, (said, off)


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_depends_on_the_length_is_refused_by_its_module(two, name):
    """Attention scaled by the length, places that are counted anew, frequencies that are learned
    and chosen by the largest position. Both ranks raise before a step."""
    for said, _ in two[f"rotated:{name}"]:
        assert said.startswith(f"ConfigError: sequence_parallel: {DEPENDENT[name]}"), said


@pytest.mark.parametrize("name", TWINS)
def test_a_part_alone_would_train_something_else(two, name):
    """The failing twin: each module gets the part, and none is tried."""
    for said, off in two[f"rotated:{name}-twin"]:
        assert said == "was taken" and off > 2e-5, (said, off)


def test_two_parts_have_half_of_the_memory_each(two):
    """Method: all results of all operations, whole models, gradients and exchanges among them."""
    for rank in two["memory"]:
        assert 0.4 * rank["one process"] < rank["part"] < 0.6 * rank["one process"]


def test_adapters_train_on_parts_of_sequences(two):
    for rank in two["adapters"]:
        assert near(rank["losses"], rank["one process"], 1e-4) and rank["grads off"] < 1e-6


@pytest.mark.slow
def test_data_ranks_beside_parts_have_the_mean_of_their_batches(standing_ranks):
    config = {"config": {"params": "host", "optimizer": "host"}}
    found = Jobs(standing_ranks(4), "sequence_jobs", {"data_and_parts": config})["data_and_parts"]
    assert all(rank["grads off"] < 1e-6 for rank in found)
    assert len({rank["loss"] for rank in found}) == 2


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_parts_is_refused_on_both_ranks(two, what):
    for rank in two["refused"]:
        assert REFUSED[what] in rank[what], rank[what]
