"""Lockstep: has the data ranks run the collectives of a pass without a meeting before each.

sequence   the collectives of a pass in their order
agreed     of a sequence: all data ranks have said, as the pass began, that such a pass went this way last time
foreseen   of a pass: agreed on with the step before it, and no forward has come to it yet
parted     of a rank that needs something else than what comes next in the agreed sequence, or that was struck
struck     of a rank: an exception may have kept it from starting what the others have started since the last meeting

What holds, whatever the ranks do: **a rank starts a collective only as the next one of the agreed sequence, or after a meeting just before it.**
So two different collectives never meet. A rank that parts starts nothing: it raises an alarm and comes to a meeting. The others hear the alarm
where they wait for it, come to the same meeting, and there each says how many it has started. All then complete what any has started, with bytes
that nobody uses: who waited for them is in the meeting, and raises. Where all part at the same place nothing is left to complete, and they go on
with a meeting before each collective until the pass is over; the next one like it is agreed anew.

A rank that an exception struck parts, too, in any pass: others may wait for what it was about to start. It need not know what that is: who has
started it describes it in numbers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

MOST_KNOWN = 64  # sequences that are remembered
DIGEST_NBYTES = 8
NUMBERS = 6  # that describe a collective (see `kinds`)
STAND_IN = ""  # what is started for others alone, and belongs to no pass of this rank's


@dataclass(frozen=True)
class Collective:
    """One collective, as it compares with others."""

    what: str
    nbytes: int
    numbers: Sequence[int] = field(default=(0,) * NUMBERS, compare=False)  # for ranks that have not come to it


class StandIns(Protocol):
    """What starts a collective that only completes other ranks': it is known by its numbers."""

    def begin(self, numbers: Sequence[int]) -> dist.Work:
        """Begins it, with bytes that nobody looks at."""

    def count(self, numbers: Sequence[int]) -> int:
        """Counts what its transport has begun."""


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
        self._recent: list[
            tuple[int, Collective]
        ] = []  # started, by number; those that some rank may not have started, and the last one
        self._under_way: list[dist.Work] = []
        self._starting: tuple[Collective, Callable[[], int], int] | None = None
        self._expects = False  # the last meeting was for what this rank was to start next
        self._was_struck = False
        self.stand_ins: StandIns | None = None  # of collectives that only others have started

    def close(self) -> None:
        """Forgets everything: what completes other ranks' collectives refers to the groups, whose threads must not wait for the collector."""
        self._known.clear()
        self._started, self._agreed, self._recent, self._under_way = [], None, [], []
        self._starting = self.stand_ins = None

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

    @property
    def total(self) -> int:
        """How many collectives this rank has started: after a meeting that all come from the same place, as many as any other."""
        return self._recent[-1][0] if self._recent else 0

    def expect(self) -> None:
        """Notes that all ranks have met, and each starts a collective now. Until this one has, it counts as struck."""
        self._expects = True

    def start(self, collective: Collective, begin: Callable[[], dist.Work], count: Callable[[], int]) -> dist.Work:
        """Starts ``collective`` by ``begin``, and notes it. ``count``: of what its transport has begun, by which it is known later whether an
        exception that strikes in here came before or after."""
        self._starting = collective, count, count()
        self._under_way.append(begin())
        self._note(collective)
        self._expects, self._starting = False, None
        return self._under_way[-1]

    def under_way(self) -> list[dist.Work]:
        """Returns what this rank has started and is not over; forgets the rest. Whoever was to have it may not have got it, where an exception
        struck."""
        self._under_way = [work for work in self._under_way if not work.is_completed()]
        return list(self._under_way)

    def _note(self, collective: Collective) -> None:
        """Notes that ``collective`` was started. Doing so again changes nothing."""
        is_own = collective.what != STAND_IN
        if is_own and not self._is_over and (not self._started or self._started[-1] is not collective):
            self._started.append(collective)
        if not self._recent or self._recent[-1][1] is not collective:
            self._recent.append((self.total + 1, collective))

    # --- where ranks part ---

    def strike(self) -> None:
        """Notes that an exception ended what this rank was at: it parts at its next meeting."""
        self._was_struck = True

    @property
    def has_parted(self) -> bool:
        """Whether the others may wait for what this rank does not start."""
        return self.is_open or self._expects or self._was_struck or self._starting is not None

    def settle(self) -> None:
        """Finds out whether a collective was started whose start an exception has struck."""
        if self._starting is not None:
            collective, count, before = self._starting
            self._was_struck = True
            if count() > before:
                self._note(collective)
            self._starting = None

    def described(self, first: int, last: int) -> torch.Tensor:
        """Describes the collectives of these numbers, as far as this rank has started them: int64 [last - first + 1, NUMBERS], else zeros."""
        found = torch.zeros(last - first + 1, NUMBERS, dtype=torch.int64, device="cpu")
        for number, collective in self._recent:
            if first <= number <= last:
                found[number - first] = torch.tensor(collective.numbers, dtype=torch.int64, device="cpu")
        return found

    def part(self, last: int, described: Sequence[Sequence[int]] = ()) -> None:
        """Ends the agreement, and completes what any rank has started: up to number ``last``, of which the last ones are ``described``. May be
        called again from the start."""
        self._agreed = None
        works = []
        while self.total < last:
            numbers = described[self.total - last]
            begin, count = partial(self.stand_ins.begin, numbers), partial(self.stand_ins.count, numbers)
            works.append(self.start(Collective(STAND_IN, 0, numbers), begin, count))
        for work in works:
            work.wait()
        self._expects = self._was_struck = False

    def forget(self, number: int) -> None:
        """Forgets what all ranks have started, up to this ``number``; but the last one, which tells how many there were."""
        self._recent = [each for each in self._recent if each[0] >= number] or self._recent[-1:]
