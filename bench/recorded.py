"""recorded: a benchmark of `pytest bench`, with its rate and, in turns after it, its ceiling."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from infinity.tools.bench.rounds import alternate

TURN_SECONDS = 2e-3  # the least time of a turn: a shorter job is repeated in it
ROUNDS = 5


def record(
    benchmark: Any,
    group: str,
    job: Callable[[], object],
    *,
    amount: float,
    unit: str,
    ceiling: tuple[str, Callable[[], object]] | None = None,
) -> None:
    """Measures ``job``, which does ``amount`` of ``unit`` (in thousands of millions a second, if
    that begins with G). ``ceiling``: its name, and a job that does as much at the hardware's
    limit, or without the engine."""
    benchmark.group = group
    job()
    benchmark(job)
    if benchmark.stats is None:  # --benchmark-disable
        if ceiling is not None:
            ceiling[1]()
        return
    seconds = benchmark.stats.stats.median
    amount /= 1e9 if unit.startswith("G") else 1
    benchmark.extra_info |= {"unit": unit, "rate": amount / seconds}
    if ceiling is None:
        return
    name, limit = ceiling
    times = max(1, round(TURN_SECONDS / seconds))
    jobs = {"job": _repeated(job, times), "limit": _repeated(limit, times)}
    wall = {who: found.wall for who, found in alternate(jobs, ROUNDS).items()}
    shares = [theirs / ours for ours, theirs in zip(wall["job"], wall["limit"])]
    benchmark.extra_info |= {
        "ceiling": name,
        "ceiling_rate": times * amount / statistics.median(wall["limit"]),
        "share": statistics.median(shares),
    }


def _repeated(job: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            job()

    return run
