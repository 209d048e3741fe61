"""`infinity trace`: summarises a timeline (``Config(trace=...)``): how busy each lane was, how much
overlapped with compute, and which units stalled it.

span      from the start of the first event looked at to the end of the last
under     the share of a lane's busy time in which a forward or a backward was running
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...files.outputs import PICTURE, Output, check_outputs
from ...untrusted import parse_json, printable, read_text
from ..cli.amounts import format_count, format_seconds
from ..cli.answers import print_object
from ..cli.options import COUNT, FLAG, takes
from ..cli.values import a_path, svg_path
from . import svg
from .timeline import FORMAT
from .trace_ready import idle_while_ready

Interval = tuple[float, float]
COMPUTE = ("forward", "backward")
WIDTH, LANE_HEIGHT, LETTER = 1000, 26, 13  # of the largest text that a page shows
COLOURS = {
    "step": "#8b9098",
    "forward": "#277f45",
    "backward": "#7a4fb0",
    "optimizer": "#8a6d1b",
    "stalled": "#c4511d",
}
GIVE = "give the file that Config(trace=...) or `infinity train --trace` wrote"


OPTIONS = (
    ("file", {"type": a_path}, "what Config(trace=...) wrote; Perfetto opens it too"),
    ("--steps", COUNT | {"default": 0}, "look at the last N steps only (default: all)"),
    ("--svg", takes("FILE", svg_path), "draw the steps as a picture"),
    ("--overwrite", FLAG, "replace a file of --svg that is not a picture of ours"),
    ("--json", FLAG, "the summary as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the summary, and draws the picture of ``--svg``."""
    if args.svg is not None:
        check_outputs(
            [Output("--svg", args.svg, made=PICTURE)],
            [("FILE", args.file)],
            overwrite=args.overwrite,
        )
    events = last_steps(read(args.file), args.steps)
    summed = summary(events)
    if args.json:
        print_object(summed)
    else:
        _print(summed)
    if args.svg is not None:
        args.svg.write_text(draw(events) + "\n")
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the events of a timeline, times in seconds. The last line may be cut off, if the job
    was killed. Raises ConfigError if the file is not a timeline, UsageError for a newer format."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: {GIVE}")
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    lines = text.rstrip().removesuffix("]").rstrip().split("\n")
    events = []
    for number, line in enumerate(lines):
        line = line.strip().removesuffix(",")
        if line in ("", "["):
            continue
        try:
            event = parse_json(line)
            if event["ph"] == "M" and event["name"] == "format":
                FORMAT.check(path, event["args"])
            if event["ph"] == "X":
                start, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
                if not (math.isfinite(start) and math.isfinite(seconds) and seconds >= 0):
                    raise ValueError(f"from {start} for {seconds} s")
                lane, name = str(event["cat"]), str(event["name"])
                read = {"lane": lane, "name": name, "start": start, "end": start + seconds}
                if "ready" in (details := event.get("args", {})):
                    read["ready"] = float(details["ready"]) / 1e6
                events.append(read)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines) - 1:
                break  # the job was killed while it wrote this line
            raise ConfigError(
                f"{path}, line {number + 1}, is not of a timeline"
                f" ({printable(repr(error))[:300]}): {GIVE}"
            ) from error
    if not events:
        raise ConfigError(
            f"{path} holds no event: it is not a timeline, or no step was taken: {GIVE}"
        )
    return events


def last_steps(events: list[dict], count: int) -> list[dict]:
    """Returns the events of the last ``count`` steps (0: all), cut at the first one's start."""
    steps = sorted(event["start"] for event in events if event["lane"] == "step")
    if not count or not steps:
        return events
    begin = steps[-min(count, len(steps))]
    return [
        event | {"start": max(begin, event["start"])}
        for event in events
        if (event["start"] >= begin if event["lane"] == "step" else event["end"] > begin)
    ]


def summary(events: list[dict]) -> dict[str, Any]:
    """Summarises each lane: busy seconds, share of the span, share under compute. Lists the five
    units with the most stall time."""
    begin, end = min(event["start"] for event in events), max(event["end"] for event in events)
    by_lane: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        by_lane[event["lane"]].append((event["start"], event["end"]))
    compute = union(interval for lane in COMPUTE for interval in by_lane.get(lane, ()))
    lanes = {}
    for lane, intervals in by_lane.items():
        busy = union(intervals)
        seconds = length(busy)
        lanes[lane] = {
            "events": len(intervals),
            "busy_seconds": seconds,
            "share": seconds / (end - begin) if end > begin else 0.0,
            "under_compute": length(common(busy, compute)) / seconds if seconds else 0.0,
        }
    waits: dict[str, float] = defaultdict(float)
    for event in events:
        if event["lane"] == "stalled":
            waits[event["name"]] += event["end"] - event["start"]
    most = sorted(waits.items(), key=lambda entry: -entry[1])[:5]
    steps = sum(event["lane"] == "step" for event in events)
    return {
        "seconds": end - begin,
        "steps": steps,
        "lanes": lanes,
        "waited_for": dict(most),
        "idle_while_ready": idle_while_ready(events),
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals into ascending, disjoint ones."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def common(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Returns the intersection of two lists of ascending, disjoint intervals."""
    overlaps, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            overlaps.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def length(intervals: Iterable[Interval]) -> float:
    """Adds up the seconds of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def _print(found: dict[str, Any]) -> None:
    print(f"{format_count(found['steps'], 'step')}, {format_seconds(found['seconds'])}")
    idle = found["idle_while_ready"]
    head = f"{'lane':<14}{'events':>8}{'busy':>11}{'share':>8}{'under compute':>15}"
    print(f"{head}{'could have run':>18}")
    for lane, of_lane in found["lanes"].items():
        share = f"{idle['lanes'][lane]:.1%}" if lane in idle["lanes"] else "-"
        print(
            f"{printable(lane):<14}{of_lane['events']:>8}{of_lane['busy_seconds']:>9.3f}"
            f" s{of_lane['share']:>8.0%}{of_lane['under_compute']:>15.0%}{share:>18}"
        )
    for name, seconds in found["waited_for"].items():
        print(f"waited {format_seconds(seconds)} for {printable(name)}")
    if (worst := idle["worst"]) is None:
        print("each lane ran as soon as it could")
        return
    lane = max(idle["lanes"], key=idle["lanes"].__getitem__)
    print(
        f"{printable(lane)} could have run, and did not, {idle['share']:.1%} of the time (longest:"
        f" {printable(worst['lane'])}, {printable(worst['name'])},"
        f" {format_seconds(worst['seconds'])})"
    )


def draw(events: list[dict]) -> str:
    """Draws the lanes below each other, time from left to right, as an SVG picture."""
    from .timeline import LANES

    begin, end = min(event["start"] for event in events), max(event["end"] for event in events)
    used = dict.fromkeys(event["lane"] for event in events)  # those of extensions as well
    lanes = [lane for lane in dict.fromkeys((*LANES, *used)) if lane in used]
    left = 16 + LETTER * min(20, max(map(len, lanes)))
    across, colours = WIDTH - left - 10, svg.colours_of(lanes, COLOURS)
    scale = across / max(end - begin, 1e-9)
    marks = []
    for number, lane in enumerate(lanes):
        y, colour = 10 + number * LANE_HEIGHT, colours[lane]
        marks.append(svg.text(left - 8, y + 16, lane, anchor="end"))
        for event in events:
            if event["lane"] == lane:
                x, seconds = (
                    left + scale * (event["start"] - begin),
                    event["end"] - event["start"],
                )
                title = f"{event['name']}, {1e3 * seconds:.1f} ms"
                edged = lane == "step"  # steps are contiguous: edges separate them
                size = max(0.4, scale * seconds), LANE_HEIGHT - 6
                marks.append(svg.bar(x, y, *size, colour, title=title, edged=edged, opacity=0.6))
    height = 10 + len(lanes) * LANE_HEIGHT + 24
    for tenth in range(0, 11, 2):
        anchor = "middle" if tenth < 10 else "end"
        marks.append(
            svg.text(
                left + across * tenth / 10,
                height - 6,
                f"{(end - begin) * tenth / 10:.2f} s",
                anchor=anchor,
            )
        )
    return svg.picture(WIDTH, height, marks)
