"""StepClock: measures when steps end, and how long the last one took.

step    one round of the loop: each optimizer steps once in it, at most. So it begins where the last
        one ended, when an optimizer steps that has stepped already. A loop that steps one optimizer
        five times for each step of another counts five
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class StepClock:
    """The wall clock of a job's steps. The seconds are until the last optimizer stepped."""

    steps: int = 0
    step_seconds: float = 0.0
    total_seconds: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)  # by then: Traffic.waits()
    began: float = 0.0  # when the last step began, of ``time.perf_counter()``
    ended: float = field(default_factory=time.perf_counter)  # so far
    stepped: set[int] = field(default_factory=set)  # the optimizers of the last step

    def tick(self, waits: dict[str, float], index: int = 0) -> None:
        """Ends now the part of a step that the optimizer ``index`` makes."""
        now = time.perf_counter()
        if not self.stepped or index in self.stepped:
            self.steps, self.began, self.stepped = self.steps + 1, self.ended, set()
        self.stepped.add(index)
        self.total_seconds, self.waits = self.total_seconds + now - self.ended, waits
        self.step_seconds, self.ended = now - self.began, now
