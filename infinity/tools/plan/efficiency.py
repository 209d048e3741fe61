"""Efficiency: explains how much of a device's rate a link allows, and what would help.

intensity  operations for every byte that passes the link
cap        the share of the device's rate if nothing overlaps: intensity x bandwidth over the same
           plus the device's rate (Rajbhandari et al., ZeRO-Infinity, 2021, section 4)
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from ...errors import ConfigError

GOOD = 0.9  # a cap from which more tokens help little
LARGEST = 1 << 20  # times the tokens
SMALL = 0.02  # of the compute: a link that needs less is not explained


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Computes the cap. ``bandwidth`` in bytes per second, ``peak`` in operations per second.
    Raises ConfigError for a rate that is not above 0."""
    if min(intensity, bandwidth, peak) <= 0:
        raise ConfigError(
            f"rates are above 0: intensity {intensity}, bandwidth {bandwidth}, peak {peak}"
        )
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(share: float, intensity: float, peak: float) -> float:
    """Computes the bandwidth at which the cap is ``share``."""
    return share / (1 - share) * peak / intensity


def intensity_of_weights(tokens: float) -> float:
    """Returns the operations for a byte of weights and gradients, of a step of ``tokens`` on a
    device that computes its blocks again."""
    return tokens


def intensity_of_state(tokens: float) -> float:
    """Returns the operations for a byte of master weights and moments."""
    return tokens / 4


def intensity_of_activations(width: int, interval: int = 1) -> float:
    """Returns the operations for a byte of the inputs kept every ``interval`` blocks."""
    return 24 * width * interval


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
    apart = compute_seconds / (compute_seconds + link_seconds)
    beside = min(1.0, compute_seconds / link_seconds)
    said = f"GPU use: {apart:.0%} to {beside:.0%}, by how much of the time of the {link} hides"
    times = 1
    while times < LARGEST and times * compute_seconds < GOOD * (
        times * compute_seconds + link_seconds
    ):
        times *= 2
    if times == 1:
        return said
    better = times * compute_seconds / (times * compute_seconds + link_seconds)
    return f"{said}; with a batch {times} times as large at least {better:.0%}"
