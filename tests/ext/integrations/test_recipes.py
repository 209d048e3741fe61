"""The recipes of docs/integrations.md run as printed, and nothing is imported early."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from infinity import library_versions
from infinity.integrations import __all__ as PUBLIC
from infinity.tools.cli import main

TEXT = (Path(__file__).parents[3] / "docs" / "integrations.md").read_text(encoding="utf-8")
LIBRARIES = list(library_versions.TESTED)


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


def test_nothing_is_imported_before_it_is_asked_for():
    """Method: a new process imports infinity and looks at every name of integrations; which
    libraries are there, is said."""
    code = (
        f"import sys, infinity, infinity.integrations as i\nprint([n for n in {LIBRARIES} if n in"
        " sys.modules], 'infinity.ext.integrations.trainer' in sys.modules, sorted(i.__all__))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True
    )
    assert done.stdout.strip() == f"[] False {sorted(PUBLIC)}"
