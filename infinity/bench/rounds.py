"""Rounds: jobs take turns, so that a machine that changes speed changes all of them, and ratios are of pairs."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Times:
    """Of one job: wall and processor seconds of every round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def alternate(jobs: Mapping[str, Callable[[], object]], rounds: int, *, warm_up: int = 1) -> dict[str, Times]:
    """Runs every job once a round, in turn. A job may return a Times of one round itself, when it knows better."""
    times = {name: Times() for name in jobs}
    for turn in range(warm_up + rounds):
        tell(f"round {turn + 1} of {warm_up + rounds}, {len(jobs)} jobs in turn")
        for name, job in jobs.items():
            cpu, start = time.process_time(), time.perf_counter()  # with its threads and the kernel's work for them
            known = job()
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            if isinstance(known, Times):
                wall, cpu = known.wall[0], known.cpu[0]
            if turn >= warm_up:
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def tell(what: str) -> None:
    """Says on standard error what is being measured: it may take minutes."""
    print(what, file=sys.stderr, flush=True)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Computes how many times better ours is, where less is better: the median over the rounds."""
    return statistics.median(their / our for our, their in zip(ours, theirs))
