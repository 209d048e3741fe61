"""Idle while ready: how long a lane stood still although there was something to start.

ready   of an event: when its inputs and its buffer were there
idle    seconds in which no work of a lane ran, and an event of it that came later was ready

A lane is a resource: an edge, the optimizer's threads, or the compute. Lanes of which the engine
does not say when work was ready are those of the loop's thread. Their work was ready at the latest
when the last thing had ended that it can have waited for: what that thread did before, and work of
the same name on another lane. So their idle time is a lower bound.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
COMPUTE, WAITS = ("forward", "backward"), "stalled"
NO_RESOURCE = ("step", WAITS)


def with_ready(events: list[Event]) -> list[Event]:
    """Returns the events by their starts, each of a resource with ``ready``. The first compute of a
    pass is ready when it starts, for the loop's own code comes before it."""
    marked = {event["lane"] for event in events if "ready" in event} | {"step"}
    made: list[Event] = []
    running: list[tuple[float, int, Event]] = []
    came: dict[str, dict[str, float]] = defaultdict(dict)  # name -> lane -> when work of it ended
    thread_end: float | None = None
    last_compute = ""  # the lane of the last one, in this step
    for number, event in enumerate(sorted(events, key=lambda event: event["start"])):
        lane, start, name = event["lane"], event["start"], event["name"].rpartition(" ")[2]
        while running and running[0][0] <= start:
            end, _, over = heapq.heappop(running)
            came[over["name"].rpartition(" ")[2]][over["lane"]] = end
        begins_pass = lane in COMPUTE and lane != last_compute
        last_compute = lane if lane in COMPUTE else "" if lane == "step" else last_compute
        if "ready" not in event and lane not in NO_RESOURCE:
            ready = start
            if lane not in marked and not begins_pass and thread_end is not None:
                ends = [end for other, end in came[name].items() if other != lane]
                ready = min(start, max(thread_end, *ends, thread_end))
            event = event | {"ready": ready}
        if lane not in marked:
            thread_end = max(event["end"], event["end"] if thread_end is None else thread_end)
        if lane not in NO_RESOURCE:
            heapq.heappush(running, (event["end"], number, event))
        made.append(event)
    return made


def idle_while_ready(events: list[Event]) -> dict[str, Any]:
    """Returns the shares of the span in which lanes were idle while ready, the largest of them, and
    the worst case: its lane, its event, and seconds."""
    events = with_ready(events)
    begin, end = min(event["start"] for event in events), max(event["end"] for event in events)
    lanes: dict[str, float] = {}
    worst: dict[str, Any] | None = None
    for lane in dict.fromkeys(event["lane"] for event in events if "ready" in event):
        free_at = begin
        lanes[lane] = 0.0
        for event in (e for e in events if e["lane"] == lane):
            ready = max(free_at, event.get("ready", event["start"]))
            if (idle := event["start"] - ready) > 0:
                lanes[lane] += idle
                if worst is None or idle > worst["seconds"]:
                    worst = {"lane": lane, "name": event["name"], "seconds": idle}
            free_at = max(free_at, event["end"])
    span = end - begin
    shares = {lane: seconds / span if span > 0 else 0.0 for lane, seconds in lanes.items()}
    return {"share": max(shares.values(), default=0.0), "lanes": shares, "worst": worst}
