"""Findings: what was audited, and the first wrong bits, which stop the training."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from ...core.homes.store import Guard
from ...errors import CorruptionError

REMEDY = (
    "Memory, a processor or a link of this machine gives wrong bits, or something else writes to"
    " this process's memory. Nothing more is trained on or saved: end this process, and resume from"
    " the last checkpoint, on another machine if it comes again (docs/audits.md)."
)
UPDATES, BLOCKS, REDUCTIONS, GATHERS, HOMES = KINDS = (
    *("updates", "recomputed blocks", "reductions"),
    *("gathered weights", "homes in memory"),
)


class Findings:
    """The audits of one job. Used from the training thread and from the auditing one."""

    def __init__(self, share: float, guard: Guard, rank: int):
        self._share, self._guard, self._rank = share, guard, rank
        self._lock = threading.Lock()
        self._counts = {kind: [0, 0] for kind in KINDS}  # pieces and bytes
        self._found: list[str] = []
        self._left_out: dict[str, None] = {}
        self._is_told = False  # to other ranks

    def count(self, kind: str, nbytes: int) -> None:
        """Counts one piece that was compared."""
        with self._lock:
            counts = self._counts[kind]
            counts[0], counts[1] = counts[0] + 1, counts[1] + nbytes

    def leave_out(self, what: str) -> None:
        """Notes what is not audited, by name."""
        with self._lock:
            self._left_out[what] = None

    def fail(self, what: str) -> CorruptionError:
        """Refuses all further work and saves: of ``what`` the bits are wrong. Returns the error.
        From any thread."""
        message = f"audit: {what} (rank {self._rank}). {REMEDY}"
        with self._lock:
            self._found.append(what)
        if self._guard.failure is None:
            self._guard.failure = partial(CorruptionError, message)
        return CorruptionError(message)

    def raise_found(self) -> None:
        """Raises CorruptionError if anything was found wrong, and tells the other ranks once. In
        the training thread."""
        if self._found and (failure := self._guard.failure) is not None:
            error = failure()
            if not self._is_told:
                self._is_told = True
                self._guard.on_failure(error)
            raise error

    def told(self) -> dict[str, Any]:
        """Returns what was audited, as values for JSON."""
        with self._lock:
            return {
                "share": self._share,
                "pieces": {kind: count for kind, (count, _) in self._counts.items()},
                "nbytes": {kind: nbytes for kind, (_, nbytes) in self._counts.items()},
                "found": list(self._found),
                "left_out": list(self._left_out),
            }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a flat tensor as bytes: NaN equals itself there."""
    return tensor.contiguous().view(torch.uint8)


def differs(expected: torch.Tensor, found: torch.Tensor) -> tuple[int, int] | None:
    """Returns how many elements of two flat tensors differ, and the first; None if none does."""
    if torch.equal(bits(expected), bits(found)):
        return None
    wrong = (bits(expected) != bits(found)).view(-1, expected.dtype.itemsize).any(1)
    return int(wrong.sum()), int(wrong.nonzero()[0])


def place_of(flat_param: Any, element: int) -> str:
    """Names the parameter that has an element of the whole flat param, and its own element."""
    places = flat_param.layout.placements
    index = max(each for each, place in enumerate(places) if place.offset <= element or not each)
    place, at = places[index], element - places[index].offset
    if at >= place.numel:
        return f"the padding after {flat_param.names[index]}"
    return f"{flat_param.names[index]}, element {at}"
