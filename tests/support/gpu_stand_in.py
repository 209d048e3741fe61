"""The GPU's module, compiled for this processor: the same sources, with a launch that runs a grid's threads in turns."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pybind11

ROOT = Path(__file__).parents[2]


def build_stand_in(tmp_path_factory) -> ModuleType:
    """Compiles it, once for all of a run's workers, and loads it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    target = folder / "_cuda.so"
    with open(folder / "stand-in.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target)
    return load_stand_in(target)


def load_stand_in(target: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_cuda", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(target: Path) -> None:
    names = ("cuda/step.cu", "cuda/scan.cu", "cuda/checksums.cu", "cuda/bindings.cpp", "optim/constants.cpp")
    sources = [ROOT / "csrc" / name for name in names]
    command = [
        "c++", "-shared", "-fPIC", "-std=c++17", "-O1", "-ffp-contract=off", "-pthread", "-Wno-unused-variable",
        f"-I{ROOT / 'csrc'}", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}",
        "-include", str(ROOT / "csrc" / "tests" / "cuda_on_cpu.h"), "-x", "c++", *map(str, sources), "-o", str(target),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
