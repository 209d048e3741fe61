"""Gradients averaged in buckets, where a budget has no room for whole ones: the bits of whole ones,
in less device memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
import rank_jobs
import torch
from ranks import Jobs
from test_ranks import MODES, one_process

pytestmark = pytest.mark.timeout(300)
PIECE = 64 * 1024  # two of which are less than the gradient of a block
TIGHT = {"parameters": "1.25MiB", "gradients": "1.75MiB", "optimizer": "1.25MiB"}


def config_of(mode: str, home: str, folder) -> dict[str, Any]:
    return models.at_home(home, home, folder) | {"shard": mode, "device_memory": TIGHT[mode]}


@pytest.fixture(scope="module")
def two(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    jobs: dict[str, dict] = {}
    for mode in MODES:
        parity = {"job": "parity", "config": config_of(mode, "host", folder)}
        jobs[f"bucketed:{mode}"] = parity | {"piece": PIECE}
        jobs[f"bucketed:lost {mode}"] = parity | {"piece": PIECE, "loses": True}
        jobs[f"bucketed:uneven {mode}"] = {
            "job": "uneven",
            "piece": PIECE,
            "shard": mode,
            "home": "host",
            "folder": str(folder),
        }
    jobs["bucketed:uneven replicas"] = jobs["bucketed:uneven parameters"] | {
        "shape": (2, 1),
        "names": ("dp_replicate", "dp_shard"),
    }
    jobs["bucketed:nvme"] = {
        "job": "parity",
        "piece": PIECE,
        "config": config_of("parameters", "nvme", folder),
    }
    host, narrow = config_of("parameters", "host", folder), {"dtype": torch.bfloat16}
    parity = {"job": "parity", "piece": PIECE}
    jobs["bucketed:bf16"] = parity | narrow | {"config": host | {"device_memory": "700KiB"}}
    jobs["bucketed:whole bf16"] = parity | narrow | {"config": host | {"device_memory": None}}
    codes = parity | {"config": host | {"compress_gathers": True, "device_memory": "2MiB"}}
    whole = host | {"compress_gathers": True, "device_memory": None}
    jobs |= {"bucketed:codes": codes, "bucketed:whole codes": codes | {"config": whole}}
    late = host | {"device_memory": "1.5MiB"}
    jobs["bucketed:late"] = parity | {"job": "elsewhere", "config": late}
    return Jobs(standing_ranks(2), "bucket_jobs", jobs)


def reductions(found: dict[str, Any]) -> int:
    return found["stats"]["collectives"]["reduce-scatter"]["operations"]


@pytest.mark.parametrize("case", [*MODES, "nvme"])
def test_buckets_have_the_bits_of_one_process(two, case):
    """Weights and moments on both ranks, in several sums for each block. Twin: ranks that
    lose what the first bucket does not have."""
    weights, optimizer, _ = one_process(2)
    for found in two[f"bucketed:{case}"]:
        assert reductions(found) > 2 * 3 * 5
        assert not models.differing(found["weights"], weights)
        assert not models.differing(
            rank_jobs.moments(found["optimizer"]), rank_jobs.moments(optimizer)
        )
        tier = found["stats"]["tiers"]["device"]
        assert tier["peak_nbytes"] <= tier["planned_nbytes"] <= tier["budget_nbytes"]
    if case in MODES:
        assert models.differing(two[f"bucketed:lost {case}"][0]["weights"], weights)


def test_buckets_of_bf16_and_of_devices_of_their_own_have_the_bits_of_whole_gradients(two):
    weights, *_ = one_process(2)
    assert all(not models.differing(found["weights"], weights) for found in two["bucketed:late"])
    for found, whole in zip(two["bucketed:bf16"], two["bucketed:whole bf16"], strict=True):
        assert reductions(found) > 2 * reductions(whole)
        assert not models.differing(found["weights"], whole["weights"])


def test_compressed_weights_come_in_buckets_where_a_budget_is_given(two):
    """The bits of codes that come whole, on both ranks, in several gathers for each block and
    within the plan, which counts the codes. Twin: without a budget each is one gather."""

    def gathers(found: dict[str, Any]) -> int:
        return found["stats"]["collectives"]["all-gather"]["operations"]

    for found, whole in zip(two["bucketed:codes"], two["bucketed:whole codes"], strict=True):
        assert not models.differing(found["weights"], whole["weights"])
        assert gathers(found) > 2 * gathers(whole)
        tier, of_whole = (each["stats"]["tiers"]["device"] for each in (found, whole))
        assert tier["peak_nbytes"] <= tier["planned_nbytes"] <= tier["budget_nbytes"]
        assert of_whole["peak_nbytes"] <= of_whole["planned_nbytes"]


@pytest.mark.parametrize("mode", [*MODES, "replicas"])
def test_ranks_that_skip_other_parts_average_in_buckets(two, mode):
    """In the least device memory, against plain torch that is given both batches."""
    first, second = two[f"bucketed:uneven {mode}"]
    assert not models.differing(first["weights"], second["weights"])
    assert first["off"] < 1e-4 and first["within"] and second["within"]
