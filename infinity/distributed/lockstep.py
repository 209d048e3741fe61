"""Lockstep: has the data ranks run the collectives of a pass without a meeting before each.

sequence   the collectives of a pass in their order
agreed     of a sequence: all data ranks have said, as the pass began, that such a pass went this way last time
foreseen   of a pass: agreed on with the step before it, and no forward has come to it yet
parted     of a rank that needs something else than what comes next in the agreed sequence

What holds, whatever the ranks do: **a rank starts a collective only as the next one of the agreed sequence, or after a meeting just before it.**
So two different collectives never meet. A rank that parts starts nothing: it raises an alarm and comes to a meeting. The others hear the alarm
where they wait for it, come to the same meeting, and there each says how many it has started. All then complete what any has started, with bytes
that nobody uses: who waited for them is in the meeting, and raises. Where all part at the same place nothing is left to complete, and they go on
with a meeting before each collective until the pass is over; the next one like it is agreed anew.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

MOST_KNOWN = 64  # sequences that are remembered
DIGEST_NBYTES = 8


@dataclass(frozen=True)
class Collective:
    """One collective, as it compares with others."""

    what: str
    nbytes: int
    stand_in: Callable[[], dist.Work] = field(compare=False)  # starts one that only completes other ranks'


class Lockstep:
    """Where this rank is in a pass. Used from the thread that runs the model."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, list[Collective]] = OrderedDict()
        self._key = b""  # what such a pass is known by
        self._started: list[Collective] = []
        self._agreed: list[Collective] | None = None
        self._is_over = True  # what is started now belongs to no pass
        self._is_foreseen = False
        self.was_followed = False  # the last pass was agreed, and went so to its end

    # --- a pass ---

    def end(self) -> None:
        """Ends the pass: remembers how it went, unless it was left before its end, or never came."""
        was_entered = not self._is_over and not self._is_foreseen
        if was_entered:
            self.was_followed = self.is_agreed and not self.is_open
        if was_entered and not self.is_open:
            self._known[self._key] = self._started
            self._known.move_to_end(self._key)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        if not self.is_open:
            self._agreed = None
        self._is_over = True

    def digest_of(self, key: bytes) -> bytes:
        """Makes a digest of the sequence of the last pass that is known by ``key``; zeros where there was none."""
        if key not in self._known:
            return bytes(DIGEST_NBYTES)
        said = repr([(each.what, each.nbytes) for each in self._known[key]])
        return hashlib.blake2b(key + said.encode(), digest_size=DIGEST_NBYTES).digest()

    def begin(self, key: bytes, *, agreed: bool, foreseen: bool = False) -> None:
        """Begins a pass that is known by ``key``. ``agreed``: it will go as the last one, on every rank. ``foreseen``: its forward is still to
        come, and tells by :meth:`enter`."""
        self._key, self._started, self._is_over, self._is_foreseen = key, [], False, foreseen
        self._agreed = self._known[key] if agreed else None

    def enter(self, key: bytes) -> bool:
        """Enters the pass that was foreseen. Returns whether it is agreed on still, known by ``key``, and nothing of it was started; else it ends."""
        if self._is_foreseen and self._agreed is not None and not self._is_over and not self._started and self._key == key:
            self._is_foreseen = False
            return True
        self.end()
        return False

    # --- what comes next ---

    @property
    def is_open(self) -> bool:
        """Whether something of the agreed sequence is still to come."""
        return self.next is not None

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks run the agreed sequence, or have run it to its end."""
        return self._agreed is not None

    @property
    def next(self) -> Collective | None:
        """What comes next in the agreed sequence; None where there is none, or it is over."""
        if self._agreed is None or len(self._started) >= len(self._agreed):
            return None
        return self._agreed[len(self._started)]

    @property
    def reach(self) -> int:
        """How many collectives of the agreed sequence this rank has started."""
        return len(self._started) if self._agreed is not None else 0

    def note(self, collective: Collective) -> None:
        """Notes that ``collective`` is started now."""
        if not self._is_over:
            self._started.append(collective)

    # --- where ranks part ---

    def part(self, reach: int) -> None:
        """Ends the agreement, and completes what any rank has started: the first ``reach`` of the sequence."""
        agreed, self._agreed = self._agreed, None
        works = [each.stand_in() for each in agreed[len(self._started) : reach]] if agreed is not None else []
        for work in works:
            work.wait()
