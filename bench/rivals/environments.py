"""Environments: one for each rival, `build/rivals/<name>`, made from pinned packages.

An environment whose pins are those of the table is taken as it is; else it is made anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from infinity.tools.bench.rounds import tell

from ..launch import ROOT
from .table import Rival

MAKER = sys.executable  # of environments
FOLDER = ROOT / "build" / "rivals"
INSTALL_SECONDS = 1200
PIP = ["-m", "pip", "install", "--quiet", "--retries", "2", "--disable-pip-version-check"]
PINS = "pins.txt"  # in an environment that is whole


def lacks(rival: Rival) -> str:
    """Says why ``rival`` cannot run on this machine, without trying it; "" if nothing is known."""
    if rival.absent:
        return rival.absent
    if rival.needs == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "needs a GPU with CUDA"
    if rival.command and shutil.which(rival.command) is None:
        return f"not installed ({rival.install or rival.command})"
    return ""


def is_made(name: str, rival: Rival) -> bool:
    """Tells whether the environment of a rival is there, with the packages of the table."""
    pins = FOLDER / name / PINS
    return not rival.packages or (pins.exists() and pins.read_text() == _pins(rival))


def _pins(rival: Rival) -> str:
    return "\n".join(rival.packages) + "\n"


def python_of(name: str, rival: Rival, *, seconds: float = INSTALL_SECONDS) -> Path | str:
    """Returns the Python of a rival's environment, which is made if it is not there; or the reason
    why there is none."""
    if why := lacks(rival):
        return why
    if not rival.packages:
        return Path(sys.executable)
    place = FOLDER / name
    python = place / "bin" / "python"
    if is_made(name, rival):
        return python
    tell(f"{name}: {', '.join(rival.packages)} are installed, for at most {seconds:.0f} s")
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command in (
        [MAKER, "-m", "venv", str(place)],
        [str(python), *PIP, *rival.packages],
    ):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, env=plain
            )
            why = "" if done.returncode == 0 else _reason(done.stderr + done.stdout)
        except subprocess.TimeoutExpired:
            why = f"no end within {seconds:.0f} s"
        if why:
            shutil.rmtree(place, ignore_errors=True)
            return f"not installed ({why})"
    (place / PINS).write_text(_pins(rival))
    return python


def _reason(said: str) -> str:
    """Returns pip's last error in what it said, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no word"]
    return ([line for line in lines if line.startswith("ERROR")] or lines)[-1][:200]


def variables(python: str) -> dict[str, str]:
    """Returns what a process of an environment of a rival has in its own: the tools that it
    compiles with, and the folder for what is compiled. Nothing of our own Python's processes."""
    if python == sys.executable:
        return {}
    place = Path(python).parent
    path = os.pathsep.join([str(place), os.environ.get("PATH", "")])
    return {"PATH": path, "TORCH_EXTENSIONS_DIR": str(place.parent / "extensions")}
