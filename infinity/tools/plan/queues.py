"""Queues: runs jobs on a clock: those of one rank's steps, and the ops of a pipeline.

queue   runs one job after the other: of those that may begin, the one with the lowest rank
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InternalError


@dataclass(eq=False)
class Job:
    """A job of a queue. ``rank``: its turn there. ``start`` and ``end``: seconds."""

    queue: Any  # hashable
    seconds: float
    rank: int = 0
    start: float = math.nan
    end: float = math.nan
    ready: float = 0.0  # when the last one that it waits for is over, as far as that is known
    waits_for: int = 0
    followers: list[tuple[Job, float]] = field(default_factory=list, repr=False)

    def follow(self, other: Job, delay: float = 0.0) -> None:
        """Lets this job wait for ``other``, and ``delay`` seconds longer."""
        other.followers.append((self, delay))
        self.waits_for += 1


def run(jobs: Sequence[Job]) -> None:
    """Runs ``jobs``, and notes when each starts and ends. Raises InternalError if some wait for
    each other."""
    number = {job: at for at, job in enumerate(jobs)}
    waiting: dict[Any, list[tuple[int, int, Job]]] = {job.queue: [] for job in jobs}
    busy: set[Any] = set()
    events: list[tuple[float, int, bool, Job]] = []  # a heap: of jobs that end, or become ready

    def let_begin(job: Job) -> None:
        heapq.heappush(waiting[job.queue], (job.rank, number[job], job))

    for job in jobs:
        if not job.waits_for:
            let_begin(job)
    now, left, changed = 0.0, len(jobs), set(waiting)
    while True:
        for queue in changed - busy:
            if waiting[queue]:
                job = heapq.heappop(waiting[queue])[-1]
                job.start, job.end = now, now + job.seconds
                busy.add(queue)
                heapq.heappush(events, (job.end, number[job], True, job))
        if not events:
            break
        now, _, ends, job = heapq.heappop(events)
        changed = {job.queue}
        if not ends:
            let_begin(job)
            continue
        left -= 1
        busy.discard(job.queue)
        for other, delay in job.followers:
            other.waits_for -= 1
            other.ready = max(other.ready, now + delay)
            if other.waits_for:
                continue
            if other.ready > now:
                heapq.heappush(events, (other.ready, number[other], False, other))
            else:
                let_begin(other)
                changed.add(other.queue)
    if left:
        first = [job for job in jobs if math.isnan(job.end)][:3]
        raise InternalError(f"{left} jobs of a plan wait for each other, as {first}")
