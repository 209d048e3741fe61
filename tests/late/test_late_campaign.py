"""Exceptions at points of public operations of a job on the late device: what goes on afterwards
has the same bits, or a typed error said what is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from marks import few

ROOT = Path(__file__).parents[2]
CAMPAIGN = ROOT / "tests" / "support" / "campaigns" / "campaign.py"
AS_GPU = ROOT / "tests" / "support" / "late_device" / "everywhere"
HOMES = ["late nvme", "late host", "late activations on host", "late micro-batches"]
OPERATIONS = "wrap,step,forward,accumulated"


@pytest.mark.slow  # three quarters of a minute
@pytest.mark.timeout(400)
@pytest.mark.parametrize("home", few(HOMES, 1))
def test_a_job_on_the_device_goes_on_after_strikes(home, tmp_path):
    out = tmp_path / "out.json"
    options = {"homes": home, "operations": OPERATIONS, "points": "4", "json": str(out)}
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *(f"--{key}={value}" for key, value in options.items())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (AS_GPU, ROOT)))},
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(out.read_text())["of"]
    outcomes = {name for each in found for name in each["outcomes"]}
    assert (
        outcomes <= {"same", "typed"} and sum(sum(each["outcomes"].values()) for each in found) > 20
    )
