"""Residency: where a unit's bytes are, and the legal moves between these states.

STORED     home only; costs nothing above it
FETCHING   home -> staging slots in flight, piece by piece; slots charged
STAGED     bytes in staging slots, each piece verified as it arrived; slots charged
GATHERING  slots (or a memory home), and the other ranks' slices -> device
RESIDENT   parameters usable; device bytes charged
"""

from __future__ import annotations

from enum import Enum, auto


class Residency(Enum):
    """Where a unit's weights are, beyond their home."""

    STORED = auto()
    FETCHING = auto()
    STAGED = auto()
    GATHERING = auto()
    RESIDENT = auto()


MOVES = {
    Residency.STORED: {Residency.FETCHING, Residency.GATHERING},
    Residency.FETCHING: {Residency.STAGED, Residency.STORED, Residency.GATHERING},
    Residency.STAGED: {Residency.GATHERING, Residency.STORED},
    Residency.GATHERING: {Residency.RESIDENT, Residency.STORED},
    Residency.RESIDENT: {Residency.STORED},
}
