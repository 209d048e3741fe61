"""Compiles an extension module of the tests once, for all processes and runs with the same
sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]


def compiled(
    name: str,
    sources: Iterable[Path],
    given: Sequence[str],
    command: Callable[[Path], Sequence[str]],
) -> Path:
    """Returns the module ``name`` of ``sources``, from `build/<name>`. ``given``: what else it
    depends on; ``command``: makes the compiler's, for a target. Raises RuntimeError if it fails."""
    digest = hashlib.sha256(" ".join([*given, sys.version]).encode())
    for path in sorted(sources):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / name
    target = folder / digest.hexdigest()[:16] / "module.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            part = target.with_name("part")
            done = subprocess.run(command(part), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name} does not compile:\n{done.stderr[-4000:]}")
            part.rename(target)
    return target


def load(name: str, path: Path) -> ModuleType:
    """Loads the module ``name``, an extension or a tool."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
