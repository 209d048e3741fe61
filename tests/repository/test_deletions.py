"""The engine needs no extension and no tool: they are deleted in a copy, all and each alone."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_import_order import PACKAGE

TRAIN = """
import sys
# That of an editable install finds the folders that were deleted
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
import torch, infinity

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
        timeout=280,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr


def folders() -> list[str]:
    """The folders of ext/, and tools/."""
    found = [path.name for path in (PACKAGE / "ext").iterdir() if (path / "__init__.py").exists()]
    return ["tools", *(f"ext/{name}" for name in sorted(found))]


def test_it_trains_without_extensions_and_tools(tmp_path):
    """Twin: not without a folder of the core."""
    assert train_without(tmp_path / "without", set(folders())) == "trained"
    assert "ModuleNotFoundError" in train_without(tmp_path / "less", {"core/step"})


@pytest.mark.slow
@pytest.mark.parametrize("folder", folders())
def test_it_trains_without_each_folder_alone(folder, tmp_path):
    assert train_without(tmp_path, {folder}) == "trained"


def test_tests_need_folders_that_are_there():
    """A misspelt folder would skip its test everywhere."""
    named = re.compile(r'needs\("([^"]+)"\)|": "(ext/\w+|tools)",')
    files = (PACKAGE.parent / "tests" / "core").rglob("test_*.py")
    found = {one or two for file in files for one, two in named.findall(file.read_text())}
    assert len(found) >= 5 and found <= set(folders()), found - set(folders())


def test_the_page_repeats_what_each_folder_says():
    page = (PACKAGE.parent / "docs" / "extensions.md").read_text()
    for name in folders()[1:]:
        said = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
        assert f"| `{name.removeprefix('ext/')}/` | {' '.join(said.split())} |" in page
