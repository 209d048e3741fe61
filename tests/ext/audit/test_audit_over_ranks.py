"""Audits over ranks: gathered weights have the same bits on all of them, and averaged gradients are
the sums of what the ranks gave.

Words used here: see `ranks` (job) and `audit_jobs` (planted flip).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from models import differing
from ranks import Jobs

pytestmark = pytest.mark.timeout(700)

WAYS: dict[str, dict[str, Any]] = {
    "parameters": {},
    "gradients": {"shard": "gradients"},
    "optimizer": {"shard": "optimizer"},
}
FEW, MANY = 4, 100  # flips of sums
PLANTS = ("a sum", "own weights", "others' weights")


@pytest.fixture(scope="module")
def two(standing_ranks) -> Mapping[str, list[Any]]:
    jobs: dict[str, dict[str, Any]] = {
        f"audited:{way}-{share}": {"config": config, "audit": share, "dtype": torch.bfloat16}
        for way, config in WAYS.items()
        for share in (0.0, 1.0)
    }
    for plant in PLANTS:
        for share in (0.0, 1.0):
            given = {"config": {}, "audit": share, "plant": plant}
            jobs[f"audited:{plant}-{share}"] = given
    jobs["audited:early"] = {"config": {}, "audit": 1.0, "early": True}
    jobs |= {f"flipped_sums:{count}": {"count": count} for count in (FEW, MANY)}
    return Jobs(standing_ranks(2), "audit_jobs", jobs)


@pytest.mark.parametrize("way", WAYS)
def test_audits_over_ranks_change_no_bit(way, two):
    """Twin: with audits reductions and gathers were compared."""
    without, found = two[f"audited:{way}-0.0"], two[f"audited:{way}-1.0"]
    for one, other in zip(without, found):
        assert one["error"] == other["error"] == "was taken"
        assert not differing(one["weights"], other["weights"])
        assert other["audited"]["found"] == [] and one["audited"] == {}
        pieces = other["audited"]["pieces"]
        assert pieces["reductions"] > 0 and pieces["gathered weights"] > 0


@pytest.mark.parametrize("plant", PLANTS)
def test_a_flip_on_one_rank_is_found_on_it_and_stops_all(plant, two):
    """Twin: without audits it is not found."""
    first, second = two[f"audited:{plant}-1.0"]
    if plant == "others' weights":  # by the fingerprints, which all ranks compare
        for found in (first, second):
            assert "on ranks [1] of the shard group than on rank 0" in found["error"]
    else:
        what = "average of the gradient" if plant == "a sum" else "not those at home"
        assert what in second["error"] and "(rank 1)" in second["error"]
        assert first["error"].startswith("PeerError") and "(rank 1)" in first["error"]
    assert second["error"].startswith("CorruptionError") and "step 3" in second["error"]
    assert first["steps"] == second["steps"] == 2
    assert {each["error"] for each in two[f"audited:{plant}-0.0"]} == {"was taken"}


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_every_flip_of_a_sum_is_found_and_named(count, two):
    """Method: a random bit of a random sum, on a random rank, before one of two steps, of jobs of
    which half step in the backward. Twin: the jobs above, where none is flipped."""
    for one, other in zip(*two[f"flipped_sums:{count}"], strict=True):
        found, told = (one, other) if one["rank"] == 0 else (other, one)
        assert found["error"].startswith("CorruptionError: audit: the average of the gradient of")
        assert f"before step {one['step'] + 1} is not the sum" in found["error"]
        assert f"(rank {one['rank']})" in found["error"] and found["taken"] == one["step"]
        assert told["error"].startswith("PeerError") and told["taken"] == one["step"]


def test_steps_in_the_backward_are_audited(two):
    """Method: a plain job and one that steps in its backward. Reductions are compared as often."""
    for plain, early in zip(two["audited:parameters-1.0"], two["audited:early"]):
        assert early["error"] == "was taken" and not early["audited"]["left_out"]
        of_plain, of_early = plain["audited"]["pieces"], early["audited"]["pieces"]
        assert of_early["reductions"] == of_plain["reductions"]
        assert of_early["gathered weights"] > of_early["reductions"]
