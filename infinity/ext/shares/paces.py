"""Shares: how many samples of a batch each data rank computes, by the seconds that it needs.

batch      all samples of a step, over all data ranks (or all tokens, if shares are in tokens)
share      of a rank: how many of them it computes, a whole number from 1
pace       of a rank: seconds of compute for each of its samples, without waits
weight     of a rank: its share over the mean share. Its gradients are multiplied by it before they
           are averaged, so that the average is the mean over all samples of the batch

Ranks compute at the same time, so a step takes as long as the slowest of them. The best shares make
the largest product of share and pace as small as possible.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from statistics import median

from ...ranks.pass_agreement import Weighing

EVERY_STEPS = 20  # from one choice of shares to the next
LEAST_GAIN = 1.03  # for which shares change
BELOW = 1 - 1e-9  # keeps a rounded quotient from being too large


def split(batch: int, paces: Sequence[float]) -> list[int]:
    """Returns the shares of ``batch`` samples for ranks of these ``paces``, in seconds: each at
    least 1, with the least possible max(share * pace). Ties go to the first rank.

    The next sample always goes to the rank that would be ready first with it. That is optimal,
    since taking a sample from the slowest rank makes another one at least as slow.
    """
    # All but the last few samples at once: none of these ranks would be ready later than that.
    seconds = (batch - len(paces)) / sum(1 / pace for pace in paces) * BELOW
    shares = [max(1, math.floor(seconds / pace)) for pace in paces]
    ready = [((share + 1) * pace, rank) for rank, (share, pace) in enumerate(zip(shares, paces))]
    heapq.heapify(ready)
    for _ in range(batch - sum(shares)):
        rank = ready[0][1]
        shares[rank] += 1
        heapq.heapreplace(ready, ((shares[rank] + 1) * paces[rank], rank))
    return shares


def step_seconds(shares: Sequence[int], paces: Sequence[float]) -> float:
    """Returns the compute seconds of a step: those of the slowest rank."""
    return max(share * pace for share, pace in zip(shares, paces))


class Split(Weighing):
    """The present shares of a batch, and this rank's paces since they were last chosen. Equal on
    all ranks but for the paces."""

    def __init__(self, batch: int, ranks: int):
        self.batch, self.ranks = batch, ranks
        self.take([1.0] * ranks)

    def take(self, paces: Sequence[float]) -> None:
        """Takes the best shares for ``paces``."""
        self.shares = split(self.batch, paces)
        weights = [share * self.ranks / self.batch for share in self.shares]
        # None: all are 1, and no bit would change
        self.weights = weights if any(weight != 1.0 for weight in weights) else None
        self.said = f" with shares {', '.join(map(str, self.shares))}"
        self._paces: list[float] = []  # since then

    def note(self, pace: float) -> bool:
        """Notes this rank's pace in one more step. Returns whether shares are to be chosen now: at
        the same step on all ranks."""
        self._paces.append(pace)
        return len(self._paces) >= EVERY_STEPS

    @property
    def pace(self) -> float:
        """The median of this rank's paces since shares were last chosen."""
        return median(self._paces)

    def choose(self, paces: Sequence[float]) -> float | None:
        """Chooses shares by the ``paces`` of all ranks. Returns the factor by which steps become
        faster, or None if that is too little and the shares stay."""
        best, before = split(self.batch, paces), step_seconds(self.shares, paces)
        gain = before / step_seconds(best, paces)
        self._paces = []
        if gain <= LEAST_GAIN:
            return None
        self.take(paces)
        return gain
