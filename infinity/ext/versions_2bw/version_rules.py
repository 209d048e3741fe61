"""VersionRule: the order of a stage's work in a pipeline without flush, and which version of the
weights each micro-batch computes with.

version   the number of updates that the weights have had in this run
delay     a micro-batch computes with all updates up to this many micro-batches before it

With n stages, s the number of one from 0, and m micro-batches for each update:

    two        delay m        PipeDream-2BW (Narayanan et al., 2021)
    stash      delay n-1-s    PipeDream's weight stashing (Narayanan et al., 2019)
    vertical   delay n-1      the same with vertical sync: all stages have the first one's version

1F1B begins the forward of micro-batch k on stage s when k-(n-1-s) backwards are done there. So
stash is the newest version that there is, and the others are no newer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import ConfigError


class Action(NamedTuple):
    """One forward or backward of a stage."""

    is_forward: bool
    number: int  # micro-batch, counted over all batches


def order_of(stage: int, stages: int, count: int) -> Iterator[Action]:
    """Yields the actions of a ``stage`` of ``stages`` for ``count`` micro-batches: 1F1B, from the
    first to the last."""
    ahead = min(count, stages - stage)
    for number in range(ahead):
        yield Action(True, number)
    for number in range(count):
        yield Action(False, number)
        if number + ahead < count:
            yield Action(True, number + ahead)


@dataclass(frozen=True)
class VersionRule:
    """The rule of one stage. ``each``: micro-batches of an update."""

    weights: str
    delay: int
    each: int
    corrects: bool = False  # by error feedback

    @classmethod
    def of(
        cls, weights: str, stage: int, stages: int, each: int, *, corrects: bool = False
    ) -> VersionRule:
        """Makes the rule ``weights`` of a ``stage`` of ``stages``. Raises ConfigError for another
        rule, or for one that needs more micro-batches."""
        delays = {"two": each, "stash": stages - 1 - stage, "vertical": stages - 1}
        if not isinstance(weights, str) or weights not in delays:
            raise ConfigError(
                f"without_flush: weights={weights!r} is not known; give one of {', '.join(delays)}"
            )
        if weights == "two" and each < stages:
            raise ConfigError(
                f"without_flush: {each} micro-batches for {stages} stages: a batch would begin"
                " before the weights that it is to have are made. Use at least"
                f' {stages} micro-batches, or weights="stash" or "vertical", which keep more'
                " versions."
            )
        return cls(weights, delays[weights], each, corrects)

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"{self.weights}{' with error_feedback' if self.corrects else ''}"

    def version(self, number: int) -> int:
        """Returns the version that micro-batch ``number`` of a run computes with, forward and
        backward."""
        return max(0, number - self.delay) // self.each

    @property
    def stale(self) -> int:
        """The most versions that are kept beside the newest."""
        return -(-self.delay // self.each)

    @property
    def ahead(self) -> float:
        """The updates, on average, that a gradient's weights lack: what error feedback makes up
        for."""
        return self.delay / self.each if self.corrects else 0.0

    @property
    def slots(self) -> int:
        """The versions that take room beside the newest."""
        return self.stale + (self.ahead > 0)
