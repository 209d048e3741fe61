"""Counts: what the edges of a job have moved, and what its steps have waited for."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import infinity

from ...core.machine.traffic import DATA, Traffic
from ..watch.time_shares import shares_of

if TYPE_CHECKING:
    from torch import nn


def traffic_of(model: nn.Module) -> Traffic:
    """Returns the counters of a wrapped model."""
    from ...core.run.registry import wrapped  # here, so that `infinity --help` starts fast

    return wrapped(model).engine.job.traffic


@dataclass(frozen=True, kw_only=True)
class EdgeCounts:
    """A copy of the counters of `infinity.stats` at one time, to subtract from a later one."""

    at_seconds: float
    edges: dict  # edge or collective -> {"nbytes", "busy_seconds", "stall_seconds"}
    waits: dict[str, float]  # what the training waited for -> seconds

    @classmethod
    def of(cls, model: nn.Module) -> EdgeCounts:
        stats = infinity.stats(model)
        edges = {
            edge: dataclasses.asdict(moved)
            for edge, moved in (stats.edges | stats.collectives).items()
        }
        waits = traffic_of(model).waits()
        return cls(at_seconds=time.perf_counter(), edges=edges, waits=waits)

    def since(self, start: EdgeCounts) -> EdgeCounts:
        none = dict.fromkeys(("nbytes", "busy_seconds", "stall_seconds"), 0)
        edges = {
            edge: {name: value - start.edges.get(edge, none)[name] for name, value in moved.items()}
            for edge, moved in self.edges.items()
        }
        waits = {name: wait - start.waits[name] for name, wait in self.waits.items()}
        return EdgeCounts(at_seconds=self.at_seconds - start.at_seconds, edges=edges, waits=waits)

    def shares(self, stalls: Any = None) -> dict[str, float]:
        """Returns the shares of the time since the start that the steps waited, by what for.
        ``stalls``: what their data waited for."""
        shares_here = shares_of(self.at_seconds, self.waits)
        if stalls is None:
            return shares_here
        data, parts = shares_here.pop(DATA), stalls.shares
        known = parts["prepare"] + parts["fetch"]
        split = {name: parts[name] / known if known else 0.5 for name in ("prepare", "fetch")}
        return shares_here | {f"data {name}": data * part for name, part in split.items()}

    @property
    def stall_share(self) -> float:
        """The share of the time since the start in which the loop waited for transfers."""
        return sum(moved["stall_seconds"] for moved in self.edges.values()) / max(
            self.at_seconds, 1e-9
        )

    @property
    def slowest_edge(self) -> str | None:
        """The edge that the loop waited for longest; None if it never waited."""
        edge = max(self.edges, key=lambda edge: self.edges[edge]["stall_seconds"])
        return edge if self.edges[edge]["stall_seconds"] > 0 else None
