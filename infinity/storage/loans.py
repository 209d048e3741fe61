"""Loans: writes memory that is somebody else's to disk from where it is, and keeps it until the disk has read it.

loan   a piece of such memory, and the transfer that reads it. One whose transfer an exception hid is kept for as long as the store is open
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from .. import native
from ..errors import InfinityError, StorageError

PIECE_NBYTES = 4 * 1024 * 1024
MOST = 32  # at a time


@dataclass(eq=False)
class _Loan:
    memory: torch.Tensor
    write: Callable[[int], native.Ticket]  # starts writing as many bytes from an address
    ticket: native.Ticket | None = None  # None: not known to have been submitted


class Loans:
    """The memory that a store's disk reads where it is."""

    def __init__(self) -> None:
        self._loans: deque[_Loan] = deque()
        self._hidden: list[_Loan] = []

    def write(self, io: native.IoEngine, extent: native.Extent, offset: int, memory: torch.Tensor, *, checksum: bool) -> None:
        """Starts writing flat ``memory``, whole checksum blocks at a whole block's address, from byte ``offset`` of ``extent`` on; it does not change
        before :meth:`finish`. Waits where much is under way. Raises what went wrong with that."""
        for begin in range(0, memory.numel(), PIECE_NBYTES):
            while len(self._loans) >= MOST:
                self._finish_first()
            piece = memory[begin : begin + PIECE_NBYTES]

            def write(address: int, at: int = offset + begin, nbytes: int = piece.numel()) -> native.Ticket:
                return io.write(extent, at, address, nbytes, checksum=checksum)

            loan = _Loan(piece, write)
            self._loans.append(loan)  # before the disk has it: an exception that comes then leaves it here
            loan.ticket = write(piece.data_ptr())

    def finish(self) -> None:
        """Returns when all of it is at home. Raises what went wrong; called again, it goes on with the rest."""
        while self._loans:
            self._finish_first()

    def _finish_first(self) -> None:
        loan = self._loans[0]
        if loan.ticket is None:
            self._hidden.append(loan)
        else:
            try:
                loan.ticket.wait()
            except StorageError as error:  # it is over; where Ctrl-C comes it need not be
                if error.errno != errno.EFAULT:
                    self._loans.popleft()
                    raise
                _write_copy(loan)
            except InfinityError:
                self._loans.popleft()
                raise
        self._loans.popleft()

    def rebuild(self) -> None:
        """Returns when nothing is under way, whatever became of it."""
        while self._loans:
            with suppress(InfinityError):
                self._finish_first()

    def clear(self) -> None:
        """Lets all memory go: the I/O engine was shut down."""
        self._loans.clear()
        self._hidden.clear()


def _write_copy(loan: _Loan) -> None:
    """Writes what a disk cannot read where it is: memory of a device, as some file systems map their files."""
    region = native.Region(loan.memory.numel(), huge_pages=False, touch_threads=0)
    native.copy_flat(native.tensor_at(region, region.address, loan.memory.numel(), torch.uint8), loan.memory)
    loan.memory = native.tensor_at(region, region.address, loan.memory.numel(), torch.uint8)  # kept as the other was
    loan.ticket = loan.write(region.address)
    loan.ticket.wait()
