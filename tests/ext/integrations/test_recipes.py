"""docs/integrations.md says what is so: its recipes run as printed, its versions are those that the
code names, and nothing is imported early."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.ext.integrations import versions
from infinity.integrations import __all__ as PUBLIC
from infinity.tools.cli import main

TEXT = (Path(__file__).parents[3] / "docs" / "integrations.md").read_text(encoding="utf-8")
LIBRARIES = list(versions.TESTED)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recipes_run_as_printed(tmp_path, monkeypatch):
    """Method: the document's blocks form one script, run in an empty folder; then the command that
    it names; from_pretrained loads every folder that was written, and no swap file is left."""
    for name in LIBRARIES:
        pytest.importorskip(name)
    script = tmp_path / "recipes.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    assert main(re.search(r"`infinity (export [^`]+)`", TEXT)[1].split()) == 0
    transformers = pytest.importorskip("transformers")
    for folder in ("base", "tuned", "merged", "averaged", "out"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder)
    assert not list(tmp_path.glob(".infinity-*"))


def test_the_versions_are_those_of_the_code():
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \| \d", TEXT, flags=re.MULTILINE))
    assert rows == {name: versions.TESTED[name] for name in LIBRARIES}


def test_the_least_versions_are_those_of_the_packages_that_are_asked_for():
    """pyproject.toml, in every list, and the page have the least version of the code. Twin: a
    library without one has another."""
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for name, least in versions.LEAST.items():
        assert set(re.findall(rf'"{name}>=([\d.]+)"', project)) == {least}
        assert re.search(rf"The least of {name}\s+is {re.escape(least)}:", TEXT)
    assert set(re.findall(r'"datasets>=([\d.]+)"', project)) != set(versions.LEAST.values())


def test_nothing_is_imported_before_it_is_asked_for():
    """Method: a new process imports infinity and looks at every name of integrations; which
    libraries are there, is said."""
    code = (
        f"import sys, infinity, infinity.integrations as i\nprint([n for n in {LIBRARIES} if n in"
        " sys.modules], 'infinity.ext.integrations.trainer' in sys.modules, sorted(i.__all__))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == f"[] False {sorted(PUBLIC)}"


def test_a_library_that_is_missing_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(versions.TESTED, "no_such_library", "1.0")
    with pytest.raises(ImportError, match=r"pip install 'no_such_library>=1\.0'") as caught:
        versions.require("no_such_library")
    assert caught.value.name == "no_such_library"


def test_another_version_is_told_once(monkeypatch, caplog):
    """Method: torch, whose version is not the one that is put into the table, required twice; with
    its own version, nothing is said."""
    import torch

    monkeypatch.setattr(versions, "_told", set())
    for tested, lines in ((".".join(torch.__version__.split(".")[:2]), 0), ("0.4", 1)):
        monkeypatch.setitem(versions.TESTED, "torch", tested)
        with caplog.at_level(logging.WARNING):
            versions.require("torch"), versions.require("torch")
        assert sum("tested with" in record.message for record in caplog.records) == lines
