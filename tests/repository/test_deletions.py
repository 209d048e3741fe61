"""The engine trains without the folders that it does not need: each is deleted in a copy.

Words used here:

**needed**: a folder of ext/ without which no model can be wrapped.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_import_order import PACKAGE

# Folders without which nothing can be wrapped today. A change may shorten the list.
NEEDED = set(("ext/class_step ext/coded ext/dtensor ext/packed ext/pipeline ext/rows ").split())
TRAIN = """
import sys, torch, infinity

def losses(home):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    if home:
        config = {"params": home, "optimizer": home, "nvme_paths": [sys.argv[1]]}
        model, optimizer = infinity.wrap_model(model, optimizer, config)
    found = []
    for _ in range(3):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if home:
        infinity.unwrap_model(model, optimizer)
    return found

plain = losses("")
assert all(losses(home) == plain for home in ("device", "host", "nvme")), "other bits"
print("trained")
"""


def train_without(folder: Path, deleted: set[str]) -> str:
    """Trains with a copy of the package that lacks ``deleted``, and returns what that printed."""
    copy = folder / "infinity"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in deleted:
        shutil.rmtree(copy / name)
    (folder / "swap").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(folder / "swap")],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr


def folders() -> list[str]:
    """The folders of ext/, and tools/."""
    found = [path.name for path in (PACKAGE / "ext").iterdir() if (path / "__init__.py").exists()]
    return ["tools", *(f"ext/{name}" for name in sorted(found))]


def test_it_trains_without_all_that_is_not_needed(tmp_path):
    """Twin: a folder that is needed cannot be deleted."""
    assert train_without(tmp_path / "without", set(folders()) - NEEDED) == "trained"
    assert "ModuleNotFoundError" in train_without(tmp_path / "less", {min(NEEDED)})


@pytest.mark.slow
@pytest.mark.parametrize("folder", folders())
def test_each_folder_alone_is_needed_or_not(folder, tmp_path):
    assert (train_without(tmp_path, {folder}) == "trained") == (folder not in NEEDED)


def test_the_page_repeats_what_each_folder_says():
    page = (PACKAGE.parent / "docs" / "extensions.md").read_text()
    for name in folders()[1:]:
        said = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
        assert f"| `{name.removeprefix('ext/')}/` | {' '.join(said.split())} |" in page
