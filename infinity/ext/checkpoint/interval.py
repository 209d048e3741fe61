"""Interval: after how many steps to save, so that saving takes a given share of the time.

stall   seconds that the loop stood still for a save
total   seconds from its begin until it could be loaded
share   of the time that stalls may take

The rule is that of CheckFreq (Mohan et al. 2021), redone after each save: a dearer save counts at
once, a cheaper one when the last three were.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from ...errors import ConfigError

RECENT_STEPS, RECENT_SAVES = 50, 3
FIRST_STEPS, FIRST_SECONDS = 10, 60.0  # before the first save: whichever is later
LEAST_SHARE = 1e-6
SLACK = 1e-9  # of quotients that should be whole


def share_of(overhead: float | str, name: str = "overhead", of: str = "the time") -> float:
    """Returns a share between 0 and 1 of a number, or of a text as "2%". Raises ConfigError, which
    calls it ``name``, a share ``of`` something."""
    value: Any = overhead
    try:
        if isinstance(overhead, str):
            text = overhead.strip()
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if not isinstance(value, bool) and LEAST_SHARE <= float(value) < 1:
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"{name}: {overhead!r} is not a share of {of}. Give a number between 0 and 1, or a"
        " percentage as 2%."
    )


def steps_between(
    stall: float, total: float, step: float, share: float, between_failures: float | None = None
) -> int:
    """Returns the steps of ``step`` seconds from one save to the next. ``between_failures``:
    seconds; then also what loses the least time to failures (Young 1974)."""
    step = max(step, SLACK)
    least = max(1, _up((total - stall) / step))  # one save at a time
    wanted = _up(stall / (share * step))
    if between_failures is not None:
        wanted = min(wanted, _up(math.sqrt(2 * stall * between_failures) / step))
    return max(least, wanted)


def _up(quotient: float) -> int:
    return math.ceil(quotient - SLACK)


class Interval:
    """Counts steps until the next save is due. Seconds are given by the caller."""

    def __init__(self, share: float, between_failures: float | None = None):
        self._share, self._between_failures = share, between_failures
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._saves: deque[tuple[float, float]] = deque(maxlen=RECENT_SAVES)
        self._since, self._seconds = 0, 0.0  # since the last save began
        self._beside: list[float] | None = None  # steps beside a save; None: there is none

    def note_step(self, seconds: float) -> None:
        """Counts a step. Beside a save, what it takes longer than others is a stall."""
        seconds = max(seconds, 0.0)
        if self._beside is None:
            self._steps.append(seconds)
        else:
            self._beside.append(seconds)
        self._since, self._seconds = self._since + 1, self._seconds + seconds

    def begin_save(self) -> None:
        """Begins a save: until :meth:`end_save` none is due."""
        self._since, self._seconds = 0, 0.0
        self._beside = []

    def end_save(self, stall: float | None, total: float | None) -> None:
        """Ends a save. ``stall``: of the calls that made it, beside that of the steps meanwhile.
        None: it failed, so that its seconds say nothing; the next one is as far away."""
        beside, self._beside = self._beside or [], None
        if stall is not None and total is not None:
            slower = max(0.0, sum(beside) - len(beside) * self.step_seconds)
            total = max(total, stall, 0.0)
            # No save stalls for longer than it lasts: such a step had another reason
            self._saves.append((min(max(stall, 0.0) + slower, total), total))

    def note_save(self, seconds: float | None) -> None:
        """Counts a save for which the loop stood still."""
        self.begin_save()
        self.end_save(seconds, seconds)

    @property
    def step_seconds(self) -> float:
        """The median of the last steps; 0 before the first."""
        return statistics.median(self._steps) if self._steps else 0.0

    @property
    def stall_seconds(self) -> float:
        """Those of the slowest of the last saves; 0 before the first."""
        return max((stall for stall, _ in self._saves), default=0.0)

    @property
    def total_seconds(self) -> float:
        """Those until the slowest of the last saves could be loaded; 0 before the first."""
        return max((total for _, total in self._saves), default=0.0)

    @property
    def steps(self) -> int | None:
        """The steps from one save to the next; None before the first."""
        if not self._saves:
            return None
        return steps_between(
            self.stall_seconds,
            self.total_seconds,
            self.step_seconds,
            self._share,
            self._between_failures,
        )

    @property
    def is_due(self) -> bool:
        """Whether the next save is due after this step."""
        if self._beside is not None:
            return False
        if (steps := self.steps) is None:
            return self._since >= FIRST_STEPS and self._seconds >= FIRST_SECONDS
        return self._since >= steps
