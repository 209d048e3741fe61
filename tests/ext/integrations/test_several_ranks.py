"""Lightning, accelerate and TRL on two ranks equal the same libraries with DistributedDataParallel.

Method: each as its users start it (Lightning by itself, accelerate by its launcher, TRL by
torchrun), over gloo, everything on disk, once with us and once without. Without accumulation and
clipping every bit is the same: two addends have one order. With them, gradients of micro-batches
and squares of a norm are added in another order, and numbers agree within 1e-5.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_torchrun

SCRIPT = Path(__file__).parents[2] / "support" / "jobs" / "library_ranks.py"
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
]
SECONDS = 540


def start(library: str, folder: Path) -> subprocess.CompletedProcess:
    if library == "trl":
        return run_torchrun(2, [str(SCRIPT), library, str(folder)], seconds=SECONDS)
    command = [
        sys.executable,
        *(ACCELERATE if library == "accelerate" else []),
        str(SCRIPT),
        library,
        str(folder),
    ]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["lightning", "accelerate", "trl"])
def test_two_ranks_train_as_the_library_alone(library, tmp_path):
    pytest.importorskip(library)
    done = start(library, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["ranks"] == 2
    ours, theirs = told["plain"]["losses"]
    assert ours == theirs and len(ours) >= 3 and told["plain"]["furthest"] == 0.0
    ours, theirs = told["sums"]["losses"]
    assert (
        ours == pytest.approx(theirs, rel=1e-5)
        and len(ours) >= 3
        and told["sums"]["furthest"] < 1e-5
    )
    assert told["other"]["furthest"] > 1e-4, "the twin: another learning rate is seen"
