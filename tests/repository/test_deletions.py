"""The engine trains without the folders that it does not need: each is deleted in a copy.

Words used here:

**needed**: a folder of ext/ that the core imports, or that one of these folders imports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from test_import_order import PACKAGE, imports_of, modules_of, sources

# Folders without which nothing can be wrapped today. A change may shorten the list.
NEEDED = set(
    (
        "ext/averages ext/blocks ext/checkpoint ext/class_step ext/coded ext/dtensor ext/foreign "
        "ext/gpu_direct ext/local_steps ext/packed ext/pipeline ext/rows ext/shared_homes "
        "ext/shares ext/speculation ext/tiles ext/versions_2bw "
    ).split()
)
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


def needed(texts: dict[str, str]) -> set[str]:
    """The folders of ext/ that ``texts`` (path below the package -> text) of the core lead to."""
    modules, found, pending = modules_of(texts), set(), ["core/", "ranks/", "files/", "config.py"]
    while pending:
        start = pending.pop()
        for path, text in texts.items():
            for _, target, _ in imports_of(text, path, modules) if path.startswith(start) else ():
                floor, *below = target.split(".")
                if floor in ("ext", "tools") and (name := f"{floor}/{below[0]}") not in found:
                    found.add(name)
                    pending.append(f"{name}/")
    return found


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


def test_few_extensions_are_needed():
    """Follows imports from the core. Twin: an import of an extension's own is followed."""
    made = {
        "core/a.py": "from ..ext.one.x import y",
        "ext/one/x.py": "from ..two.z import y",
        "ext/two/z.py": "y = 1",
        "ext/three/z.py": "from ..one.x import y",
    }
    assert needed(made) == {"ext/one", "ext/two"}
    assert needed(sources()) == NEEDED


def test_it_trains_without_all_that_is_not_needed(tmp_path):
    """Twin: a folder that is needed cannot be deleted."""
    folders = {f"ext/{path.name}" for path in (PACKAGE / "ext").iterdir() if path.is_dir()}
    deleted = {name for name in folders if not name.endswith("__")} - NEEDED | {"tools"}
    assert train_without(tmp_path / "without", deleted) == "trained"
    assert "ModuleNotFoundError" in train_without(tmp_path / "less", {min(NEEDED)})
