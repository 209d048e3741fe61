"""Rounds: jobs take turns, so that a change of the machine's speed affects all of them alike."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

BAR, WIDTH = 20, 100  # characters: of the bar, and of its whole line


@dataclass
class Times:
    """Wall and CPU seconds of one job in every round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def alternate(
    jobs: Mapping[Hashable, Callable[[], object]], rounds: int, *, warm_up: int = 1
) -> dict[Hashable, Times]:
    """Runs every job once per round, in turn, after ``warm_up`` rounds that are not recorded. A job
    may return a Times of one round, which is used instead of the measured one."""
    times = {name: Times() for name in jobs}
    for turn in range(warm_up + rounds):
        kind = "warm-up" if turn < warm_up else f"round {turn + 1 - warm_up} of {rounds}"
        for number, (name, job) in enumerate(jobs.items()):
            done = (turn * len(jobs) + number) / ((warm_up + rounds) * len(jobs))
            PROGRESS.tell(kind, detail=_label(name), share=done)
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


def _label(name: Hashable) -> str:
    return " ".join(map(str, name)) if isinstance(name, tuple) else str(name)


class Progress:
    """What is measured now, on stderr: a bar on a terminal, else a line whenever something new
    begins."""

    def __init__(self) -> None:
        self._theme = self._last = ""

    def begin(self, number: int, count: int, theme: str) -> None:
        """Begins a theme."""
        self._theme = f"{number} of {count}: {theme}"
        self.tell("")

    def tell(self, what: str, *, detail: str = "", share: float | None = None) -> None:
        """Tells what is measured. ``detail`` and ``share``, of what is done, are for the bar."""
        told = ", ".join(filter(None, (self._theme, what)))
        if sys.stderr.isatty():
            filled = round(BAR * (share or 0.0))
            line = f"[{'#' * filled:.<{BAR}}] {', '.join(filter(None, (told, detail)))}"
            print(f"\r{line[:WIDTH]:<{WIDTH}}", end="", file=sys.stderr, flush=True)
        elif told != self._last:
            print(told, file=sys.stderr, flush=True)
        self._last = told

    def clear(self) -> None:
        """Removes the bar, before something else is printed."""
        if sys.stderr.isatty():
            print(f"\r{'':<{WIDTH}}\r", end="", file=sys.stderr, flush=True)


PROGRESS = Progress()


def tell(what: str) -> None:
    """Prints progress on stderr: a measurement may take minutes."""
    PROGRESS.tell(what)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns how many times smaller ours is than theirs: the median ratio over the rounds."""
    return statistics.median(their / our for our, their in zip(ours, theirs))
