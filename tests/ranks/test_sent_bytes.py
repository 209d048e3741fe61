"""What a rank says that it sends is what the kernel counts (see `sent_jobs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ranks import Jobs

pytestmark = pytest.mark.timeout(400)
SENT = {"share_homes": False}
REPLICAS = {"config": SENT, "shape": (2, 1)}
CASES: dict[str, dict[str, Any]] = {
    "parameters": {"config": SENT},
    "gradients": {"config": SENT | {"shard": "gradients"}},
    "optimizer": {"config": SENT | {"shard": "optimizer"}},
    "bf16": {"config": SENT, "dtype": torch.bfloat16},
    "codes": {"config": SENT | {"compress_gathers": True}},
    "replicas": REPLICAS,
    "shared memory": {"config": {"share_homes": True}},
}
UNIT = 512 * 512 * 4 // 2  # bytes of a layer in fp32 that one of two ranks sends
# Layers that a step gathers, at least and at most: some stay until the backward.
GATHERED = {"parameters": (4, 8), "gradients": (4, 4), "optimizer": (4, 4)}


@pytest.fixture(scope="module")
def two(standing_ranks) -> Mapping[str, list[Any]]:
    jobs = {f"sent:{name}": given for name, given in CASES.items()}
    jobs["sent:besides"] = {"config": SENT, "besides": UNIT // 8}
    return Jobs(standing_ranks(2), "sent_jobs", jobs)


def apart(found: dict[str, Any]) -> float:
    """How many times the counted bytes the kernel has counted."""
    counted = sum(nbytes for name, nbytes in found["nbytes"].items() if name != "shared memory")
    return found["kernel"] / counted


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_counts_what_stats_say_is_sent(two, case):
    """Within 1 %, which is the transport's own headers. Twin: the loop itself sends an eighth of
    a layer more."""
    for found in two[f"sent:{case}"]:
        assert found["nbytes"].keys() == found["operations"].keys()
        assert 1 <= apart(found) < 1.01, found
    for found in two["sent:besides"]:
        assert apart(found) > 1.01


@pytest.mark.parametrize("shard", GATHERED)
def test_each_kind_counts_its_operations_and_bytes(two, shard):
    """Three steps of four layers. Flags travel beside gradients only where updates begin early."""
    for found in two[f"sent:{shard}"]:
        assert found["operations"]["reduce-scatter"] == 3 * 4
        assert found["nbytes"]["reduce-scatter"] == 3 * 4 * UNIT
        gathers = found["operations"]["all-gather"]
        least, most = GATHERED[shard]
        assert 3 * least <= gathers <= 3 * most
        assert found["nbytes"]["all-gather"] == gathers * UNIT
        assert found["operations"]["sync points"] > 0 and found["nbytes"]["sync points"] > 0
        assert not found["operations"]["shared memory"]


def test_replicas_send_sums_and_shared_memory_sends_no_weights(two):
    for found in two["sent:replicas"]:
        assert found["nbytes"]["all-gather over replicas"] == 3 * 4 * 2 * UNIT
        assert not found["nbytes"]["reduce-scatter"] and not found["operations"]["reduce-scatter"]
    for found in two["sent:shared memory"]:
        assert found["nbytes"]["shared memory"] == found["operations"]["shared memory"] * UNIT > 0
        assert not found["nbytes"]["all-gather"]
