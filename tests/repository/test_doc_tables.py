"""The long tables of the documents, printed anew as a whole: `make docs` checks samples of them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def tools(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tables_of_what_fits_are_what_is_planned():
    """Method: prints them anew. Twin: another one."""
    import what_fits

    text = (ROOT / "docs/what-fits.md").read_text()
    exact, smaller = what_fits.table([]), what_fits.table(["--moments", "int8"])
    assert exact in text and smaller in text and exact != smaller
    assert what_fits.meshes() in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_table_of_models_is_what_they_do():
    """Method: trains all of them anew. Twin: a run with other bits is not counted."""
    import tested_models

    assert tested_models.table() in (ROOT / "docs/models.md").read_text()
    entry = tested_models.ZOO["llama"]
    run = tested_models.trained(entry, tested_models.HOMES["device"])
    run.losses[0] = run.losses[0] + 1
    assert not tested_models.has_same_bits(entry, run, tested_models.HOMES["host"])
