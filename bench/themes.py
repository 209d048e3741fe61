"""Themes: the name of each benchmark, its module or function, what it measures, and the paths that
decide its figures.

old    a result whose paths have changed in more than OLD commits since
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError

OLD = 100
ENGINE = ("infinity/core", "infinity/native.py", "csrc/io", "csrc/optim", "csrc/update")
RANKS = (*ENGINE, "infinity/ranks")
CHECKPOINTS = ("infinity/ext/checkpoint", "infinity/files", "csrc/io")


@dataclass(frozen=True)
class Theme:
    """One benchmark. ``needs``: of the machine, if not every one has it."""

    where: str
    help: str
    paths: tuple[str, ...]
    needs: str = ""


IN_ALL = {
    "machine": Theme(
        "infinity.tools.bench.machine", "what limits training here", ("csrc/io", "csrc/memory")
    ),
    "io": Theme(
        "bench.loops:measure_io", "one file, read, written and both, beside fio", ("csrc/io",)
    ),
    "adam": Theme(
        "bench.loops:measure_adam", "optimizer kernels in memory, beside torch", ("csrc/optim",)
    ),
    "update": Theme(
        "bench.update",
        "the optimizer's step over NVMe, beside its disk",
        ("csrc/io", "csrc/optim", "csrc/update"),
    ),
    "pool": Theme("bench.loops:measure_pool", "leases of pinned memory", ("csrc/memory",)),
    "copy": Theme("infinity.tools.bench.copies", "memory to memory", ("csrc/memory",)),
    "step": Theme("bench.step", "a GPT-2 at every home, beside plain torch", ENGINE),
}
APART_FROM_ALL = {
    "train": Theme("bench.endtoend", "systems in processes of their own", ENGINE),
    "train_ways": Theme("bench.endtoend:measure_ways", "clipping, micro-batches, budgets", ENGINE),
    "train_1b": Theme("bench.endtoend:measure_large", "1 B parameters", ENGINE),
    "tiling": Theme("bench.tiling", "the widest layer in tiles", ("infinity/ext/tiles",)),
    "attention": Theme("bench.attention", "windows in tiles", ("infinity/ext/attention",)),
    "startup": Theme(
        "bench.startup", "from files to a wrapped model", ("infinity/core/wrap", "infinity/files")
    ),
    "packed": Theme("bench.packed", "LoRA on a packed base", ("infinity/ext/packed",)),
    "experts": Theme(
        "bench.experts", "experts apart and whole", ("infinity/ext/experts_parallel",)
    ),
    "rules": Theme("bench.rules", "each optimizer's kernel", ("csrc/optim",)),
    "optimizers": Theme("bench.optimizers", "optimizers from NVMe", ENGINE),
    "touches": Theme(
        "bench.touches", "loops over parameters", ("infinity/core/params", "infinity/core/homes")
    ),
    "idle": Theme("bench.idle", "lanes that stand still", ENGINE),
    "disks": Theme("bench.disks", "eight modelled disks", ("csrc/io", "infinity/core/homes")),
    "cluster": Theme("bench.cluster", "steps beside their plan", RANKS),
    "checkpoint": Theme("bench.checkpoint", "saves, loads and stalls", CHECKPOINTS),
    "ranks": Theme("bench.endtoend:measure_ranks", "1, 2 and 4 processes, beside FSDP2", RANKS),
    "meetings": Theme("bench.meetings", "what ranks' agreement costs", ("infinity/ranks",)),
    "meshes": Theme("bench.meshes", "steps on four meshes", RANKS),
    "shares": Theme("bench.shares", "batches by speed", ("infinity/ranks", "infinity/ext/shares")),
    "slow_links": Theme(
        "bench.slow_links", "groups over a slow link", ("infinity/ext/local_steps",)
    ),
    "tensor_parallel": Theme("bench.tensor_parallel", "2 and 4 processes, beside torch", RANKS),
    "pipeline": Theme("bench.pipeline", "stages, beside torch's schedules", RANKS),
    "late_updates": Theme(
        "bench.late_updates", "the loss by older weights", ("infinity/ext/versions_2bw",)
    ),
    "integrations": Theme(
        "bench.integrations", "trainers beside their own", ("infinity/integrations.py", *ENGINE)
    ),
    "late_device": Theme("bench.late_device", "steps on a simulated device", ENGINE),
    "gpu": Theme("bench.gpu", "kernels and copies", ("csrc/cuda",), needs="a GPU"),
    "gpu_train": Theme("bench.gpu_train", "training on a GPU", ENGINE, needs="a GPU"),
    "past_host": Theme(
        "bench.past_host",
        "disk to device past the host",
        ("infinity/ext/gpu_direct", "csrc/cuda"),
        needs="a GPU with cuFile or P2PDMA, and NVMe",
    ),
}
ALL = IN_ALL | APART_FROM_ALL
THEMES = {name: theme.where for name, theme in IN_ALL.items()}
APART = {name: theme.where for name, theme in APART_FROM_ALL.items()}


def listing() -> str:
    """Returns a line for each theme."""
    return "\n".join(
        f"  {name:<16} {theme.help}"
        + (f"; needs {theme.needs}" if theme.needs else "")
        + (" (in all)" if name in IN_ALL else "")
        for name, theme in ALL.items()
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
