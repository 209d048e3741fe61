"""Packed weights on two ranks: sharded or whole, from memory and disk, with the library's numbers.

Method: each rank trains adapters on its own batches, under torchrun over gloo; the plain model
takes the mean of both. The second rank's values are zeros: the first one's count. Twin: formats
differ in their losses, so that a packed byte that is lost would show.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks

SCRIPT = Path(__file__).parents[2] / "support" / "jobs" / "packed_ranks.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "home, shard",
    [
        pytest.param("host", "parameters", marks=pytest.mark.slow),
        ("nvme", "optimizer"),
    ],
)
def test_two_ranks_train_on_packed_weights(home, shard, tmp_path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("torchao")
    done = run_ranks(2, [str(SCRIPT), str(tmp_path), home, shard], seconds=240)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "told.json").read_text())
    for kind, found in told.items():
        limit = 0.02 if kind == "compressed" else 2e-7
        assert found["losses"] == pytest.approx(found["expected"], rel=limit), kind
        assert found["same"], kind
    assert len({tuple(found["losses"]) for found in told.values()}) == len(told)
