"""Class steps on several ranks: each whole parameter on one of them, with the bits of one process.

Method: ranks with the same batches under torchrun over gloo, beside the library's optimizer. The
elements that a rank receives show that none gets every parameter whole.
"""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import run_ranks

from infinity.ext.class_step.class_ranks import stepping_ranks
from infinity.ext.class_step.matrices import multiplications

SCRIPT = Path(__file__).parents[2] / "support" / "jobs" / "class_ranks.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "world, home, shard",
    [
        pytest.param(2, "host", "parameters", marks=pytest.mark.slow),
        (2, "nvme", "optimizer"),
        pytest.param(4, "nvme", "parameters", marks=pytest.mark.slow),
    ],
)
def test_ranks_step_as_one_process(world, home, shard, tmp_path):
    pytest.importorskip("prodigyopt")
    done = run_ranks(world, [str(SCRIPT), str(tmp_path), home, shard], seconds=240)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads((tmp_path / f"told.{rank}.json").read_text()) for rank in range(world)]
    for found in told:
        for case, of_case in found.items():
            assert of_case["same"] and of_case["resumed"], case
        assert "whole parameters, for which the ranks meet" in found["Adafactor"]["refused"]
        assert "on rank 1 raised ZeroDivisionError" in found["Adafactor"]["failed"]
        assert found["Adafactor"]["moved"]
        assert not found["in parts"]["received"]  # any part of the elements can be stepped
        assert found["Muon"]["received"]
    # of 6 steps: elements, gradient, and back elements, with the momentum both ways but once
    numel = 3 * 64 * 64 + 64 * 7
    total = sum(sum(found["Muon"]["received"]) for found in told)
    assert total == 6 * numel * 5 - numel
    assert max(sum(found["Muon"]["received"]) for found in told) < total * 0.9


def owned(shapes: list[tuple[int, ...]], size: int) -> list[list[int]]:
    handles = [SimpleNamespace(cost=multiplications(shape, None)) for shape in shapes]
    rounds = [handles[at : at + size] for at in range(0, len(handles), size)]
    return stepping_ranks(rounds, size, attrgetter("cost"))


def test_the_costliest_goes_to_the_rank_that_has_done_least():
    """Claim: stepping ranks differ within a round, and loads even out over rounds. The twin: by
    place alone the first rank would have all large ones."""
    shapes = [(64, 64), (8, 8), (64, 64), (8, 8), (64, 64), (8, 8)]
    rounds = owned(shapes, 2)
    assert rounds == [[0, 1], [1, 0], [0, 1]]
    for of_round in owned([(4, 4)] * 7, 3):
        assert len(set(of_round)) == len(of_round)
