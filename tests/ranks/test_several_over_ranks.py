"""Several optimizers of one model over several ranks."""

from __future__ import annotations

import pytest
from ranks import Jobs

pytestmark = pytest.mark.timeout(700)


@pytest.mark.parametrize("shard", ["parameters", "gradients", "optimizer"])
def test_ranks_step_each_optimizer_together(shard, standing_ranks, tmp_path):
    """With the bits of one process, and through a checkpoint: gradients of one that steps every
    other time add up meanwhile, also when the other is clipped. Twin: ranks that step different
    ones raise."""
    given = {"folder": str(tmp_path), "shard": shard}
    jobs = Jobs(standing_ranks(2), "several_jobs", {"several": given})
    for found in jobs["several"]:
        assert found["same"] and found["resumed"] and found["clipped"]
        assert found["said"] in ("UsageError", "PeerError")


@pytest.mark.parametrize("shard", ["parameters", "optimizer"])
def test_ranks_take_over_together(shard, standing_ranks):
    """Method: two ranks with one batch, beside one process. Twin: frozen parameters cannot join
    over ranks, which is said before anything changes."""
    for found in Jobs(standing_ranks(2), "several_jobs", {"stages": {"shard": shard}})["stages"]:
        assert found["same"] and found["former"] == "UsageError"
        assert "with several ranks: not available" in found["frozen"] and found["goes_on"]
