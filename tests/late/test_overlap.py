"""What runs beside the compute of a late device: updates, weights on their way, and the training
thread. By the order of beginnings and ends, not by seconds: the device is slow beside this machine.

`measure_late_device.py` has how long a step takes, beside the bound of its parts.
"""

from __future__ import annotations

import json
from pathlib import Path

import prepared
import pytest

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "tests" / "support" / "jobs" / "late_overlap.py"
LATE_UPDATES = "updates begin once all gradients have landed"
LATE_WEIGHTS = "weights are freed behind all compute"
CASES = ["host:none", "nvme:none", f"host:{LATE_UPDATES}", f"nvme:{LATE_WEIGHTS}"]

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]  # 35 s for one promise of speed


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlap")
    ended = prepared.run(JOBS, folder / "answers", *CASES, seconds=200, folder=folder)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads((folder / "answers").read_text())


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_updates_begin_before_the_last_gradient_has_landed(home, answers):
    """Failing twin: a step that is called once all have landed. Updates are this machine's own: a
    busy one makes fewer of them early, and no machine makes one early in the twin."""
    assert answers[f"{home}:none"]["early updates"] > 0
    assert answers[f"host:{LATE_UPDATES}"]["early updates"] == 0


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_weights_come_while_the_unit_before_is_computed(home, answers):
    """Failing twin: the memory for them is free only behind all compute that was launched. On a
    busy machine some come ahead there, too: fewer than without the fault."""
    assert answers[f"{home}:none"]["weights ahead"] > 0.6
    late = answers[f"nvme:{LATE_WEIGHTS}"]["weights ahead"]
    assert late < answers["nvme:none"]["weights ahead"] - 0.1


def test_the_training_thread_waits_for_no_job_of_the_device(answers):
    """Failing twin: a step that is called once all gradients have landed."""
    assert answers["host:none"]["waits"] == 0 < answers[f"host:{LATE_UPDATES}"]["waits"]
