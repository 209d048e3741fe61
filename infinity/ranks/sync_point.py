"""SyncPoint: every rank of a channel announces its next operation, and learns whether all announced
the same.

It is announced when it begins, and checked when it is waited for. In between a rank can do any
independent work. Its message: a header (see `Word`); values, reduced to their minimum and maximum;
flags, reduced to their maximum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch

from ..errors import InfinityError
from .collective_trace import CollectiveTrace
from .transfer import Transfer
from .tree import Tree


class Place(Protocol):
    """The interface of a sync point's channel."""

    collective_trace: CollectiveTrace
    tree: Tree
    flags_nbytes: int

    def raise_alarm(self, number: int) -> None:
        """Calls the ranks that wait elsewhere to the sync point of this ``number``."""

    def complete(self, transfer: Transfer, what: str) -> Any:
        """Waits for the result of ``transfer``."""

    def come_together(self, last: int, described: Sequence[Sequence[int]], number: int) -> None:
        """Ends the verified sequence, at the sync point of this ``number``."""

    def exchange_texts(self, what: str) -> Transfer:
        """Makes the transfer in which all ranks exchange their announcements as text."""

    def refusal(self, what: str, texts: Sequence[str]) -> InfinityError:
        """Makes the error of a sync point at which the announcements ``texts`` differ."""


class Word(IntEnum):
    """The header's numbers, int64. Each is reduced to its maximum over ranks."""

    FAILED = 0  # 1: this rank failed, and reports why
    SETTLING = 1  # 1: it cleans up after an exception, and meets again
    DIVERGED = 2  # 1: it left the verified sequence, or was interrupted
    WHOLE = 3  # 1: it did not, and may use what it has started
    STARTED = 4  # collectives that it has started
    MINUS_STARTED = 5  # the maximum is minus the minimum count
    DIGEST = 6  # of its announcement
    MINUS_DIGEST = 7


MOST_VALUES = 8  # int64 values per sync point; each negated too, for the minimum
VALUES_NBYTES = 8 * 2 * MOST_VALUES
HEADER_NBYTES = 8 * len(Word) + VALUES_NBYTES


@dataclass(eq=False)
class Round:
    """One exchange of a sync point. A sync point with a rank that cleans up after an exception has
    another."""

    number: int  # among the merges of the tree
    announcement: str  # the header has its digest
    merge: Transfer
    missing: Transfer | None = None  # describes collectives that some rank has not started
    texts: Transfer | None = None  # if announcements differ


class SyncPoint:
    """One sync point. Every rank of the channel makes the same ones, in one order. After an
    interrupt :meth:`wait` resumes."""

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
        self._transfer = transfer  # follows if all announced the same
        self._rounds: list[Round] = []
        self._heard: torch.Tensor | None = None  # of a round in which all announced the same
        self._found: torch.Tensor | None = None

    def begin(self) -> None:
        """Sends this rank's announcement."""
        collective_trace, tree = self._channel.collective_trace, self._channel.tree
        collective_trace.settle()
        number = tree.begun
        if diverged := collective_trace.has_diverged or self._failed:
            self._channel.raise_alarm(number)
        announcement = (
            f"{self._what}, having begun {collective_trace.reach} collectives of the pass"
            if self._is_between
            else self._what
        )
        digest = int.from_bytes(
            hashlib.blake2b(announcement.encode(), digest_size=7).digest(), "big"
        )
        total = collective_trace.total
        header = [
            self._failed,
            self._settling,
            diverged,
            not diverged,
            total,
            -total,
            digest,
            -digest,
        ]
        header += [*self._values, *(-value for value in self._values)]
        merge = tree.merge(_message(header, self._flags, self._channel.flags_nbytes), _merged)
        self._rounds.append(Round(number, announcement, merge))
        merge.begin()

    @property
    def _is_between(self) -> bool:
        return self._channel.collective_trace.is_open and not self._failed

    def wait(self) -> torch.Tensor:
        """Blocks until the sync point is over. Returns the maximum of the ranks' flags, uint8
        [flags]. Raises UsageError if another rank is at something else, PeerError if one failed or
        is gone. Both are raised on all ranks, which are at the same point afterwards."""
        with self._channel.collective_trace.lock:
            while self._found is None:
                self._go_on(self._rounds[-1])
            if self._transfer is not None:
                self._channel.complete(self._transfer, self._what)
                self._transfer = None
            return self._flags_of(self._found)

    def _go_on(self, last: Round) -> None:
        """Handles the result of a round. Idempotent."""
        message = self._channel.complete(last.merge, self._what)
        header = message[:HEADER_NBYTES].view(torch.int64).tolist()
        least, most = -header[Word.MINUS_STARTED], header[Word.STARTED]
        if header[Word.DIVERGED]:
            self._come_together(last, least, most)
        self._channel.collective_trace.forget(most)
        # A collective completed with dummy data must not be used. Every rank that would use it gets
        # the error here.
        is_torn = header[Word.DIVERGED] and header[Word.WHOLE] and least < most
        differs = header[Word.DIGEST] != -header[Word.MINUS_DIGEST]
        if header[Word.FAILED] or (not header[Word.SETTLING] and (differs or is_torn)):
            if last.texts is None:
                last.texts = self._channel.exchange_texts(last.announcement)
            error = self._channel.refusal(
                last.announcement, self._channel.complete(last.texts, self._what)
            )
            self._transfer = None
            self._end(message)
            raise error
        if header[Word.SETTLING] and not self._settling:
            return self.begin()
        if not header[Word.SETTLING]:
            self._heard = message
            self._then(self._flags_of(message))
        self._end(message)
        return None

    def _end(self, message: torch.Tensor) -> None:
        # The channel has its last sync point, and the process the channel until the engine is gone
        self._found, self._then = message, _nothing

    def _come_together(self, last: Round, least: int, most: int) -> None:
        """Makes every rank start the collectives that any has started. Numbers above ``least`` are
        described by the others."""
        if least < most and last.missing is None:
            last.missing = self._channel.tree.merge(
                self._channel.collective_trace.described(least + 1, most), _most
            )
        described = (
            self._channel.complete(last.missing, self._what).tolist()
            if last.missing is not None
            else []
        )
        self._channel.come_together(most, described, last.number)

    def _flags_of(self, message: torch.Tensor) -> torch.Tensor:
        return message[HEADER_NBYTES : HEADER_NBYTES + len(self._flags)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The minimum and maximum of each of the ranks' values. Only valid once all are known to be
        there."""
        count, begin = len(self._values), 8 * len(Word)
        found = self._heard[begin : begin + 8 * 2 * count].view(torch.int64).tolist()
        return [(-found[count + index], found[index]) for index in range(count)]

    @property
    def is_begun(self) -> bool:
        """Whether another rank may have observed it."""
        return bool(self._rounds) and self._rounds[0].merge.is_begun

    @property
    def is_failure_report(self) -> bool:
        """Whether this rank reports a failure at it."""
        return self._failed

    @property
    def is_over(self) -> bool:
        """Whether its result and its transfer are complete, or an error was raised."""
        return self._found is not None and self._transfer is None

    def poll(self) -> bool:
        """Returns whether all ranks have come. Does not block."""
        with self._channel.collective_trace.lock:
            return self._rounds[-1].merge.poll()


def _nothing(found: torch.Tensor) -> None:
    """Does nothing with the flags of a sync point that is over."""


def _message(header: Sequence[int], flags: Sequence[int], flags_nbytes: int) -> torch.Tensor:
    message = torch.zeros(HEADER_NBYTES + flags_nbytes, dtype=torch.uint8, device="cpu")
    message[: 8 * len(header)] = torch.tensor(header, dtype=torch.int64, device="cpu").view(
        torch.uint8
    )
    if len(flags):
        message[HEADER_NBYTES : HEADER_NBYTES + len(flags)] = torch.tensor(
            flags, dtype=torch.uint8, device="cpu"
        )
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
