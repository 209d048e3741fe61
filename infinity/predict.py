"""Prediction: what a step moves over every edge, and how long it takes, known before the first one.

traffic    bytes of one step over each edge, from the plan: with one backward, and weights that are not kept
rates      what the machine does: disk and memory measured once, compute given by whoever knows the batch
processor  compute, copies, checksums and the optimizer share it; the disk works beside it
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from . import disks, native
from .plan import MemoryPlan, UnitSize, traffic

PROBE_NBYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Rates:
    """Bytes per second; ``disk_*`` are None without a disk."""

    memory: float  # read and written by a copy
    checksum: float
    disk_read: float | None = None
    disk_write: float | None = None
    disk_mixed: float | None = None

    @classmethod
    def measure(cls, nvme_paths: Sequence[str]) -> Rates:
        """Of this machine; the disk's from its profile, which is kept."""
        found = disks.rates(nvme_paths) if nvme_paths else (None, None, None)
        return cls(memory_rate(), checksum_rate(), *found)


@dataclass(frozen=True)
class Prediction:
    """One optimizer step. ``edges``: bytes; ``seconds``: what each resource alone needs."""

    edges: dict[str, int]
    seconds: dict[str, float]
    step_seconds: float

    @property
    def bottleneck(self) -> str:
        """The resource that needs most."""
        return max(self.seconds, key=self.seconds.get)


def predict(
    plan: MemoryPlan, units: Sequence[UnitSize], rates: Rates, *, compute_seconds: float, passes: int = 1
) -> Prediction:
    """The step time from what the processor has to do in turn and the disk beside it.

    ``compute_seconds``: forward and backward of one step's whole batch, without the optimizer.
    """
    edges = traffic(plan, units, passes=passes)
    through_disk = edges["nvme->host"] + edges["host->nvme"]
    seconds = {
        "compute": compute_seconds,
        "copies": 2 * (edges["host->device"] + edges["device->host"]) / rates.memory,
        "checksums": through_disk / rates.checksum,
        "optimizer": edges["optimizer"] / rates.memory,
    }
    processor = sum(seconds.values())
    if through_disk and rates.disk_mixed:
        seconds["disk"] = max(
            edges["nvme->host"] / rates.disk_read, edges["host->nvme"] / rates.disk_write, through_disk / rates.disk_mixed
        )
    return Prediction(edges, seconds, max(processor, seconds.get("disk", 0.0)))


@cache
def memory_rate() -> float:
    """Bytes per second that a copy reads and writes in memory, measured once per process."""
    source = torch.ones(PROBE_NBYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * PROBE_NBYTES / _best(lambda: target.copy_(source))


@cache
def checksum_rate() -> float:
    """Bytes per second that one thread checks, measured once per process."""
    source = torch.ones(PROBE_NBYTES, dtype=torch.uint8)
    return PROBE_NBYTES / _best(lambda: native.crc32c(source))


def _best(work) -> float:
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
