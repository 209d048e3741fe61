"""Traffic: counts the bytes on each edge between two tiers, and the step's waits for them.

busy    seconds with at least one transfer in flight on the edge
stall   seconds that the training thread waited for it
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

EDGES = ("nvme->host", "host->nvme", "host->device", "device->host")
PAST_HOST = "nvme->device"  # if available
COLLECTIVES = (
    "all-gather",
    "all-gather in node",
    "all-gather over replicas",
    "reduce-scatter",
    "flags",
    "shared memory",
)

UPDATES = "optimizer"  # what the compute waits for if weights are still being updated
DATA = "data"  # what the loop waits for before a step
OTHER_RANKS = "other ranks"
# What a step waits for -> the edges
WAITS = {"copies": ("host->device", "device->host"), "disk": ("nvme->host", "host->nvme")}


@dataclass
class EdgeTraffic:
    """Totals of one edge since the model was wrapped."""

    nbytes: int = 0
    busy_seconds: float = 0.0
    stall_seconds: float = 0.0


@dataclass
class CollectiveTraffic(EdgeTraffic):
    """Totals of one kind of exchange between ranks, since then."""

    operations: int = 0


@dataclass
class Traffic:
    """The four edges of one engine, the exchanges with other ranks, the waits for updates
    since they were last taken."""

    edges: dict[str, EdgeTraffic] = field(
        default_factory=lambda: {edge: EdgeTraffic() for edge in EDGES}
    )
    collectives: dict[str, CollectiveTraffic] = field(
        default_factory=lambda: {name: CollectiveTraffic() for name in COLLECTIVES}
    )
    # Bytes of the transfers whose seconds are counted: a device's are counted when they are over.
    timed: Counter[str] = field(default_factory=Counter)
    updates: EdgeTraffic = field(default_factory=EdgeTraffic)  # only its stalls are counted
    data: EdgeTraffic = field(default_factory=EdgeTraffic)  # of loaders that are watched
    update_waits: list[float] = field(default_factory=list)
    # Listeners, called with work that has ended: :class:`infinity.core.seams.Events`.
    moved: list[Callable[..., None]] = field(default_factory=list)

    def take_update_waits(self) -> list[float]:
        """Returns the seconds of each wait for an update, and forgets them."""
        taken, self.update_waits = self.update_waits, []
        return taken

    def waits(self) -> dict[str, float]:
        """Returns the seconds that the training thread has waited, by what for."""
        return {
            **{
                name: sum(self.edges[edge].stall_seconds for edge in edges)
                for name, edges in WAITS.items()
            },
            UPDATES: self.updates.stall_seconds,
            OTHER_RANKS: sum(counted.stall_seconds for counted in self.collectives.values()),
            DATA: self.data.stall_seconds,
        }

    def tell(
        self,
        lane: str,
        name: str,
        start: float,
        end: float | None = None,
        *,
        ready: float | None = None,
        **details,
    ) -> None:
        """Tells listeners of work that ended now (or at ``end``). ``ready``: when all was there
        that it starts from."""
        end = end or time.perf_counter()
        for listener in self.moved:
            listener(lane, name, start, end, ready=ready, **details)

    @contextmanager
    def stalled(self, edge: str, label: str = "") -> Iterator[None]:
        """Counts the block's duration as a stall of the training thread on ``edge``: one of the
        edges, a collective, :data:`UPDATES` or :data:`DATA`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stood_still(edge, label, start, time.perf_counter())

    def stood_still(self, edge: str, label: str, start: float, end: float) -> None:
        """Counts a stall of the compute on ``edge``."""
        if edge == UPDATES:
            counted = self.updates
            self.update_waits.append(end - start)
        elif edge == DATA:
            counted = self.data
        else:
            counted = self.edges.get(edge) or self.collectives[edge]
        counted.stall_seconds += end - start
        self.tell("stalled", f"{edge} {label}".strip(), start, end)

    def rate(self, edge: str) -> float | None:
        """Returns the bytes per second of the copies over ``edge`` that are over; None if there are
        none."""
        seconds = self.edges[edge].busy_seconds
        return self.timed[edge] / seconds if self.timed[edge] and seconds else None

    def copied(
        self,
        edge: str,
        nbytes: int,
        label: str,
        start: float,
        end: float,
        *,
        is_counted: bool = False,
    ) -> None:
        """Counts a copy made beside the training thread. ``is_counted``: its bytes were when it was
        launched."""
        traffic = self.edges[edge]
        traffic.nbytes += 0 if is_counted else nbytes
        traffic.busy_seconds += end - start
        self.timed[edge] += nbytes
        self.tell(edge, label, start, end)

    def received(self, collective: str, nbytes: int, label: str, start: float | None) -> None:
        """Counts a collective that ends now, and the bytes that others sent to this rank.
        ``start``: None if the host does not know its duration, which is then not counted."""
        now, traffic = time.perf_counter(), self.collectives[collective]
        traffic.nbytes += nbytes
        traffic.operations += 1
        if start is None:
            return
        traffic.busy_seconds += now - start
        self.tell(collective, label, start, now)

    @contextmanager
    def copying(self, edge: str, nbytes: int, label: str = "") -> Iterator[None]:
        """Counts a copy of ``nbytes`` by the training thread itself: both busy and stalled."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.copied_here(edge, nbytes, label, start)

    def copied_here(self, edge: str, nbytes: int, label: str, start: float) -> None:
        """Counts a copy that the training thread itself has made, from ``start`` to now."""
        seconds, traffic = time.perf_counter() - start, self.edges[edge]
        traffic.nbytes += nbytes
        traffic.busy_seconds += seconds
        traffic.stall_seconds += seconds
        self.timed[edge] += nbytes
        if self.moved:
            self.tell(edge, label, start, nbytes=nbytes)
