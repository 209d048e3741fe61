"""What a measured time of compute assumes: the processors that it got."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.tools.train.compute import Compute, Sharing

SPIN = "while True: pass"


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's schedstat")
def test_the_share_of_the_processors_falls_when_others_take_them():
    """Method: this process and two others on one processor."""
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    os.sched_setaffinity(0, one)
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2)]
    try:
        time.sleep(1)
        sharing = Sharing()
        spin(0.3)
        assert 0 < sharing.share < 0.75
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            other.kill()
            other.wait()


def test_a_measured_time_says_what_others_took():
    """Twin: a process that was nearly alone says nothing of others."""
    said = Compute(1.0, "measured", 0.45).said
    assert "55% of the processors' time" in said
    for share in (None, 0.97):
        assert Compute(1.0, "measured", share).said == "measured on this machine"
