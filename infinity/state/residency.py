"""TODO state.residency."""

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
