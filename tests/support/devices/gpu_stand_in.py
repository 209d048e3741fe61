"""The GPU's module, compiled for this processor: the same sources, with a launch that runs a grid's
threads in turns."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import ModuleType

import pybind11
from compiled import ROOT, compiled, load

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
    '-DINFINITY_CUDA_TARGETS="processor"',
    f"-I{ROOT / 'csrc'}",
    f"-I{pybind11.get_include()}",
    f"-I{sysconfig.get_path('include')}",
    "-include",
    str(ROOT / "csrc" / "tests" / "cuda_on_cpu.h"),
]


def build_stand_in() -> ModuleType:
    """Compiles it, and loads it."""
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu")]
    return load_stand_in(compiled("stand-in", sources, [*FLAGS, pybind11.__version__], _command))


def load_stand_in(target: Path) -> ModuleType:
    return load("_cuda", target)


def _command(target: Path) -> list[str]:
    names = (
        "cuda/step.cu",
        "cuda/step.cpp",
        "cuda/scan.cu",
        "cuda/checksums.cu",
        "cuda/bindings.cpp",
        "optim/constants.cpp",
    )
    sources = [str(ROOT / "csrc" / name) for name in names]
    return ["c++", *FLAGS, "-x", "c++", *sources, "-o", str(target)]
