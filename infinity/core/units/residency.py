"""Residency: where a unit's bytes are, and the legal moves between these states.

STORED     home only; costs nothing above it
FETCHING   home -> staging slots in flight, piece by piece; slots charged
STAGED     bytes in staging slots, each piece verified as it arrived; slots charged
GATHERING  slots (or a memory home), and the other ranks' shards -> device
RESIDENT   parameters usable; device bytes charged
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from ...errors import UsageError


class Residency(Enum):
    """Where a unit's weights are, beyond their home."""

    __hash__ = object.__hash__  # in C: it is looked up at every move

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


class Moves:
    """The last moves of ``name``, and the errors for others."""

    def __init__(self, name: str):
        self._name = name
        # From and to; None: reset by a rebuild
        self._last: deque[tuple[Residency, Residency | None]] = deque(maxlen=6)

    def note(self, begin: Residency, to: Residency) -> None:
        """Notes a move. Raises UsageError for one outside the table."""
        if to not in MOVES[begin]:
            raise self.illegal(begin, f"go to {to.name}")
        self._last.append((begin, to))

    def note_rebuild(self, begin: Residency) -> None:
        """Notes that ``begin`` was given up, after an exception."""
        self._last.append((begin, None))

    def illegal(self, now: Residency, action: str) -> UsageError:
        """Makes the error for an ``action`` that is illegal ``now``."""
        moves = (
            ", ".join(
                f"{begin.name}{' given up' if to is None else f'->{to.name}'}"
                for begin, to in self._last
            )
            or "none"
        )
        return UsageError(
            f"{self._name} is {now.name} and cannot {action}; its last moves: {moves}"
        )
