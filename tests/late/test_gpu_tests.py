"""The tests of a GPU, with the late device as this machine's: they are right before a GPU runs
them, and the device keeps what they ask of one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AS_GPU = ROOT / "tests" / "support" / "late_device" / "everywhere"


@pytest.mark.slow  # a minute
@pytest.mark.timeout(400)
def test_the_tests_of_a_gpu_pass_on_the_late_device(tmp_path):
    """Twin: without the device all of them are left out."""
    counts = []
    for paths in ([AS_GPU, ROOT], [ROOT]):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                *("-p", "no:benchmark", f"--basetemp={tmp_path}/tests", "tests/gpu"),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=350,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        found = re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1])
        counts.append({kind: int(count) for count, kind in found})
    assert counts[0]["passed"] > 100 and counts[0].get("skipped", 0) <= 1
    assert "passed" not in counts[1]
