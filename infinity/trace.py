"""Traffic: what moved over each edge between two tiers, and how long the step waited for it.

busy   seconds with at least one transfer in flight on the edge
stall  seconds the training thread stood still for it
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field

EDGES = ("nvme->host", "host->nvme", "host->device", "device->host")


@dataclass
class EdgeTraffic:
    """Totals of one edge since the model was wrapped."""

    nbytes: int = 0
    busy_seconds: float = 0.0
    stall_seconds: float = 0.0


@dataclass
class Traffic:
    """The four edges of one engine."""

    edges: dict[str, EdgeTraffic] = field(default_factory=lambda: {edge: EdgeTraffic() for edge in EDGES})

    @contextmanager
    def stalled(self, edge: str):
        """Counts the block's duration as time the training thread stood still for ``edge``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.edges[edge].stall_seconds += time.perf_counter() - start

    @contextmanager
    def copying(self, edge: str, nbytes: int):
        """Counts a copy of ``nbytes`` made by the training thread itself: busy and stalled are the same."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            traffic = self.edges[edge]
            traffic.nbytes += nbytes
            traffic.busy_seconds += seconds
            traffic.stall_seconds += seconds
