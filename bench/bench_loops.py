"""Loops of the whole engine under pytest-benchmark, one benchmark a quantity and parameter.

`pytest bench` calibrates and compares as pytest-benchmark's manual has it: --benchmark-autosave,
--benchmark-compare, --benchmark-compare-fail=median:5%, --benchmark-histogram. A benchmark's
`extra_info` has its rate and, measured in turns after it, its ceiling and the share of that.
bench_disk.py, bench_kernels.py and bench_units.py have the parts of the engine.
"""

from __future__ import annotations

import tempfile

import pytest

from . import headline
from .recorded import record


@pytest.mark.parametrize("name", ["tiny400", "wrap", "save", "load"])
def test_headline(benchmark, settings, name):
    """Measures a loop of `python -m bench against`."""
    with (
        tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder,
        headline.JOBS[name](folder, settings.scale) as turn,
    ):
        record(benchmark, "engine", turn, amount=1, unit="turns/s")


@pytest.mark.parametrize("size", ["50M", "134M"])
@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_step(benchmark, settings, size, home):
    """Measures training steps at every home."""
    with (
        tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder,
        headline.JOBS[f"step{size}.{home}"](folder, settings.scale) as turn,
    ):
        record(benchmark, f"step {size}", turn, amount=headline.STEPS, unit="steps/s")
