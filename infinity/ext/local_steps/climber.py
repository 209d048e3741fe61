"""Climber: chooses how many steps groups train apart, by how much their data differ (Hsieh et al.
2020, SkewScout), or by the learning rate (Gu et al. 2024, QSR).

period    steps from one average of a unit to the next
gap       how much better a group's model is on its own data than on another group's
cost      what a period costs: the gap beyond ``TOLERATED``, and the exchanges, one for each period
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

PERIODS = tuple(2**power for power in range(10))  # 1 to 512
TOLERATED, WEIGHT = 0.05, 50.0  # of the gap
REMEMBERED = 4  # probes


def cost_of(gap: float, period: int) -> float:
    """Returns the cost of a ``period`` with which ``gap`` was measured."""
    return WEIGHT * max(0.0, gap - TOLERATED) + 1 / period


def quadratic_period(least: int, coefficient: float, lr: float) -> int:
    """Returns the period for a learning rate: ``(coefficient / lr)`` squared, at least ``least``
    (Gu et al. 2024, the quadratic synchronization rule)."""
    if not lr > 0:
        return least
    return max(least, math.floor((coefficient / lr) ** 2 * (1 + 1e-12)))


class Climber:
    """Moves the period up while that is cheaper, and down when the gap is too large: one of
    ``PERIODS`` at a time. ``memory``: periods and costs of the last probes."""

    def __init__(self, period: int = 1, memory: Iterable[tuple[int, float]] = ()):
        self.period = period
        self.memory = deque(((int(at), float(cost)) for at, cost in memory), maxlen=REMEMBERED)

    def observe(self, gap: float) -> int:
        """Takes the ``gap`` measured with the present period, and returns the next one. A gap that
        is no number, of a model that has diverged, counts as the largest."""
        gap = gap if math.isfinite(gap) else 1.0
        here, place = cost_of(gap, self.period), PERIODS.index(self.period)
        self.memory.append((self.period, here))
        if gap > TOLERATED:
            self.period = PERIODS[max(place - 1, 0)]
        elif place + 1 < len(PERIODS):
            above = [cost for period, cost in self.memory if period == PERIODS[place + 1]]
            if not above or above[-1] < here:
                self.period = PERIODS[place + 1]
        return self.period
