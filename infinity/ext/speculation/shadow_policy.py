"""ShadowPolicy: decides when updates run in the backward, before clipping may change the gradients.

shadow   a unit's update with the results beside the unchanged state. ``step()`` keeps it if its own
         update would be the same, bit for bit; otherwise drops it and updates from the state
pause    steps without shadows after a step that dropped some. It doubles each time, so shadows
         cost next to nothing if gradients are always clipped
"""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_PAUSE = 256  # steps


@dataclass
class ShadowPolicy:
    """Decides when shadows are made, and counts those made and kept, one per flat param."""

    made: int = 0
    kept: int = 0
    _backward: int = 1  # makes shadows; number of the last backward of the step before
    _pause: int = field(default=0, repr=False)
    _next_pause: int = field(default=1, repr=False)

    def is_wanted(self, backward: int) -> bool:
        """Returns whether this backward of a step, counted from 1, should make shadows: a later
        backward would invalidate them."""
        return not self._pause and backward == self._backward

    def end_step(self, *, made: int, kept: int, backwards: int) -> None:
        """Records a step of ``backwards`` backwards: ``made`` shadows existed, ``kept`` became its
        updates."""
        self.made += made
        self.kept += kept
        self._backward = max(1, backwards)
        if kept < made:
            self._pause, self._next_pause = (
                self._next_pause,
                min(LONGEST_PAUSE, 2 * self._next_pause),
            )
        elif made:
            self._next_pause = max(1, self._next_pause // 2)
        elif self._pause:
            self._pause -= 1
