"""Rounds: jobs take turns, so that a change of the machine's speed affects all of them alike."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..cli.amounts import format_seconds
from . import intervals

BAR, WIDTH = 20, 100  # characters: of the bar, and of its whole line
SEED = 0  # of the order within a round: the same on all ranks
NARROW = 0.03  # of a median: an interval that needs no further round
MOST_ROUNDS = 1000

Name = TypeVar("Name", bound=Hashable)


@dataclass
class Times:
    """Wall and CPU seconds of one job in every round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def alternate(
    jobs: Mapping[Name, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = 1,
    seconds: float = 0.0,
    in_order: bool = False,
) -> dict[Name, Times]:
    """Runs every job once per round, after ``warm_up`` rounds that are not recorded. A job may
    return a Times of one round, which is used instead of the measured one.

    seconds
        Further rounds follow for so long, until the interval of each job's median is within 3 %.
    in_order
        Keep the order of ``jobs``, of which one prepares the next. Else each round has an order of
        its own: a job that leaves work to the system does not always burden the same one.
    """
    times = {name: Times() for name in jobs}
    order, chance = list(jobs), random.Random(SEED)
    deadline, turn = time.perf_counter() + seconds, 0
    while turn < warm_up + rounds or (
        turn < MOST_ROUNDS and time.perf_counter() < deadline and not _are_narrow(times)
    ):
        kind = (
            "warm-up"
            if turn < warm_up
            else f"round {turn + 1 - warm_up} of {max(rounds, turn + 1 - warm_up)}"
        )
        if turn >= warm_up and not in_order:
            chance.shuffle(order)
        for number, name in enumerate(order):
            done = (turn * len(jobs) + number) / ((warm_up + rounds) * len(jobs))
            PROGRESS.tell(kind, detail=_label(name), share=min(done, 1.0))
            # CPU time includes the job's threads and the kernel's work for them.
            cpu, start = time.process_time(), time.perf_counter()
            known = jobs[name]()
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            if isinstance(known, Times):
                wall, cpu = known.wall[0], known.cpu[0]
            if turn >= warm_up:
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
        turn += 1
    return times


def _are_narrow(times: Mapping[Name, Times]) -> bool:
    return all(intervals.width(intervals.of_median(each.wall)) < NARROW for each in times.values())


def _label(name: Hashable) -> str:
    return " ".join(map(str, name)) if isinstance(name, tuple) else str(name)


class Progress:
    """What is measured now, on stderr: a bar on a terminal, else a line for each loop."""

    def __init__(self) -> None:
        self._theme = self._loop = self._last = ""
        self._begun = 0.0

    def begin(self, number: int, count: int, theme: str) -> None:
        """Begins a theme."""
        self._theme = f"{number} of {count}: {theme}"
        self.begin_loop("")

    def begin_loop(self, what: str) -> None:
        """Begins one of a theme's loops, whose rounds follow."""
        self._loop = what
        self.tell("")

    def tell(self, what: str, *, detail: str = "", share: float | None = None) -> None:
        """Tells what is measured. ``detail`` and ``share``, of what is done, are for the bar."""
        place, left = ", ".join(filter(None, (self._theme, self._loop, what))), ""
        if not share:
            self._begun = time.monotonic()
        else:  # of this loop: how many follow it is the theme's own
            seconds = (time.monotonic() - self._begun) * (1 - share) / share
            left = f"{format_seconds(seconds)} of this loop left"
        if sys.stderr.isatty():
            filled = round(BAR * (share or 0.0))
            line = f"[{'#' * filled:.<{BAR}}] {', '.join(filter(None, (place, detail, left)))}"
            print(f"\r{line[:WIDTH]:<{WIDTH}}", end="", file=sys.stderr, flush=True)
        elif place != self._last and share is None:  # a log has no line for each round
            print(place, file=sys.stderr, flush=True)
        self._last = place

    def clear(self) -> None:
        """Removes the bar, before something else is printed."""
        if sys.stderr.isatty():
            print(f"\r{'':<{WIDTH}}\r", end="", file=sys.stderr, flush=True)


PROGRESS = Progress()


def tell(what: str) -> None:
    """Prints on stderr what is measured now: it may take minutes."""
    PROGRESS.begin_loop(what)


class Ratio(float):
    """A ratio to a rival: the median over the rounds, whose values it keeps."""

    rounds: list[float]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Returns how many times smaller ours is than theirs: the median ratio over the rounds."""
    rounds = [their / our for our, their in zip(ours, theirs)]
    ratio = Ratio(statistics.median(rounds))
    ratio.rounds = rounds
    return ratio
