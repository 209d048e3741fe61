"""Efficiency: explains how much of a device's rate a link allows, and what would help.

cap   the share of the device's rate if nothing overlaps (Rajbhandari et al., ZeRO-Infinity, 2021,
      section 4)
"""

from __future__ import annotations

from collections.abc import Container, Mapping

GOOD = 0.9  # a cap from which more tokens help little
LARGEST = 1 << 20  # times the tokens
SMALL = 0.02  # of the compute: a link that needs less is not explained


def explain_slowest(seconds: Mapping[str, float], besides: Container[str] = ()) -> str:
    """Describes what the slowest of a step's links allows; "" if it matters little. ``seconds``: of
    each resource, "compute" among them. ``besides``: those that are no link with a home."""
    links = {name: each for name, each in seconds.items() if name not in besides}
    compute = links.pop("compute", seconds["compute"])
    slowest = max(links, key=links.__getitem__, default=None)
    if slowest is None or links[slowest] <= SMALL * compute:
        return ""
    return explain(slowest, compute, links[slowest])


def explain(link: str, compute_seconds: float, link_seconds: float) -> str:
    """Describes in a line what ``link`` allows, and how many more tokens for its bytes would help;
    "" if it moves nothing."""
    if link_seconds <= 0 or compute_seconds <= 0:
        return ""
    in_sequence = compute_seconds / (compute_seconds + link_seconds)
    overlapped = min(1.0, compute_seconds / link_seconds)
    source = link.removesuffix("s")
    said = (
        f"the GPU waits for the {source}: it computes {100 * in_sequence:.0f}\u2013"
        f"{100 * overlapped:.0f} % of the time"
    )
    times = 1
    while times < LARGEST and times * compute_seconds < GOOD * (
        times * compute_seconds + link_seconds
    ):
        times *= 2
    if times == 1:
        return said
    better = times * compute_seconds / (times * compute_seconds + link_seconds)
    return (
        f"{said}; a batch {times} times as large would keep it busy at least {100 * better:.0f} %"
    )
