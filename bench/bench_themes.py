"""Every theme of `python -m bench all` under pytest-benchmark; result files go to
``bench/results``.

INFINITY_BENCH_SCALE makes them smaller; figures are then not kept.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from infinity.tools.bench import results
from infinity.tools.bench.settings import Settings

from .themes import THEMES

SCALE = float(os.environ.get("INFINITY_BENCH_SCALE", "1"))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.timeout(1800)
def test_theme(theme, benchmark, tmp_path, capsys):
    """Runs the theme once and prints its rows. They are kept if the sizes are the usual ones."""
    module = importlib.import_module(THEMES[theme])
    settings = Settings(folder=str(tmp_path), scale=SCALE)
    measured = benchmark.pedantic(module.measure, args=(settings,), rounds=1)
    assert measured.rows, measured.notes
    with capsys.disabled():
        print(f"\n{results.table(measured.rows)}", *measured.notes, sep="\n")
    if SCALE == 1:
        results.save(results.result(theme, measured), Path(__file__).parent / "results")
