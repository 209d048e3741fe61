"""Meeting: every rank of a channel says what it is about to do, and hears whether all are about to do the same.

It is announced when it begins, and checked when it is waited for. In between a rank can do whatever does not hang on it. Bytes that it
carries: a header (see `Word`), values, of which all hear the least and the largest of each, and flags, of which all hear the largest of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch

from ..errors import InfinityError
from .lockstep import Lockstep
from .transfer import Transfer
from .tree import Tree


class Place(Protocol):
    """What a meeting asks of the channel where it is held."""

    lockstep: Lockstep
    tree: Tree
    flags_nbytes: int

    def raise_alarm(self, number: int) -> None:
        """Calls the ranks that wait elsewhere to the meeting with this ``number``."""

    def complete(self, transfer: Transfer, what: str) -> Any:
        """Waits for the result of ``transfer``."""

    def come_together(self, last: int, described: Sequence[Sequence[int]], number: int) -> None:
        """Ends the agreement on a sequence, at the meeting with this ``number``."""

    def tell_in_words(self, what: str) -> Transfer:
        """Makes the transfer in which all tell each other in words."""

    def refusal(self, what: str, texts: Sequence[str]) -> InfinityError:
        """Makes the error of a meeting at which not all could say the same, but ``texts``."""


class Word(IntEnum):
    """The header's numbers, int64. All hear the largest of each."""

    FAILED = 0  # 1: this rank says why it cannot go on
    SETTLING = 1  # 1: it puts right what an exception left, and meets again
    PARTED = 2  # 1: it has left the agreed sequence, or was struck
    WHOLE = 3  # 1: it has not, and may use what it has started
    STARTED = 4  # collectives that it has started
    MINUS_STARTED = 5  # the largest of which is minus the least of them
    DIGEST = 6  # of what it is about to do
    MINUS_DIGEST = 7


MOST_VALUES = 8  # int64, that a meeting has room for, each with its negative: of that the largest is the least value
VALUES_NBYTES = 8 * 2 * MOST_VALUES
HEADER_NBYTES = 8 * len(Word) + VALUES_NBYTES


@dataclass(eq=False)
class Round:
    """What a meeting says once: one that puts right what an exception left meets again."""

    number: int  # among the merges of the tree
    said: str  # of which the header has the digest
    merge: Transfer
    missing: Transfer | None = None  # describes what some rank has not started
    words: Transfer | None = None  # where not all have said the same


class Meeting:
    """One meeting. Every rank of the channel makes the same ones, in one order. Whatever an
    exception strikes, :meth:`wait` goes on from there."""

    def __init__(
        self,
        channel: Place,
        what: str,
        flags: Sequence[int] = (),
        *,
        values: Sequence[int] = (),
        failed: bool = False,
        settling: bool = False,
        then: Callable[[torch.Tensor], None] = lambda found: None,
        transfer: Transfer | None = None,
    ):
        self._channel, self._what, self._flags, self._values = channel, what, flags, values
        self._failed, self._settling, self._then = failed, settling, then
        self._transfer = transfer  # follows where all have said the same
        self._rounds: list[Round] = []
        self._heard: torch.Tensor | None = None  # where all are about to do the same
        self._found: torch.Tensor | None = None

    def begin(self) -> None:
        """Says this rank's word."""
        lockstep, tree = self._channel.lockstep, self._channel.tree
        lockstep.settle()
        number = tree.begun
        if parted := lockstep.has_parted or self._failed:
            self._channel.raise_alarm(number)
        said = f"{self._what}, having begun {lockstep.reach} collectives of the pass" if self._is_between else self._what
        digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "big")
        total = lockstep.total
        header = [self._failed, self._settling, parted, not parted, total, -total, digest, -digest]
        header += [*self._values, *(-value for value in self._values)]
        merge = tree.merge(_message(header, self._flags, self._channel.flags_nbytes), _merged)
        self._rounds.append(Round(number, said, merge))
        merge.begin()

    @property
    def _is_between(self) -> bool:
        return self._channel.lockstep.is_open and not self._failed

    def wait(self) -> torch.Tensor:
        """Returns the largest of everyone's flags, uint8 [flags]. Raises UsageError where another rank is at something else, PeerError where one
        failed or is gone. Both are raised on all ranks, which are at the same place afterwards."""
        while self._found is None:
            self._go_on(self._rounds[-1])
        if self._transfer is not None:
            self._channel.complete(self._transfer, self._what)
            self._transfer = None
        return self._flags_of(self._found)

    def _go_on(self, last: Round) -> None:
        """Takes what a round has brought. Done twice it is done once."""
        message = self._channel.complete(last.merge, self._what)
        header = message[:HEADER_NBYTES].view(torch.int64).tolist()
        least, most = -header[Word.MINUS_STARTED], header[Word.STARTED]
        if header[Word.PARTED]:
            self._come_together(last, least, most)
        self._channel.lockstep.forget(most)
        # What was completed with bytes of nobody must not be used: whoever would has come here, and
        # is told.
        is_torn = header[Word.PARTED] and header[Word.WHOLE] and least < most
        differs = header[Word.DIGEST] != -header[Word.MINUS_DIGEST]
        if header[Word.FAILED] or (not header[Word.SETTLING] and (differs or is_torn)):
            if last.words is None:
                last.words = self._channel.tell_in_words(last.said)
            error = self._channel.refusal(last.said, self._channel.complete(last.words, self._what))
            self._transfer = None
            self._found = message
            raise error
        if header[Word.SETTLING] and not self._settling:
            return self.begin()
        if not header[Word.SETTLING]:
            self._heard = message
            self._then(self._flags_of(message))
        self._found = message
        return None

    def _come_together(self, last: Round, least: int, most: int) -> None:
        """Has every rank start what any has started: those with the numbers behind ``least``, which the others describe."""
        if least < most and last.missing is None:
            last.missing = self._channel.tree.merge(self._channel.lockstep.described(least + 1, most), _most)
        described = self._channel.complete(last.missing, self._what).tolist() if last.missing is not None else []
        self._channel.come_together(most, described, last.number)

    def _flags_of(self, message: torch.Tensor) -> torch.Tensor:
        return message[HEADER_NBYTES : HEADER_NBYTES + len(self._flags)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The least and the largest of each of everyone's values. Only once all are known to be there."""
        count, begin = len(self._values), 8 * len(Word)
        found = self._heard[begin : begin + 8 * 2 * count].view(torch.int64).tolist()
        return [(-found[count + index], found[index]) for index in range(count)]

    @property
    def is_begun(self) -> bool:
        """Whether another rank may have heard of it."""
        return bool(self._rounds) and self._rounds[0].merge.is_begun

    @property
    def is_farewell(self) -> bool:
        """Whether this rank says at it that it failed."""
        return self._failed

    @property
    def is_over(self) -> bool:
        """Whether its result is known and what follows it is done, or an error was raised."""
        return self._found is not None and self._transfer is None

    def poll(self) -> bool:
        """Tells whether everyone has come, without waiting for them."""
        return self._rounds[-1].merge.poll()


def _message(header: Sequence[int], flags: Sequence[int], flags_nbytes: int) -> torch.Tensor:
    message = torch.zeros(HEADER_NBYTES + flags_nbytes, dtype=torch.uint8, device="cpu")
    message[: 8 * len(header)] = torch.tensor(header, dtype=torch.int64, device="cpu").view(torch.uint8)
    if len(flags):
        message[HEADER_NBYTES : HEADER_NBYTES + len(flags)] = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    return message


def _most(described: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([*described]).amax(0)


def _merged(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    found = messages[0].clone()
    headers, flags = found[:HEADER_NBYTES].view(torch.int64), found[HEADER_NBYTES:]
    for message in messages[1:]:
        torch.maximum(headers, message[:HEADER_NBYTES].view(torch.int64), out=headers)
        torch.maximum(flags, message[HEADER_NBYTES:], out=flags)
    return found
