"""AveragingSchedule: after which steps groups that train on their own are averaged.

period          the steps in which every unit is averaged once
averaging step  the step of a period after which a unit is averaged
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError
from .climber import Climber, quadratic_period

SKEW, QUADRATIC = "skew", "quadratic"


@dataclass(frozen=True)
class AveragingSchedule:
    """The user's choice. ``every``: a number of steps, or how the period is chosen; ``least`` and
    ``coefficient``: of ``"quadratic"``; ``probe_every``: of ``"skew"``. Raises ConfigError for what
    does not fit."""

    every: int | str
    stream: bool
    delay: int
    least: int
    coefficient: float | None
    probe_every: int

    def __post_init__(self) -> None:
        if not (_is_steps(self.every) or self.every in (SKEW, QUADRATIC)):
            raise ConfigError(
                f"every={self.every!r}: give a number of steps from 1, {QUADRATIC!r} or {SKEW!r}"
            )
        for name, value in (("least", self.least), ("probe_every", self.probe_every)):
            if not _is_steps(value):
                raise ConfigError(f"{name}={value!r}: give a number of steps from 1")
        if self.every == QUADRATIC and not (self.coefficient and self.coefficient > 0):
            raise ConfigError(
                f"every={QUADRATIC!r} with coefficient={self.coefficient!r}: give a number above 0,"
                " as 5 times the learning rate at which the period is to be 25"
            )
        if not (self.delay == 0 or _is_steps(self.delay)) or self.delay >= self.shortest:
            raise ConfigError(
                f"delay={self.delay!r}: give 0 to {self.shortest - 1} steps, less than the shortest"
                " period"
            )

    @property
    def shortest(self) -> int:
        """The shortest period."""
        if isinstance(self.every, int):
            return self.every
        return self.least if self.every == QUADRATIC else 1

    def period(self, climber: Climber, lr: float) -> int:
        """Returns the steps of the next period. ``lr``: of the inner optimizer."""
        if isinstance(self.every, int):
            return self.every
        if self.every == QUADRATIC and self.coefficient is not None:
            return quadratic_period(self.least, self.coefficient, lr)
        return climber.period

    def averaging_steps(self, units: int, period: int) -> list[int]:
        """Returns the averaging step of each unit: spread evenly, that of the last at the end."""
        if not self.stream:
            return [period] * units
        return [-(-(unit + 1) * period // units) for unit in range(units)]

    def most_at_once(self, units: int) -> int:
        """Counts the exchanges that run at a time, at most. Without a delay each is waited for,
        with the next one under way."""
        if not self.delay:
            return min(2, units)
        steps = self.averaging_steps(units, self.shortest)
        steps += [step + self.shortest for step in steps]
        return max((sum(end - self.delay < at <= end for at in steps) for end in steps), default=0)


def _is_steps(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
