"""Intervals of medians and of their ratios, by the bootstrap.

interval   the middle 95 % of what the figure is when its rounds are drawn anew, with replacement
verdict    what an interval of a ratio allows to be said; noise alone gives "no difference"

A median of few rounds has steps: at least FEWEST are drawn from, else there is no interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
DRAWS = 1000
FEWEST = 5  # rounds; the interval of fewer is narrower than their noise
Interval = tuple[float, float]


def of_median(values: Sequence[float]) -> Interval | None:
    """Returns the interval of the median of ``values``. None: too few of them."""
    return None if len(values) < FEWEST else _middle(_medians(np.asarray(values, float)))


def of_ratio(over: Sequence[float], under: Sequence[float]) -> Interval | None:
    """Returns the interval of median(``over``) / median(``under``) of two runs. None: too few
    rounds."""
    if min(len(over), len(under)) < FEWEST:
        return None
    draws = [_medians(np.asarray(each, float), seed) for seed, each in enumerate((over, under))]
    with np.errstate(all="ignore"):
        return _middle(draws[0] / draws[1])


def _medians(values: np.ndarray, seed: int = 0) -> np.ndarray:
    draws = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    return np.median(values[draws], axis=1)


def _middle(drawn: np.ndarray) -> Interval:
    rest = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (rest, 1 - rest))
    return float(low), float(high)


def width(interval: Interval | None) -> float:
    """Returns the width of an interval over its middle; infinite where there is none."""
    if interval is None or not sum(interval):
        return float("inf")
    return abs(2 * (interval[1] - interval[0]) / sum(interval))


def verdict(interval: Interval | None, *, bound: float = 0.0) -> str:
    """Says what the interval of a ratio of seconds, new over old, shows beyond ``bound``: "slower",
    "faster", "no difference can be seen", or that there are "too few rounds"."""
    if interval is None:
        return "too few rounds"
    low, high = interval
    if low > 1 + bound:
        return "slower"
    return "faster" if high < 1 / (1 + bound) else "no difference can be seen"
