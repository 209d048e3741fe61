"""Meeting: every rank of a channel says what it is about to do, and hears whether all are about to do the same.

It is announced when it is made, and checked when it is waited for. In between a rank can do whatever does not hang on it. Bytes that it
carries: a header (see `Word`), values, of which all hear the least and the largest of each, and flags, of which all hear the largest of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import torch

from ..errors import InfinityError
from .lockstep import Lockstep
from .tree import Merge, Tree


class Place(Protocol):
    """What a meeting asks of the channel where it is held."""

    lockstep: Lockstep
    tree: Tree
    flags_nbytes: int

    def raise_alarm(self, number: int) -> None:
        """Calls the ranks that wait elsewhere to the meeting with this ``number``."""

    def complete(self, merge: Merge, what: str) -> torch.Tensor:
        """Waits for the result of ``merge``."""

    def come_together(self, last: int, described: Sequence[Sequence[int]], number: int) -> None:
        """Ends the agreement on a sequence, at the meeting with this ``number``."""

    def refusal(self, what: str) -> InfinityError:
        """Makes the error of a meeting at which not all could say the same."""


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


class Meeting:
    """One meeting. Made on every rank of the channel, in the same order."""

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
    ):
        self._channel, self._what, self._flags, self._values = channel, what, flags, values
        self._failed, self._settling, self._then = failed, settling, then
        self._found: torch.Tensor | None = None
        self._missing: Merge | None = None  # what some rank has not started
        self._begin()

    def _begin(self) -> None:
        lockstep, tree = self._channel.lockstep, self._channel.tree
        lockstep.settle()
        self._number, self._missing = tree.begun, None
        if parted := lockstep.has_parted or self._failed:
            self._channel.raise_alarm(self._number)
        digest = int.from_bytes(hashlib.blake2b(self._said.encode(), digest_size=7).digest(), "big")
        total = lockstep.total
        header = [self._failed, self._settling, parted, not parted, total, -total, digest, -digest]
        header += [*self._values, *(-value for value in self._values)]
        self._merge = tree.begin(_message(header, self._flags, self._channel.flags_nbytes), _merged)

    @property
    def _said(self) -> str:
        lockstep = self._channel.lockstep
        return f"{self._what}, having begun {lockstep.reach} collectives of the pass" if lockstep.is_open else self._what

    def wait(self) -> torch.Tensor:
        """Returns the largest of everyone's flags, uint8 [flags]. Raises UsageError where another rank is at something else, PeerError where one
        failed or is gone. Both are raised on all ranks, which are at the same place afterwards."""
        while self._found is None:
            said, message = self._said, self._channel.complete(self._merge, self._what)
            header = message[:HEADER_NBYTES].view(torch.int64).tolist()
            least, most = -header[Word.MINUS_STARTED], header[Word.STARTED]
            if header[Word.PARTED]:
                self._come_together(least, most)
            self._channel.lockstep.forget(most)
            # What was completed with bytes of nobody must not be used: whoever would has come here, and is told.
            is_torn = header[Word.PARTED] and header[Word.WHOLE] and least < most
            differs = header[Word.DIGEST] != -header[Word.MINUS_DIGEST]
            if header[Word.FAILED] or (not header[Word.SETTLING] and (differs or is_torn)):
                self._found = message
                raise self._channel.refusal(said)
            if header[Word.SETTLING] and not self._settling:
                self._begin()
                continue
            if not header[Word.SETTLING]:
                self._then(self._flags_of(message))
            self._found = message
        return self._flags_of(self._found)

    def _come_together(self, least: int, most: int) -> None:
        """Has every rank start what any has started: those with the numbers behind ``least``, which the others describe."""
        if least < most and self._missing is None:
            self._missing = self._channel.tree.begin(self._channel.lockstep.described(least + 1, most), _most)
        described = self._channel.complete(self._missing, self._what).tolist() if self._missing is not None else []
        self._channel.come_together(most, described, self._number)

    def _flags_of(self, message: torch.Tensor) -> torch.Tensor:
        return message[HEADER_NBYTES : HEADER_NBYTES + len(self._flags)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The least and the largest of each of everyone's values. Only once it is over."""
        count, begin = len(self._values), 8 * len(Word)
        found = self._found[begin : begin + 8 * 2 * count].view(torch.int64).tolist()
        return [(-found[count + index], found[index]) for index in range(count)]

    @property
    def is_over(self) -> bool:
        """Whether its result is known, or was raised."""
        return self._found is not None

    def poll(self) -> bool:
        """Tells whether everyone has come, without waiting for them."""
        return self._merge.poll()


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
