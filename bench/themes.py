"""Themes: twelve names with parts, each a module or function, what it measures, and the paths that
decide its figures.

part   one benchmark. `python -m bench ranks.meetings` measures a part, also by its own name,
       `meetings`; a theme's name alone is its first part. Result files have the part's own name
old    a result whose paths have changed in more than OLD commits since

What the themes say together, and which to run when, is in docs/measurements.md.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError

from .launch import ROOT

OLD = 100
ENGINE = ("infinity/core", "infinity/native.py", "csrc/io", "csrc/optim", "csrc/update")
RANKS = (*ENGINE, "infinity/ranks")
HERE, LOOPS = "infinity/tools/bench", ("machine", "io", "adam", "rounds")
CHECKPOINTS = ("infinity/ext/checkpoint", "infinity/files", "csrc/io")


@dataclass(frozen=True)
class Part:
    """One benchmark.

    where
        A module, or module:function; of a model of a disk, a network or a device the file beside
        the tests of its system.
    needs
        Of the machine, if not every one has it.
    """

    where: str
    help: str
    paths: tuple[str, ...]
    needs: str = ""
    in_all: bool = False


THEMES = {
    "machine": {
        "machine": Part(
            "infinity.tools.bench.machine",
            "what limits training here",
            ("csrc/io", "csrc/memory", "csrc/optim", *(f"{HERE}/{name}.py" for name in LOOPS)),
            in_all=True,
        )
    },
    "io": {
        "io": Part(
            "bench.loops:measure_io",
            "one file, read, written and both, beside fio",
            ("csrc/io", f"{HERE}/io.py", f"{HERE}/rounds.py", "bench/rivals"),
            in_all=True,
        )
    },
    "adam": {
        "adam": Part(
            "bench.loops:measure_adam",
            "optimizer kernels in memory, beside torch",
            ("csrc/optim", f"{HERE}/adam.py", f"{HERE}/rounds.py", "bench/rivals"),
            in_all=True,
        ),
        "update": Part(
            "bench.update",
            "the optimizer's step over NVMe, beside its disk",
            ("csrc/io", "csrc/optim", "csrc/update"),
            in_all=True,
        ),
        "rules": Part("bench.rules", "each optimizer's kernel", ("csrc/optim",)),
        "optimizers": Part("bench.optimizers", "optimizers from NVMe", ENGINE),
    },
    "copy": {
        "copy": Part(
            "infinity.tools.bench.copies", "memory to memory", ("csrc/memory",), in_all=True
        ),
        "pool": Part(
            "bench.loops:measure_pool", "leases of pinned memory", ("csrc/memory",), in_all=True
        ),
    },
    "step": {
        "step": Part(
            "bench.step", "a GPT-2 at every home, beside plain torch", ENGINE, in_all=True
        ),
        "idle": Part("bench.idle", "lanes that stand still", ENGINE),
        "touches": Part(
            "bench.touches",
            "loops over parameters",
            ("infinity/core/params", "infinity/core/homes"),
        ),
        "small": Part("bench.small", "what small models cost beside plain torch", ENGINE),
    },
    "train": {
        "train": Part("bench.endtoend", "systems in processes of their own", ENGINE),
        "train_ways": Part(
            "bench.endtoend:measure_ways", "clipping, micro-batches, budgets", ENGINE
        ),
        "train_1b": Part("bench.endtoend:measure_large", "1 B parameters", ENGINE),
    },
    "startup": {
        "startup": Part(
            "bench.startup",
            "from files to a wrapped model",
            ("infinity/core/wrap", "infinity/files"),
        )
    },
    "checkpoint": {"checkpoint": Part("bench.checkpoint", "saves, loads and stalls", CHECKPOINTS)},
    "ranks": {
        "ranks": Part("bench.endtoend:measure_ranks", "1, 2 and 4 processes, beside FSDP2", RANKS),
        "meetings": Part("bench.meetings", "what ranks' agreement costs", ("infinity/ranks",)),
        "tensor_parallel": Part("bench.tensor_parallel", "2 and 4 processes, beside torch", RANKS),
        "pipeline": Part("bench.pipeline", "stages, beside torch's schedules", RANKS),
    },
    "ext": {
        "tiling": Part("bench.tiling", "the widest layer in tiles", ("infinity/ext/tiles",)),
        "attention": Part("bench.attention", "windows in tiles", ("infinity/ext/attention",)),
        "packed": Part("bench.packed", "LoRA on a packed base", ("infinity/ext/packed",)),
        "experts": Part(
            "bench.experts", "experts apart and whole", ("infinity/ext/experts_parallel",)
        ),
        "integrations": Part(
            "bench.integrations", "trainers beside their own", ("infinity/integrations.py", *ENGINE)
        ),
    },
    "gpu": {
        "gpu": Part(
            "infinity.tools.bench.gpu", "kernels and copies", ("csrc/cuda",), needs="a GPU"
        ),
        "gpu_train": Part("bench.gpu_train", "training on a GPU", ENGINE, needs="a GPU"),
        "past_host": Part(
            "bench.past_host",
            "disk to device past the host",
            ("infinity/ext/gpu_direct", "csrc/cuda"),
            needs="a GPU with cuFile or P2PDMA, and NVMe",
        ),
    },
    "models": {
        "disks": Part(
            "tests/core/homes/measure_disks.py",
            "eight modelled disks",
            ("csrc/io", "infinity/core/homes"),
        ),
        "cluster": Part("tests/tools/plan/measure_cluster.py", "steps beside their plan", RANKS),
        "meshes": Part("tests/tools/plan/measure_meshes.py", "steps on four meshes", RANKS),
        "shares": Part(
            "tests/ext/shares/measure_shares.py",
            "batches by speed",
            ("infinity/ranks", "infinity/ext/shares"),
        ),
        "slow_links": Part(
            "tests/ext/local_steps/measure_slow_links.py",
            "groups over a slow link",
            ("infinity/ext/local_steps",),
        ),
        "late_updates": Part(
            "tests/ext/versions_2bw/measure_late_updates.py",
            "the loss by older weights",
            ("infinity/ext/versions_2bw",),
        ),
        "papers": Part(
            "bench.papers",
            "headlines of the papers, planned and run",
            ("infinity/tools/plan", "infinity/ext/versions_2bw", "infinity/ext/local_steps"),
        ),
        "late_device": Part(
            "tests/support/late_device/measure_late_device.py",
            "steps on a simulated device",
            ENGINE,
        ),
    },
}
PARTS = {name: part for parts in THEMES.values() for name, part in parts.items()}
IN_ALL = [name for name, part in PARTS.items() if part.in_all]


def part_named(name: str) -> str:
    """Returns the own name of a part that is given as ``theme.part``, or ``name`` itself."""
    theme, _, rest = name.partition(".")
    parts = THEMES.get(theme, {})
    return next((each for each in (rest, f"{theme}_{rest}") if rest and each in parts), name)


def full_name(part: str) -> str:
    """Returns ``theme.part`` of a part's own name; of a theme's first part the theme's name."""
    theme = next(theme for theme, parts in THEMES.items() if part in parts)
    return theme if part == theme else f"{theme}.{part.removeprefix(f'{theme}_')}"


def module_of(where: str) -> str:
    """Returns a :class:`Part`'s module, or module:function, which can be imported then, also by
    processes that are spawned."""
    if not where.endswith(".py"):
        return where
    folder, name = str((ROOT / where).parent), Path(where).stem
    if folder not in sys.path:
        sys.path.append(folder)
    return name


def listing() -> str:
    """Returns a line for each theme and part."""
    return "\n".join(
        f"  {full_name(name):<22} {part.help}"
        + (f"; needs {part.needs}" if part.needs else "")
        + (" (in all)" if part.in_all else "")
        for name, part in PARTS.items()
    )


def of_file(path: Path) -> tuple[str, str]:
    """Imports a benchmark of a user's own: a Python file with ``measure(settings)``. Returns its
    name and its module. Raises ConfigError for another file."""
    name = f"bench_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not there: give a Python file with `measure(settings)`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, "measure", None)):
        raise ConfigError(f"{path} has no `measure(settings)`, which returns what was measured")
    return path.stem, name
