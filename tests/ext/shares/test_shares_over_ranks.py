"""infinity.Shares over several ranks: the loss and the weights of one process, whatever the shares.

Words used here: see `ranks` (job) and `share_jobs`. **one process**: plain torch, which is given
the whole batch of each step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import models
import parallel_jobs
import pytest
import share_jobs
import torch
from decoder import decoder
from rank_jobs import build, cloned
from ranks import Jobs, near
from share_jobs import HOST

pytestmark = pytest.mark.timeout(700)

WAYS: dict[str, dict[str, Any]] = {
    "parameters": {"config": HOST},
    "gradients": {"config": HOST | {"shard": "gradients"}},
    "optimizer": {"config": HOST | {"shard": "optimizer"}},
    "replicas": {"config": HOST, "shape": (2, 1), "names": ("dp_replicate", "dp_shard")},
    "clip": {"config": HOST, "clip": 0.5},
    "max_grad_norm": {"config": HOST | {"max_grad_norm": 0.5}},
    "micro": {"config": HOST, "micro": 3},
    "micro-optimizer": {"config": HOST | {"shard": "optimizer"}, "micro": 3},
    "block": {"config": HOST, "micro": 3, "block": True},
}
OF_FOUR = {
    "hybrid": {"config": HOST, "shape": (2, 2), "names": ("dp_replicate", "dp_shard")},
    "parameters": {"config": HOST},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    folder = tmp_path_factory.mktemp("shares")
    jobs: dict[str, dict[str, Any]] = {f"uneven:{way}": given for way, given in WAYS.items()}
    jobs["uneven:unweighed"] = {"config": HOST, "shares": False}
    jobs |= {f"followed:{mode}": WAYS[mode] for mode in ("parameters", "optimizer")}
    jobs["resumed"] = {"path": str(folder / "saved"), "config": HOST}
    jobs |= {name: {} for name in ("measured", "of_order", "refused", "on_other_shares")}
    jobs |= {"refused_axis": {"axis": "cp"}, "slow": {}, "of_tokens": {}}
    return Jobs(standing_ranks(2), "share_jobs", jobs)


@functools.cache
def one_process(steps: int = 3, clip: float | None = None) -> tuple[dict, list[float]]:
    """The weights and losses of one process."""
    model = build()
    optimizer = share_jobs.sgd(model)
    losses = [
        share_jobs.step(model, optimizer, share_jobs.batch_of(number), clip=clip).item()
        for number in range(steps)
    ]
    return cloned(model.state_dict()), losses


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name] - value).abs().max().item() for name, value in other.items())


def check(found: list[dict], weights: dict, losses: list[float]) -> None:
    """All ranks have the same bits, which are those of one process within fp32 rounding."""
    for of_rank in found:
        assert not models.differing(of_rank["weights"], found[0]["weights"])
        assert furthest(of_rank["weights"], weights) < 2e-6
        assert not of_rank["losses"] or near(of_rank["losses"], losses, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_uneven_shares_have_the_loss_and_the_weights_of_one_process(way, two):
    """Nine samples on one rank and three on the other."""
    found = two[f"uneven:{way}"]
    assert [of_rank["slice"] for of_rank in found] == [slice(0, 9), slice(9, 12)]
    check(found, *one_process(clip=0.5 if way in ("clip", "max_grad_norm") else None))


def test_uneven_shares_without_weights_end_elsewhere(two):
    """The twin: an average of both ranks' means is not the mean of the batch."""
    weights, _ = one_process()
    assert furthest(two["uneven:unweighed"][0]["weights"], weights) > 1e-4


@pytest.mark.parametrize("mode", ["parameters", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_shares_follow_the_slow_rank_and_no_loss_shows_it(mode, two):
    """Rank 1 takes twice as long, from step 25 on rank 0 does: shares turn within 40 steps, and all
    losses are those of one process."""
    found = two[f"followed:{mode}"]
    counts = [list(pair) for pair in zip(*(of_rank["counts"] for of_rank in found))]
    assert counts[19:21] == [[6, 6], [8, 4]]
    assert counts[39:41] == [[8, 4], [4, 8]]
    weights, losses = one_process(42)
    for of_rank in found:
        assert not models.differing(of_rank["weights"], found[0]["weights"])
        assert near(of_rank["losses"], losses, 1e-4)
        assert furthest(of_rank["weights"], weights) < 1e-3


def test_a_rank_that_is_ten_times_slower_computes_one_sample(two):
    """And its gradient counts for one: the weights are those of one process."""
    found = two["slow"]
    assert [of_rank["counts"] for of_rank in found] == [[6, 6, 11, 11], [6, 6, 1, 1]]
    check(found, *one_process(4))


def test_shares_of_a_row_of_tokens_have_the_weights_of_one_process(two):
    """Packed rows: a rank has a stretch of the step's tokens. Twin: without weights others."""
    for of_rank in two["of_tokens"]:
        assert of_rank["slice"] in (slice(0, 75), slice(75, 100))
        assert furthest(of_rank["weights"], of_rank["one process"]) < 1e-6
        assert furthest(of_rank["unweighed"], of_rank["one process"]) > 1e-4


def test_a_rank_whose_blocks_take_long_gets_fewer_samples(two):
    """By the clock: its blocks sleep for each sample, and the rest of its step does not count."""
    found = [of_rank["shares"] for of_rank in two["measured"]]
    assert found[0] == found[1] and sum(found[0]) == 12 and found[0][0] > found[0][1] >= 1


def test_slices_of_an_orders_batches_are_the_whole_batch_in_its_order(two):
    first, second = two["of_order"]
    assert first["batches"] == second["batches"]
    for batch, mine, other in zip(first["batches"], first["own"], second["own"]):
        assert mine + other == batch and (len(mine), len(other)) == (9, 3)


def test_checkpoints_keep_shares(two):
    """Also for twice the batch. Twin: Shares that load nothing begin with even ones."""
    first, second = two["resumed"]
    assert (first["before"], second["before"]) == (slice(0, 8), slice(8, 12))
    assert (first["new"], second["new"]) == (slice(0, 12), slice(12, 24))
    assert (first["twice"], second["twice"]) == (slice(0, 16), slice(16, 24))
    assert (first["after"], second["after"]) == (slice(0, 8), slice(8, 12))


def test_batches_that_ranks_cannot_share_are_refused_on_all_of_them(two):
    for rank, said in enumerate(two["refused"]):
        assert said["few"].startswith("ConfigError: Shares: batch=1 for 2 data ranks"), said
        assert "the batch is 12 samples on rank 0 and 13 samples on rank 1" in said["others"]
        assert "the batch is 12 tokens on rank 0 and 12 samples on rank 1" in said["mixed"]
        assert "the shares is [8, 4] on rank 0 and [7, 5] on rank 1" in said["states"]
        assert said["even"] == str(slice(6 * rank, 6 + 6 * rank))
    for said in two["refused_axis"]:
        assert said.startswith("ConfigError: Shares: not with a mesh that has a cp axis"), said


def test_ranks_on_other_shares_are_told_before_anything_is_averaged(two):
    """As after an interrupt of one rank. They go on with new Shares, which both make."""
    for found in two["on_other_shares"]:
        assert found["said"].startswith("UsageError") and found["again"] == "was taken"
        assert "with shares 8, 4" in found["said"] and "with shares 6, 6" in found["said"]
        assert found["changed"] and furthest(found["weights"], one_process(1)[0]) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("way", OF_FOUR)
def test_four_ranks_and_replicas_have_the_weights_of_one_process(way, standing_ranks):
    """Six, three, two and one samples."""
    found = Jobs(standing_ranks(4), "share_jobs", {"uneven": OF_FOUR[way]})["uneven"]
    assert sorted((of_rank["slice"] for of_rank in found), key=lambda part: part.start) == [
        slice(0, 6),
        slice(6, 9),
        slice(9, 11),
        slice(11, 12),
    ]
    check(found, *one_process())


@pytest.mark.slow
def test_ranks_of_one_tp_group_have_the_share_of_the_slowest(standing_ranks):
    """One of four ranks, two by two, takes twice as long: both ranks of its tp group get four of
    twelve samples, and the weights are those of one process."""
    found = Jobs(standing_ranks(4), "share_jobs", {"over_tensors": {}})["over_tensors"]
    assert [of_rank["counts"] for of_rank in found] == [[6, 6, 8, 8]] * 2 + [[6, 6, 4, 4]] * 2
    model = decoder()
    optimizer = share_jobs.sgd(model)
    for number in range(4):
        parallel_jobs.loss_of(model, share_jobs.batch_of(number), "plain").backward()
        optimizer.step()
        optimizer.zero_grad()
    for of_rank in found:
        assert furthest(of_rank["weights"], model.state_dict()) < 2e-6
