"""adam: the optimizer kernels on state in memory, against a loop that only moves their bytes.

whole job   bf16 gradients are unscaled and clipped, an fp32 master is stepped, bf16 weights come
            out. Our kernel does it in one pass. Rivals need extra passes for casts and scaling
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity import native

from .results import Measured, Row, row
from .rounds import paired, tell
from .settings import Settings

PARAMETERS = 96 * 1024 * 1024
GRAD_FACTOR = 0.37  # of unscaling and clipping combined


@dataclass(frozen=True)
class Variant:
    """One layout of optimizer state that users can choose."""

    name: str
    layout: dict
    nbytes: dict[str, int]  # per element
    rule: native.Rule = native.Rule.ADAMW
    settings: Mapping[str, float] = field(default_factory=lambda: {"weight_decay": 0.01})


FP32 = dict(master=native.Master.OWN, grad=native.DType.FLOAT32, weight=native.DType.FLOAT32)
SPLIT = dict(master=native.Master.SPLIT, grad=native.DType.BFLOAT16, weight=native.DType.BFLOAT16)
VARIANTS = (
    Variant(
        "split",
        SPLIT | {"moments": native.DType.FLOAT32},
        {"weight": 2, "master": 2, "exp_avg": 4, "exp_avg_sq": 4, "grad": 2},
    ),
    Variant(
        "int8",
        SPLIT | {"moments": native.DType.INT8},
        {"weight": 2, "master": 2, "exp_avg": 1, "exp_avg_sq": 1, "grad": 2},
    ),
    Variant(
        "fp32",
        FP32 | {"moments": native.DType.FLOAT32},
        {"weight": 4, "exp_avg": 4, "exp_avg_sq": 4, "grad": 4},
    ),
)


class Ours:
    """One variant's arrays in memory, stepped by the engine's kernels, or only moved."""

    def __init__(self, variant: Variant, count: int, threads: int):
        self.variant, self.count, self.threads = variant, count, threads
        self.regions = {
            name: native.Region(count * size, True, threads)
            for name, size in variant.nbytes.items()
        }
        if variant.layout["moments"] == native.DType.INT8:
            self.regions |= {
                f"{name}_scale": native.Region(count // native.MOMENT_BLOCK, True, 1)
                for name in native.SCALED_MOMENTS
                if name in variant.nbytes
            }
        fill = {"weight": 0.02, "grad": 1e-3}
        for name, scale in fill.items():
            dtype = {2: torch.bfloat16, 4: torch.float32}[variant.nbytes[name]]
            self.tensor(name, dtype).normal_(std=scale)
        self.extents = {
            name: native.Extent.in_memory(region.address, region.nbytes)
            for name, region in self.regions.items()
        }
        self.updater = native.Updater(native.IoEngine(kind="threads"), 0, 0, 0, threads)
        self.steps = 0

    def with_threads(self, threads: int) -> Ours:
        """Returns this state, stepped by so many threads."""
        other = copy.copy(self)
        other.threads = threads
        other.updater = native.Updater(native.IoEngine(kind="threads"), 0, 0, 0, threads)
        return other

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns one of the arrays as a flat tensor."""
        return native.tensor_at(self.regions[name], self.regions[name].address, self.count, dtype)

    def master(self) -> torch.Tensor:
        """Joins the fp32 masters of a variant with split masters."""
        return native.join_master(
            self.tensor("weight", torch.bfloat16), self.tensor("master", torch.int16)
        )

    def step(self) -> None:
        self.steps += 1
        hyper = native.Hyperparameters()
        hyper.step = self.steps
        for name, value in self.variant.settings.items():
            setattr(hyper, name, value)
        hyper.grad_factors = [GRAD_FACTOR] if self.variant.name != "fp32" else []
        arrays = dict.fromkeys(("master", "exp_avg", "exp_avg_sq")) | self.extents
        update = native.UnitUpdate(
            layout=native.Layout(rule=self.variant.rule, **self.variant.layout),
            count=self.count,
            **arrays,
            runs=[native.Run(0, self.count, hyper)],
            version=self.steps,
        )
        self.updater.submit(update).wait()

    def move(self) -> None:
        """Reads and writes back the bytes of a step, unchanged, in a step's access pattern."""
        sizes = self.variant.nbytes.items()
        streams = [(self.regions[name].address, size, True, name != "grad") for name, size in sizes]
        native.move_streams(streams, self.count, self.threads)


def measure(
    settings: Settings,
    *,
    rivals: Sequence[Any] = (),
    limit_threads: Callable[[int], AbstractContextManager[None]] = nullcontext,
) -> Measured:
    """Measures rows adam.split, adam.int8, adam.fp32, on all threads and on one.

    rivals
        Other optimizers. Each has a NAME and `find`. A note names each absent one.
    limit_threads
        A context for the rounds that limits the threads of the rivals.
    """
    count = settings.scaled(PARAMETERS, 64 * 1024)
    measured = Measured([])
    for variant in VARIANTS:
        for threads in dict.fromkeys((settings.threads, 1)):
            if settings.wants(name_of(variant, threads, settings)):
                measured.add(_measure(variant, count, threads, settings, rivals, limit_threads))
    if settings.wants("adam.split"):
        measured.series["adam.threads"] = by_threads(count, settings)
    return measured


def thread_counts(most: int) -> list[int]:
    """Returns 1, 2, 4 ... and ``most``."""
    return sorted({min(2**power, most) for power in range(10)})


def by_threads(count: int, settings: Settings) -> list[dict]:
    """Measures the split kernel and the moving loop at 1, 2, 4 ... and all threads."""
    points = []
    for threads in thread_counts(settings.threads):
        ours = Ours(VARIANTS[0], count, threads)
        times = settings.alternate({"split": ours.step, "moving": ours.move})
        rates = {who: count / statistics.median(of_one.wall) / 1e9 for who, of_one in times.items()}
        points.append({"threads": threads, **rates})
    return points


def name_of(variant: Variant, threads: int, settings: Settings, theme: str = "adam") -> str:
    """Returns the name of a row."""
    suffix = "" if threads == settings.threads else f".{threads}thread"
    return f"{theme}.{variant.name}{suffix}"


def beside_moving(name: str, ours: Ours, settings: Settings) -> Row:
    """Measures one variant beside a loop that moves its bytes."""
    tell(name)
    times = settings.alternate({"ours": ours.step, "moving": ours.move})
    rates = {who: [ours.count / s / 1e9 for s in of_one.wall] for who, of_one in times.items()}
    ceiling = ("moving the same bytes", rates["moving"])
    return row(name, "G parameters/s", rates["ours"], ceiling=ceiling)


def _measure(
    variant: Variant,
    count: int,
    threads: int,
    settings: Settings,
    rivals: Sequence[Any],
    limit_threads: Callable[[int], AbstractContextManager[None]],
) -> Measured:
    ours = Ours(variant, count, threads)
    measured = Measured([beside_moving(name_of(variant, threads, settings), ours, settings)])
    settings.show(measured.rows)
    jobs: dict[Any, Callable[[], object]] = {"ours": ours.step}
    for rival in rivals:
        job = rival.find(count, whole_job=variant.name != "fp32", factor=GRAD_FACTOR)
        if isinstance(job, str):
            measured.notes.append(f"{rival.NAME}: {job}")
        else:
            jobs[rival.NAME] = job
            measured.rivals[rival.NAME] = job.told()
    if len(jobs) > 1:
        with limit_threads(threads):
            times = settings.alternate(jobs)
        wall = times.pop("ours").wall
        measured.rows[0].ratios = {who: paired(wall, each.wall) for who, each in times.items()}
    return measured
