"""Rounds: jobs take turns, so that a change of the machine's speed affects all of them alike."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Times:
    """Wall and CPU seconds of one job in every round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def alternate(
    jobs: Mapping[str, Callable[[], object]], rounds: int, *, warm_up: int = 1
) -> dict[str, Times]:
    """Runs every job once per round, in turn, after ``warm_up`` rounds that are not recorded. A job
    may return a Times of one round, which is used instead of the measured one."""
    times = {name: Times() for name in jobs}
    for turn in range(warm_up + rounds):
        kind = "warm-up" if turn < warm_up else f"round {turn + 1 - warm_up} of {rounds}"
        tell(f"{kind}: {', '.join(jobs)}")
        for name, job in jobs.items():
            # CPU time includes the job's threads and the kernel's work for them.
            cpu, start = time.process_time(), time.perf_counter()
            known = job()
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            if isinstance(known, Times):
                wall, cpu = known.wall[0], known.cpu[0]
            if turn >= warm_up:
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def tell(what: str) -> None:
    """Prints progress on stderr: a measurement may take minutes."""
    print(what, file=sys.stderr, flush=True)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns how many times smaller ours is than theirs: the median ratio over the rounds."""
    return statistics.median(their / our for our, their in zip(ours, theirs))
