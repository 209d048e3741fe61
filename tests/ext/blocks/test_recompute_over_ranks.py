"""Recompute over ranks: each data rank chooses for its own blocks."""

from __future__ import annotations

import pytest
from ranks import Jobs

pytestmark = pytest.mark.timeout(700)

BLOCKS = 4


@pytest.mark.parametrize(
    ("shard", "choices"),
    [
        ("parameters", ["recomputed", "kept"]),
        ("parameters", ["products_sent", "recomputed"]),
        ("gradients", ["sent", "recomputed"]),
        ("optimizer", ["recomputed", "products_kept"]),
    ],
)
def test_ranks_that_choose_otherwise_have_the_same_bits(shard, choices, standing_ranks, swap):
    """Method: two ranks with other choices, whose weights come from a disk. Twin: a rank that
    recomputes runs each block twice in a step, and one that does not runs each once."""
    given = {"shard": shard, "choices": choices, "meets": False, "nvme": str(swap)}
    found = Jobs(standing_ranks(2), "recompute_jobs", {"chosen": given})["chosen"]
    for rank, choice in zip(found, choices):
        assert rank["plain"]["losses"] == rank["chosen"]["losses"]
        assert rank["plain"]["values"] == rank["chosen"]["values"]
        again = choice in ("recomputed", "products_kept", "products_sent")
        assert rank["chosen"]["runs"] == BLOCKS * (1 + again)
        assert rank["chosen"]["blocks"][choice] == BLOCKS


def test_a_block_that_meets_other_ranks_does_not_run_again(standing_ranks, swap):
    """The other rank would wait for it. Twin: above, blocks that do not."""
    given = {"shard": "parameters", "choices": ["recomputed", "kept"], "meets": True}
    given["nvme"] = str(swap)
    found = Jobs(standing_ranks(2), "recompute_jobs", {"chosen": given})["chosen"]
    for rank, choice in zip(found, ("sent", "kept")):
        assert rank["plain"]["losses"] == rank["chosen"]["losses"]
        assert rank["chosen"]["runs"] == BLOCKS and rank["chosen"]["blocks"][choice] == BLOCKS
