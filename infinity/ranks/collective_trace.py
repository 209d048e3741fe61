"""CollectiveTrace: runs the collectives of a pass on all data ranks without a sync point before
each.

sequence     the collectives of a pass in their order
verified     of a sequence: all data ranks reported, as the pass started, that the last pass of this
             key went this way
predicted    of a pass: verified at the step before it, and no forward has entered it yet
diverged     of a rank: it needs another collective than the next of the verified sequence, or was
             interrupted
interrupted  of a rank: by an exception, which may have kept it from starting what the others have
             started since the last sync point

Invariant: **a rank starts a collective only as the next one of the verified sequence, or after a
sync point just before it.** So two different collectives never meet.

A rank that diverges starts nothing: it raises an alarm and comes to a sync point. The others see
the alarm while they wait for it, come to the same sync point, and each reports how many collectives
it has started. All then complete what any rank has started, with dummy data. The ranks that wanted
those results are in the sync point, and raise.

If all diverge at the same point, nothing is left to complete. They go on with a sync point before
each collective until the pass is over. The next pass like it is verified anew.

An interrupted rank diverges in any pass: others may wait for what it was about to start. It need
not know what that is: a rank that has started it encodes it as numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

MOST_SEQUENCES = 64  # remembered sequences
NUMBERS = 6  # that encode a collective (see `kinds`)
IS_ON_HOST = 5  # which of them tells whether it is in host memory
STAND_IN = ""  # the name of one started only to complete another rank's


@dataclass(frozen=True)
class Collective:
    """One collective, as it is compared."""

    what: str
    nbytes: int
    # For ranks that have not reached it
    numbers: Sequence[int] = field(default=(0,) * NUMBERS, compare=False)


# Starts a collective with dummy data; counts the collectives that its transport has started.
Dummy = tuple[Callable[[], dist.Work], Callable[[], int]]


def number_of(said: Any) -> int:
    """Returns a digest of ``said``, by its repr, as a positive int64."""
    return int(hashlib.blake2b(repr(said).encode(), digest_size=7).hexdigest(), 16)


class CollectiveTrace:
    """The position of this rank in a pass. Used from the thread that runs the model, or by the
    channel's listener, under the ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._sequences: OrderedDict[Hashable, list[Collective]] = OrderedDict()
        self._key: Hashable = None  # of this pass
        self._started: list[Collective] = []
        self._verified: list[Collective] | None = None
        self._is_over = True  # collectives started now belong to no pass
        self._is_predicted = False
        self.was_followed = False  # the last pass was verified, and did not diverge
        # Started, by number: those that some rank may lack, and the last
        self._recent: list[tuple[int, Collective]] = []
        self._under_way: list[tuple[dist.Work, Collective]] = []
        self._starting: tuple[Collective, Callable[[], int], int] | None = None
        self._expects = False  # the last sync point was for this rank's next collective
        self._was_interrupted = False
        # Makes collectives that only others have started, from their numbers.
        self.dummy_of: Callable[[Sequence[int]], Dummy] | None = None

    def close(self) -> None:
        """Forgets everything: ``dummy_of`` refers to the groups, whose threads must not wait for
        the garbage collector."""
        self._sequences.clear()
        self._started, self._verified, self._recent, self._under_way = [], None, [], []
        self._starting = self.dummy_of = None

    # --- a pass ---

    def end(self) -> None:
        """Ends the pass. Remembers its sequence, unless it was left early or never entered."""
        was_entered = not self._is_over and not self._is_predicted
        if was_entered:
            self.was_followed = self.is_verified and not self.is_open
        if was_entered and not self.is_open:
            self._sequences[self._key] = self._started
            self._sequences.move_to_end(self._key)
            if len(self._sequences) > MOST_SEQUENCES:
                self._sequences.popitem(last=False)
        if not self.is_open:
            self._verified = None
        self._is_over = True

    def digest_of(self, key: Hashable) -> int:
        """Returns a digest of the sequence of the last pass of ``key``; 0 if there was none."""
        if key not in self._sequences:
            return 0
        return number_of(
            (key, [(collective.what, collective.nbytes) for collective in self._sequences[key]])
        )

    def begin(self, key: Hashable, *, verified: bool, predicted: bool = False) -> None:
        """Starts a pass of ``key``. ``verified``: all ranks repeat the last sequence.
        ``predicted``: predicted; its forward calls :meth:`enter` later."""
        self._key, self._started, self._is_over, self._is_predicted = key, [], False, predicted
        self._verified = self._sequences[key] if verified else None

    def enter(self, key: Hashable) -> bool:
        """Enters the predicted pass. Returns whether it is still verified, has this ``key``, and
        nothing of it was started. If not, it ends."""
        if (
            self._is_predicted
            and self._verified is not None
            and not self._is_over
            and not self._started
            and self._key == key
        ):
            self._is_predicted = False
            return True
        self.end()
        return False

    # --- what comes next ---

    @property
    def is_open(self) -> bool:
        """Whether more of the verified sequence follows."""
        return self.next is not None

    @property
    def is_verified(self) -> bool:
        """Whether all ranks run the verified sequence, or have run it to its end."""
        return self._verified is not None

    @property
    def next(self) -> Collective | None:
        """The next collective of the verified sequence; None if there is none."""
        if self._verified is None or len(self._started) >= len(self._verified):
            return None
        return self._verified[len(self._started)]

    @property
    def reach(self) -> int:
        """How many collectives of the verified sequence this rank has started."""
        return len(self._started) if self._verified is not None else 0

    @property
    def total(self) -> int:
        """How many collectives this rank has started in all. Equal on all ranks after a sync point
        without divergence."""
        return self._recent[-1][0] if self._recent else 0

    def expect(self) -> None:
        """Notes that all ranks have met, and each starts a collective next. Until then this rank
        counts as interrupted."""
        self._expects = True

    def start(
        self, collective: Collective, begin: Callable[[], dist.Work], count: Callable[[], int]
    ) -> dist.Work:
        """Starts ``collective`` by ``begin()``, and records it. ``count()``: collectives the
        transport has started. After an interrupt it tells whether this one was."""
        self._starting = collective, count, count()
        self._under_way.append((begin(), collective))
        self._note(collective)
        self._expects, self._starting = False, None
        return self._under_way[-1][0]

    def under_way(self) -> list[tuple[dist.Work, bool]]:
        """Returns the started collectives that are not complete, and whether each is in host
        memory. Forgets the others. If interrupted, the caller may not have received the handle."""
        self._under_way = [entry for entry in self._under_way if not entry[0].is_completed()]
        return [(work, bool(of.numbers[IS_ON_HOST])) for work, of in self._under_way]

    @property
    def is_under_way(self) -> bool:
        """Whether a started collective is not complete. Valid from any thread."""
        return any(not work.is_completed() for work, _ in tuple(self._under_way))

    def _note(self, collective: Collective) -> None:
        """Records that ``collective`` was started. Idempotent."""
        is_own = collective.what != STAND_IN
        if (
            is_own
            and not self._is_over
            and (not self._started or self._started[-1] is not collective)
        ):
            self._started.append(collective)
        if not self._recent or self._recent[-1][1] is not collective:
            self._recent.append((self.total + 1, collective))

    # --- divergence ---

    def strike(self) -> None:
        """Notes that an exception interrupted this rank: it diverges at its next sync point."""
        self._was_interrupted = True

    @property
    def has_diverged(self) -> bool:
        """Whether the others may wait for a collective that this rank does not start."""
        return self.is_open or self._expects or self._was_interrupted or self._starting is not None

    def settle(self) -> None:
        """Finds out whether an interrupted start has started its collective."""
        if self._starting is not None:
            collective, count, before = self._starting
            self._was_interrupted = True
            if count() > before:
                self._note(collective)
            self._starting = None

    def described(self, first: int, last: int) -> torch.Tensor:
        """Encodes the collectives of these numbers: int64 [last - first + 1, NUMBERS]. Zeros for
        those that this rank has not started."""
        table = torch.zeros(last - first + 1, NUMBERS, dtype=torch.int64, device="cpu")
        for number, collective in self._recent:
            if first <= number <= last:
                table[number - first] = torch.tensor(
                    collective.numbers, dtype=torch.int64, device="cpu"
                )
        return table

    def part(self, last: int, described: Sequence[Sequence[int]] = ()) -> None:
        """Ends the verified sequence, and completes the collectives that any rank has started, up
        to number ``last``. ``described``: the last of them. Can be repeated after an interrupt."""
        self._verified = None
        works = []
        while self.total < last:
            numbers = described[self.total - last]
            begin, count = self.dummy_of(numbers)
            works.append(self.start(Collective(STAND_IN, 0, numbers), begin, count))
        for work in works:
            work.wait()
        self._expects = self._was_interrupted = False

    def forget(self, number: int) -> None:
        """Forgets the collectives below ``number``, which all ranks have started; keeps the last
        one, which holds their count."""
        self._recent = [entry for entry in self._recent if entry[0] >= number] or self._recent[-1:]
