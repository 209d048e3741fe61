"""Idle while ready: how long a lane stood still although there was something to start.

ready   of an event: when its inputs and its buffer were there
idle    seconds in which no work of a lane ran, and an event of it that came later was ready

A lane is a resource: an edge, or the optimizer's threads.
"""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def idle_while_ready(events: list[Event]) -> dict[str, Any]:
    """Returns the shares of the span in which lanes were idle while ready, the largest of them, and
    the worst case: its lane, its event, and seconds. An event that does not say when it was ready
    could not have started earlier."""
    begin, end = min(event["start"] for event in events), max(event["end"] for event in events)
    lanes: dict[str, float] = {}
    worst: dict[str, Any] | None = None
    for lane in dict.fromkeys(event["lane"] for event in events if "ready" in event):
        free_at = begin
        lanes[lane] = 0.0
        for event in sorted((e for e in events if e["lane"] == lane), key=lambda e: e["start"]):
            ready = max(free_at, event.get("ready", event["start"]))
            if (idle := event["start"] - ready) > 0:
                lanes[lane] += idle
                if worst is None or idle > worst["seconds"]:
                    worst = {"lane": lane, "name": event["name"], "seconds": idle}
            free_at = max(free_at, event["end"])
    span = end - begin
    shares = {lane: seconds / span if span > 0 else 0.0 for lane, seconds in lanes.items()}
    return {"share": max(shares.values(), default=0.0), "lanes": shares, "worst": worst}
