"""ShadowPolicy: says when updates are made in the backward, before it is known whether clipping changes the gradients.

shadow   a unit's update with its results beside the state, which stays as it was. ``step()`` keeps it when the step turns out
        to be that one, bit for bit; otherwise it is dropped and the update made as if there had been no shadow
pause   steps without shadows after one whose shadows were dropped; twice as long each time, so that where gradients are
        always clipped next to nothing is spent on shadows
"""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_PAUSE = 256  # steps


@dataclass
class ShadowPolicy:
    """When shadows are made, and what became of them. A shard's shadow counts as one."""

    made: int = 0
    kept: int = 0
    _backward: int = 1  # of a step: the last one in the step before
    _pause: int = field(default=0, repr=False)
    _next_pause: int = field(default=1, repr=False)

    def is_wanted(self, backward: int) -> bool:
        """Tells whether shadows are to be made in this backward of a step, counted from 1: another one would spoil them."""
        return not self._pause and backward == self._backward

    def end_step(self, *, made: int, kept: int, backwards: int) -> None:
        """Ends a step of so many backwards, for which ``made`` shadows were there and ``kept`` are its updates."""
        self.made += made
        self.kept += kept
        self._backward = max(1, backwards)
        if kept < made:
            self._pause, self._next_pause = self._next_pause, min(LONGEST_PAUSE, 2 * self._next_pause)
        elif made:
            self._next_pause = max(1, self._next_pause // 2)
        elif self._pause:
            self._pause -= 1
