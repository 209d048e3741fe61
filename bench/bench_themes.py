"""Every theme of `infinity bench` under pytest-benchmark, with its result file in ``bench/results``.

INFINITY_BENCH_SCALE makes them smaller; figures are then not kept.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from infinity.bench import results
from infinity.bench.settings import Settings
from infinity.cli.bench import MODULES

SCALE = float(os.environ.get("INFINITY_BENCH_SCALE", "1"))


@pytest.mark.parametrize("theme", MODULES)
@pytest.mark.timeout(1800)
def test_theme(theme, benchmark, tmp_path, capsys):
    """Method: one run of the theme; its rows are printed, and kept when the sizes are the usual ones."""
    module = importlib.import_module(MODULES[theme])
    settings = Settings(folder=str(tmp_path), scale=SCALE)
    measured = benchmark.pedantic(module.measure, args=(settings,), rounds=1)
    assert measured.rows, measured.notes
    with capsys.disabled():
        print(f"\n{results.table(measured.rows)}", *measured.notes, sep="\n")
    if SCALE == 1:
        results.save(results.result(theme, measured), Path(__file__).parent / "results")
