"""Look-ahead: how many units to read before their use, from measured reads and computes.

depth   units read ahead from the disk. The fewest with which compute waits no longer than with any
        number, plus one because reads vary; the staging pool may hold fewer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DEEPEST = 16
NEGLIGIBLE = 0.01  # share of the compute: less waiting is not worth another unit's memory
WEIGHT = 0.3  # of the newest measurement


def waiting(
    trace: Sequence[int], reads: Mapping[int, float], computes: Mapping[int, float], depth: int
) -> float:
    """Simulates one pass over ``trace`` (units in order of use), and returns the seconds that
    compute waits. ``depth`` units are read ahead from the disk, one after the other.

    ``reads``: seconds to read each unit that is on disk. ``computes``: of each unit's compute.
    """
    now = disk_free = waited = 0.0
    coming = [position for position, unit in enumerate(trace) if reads.get(unit)]
    arrivals: dict[int, float] = {}
    issued = 0
    for position, unit in enumerate(trace):
        while issued < len(coming) and (
            coming[issued] <= position or _ahead(coming, issued, position) < depth
        ):
            disk_free = max(disk_free, now) + reads[trace[coming[issued]]]
            arrivals[coming[issued]] = disk_free
            issued += 1
        ready = arrivals.get(position, now)
        waited += max(0.0, ready - now)
        now = max(now, ready) + computes.get(unit, 0.0)
    return waited


def _ahead(coming: Sequence[int], index: int, position: int) -> int:
    """Counts the reads due after ``position`` and before read number ``index``."""
    count = 0
    while index - count > 0 and coming[index - count - 1] > position:
        count += 1
    return count


def choose(trace: Sequence[int], reads: Mapping[int, float], computes: Mapping[int, float]) -> int:
    """Chooses the depth, as the module describes."""
    least = waiting(trace, reads, computes, DEEPEST)
    negligible = NEGLIGIBLE * sum(computes.get(unit, 0.0) for unit in trace)
    for depth in range(1, DEEPEST):
        if waiting(trace, reads, computes, depth) <= least + negligible:
            return min(depth + 1, DEEPEST)
    return DEEPEST


class LookAhead:
    """Records measured reads and computes, and chooses the depth when a pass has a known trace."""

    def __init__(self, depth: int, *, is_fixed: bool = False):
        """``depth``: used until there are measurements. ``is_fixed``: never changes the depth."""
        self.depth = depth
        self._is_fixed = is_fixed or depth == 0  # the plan has no staging memory to spare
        self._reads: dict[int, float] = {}
        self._computes: dict[int, float] = {}
        self._disk_free = 0.0

    def note_read(self, unit: int, start: float, end: float) -> None:
        """Notes when a unit's read was requested (``start``) and completed. Time in which the disk
        still read another unit does not count."""
        self._note(self._reads, unit, max(0.0, end - max(start, self._disk_free)))
        self._disk_free = max(self._disk_free, end)

    def note_compute(self, unit: int, seconds: float) -> None:
        """Notes a unit's compute time, until the next unit was requested."""
        self._note(self._computes, unit, seconds)

    @staticmethod
    def _note(durations: dict[int, float], unit: int, seconds: float) -> None:
        before = durations.get(unit, seconds)
        durations[unit] = before + WEIGHT * (seconds - before)

    def begin_pass(self, trace: Sequence[int]) -> None:
        """Chooses the depth for a pass that is expected to follow ``trace``."""
        if trace and self._reads and not self._is_fixed:
            self.depth = choose(trace, self._reads, self._computes)
