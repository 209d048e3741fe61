"""read_files: reads files past the page cache straight to their destinations, once, and verifies
their checksums.

destination   the memory for consecutive bytes of a file
piece         consecutive bytes of a file in one transfer: straight to their destination if file
              blocks and memory blocks are aligned, else to a slot, from which they are copied
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ... import native
from ...core.homes.transfers import TransferQueue
from ...core.machine import processors
from ...core.machine.sizes import round_up
from ...errors import CorruptionError, StorageError
from .file_writer import SLOT_NBYTES, make_slots

PIECES_AT_ONCE = 24  # in flight
FILES_AT_ONCE = 64  # open


@dataclass(frozen=True)
class Destination:
    """The memory for the bytes of a file from ``begin`` on: flat uint8 ``memory``, filled
    completely."""

    begin: int
    memory: torch.Tensor

    @property
    def end(self) -> int:
        """Offset after the last byte, in the file."""
        return self.begin + self.memory.numel()


@dataclass(frozen=True)
class WholeFile:
    """A file that is read completely. Its destinations are in order and do not overlap."""

    path: Path
    nbytes: int
    crc32c: int
    destinations: Sequence[Destination]

    @property
    def blocks_nbytes(self) -> int:
        """Bytes of its whole blocks, which direct I/O reads."""
        return self.nbytes // native.BLOCK_NBYTES * native.BLOCK_NBYTES


class _Open:
    """A file that is being read."""

    def __init__(self, file: WholeFile, io: native.IoEngine):
        self.file, self.io = file, io
        self.missing = file.blocks_nbytes  # bytes of blocks that have not arrived
        self.untouched = deque(file.destinations)
        if self.missing:
            self.extent = native.Extent.unknown(io.open_file(str(file.path)), 0, self.missing)

    def start(
        self, begin: int, end: int, address: int, lease: native.Lease | None
    ) -> native.Ticket:
        return self.io.read(self.extent, begin, address, end - begin, lease=lease)

    def announce(self, end: int, before: Callable[[Destination], object]) -> None:
        """Calls ``before`` with the destinations that begin before byte ``end``; with the last
        block, with all remaining ones."""
        while self.untouched and (self.untouched[0].begin < end or end == self.file.blocks_nbytes):
            before(self.untouched.popleft())

    def arrived(self, nbytes: int) -> int:
        """Counts bytes of blocks that have arrived. After the last block also reads the rest of the
        file. Returns the number of bytes. Raises CorruptionError after the last block if the file's
        checksum differs."""
        self.missing -= nbytes
        if self.missing:
            return nbytes
        file, blocks = self.file, self.file.blocks_nbytes
        checksum = self.extent.checksum(blocks) if blocks else 0
        if blocks < file.nbytes:
            rest = _read_rest(file.path, blocks, file.nbytes)
            _hand_out(rest, blocks, file)
            checksum = native.crc32c(rest, checksum)
        if checksum != file.crc32c:
            raise changed_file(file.path, checksum, file.crc32c)
        return nbytes + file.nbytes - blocks


def _read_rest(path: Path, begin: int, end: int) -> torch.Tensor:
    """Reads the bytes after the last whole block of a file. Missing bytes count as zeros, which the
    checksum detects."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), end - begin, begin)
            return torch.frombuffer(bytearray(content.ljust(end - begin, b"\0")), dtype=torch.uint8)
    except OSError as error:
        raise StorageError(
            error.errno or 0, f"cannot read {path}: {error.strerror}", str(path)
        ) from error


def changed_file(path: Path, found: int, written: int) -> CorruptionError:
    """Makes the error for a file whose bytes are not those that were written."""
    return CorruptionError(
        f"{path} was changed: its CRC-32C is {found:08x}, {written:08x} was written"
    )


def read_files(
    files: Sequence[WholeFile],
    running: list[native.IoEngine],
    *,
    before: Callable[[Destination], object],
    after: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Reads ``files`` to their destinations, several at a time. Blocks until all are read.

    running
        Receives the engines that may still read when this raises: see :func:`stop`.
    before
        Called with each destination before the first write to it.
    after
        Called with the bytes of each piece that has arrived.

    Raises CorruptionError for a file that is not as it was written, StorageError if it cannot be
    read. The destinations then hold arbitrary bytes.
    """
    slots = make_slots(sum(file.nbytes for file in files))
    for first in range(0, len(files), FILES_AT_ONCE):
        running.append(native.make_io_engine(work_threads=processors.for_checksums()))
        _read_group(files[first : first + FILES_AT_ONCE], running[-1], slots, before, after)
        stop(running)


def stop(running: list[native.IoEngine]) -> str:
    """Waits until the engines read no more. If a disk has not answered and may still write to a
    destination, returns its path, else "". If interrupted, call it again."""
    for io in running:
        io.shut_down()
    hung = next((io.hung for io in running if io.hung), "")
    if not hung:
        running.clear()
    return hung


def _read_group(
    group: Sequence[WholeFile],
    io: native.IoEngine,
    slots: native.PinnedPool,
    before: Callable[[Destination], object],
    after: Callable[[int], object],
) -> None:
    def finish(piece: tuple[_Open, int, int, native.Ticket, native.Lease | None]) -> None:
        opened, begin, end, ticket, lease = piece
        ticket.wait()
        if lease is not None:
            _hand_out(
                native.tensor_at(slots.region, lease.address, end - begin, torch.uint8),
                begin,
                opened.file,
            )
            lease.release()
        after(opened.arrived(end - begin))

    # Open all of them first: opening one tries a read, which would queue behind those in flight.
    opened_files = [_Open(file, io) for file in group]
    # The caller stops the engine after an exception
    with TransferQueue(PIECES_AT_ONCE, finish) as reads:
        for opened in opened_files:
            if not opened.missing:
                opened.announce(0, before)
                after(opened.arrived(0))
            for begin, end, address in _pieces(opened.file):
                opened.announce(end, before)
                reads.make_room()
                lease = None
                while address is None and (lease := slots.try_lease(SLOT_NBYTES)) is None:
                    reads.finish_oldest()
                start = lease.address if lease is not None else address
                reads.add((opened, begin, end, opened.start(begin, end, start, lease), lease))


def _pieces(file: WholeFile) -> Iterator[tuple[int, int, int | None]]:
    """Yields the pieces of a file's blocks in order: first byte, end, and destination address; None
    if they go to a slot."""
    at, whole = 0, file.blocks_nbytes
    for destination in file.destinations:
        shift = destination.memory.data_ptr() - destination.begin
        begin, end = round_up(destination.begin, native.CHECKSUM_NBYTES), destination.end
        end = whole if end >= whole else end // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES
        if shift % native.BLOCK_NBYTES == 0 and begin < end:
            yield from _cut(at, begin, None)
            yield from _cut(begin, end, shift)
            at = end
    yield from _cut(at, whole, None)


def _cut(begin: int, end: int, shift: int | None) -> Iterator[tuple[int, int, int | None]]:
    for at in range(begin, end, SLOT_NBYTES):
        yield at, min(end, at + SLOT_NBYTES), None if shift is None else at + shift


def _hand_out(piece: torch.Tensor, begin: int, file: WholeFile) -> None:
    """Copies bytes of a file, from ``begin`` on, to their destinations."""
    for destination in file.destinations:
        low, high = max(begin, destination.begin), min(begin + piece.numel(), destination.end)
        if low < high:
            first = low - destination.begin
            native.copy_flat(
                destination.memory[first : first + high - low], piece[low - begin : high - begin]
            )
