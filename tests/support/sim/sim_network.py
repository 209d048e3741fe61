"""The simulated network: collectives of gloo, to which a rank comes late or never.

Where both happen is drawn from a seed and counted in collectives, not in seconds, so that it is the
same place in every run.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

from infinity.ranks import bulk, kinds

LATE_SECONDS = 0.05


class SimulatedNetwork:
    """The network of one rank. ``late``: how many collectives it came late to."""

    def __init__(self, faults: dict[str, float], rank: int):
        self._share = faults.get("late", 0.0)
        self._rng = random.Random(f"{faults.get('seed', 0)} of {rank}")
        self._left = -1  # collectives until this rank is lost
        self.late = 0

    def lose_after(self, count: int) -> None:
        """Has this rank end before the next collective but ``count``."""
        self._left = count

    def _begin(self, *args: Any) -> Any:
        if self._left == 0:
            os._exit(0)
        self._left -= 1
        if self._rng.random() < self._share:
            self.late += 1
            time.sleep(LATE_SECONDS)
        return kinds.begin(*args)

    def __enter__(self) -> SimulatedNetwork:
        bulk.begin_kind = self._begin
        return self

    def __exit__(self, *_: object) -> None:
        bulk.begin_kind = kinds.begin
