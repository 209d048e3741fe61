"""StepClock: measures when optimizer steps end, and how long the last one took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class StepClock:
    """The wall clock of optimizer steps."""

    steps: int = 0
    step_seconds: float = 0.0
    total_seconds: float = 0.0  # until the end of the last step
    waits: dict[str, float] = field(default_factory=dict)  # by then: Traffic.waits()
    _last: float = field(default_factory=time.perf_counter)

    def tick(self, waits: dict[str, float]) -> float:
        """Ends a step now. Returns its start, of ``time.perf_counter()``."""
        began, now = self._last, time.perf_counter()
        self.step_seconds, self._last = now - began, now
        self.total_seconds, self.waits = self.total_seconds + self.step_seconds, waits
        self.steps += 1
        return began
