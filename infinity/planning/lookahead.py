"""Look-ahead: how many units to read before their use, from what reads and computes were measured to take.

depth   units from the disk that are read ahead. As few as leave the compute waiting no longer than any number would, and one
        more, since no two reads take the same; the staging pool may hold fewer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DEEPEST = 16
NEGLIGIBLE = 0.01  # of the compute: waiting that is not worth another unit's memory
WEIGHT = 0.3  # of the newest measurement


def waiting(trace: Sequence[int], reads: Mapping[int, float], computes: Mapping[int, float], depth: int) -> float:
    """Computes the seconds that the compute waits in one pass over ``trace`` (units in order of use), when ``depth`` units from the
    disk are read ahead, one after the other. ``reads``: seconds of each unit that comes from the disk; ``computes``: of each."""
    now = disk_free = waited = 0.0
    coming = [position for position, unit in enumerate(trace) if reads.get(unit)]
    arrivals: dict[int, float] = {}
    issued = 0
    for position, unit in enumerate(trace):
        while issued < len(coming) and (coming[issued] <= position or _ahead(coming, issued, position) < depth):
            disk_free = max(disk_free, now) + reads[trace[coming[issued]]]
            arrivals[coming[issued]] = disk_free
            issued += 1
        ready = arrivals.get(position, now)
        waited += max(0.0, ready - now)
        now = max(now, ready) + computes.get(unit, 0.0)
    return waited


def _ahead(coming: Sequence[int], index: int, position: int) -> int:
    """How many units from the disk come after ``position`` and before the one with this index."""
    count = 0
    while index - count > 0 and coming[index - count - 1] > position:
        count += 1
    return count


def choose(trace: Sequence[int], reads: Mapping[int, float], computes: Mapping[int, float]) -> int:
    """Chooses the depth: see the module."""
    least = waiting(trace, reads, computes, DEEPEST)
    negligible = NEGLIGIBLE * sum(computes.get(unit, 0.0) for unit in trace)
    for depth in range(1, DEEPEST):
        if waiting(trace, reads, computes, depth) <= least + negligible:
            return min(depth + 1, DEEPEST)
    return DEEPEST


class LookAhead:
    """Measures reads and computes as they happen, and chooses from them once a pass is known."""

    def __init__(self, depth: int, *, is_fixed: bool = False):
        """``depth``: until there are measurements; ``is_fixed``: where none can be made."""
        self.depth = depth
        self._is_fixed = is_fixed or depth == 0  # the plan has no staging memory to spare
        self._reads: dict[int, float] = {}
        self._computes: dict[int, float] = {}
        self._disk_free = 0.0

    def note_read(self, unit: int, start: float, end: float) -> None:
        """Notes when a unit's bytes were asked for and came: what of that time was not another unit's counts."""
        self._note(self._reads, unit, max(0.0, end - max(start, self._disk_free)))
        self._disk_free = max(self._disk_free, end)

    def note_compute(self, unit: int, seconds: float) -> None:
        """Notes for how long a unit was computed with, until the next was asked for."""
        self._note(self._computes, unit, seconds)

    @staticmethod
    def _note(known: dict[int, float], unit: int, seconds: float) -> None:
        before = known.get(unit, seconds)
        known[unit] = before + WEIGHT * (seconds - before)

    def begin_pass(self, trace: Sequence[int]) -> None:
        """Chooses the depth for the pass that begins, which is expected to go as ``trace``."""
        if trace and self._reads and not self._is_fixed:
            self.depth = choose(trace, self._reads, self._computes)
