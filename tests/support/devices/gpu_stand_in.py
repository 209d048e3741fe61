"""The GPU's module, compiled for this processor: the same sources, with a launch that runs a grid's
threads in turns."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pybind11

ROOT = Path(__file__).parents[3]
FLAGS = [
    "-shared",
    "-fPIC",
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-pthread",
    "-Wno-unused-variable",
    # A misaligned vector, which this processor forgives and a GPU does not, ends the process.
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
    f"-I{ROOT / 'csrc'}",
    f"-I{pybind11.get_include()}",
    f"-I{sysconfig.get_path('include')}",
    "-include",
    str(ROOT / "csrc" / "tests" / "cuda_on_cpu.h"),
]


def build_stand_in() -> ModuleType:
    """Compiles it, once for all workers and for all runs with the same sources, and loads it."""
    digest = hashlib.sha256(" ".join([*FLAGS, pybind11.__version__, sys.version]).encode())
    for path in sorted(
        path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu")
    ):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "stand-in"
    target = folder / digest.hexdigest()[:16] / "_cuda.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target.with_name("part"))
            target.with_name("part").rename(target)
    return load_stand_in(target)


def load_stand_in(target: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_cuda", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(target: Path) -> None:
    names = (
        "cuda/step.cu",
        "cuda/scan.cu",
        "cuda/checksums.cu",
        "cuda/bindings.cpp",
        "optim/constants.cpp",
    )
    sources = [ROOT / "csrc" / name for name in names]
    command = ["c++", *FLAGS, "-x", "c++", *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
