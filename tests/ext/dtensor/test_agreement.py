"""What ranks of a group must have in common is compared where they meet: two ranks over gloo, of
which the second differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import agreement_jobs
import pytest
from ranks import Jobs

DIFFERS = {
    "batch": "UsageError: a forward: argument 0 is int64 of (2, 16) with digest",
    "length": "UsageError: a forward: argument 0 is int64 of (2, 16) with digest",
    "evaluation batch": "UsageError: a forward: argument 0 is int64 of (2, 16) with digest",
    "mode": (
        "UsageError: a forward: the mode is training, with gradients on rank 0 and evaluation, with"
        " gradients on rank 1"
    ),
    "drops by other seeds": (
        "UsageError: a step: the state of torch's generator before what was drawn is digest"
    ),
    "labels": "UsageError: a step: the gradient of what the model gives differs between ranks",
    "scale": "UsageError: a step: the gradient of what the model gives differs between ranks",
    "experts batch": "UsageError: a forward: argument 0 is int64 of (2, 16) with digest",
    "experts seeds": (
        "UsageError: a step: the state of torch's generator before what was drawn is digest"
    ),
    "experts labels": (
        "UsageError: a step: the gradient of what the model gives differs between ranks"
    ),
}
TWINS = ("batch", "drops by other seeds", "labels")
CUTS = {
    "depth": "ConfigError: pipeline: the number of layers is 4 on rank 0 and 6 on rank 1",
    "schedule": "ConfigError: pipeline: schedule is 1F1B on rank 0 and GPipe on rank 1",
    "micro-batches": "ConfigError: pipeline: micro_batches is 4 on rank 0 and 8 on rank 1",
    "chunks": "ConfigError: pipeline: chunks is 1 on rank 0 and 2 on rank 1",
    "ties": (
        "ConfigError: pipeline: parameters that are one is model.embed_tokens.weight ="
        " lm_head.weight on rank 0 and none on rank 1"
    ),
    "a configuration": (
        "ConfigError: pipeline: Config(max_grad_norm) is 1.0 on rank 0 and 2.0 on rank 1"
    ),
    "one that does not fit": "ConfigError: pipeline: schedule is auto on rank 0 and 2F2B on rank 1",
    "a plan": (
        "ConfigError: tensor_parallel: the plan for blocks.*.attention.q is colwise on rank 0 and"
        " absent on rank 1"
    ),
    "a plan that does not fit": "ConfigError: ",
    "an exchange": (
        "ConfigError: expert_parallel: exchange is outputs on rank 0 and tokens on rank 1"
    ),
}
CALLS = {
    "pipe": ("step()", "eval()"),
    "eval": ("training", "evaluation"),
    "schedule": ("1F1B", "GPipe"),
    "micro-batches": ("8", "4"),
}


@pytest.fixture(scope="module")
def two(standing_ranks) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    jobs: dict[str, dict] = {f"differs:{what}": {"what": what} for what in ("nothing", *DIFFERS)}
    jobs |= {f"differs:{what}-twin": {"what": what, "fault": True} for what in TWINS}
    jobs |= {f"cuts:{what}": {"what": what} for what in CUTS} | {
        f"calls:{what}": {"what": what} for what in CALLS
    }
    jobs |= {
        f"cut_rest:{what}": {"what": what}
        for what in ("tied", "one key head", "drops", "tensor_parallel")
    }
    jobs["plainly_right"] = {}
    return Jobs(standing_ranks(2), "agreement_jobs", jobs)


@pytest.mark.parametrize("what", DIFFERS)
def test_ranks_with_parts_of_the_same_tensors_are_told_where_they_differ(two, what):
    """On both ranks, before anything was changed; a right step follows."""
    for rank in two[f"differs:{what}"]:
        assert rank["said"].startswith(DIFFERS[what]), rank["said"]
        assert rank["kept"] and rank["goes on"] == "was taken", rank["goes on"]


@pytest.mark.parametrize("what", TWINS)
def test_without_the_comparison_nobody_is_told(two, what):
    """The failing twin: weights change by gradients of no loss."""
    for rank in two[f"differs:{what}-twin"]:
        assert rank["said"] == "was taken" and not rank["kept"]


def test_ranks_that_do_not_differ_are_not_refused(two):
    """Nor where they may differ: in seeds of which nothing is drawn, in parts of a sequence."""
    for rank in two["differs:nothing"]:
        assert rank["said"] == "was taken" and not rank["kept"]
    for rank in two["plainly_right"]:
        assert rank == ["was taken"] * 2


@pytest.mark.parametrize("what", CUTS)
def test_a_model_is_not_cut_where_ranks_were_given_something_else(two, what):
    for rank in two[f"cuts:{what}"]:
        assert rank.startswith(CUTS[what]), rank
    assert "upper is not a module" in "".join(two["cuts:a plan that does not fit"])


@pytest.mark.parametrize("what", CALLS)
def test_a_call_is_compared_by_its_arguments(two, what):
    first, second = two[f"calls:{what}"]
    for rank in (first, second):
        assert rank["said"].startswith("UsageError: rank ") and all(
            word in rank["said"] for word in CALLS[what]
        ), rank["said"]
        assert rank["goes on"] == "was taken"


def test_the_rest_of_a_mixture_is_cut_as_tensor_parallel_cuts(two):
    """Ties, heads that do not divide, dropout inside of regions."""
    for found, expected in two["cut_rest:tied"]:
        assert found == pytest.approx(expected, rel=1e-5)
    for rank in two["cut_rest:one key head"]:
        assert "1 heads (num_key_value_heads) cannot be shared out to 2 ranks" in rank
    first, second = two["cut_rest:drops"][0]
    assert len(first) == len(second) == 2 and all(
        mine != theirs for mine, theirs in zip(first, second)
    )


def test_tensor_parallel_refuses_stripes_with_the_model_as_it_was(two):
    for said, is_cut in two["cut_rest:tensor_parallel"]:
        assert said.startswith(
            "ConfigError: the model's plan cuts model.layers.0.mlp.experts.gate_up_proj as"
            " 'packed_colwise'"
        )
        assert "expert_parallel(model, mesh, cut_rest=True)" in said and not is_cut


def test_every_difference_has_a_job():
    assert set(CUTS) == set(agreement_jobs.CUTS)
