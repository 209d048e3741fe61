"""Stalls: measures what a step waits for its data, before the first step of a job.

cold      fresh batches, whose files are not in the page cache
cached    the same batches again: nothing is fetched
made up   one of them over and over: nothing is prepared either

The shares are those of DS-Analyzer (Mohan et al. 2021, "Analyzing and Mitigating Data Stalls in DNN
Training").
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..checkpoint.content import rest_of
from ..checkpoint.random_state import keep_random_state

Batch = TypeVar("Batch")
NOISE = 0.02  # of a pass: what is shorter is not told


@dataclass(frozen=True)
class Stalls:
    """Mean seconds of a forward and backward, with its data."""

    made_up: float
    cached: float
    cold: float

    @property
    def shares(self) -> dict[str, float]:
        """The shares of a cold step: "compute", "prepare" and "fetch". They sum to 1."""
        prepare = max(0.0, self.cached - self.made_up)
        fetch = max(0.0, self.cold - self.cached)
        parts = {"compute": self.made_up, "prepare": prepare, "fetch": fetch}
        total = sum(parts.values()) or 1.0
        return {name: seconds / total for name, seconds in parts.items()}

    @property
    def remedy(self) -> Remedy | None:
        """What would hide the data behind the compute, if the loop computed beside its workers.
        None: there is nothing to hide."""
        prepare = max(0.0, self.cached - self.made_up)
        fetch = max(0.0, self.cold - self.cached)
        if self.made_up <= 0 or prepare + fetch <= NOISE * self.made_up:
            return None
        kept = max(0.0, 1 - self.made_up / fetch) if fetch else 0.0
        work = prepare + (1 - kept) * fetch  # of a worker, for a batch
        workers = max(1, math.ceil(work / self.made_up - NOISE))
        return Remedy(workers, kept, (self.made_up + prepare + fetch) / self.made_up)


@dataclass(frozen=True)
class Remedy:
    """What hides the data of a step: processes that read and prepare batches, the part of the data
    kept in memory, and how many times as fast a cold pass becomes.

    A step then takes as long as the longest of compute, preparation divided by the workers, and the
    reads of what is not kept, which share one disk (Mohan et al. 2021, section 3.3).
    """

    workers: int
    kept: float
    times: float

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        would = f"would hide it: {self.times:.2f} times as fast"
        if not self.kept:
            return f"{workers} {would}"
        disk = 1 / (1 - self.kept)
        return (
            f"{workers} with {self.kept:.0%} of the data kept in memory (or a disk {disk:.1f} times"
            f" as fast) {would}"
        )


def measure_stalls(
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    passes: Callable[[Batch], object],
    steps: int,
    files: Iterable[str | os.PathLike | np.memmap] = (),
) -> Stalls:
    """Measures three times ``steps`` forwards and backwards of a wrapped ``model``. Generators and
    buffers are put back, so a job that is measured has the bits of one that is not. Every rank
    calls this.

    batch_of
        Reads and prepares the batch of an index.
    passes
        Runs forward and backward of a batch, and drops the gradients.
    files
        The data's files, or arrays that map them.
    """

    seconds = dict.fromkeys(("cold", "cached", "made_up"), 0.0)

    def run(kind: str, batch: Callable[[], Batch]) -> None:
        began = time.perf_counter()
        passes(batch())
        seconds[kind] += (time.perf_counter() - began) / steps

    with keep_random_state(), _keeping_buffers(model):
        one = batch_of(0)
        passes(one)  # the first is slower than all others
        forget(files)
        for index in range(steps):  # in turns: a machine's speed changes
            run("cold", lambda: batch_of(index + 1))
            run("cached", lambda: batch_of(index + 1))
            run("made_up", lambda: one)
    return Stalls(**seconds)


def forget(files: Iterable[str | os.PathLike | np.memmap]) -> None:
    """Drops files from the page cache. Pages stay that another process maps, or that are not
    written to the disk yet."""
    for each in files:
        if isinstance(each, np.memmap):
            each._mmap.madvise(mmap.MADV_DONTNEED)  # pages that are mapped are not dropped
        path = each.filename if isinstance(each, np.memmap) else each
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    before: dict[str, Any] = {
        name: buffer.detach().clone() for name, buffer in rest_of(model, "").buffers.items()
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in rest_of(model, "").buffers.items():
                buffer.copy_(before[name])
