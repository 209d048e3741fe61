"""ZeroCopyWrites: writes borrowed memory to disk without a copy, and keeps it alive until the disk
has read it.

borrowed   a piece of borrowed memory, and the transfer that reads it
hidden     interrupted during submit, so the transfer may or may not be running
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from ... import native
from ...errors import InfinityError, StorageError
from .transfers import never_freed

PIECE_NBYTES = 4 * 1024 * 1024
MOST = 32  # pieces at once


@dataclass(eq=False)
class _ZeroCopyWrite:
    memory: torch.Tensor
    extent: native.Extent
    write: Callable[[int], native.Ticket]  # starts writing the piece from an address
    ticket: native.Ticket | None = None  # None: maybe not submitted
    is_copy: bool = False

    def write_copy(self) -> None:
        """Starts writing a copy of memory that a disk cannot read in place: a device's, as some
        file systems map files."""
        nbytes = self.memory.numel()
        region = native.Region(nbytes, huge_pages=False, touch_threads=0)
        copy = native.tensor_at(region, region.address, nbytes, torch.uint8)
        native.copy_flat(copy, self.memory)
        self.memory, self.ticket, self.is_copy = copy, None, True
        self.ticket = self.write(region.address)


class ZeroCopyWrites:
    """The borrowed memory that a store's disks read in place."""

    def __init__(self) -> None:
        self._zero_copy: deque[_ZeroCopyWrite] = deque()
        self._hidden: list[_ZeroCopyWrite] = []

    def write(
        self,
        io: native.IoEngine,
        extent: native.Extent,
        offset: int,
        memory: torch.Tensor,
        *,
        checksum: bool,
    ) -> None:
        """Starts writing flat ``memory`` from byte ``offset`` of ``extent`` on, in whole checksum
        blocks, block-aligned.

        The memory must not change before :meth:`finish`. Blocks while ``MOST`` pieces are under
        way, and raises their errors.
        """
        for begin in range(0, memory.numel(), PIECE_NBYTES):
            while len(self._zero_copy) >= MOST:
                self._finish_first()
            piece = memory[begin : begin + PIECE_NBYTES]

            def write(
                address: int, at: int = offset + begin, nbytes: int = piece.numel()
            ) -> native.Ticket:
                return io.write(extent, at, address, nbytes, checksum=checksum)

            borrowed = _ZeroCopyWrite(piece, extent, write)
            self._zero_copy.append(borrowed)  # before the submit: an interrupt leaves it here
            borrowed.ticket = write(piece.data_ptr())

    def finish(self) -> None:
        """Blocks until all writes are over. Raises their first error."""
        first: InfinityError | None = None
        while self._zero_copy:
            try:
                self._finish_first()
            except InfinityError as error:
                first = first or error
        if first is not None:
            raise first

    def _finish_first(self) -> None:
        borrowed = self._zero_copy[0]
        if borrowed.ticket is None:
            self._hidden.append(borrowed)
        else:
            try:
                borrowed.ticket.wait()
            except InfinityError as error:  # it is over; after Ctrl-C it may not be
                if _number_of(error) == errno.EFAULT and not borrowed.is_copy:
                    borrowed.write_copy()
                    return  # it is waited for next
                if _number_of(error) == errno.ETIMEDOUT:
                    never_freed.append(borrowed.memory)
                self._zero_copy.popleft()
                raise
        self._zero_copy.popleft()

    def rebuild(self) -> None:
        """Blocks until no write is running. Ignores errors."""
        with suppress(InfinityError):
            self.finish()
        while self._hidden:
            try:
                if (ticket := self._hidden[-1].extent.writes_under_way()) is not None:
                    ticket.wait()
            except InfinityError as error:
                if _number_of(error) == errno.ETIMEDOUT:
                    never_freed.append(self._hidden[-1].memory)
            self._hidden.pop()

    def clear(self, *, hung: bool) -> None:
        """Releases all memory, after the I/O engine's shutdown. ``hung``: it abandoned a disk,
        which may still read the memory."""
        if hung:
            never_freed.extend(borrowed.memory for borrowed in (*self._zero_copy, *self._hidden))
        self._zero_copy.clear()
        self._hidden.clear()


def _number_of(error: InfinityError) -> int | None:
    return error.errno if isinstance(error, StorageError) else None
