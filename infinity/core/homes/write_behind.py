"""WriteBehind: joins adjacent writes to arrays on disk, and does not wait for them.

part        a piece of the store's service buffer, with bytes of one array
open        collects adjacent writes; at most one part for each array
under way   being written
borrowed    memory of the caller's from which whole blocks are written without a copy
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from ... import native
from ...errors import InfinityError, UsageError
from ...native import CHECKSUM_NBYTES
from ..machine.sizes import round_down, round_up
from ..machine.tiers import Tier
from .arrays import StateArray, bytes_of
from .store import ArrayStore

PARTS = 6  # at least, given as many blocks: two collect while others are written
MOST_PARTS = 16  # if each is large enough to keep a disk busy
PART_NBYTES = 256 * 1024
UNDER_WAY = 2  # parts that are not open, at least


@dataclass(eq=False)
class OpenPart:
    """A piece of the service buffer with bytes ``start`` to ``end`` of an array, being collected or
    (with a ticket) written."""

    lease: native.Lease
    memory: torch.Tensor
    array: StateArray | None = None
    start: int = 0
    end: int = 0
    ticket: native.Ticket | None = None

    def holds(self, array: StateArray, start: int, end: int) -> bool:
        """Returns whether any of bytes ``start`` to ``end`` of ``array`` are in this part."""
        return self.array is array and self.start < end and start < self.end


@contextmanager
def writing_behind(store: ArrayStore) -> Iterator[WriteBehind]:
    """Yields a writer to ``store`` that joins adjacent writes and does not block. All is at home
    when the block ends; if it raises, some may be unwritten. Raises UsageError inside another
    one."""
    writer = WriteBehind(store, store.service)
    # First: a refused writer must not wait for what the other one has borrowed.
    with store.lending_service(writer.flush):
        try:
            yield writer
            writer.flush()
        finally:
            writer.close()


class WriteBehind:
    """Reads and writes arrays as the store does, but a write to disk returns before its bytes are
    at home."""

    def __init__(self, store: ArrayStore, service: native.PinnedPool):
        """``service``: the buffer of the parts."""
        self._store, self._service, self.guard = store, service, store.guard
        blocks = service.capacity_nbytes // CHECKSUM_NBYTES - 1  # one block for reading
        self._count = max(
            0, min(PARTS, blocks), min(MOST_PARTS, blocks * CHECKSUM_NBYTES // PART_NBYTES)
        )
        # A parameter's four arrays are written in turn; each open part continues where it stopped.
        self._most_open = max(1, min(self._count - UNDER_WAY, max(4, self._count // 2)))
        self._part_nbytes = blocks // self._count * CHECKSUM_NBYTES if self._count else 0
        self._free: list[OpenPart] = []
        self._open: dict[StateArray, OpenPart] = {}
        self._under_way: list[OpenPart] = []
        # Bytes from .. to of all borrowed memory, including completed
        self._borrowed: dict[StateArray, tuple[int, int]] = {}

    def read(self, array: StateArray, begin: int, end: int) -> torch.Tensor:
        """Reads as the store does, including what was written here."""
        return self._store.read(array, begin, end)

    def write(
        self,
        array: StateArray,
        begin: int,
        source: torch.Tensor,
        *,
        version: int,
        stable: bool = False,
    ) -> None:
        """Writes as the store does, without waiting. ``stable``: ``source`` does not change before
        :meth:`flush`. Then its whole blocks are borrowed if aligned as on disk. Raises UsageError
        beyond the array's end."""
        if array.tier is not Tier.NVME or not self._count:
            self._store.write(array, begin, source, version=version)
            return
        self._store.check_process()
        raw, at = (
            source.to(array.dtype).contiguous().view(torch.uint8),
            begin * array.dtype.itemsize,
        )
        if at + raw.numel() > array.nbytes:
            raise UsageError(f"{raw.numel()} bytes at {at} of an array of {array.nbytes}")
        with self.guard:
            low = high = at
            if stable and (raw.data_ptr() - at) % native.BLOCK_NBYTES == 0:
                low = min(at + raw.numel(), round_up(at, CHECKSUM_NBYTES))
                high = max(low, round_down(at + raw.numel(), CHECKSUM_NBYTES))
            self._gather(array, at, raw[: low - at])
            if low < high:
                self._lend(array, low, raw[low - at : high - at])
            self._gather(array, high, raw[high - at :])
        array.extent.version = version

    def _lend(self, array: StateArray, start: int, raw: torch.Tensor) -> None:
        """Lends ``raw``, whole blocks from byte ``start`` of the array on."""
        part, end = self._open.get(array), start + raw.numel()
        if part is not None and part.holds(array, start, end):
            self._submit(part)
        self._finish_those_with(array, start, end)
        low, high = self._borrowed.get(array, (start, end))
        self._borrowed[array] = min(low, start), max(high, end)
        self._store.lend(array, start, raw)

    def _gather(self, array: StateArray, at: int, raw: torch.Tensor) -> None:
        """Copies ``raw`` to parts, from byte ``at`` of the array on."""
        while raw.numel():
            part = self._part_for(array, at)
            count = min(raw.numel(), part.start + self._part_nbytes - at)
            native.copy_flat(part.memory[at - part.start : at - part.start + count], raw[:count])
            raw, at = raw[count:], at + count
            part.end = at
            if at == part.start + self._part_nbytes:
                self._submit(part)

    def flush(self) -> None:
        """Blocks until everything is at home. Releases the service buffer."""
        with self.guard:
            for part in list(self._open.values()):
                self._submit(part)
            while self._under_way:
                self._finish(self._under_way[0])
            self._store.finish_borrowed()
            self._let_go()

    def close(self) -> None:
        """Blocks until no write is running, after an error too. Drops what was only collected."""
        for wait in (*(part.ticket.wait for part in self._under_way), self._store.finish_borrowed):
            try:
                wait()
            # Another error is being raised; record this one in the store
            except InfinityError as error:
                with suppress(InfinityError), self.guard:
                    raise error
        self._under_way.clear()
        self._let_go()

    def _let_go(self) -> None:
        for part in (*self._free, *self._open.values()):
            part.lease.release()
        self._free.clear()
        self._open.clear()

    def _part_for(self, array: StateArray, at: int) -> OpenPart:
        """Returns the open part that continues at byte ``at`` of the array."""
        part = self._open.get(array)
        if part is not None:
            if (
                part.end
                < at
                < min(round_up(part.end, CHECKSUM_NBYTES), part.start + self._part_nbytes)
            ):
                self._fill(part, part.end, at)  # padding between two parameters
                part.end = at
            if part.end == at:
                return part
            self._submit(part)
        while len(self._open) >= self._most_open:
            self._submit(next(iter(self._open.values())))
        part = self._take()
        part.array, part.start, part.end = array, round_down(at, CHECKSUM_NBYTES), at
        self._fill(part, part.start, at)
        self._open[array] = part
        return part

    def _take(self) -> OpenPart:
        if not self._free and len(self._open) + len(self._under_way) < self._count:
            lease = self._store.take_lease(self._service, self._part_nbytes)
            self._free.append(OpenPart(lease, bytes_of(self._service, lease, self._part_nbytes)))
        if not self._free:
            if not self._under_way:
                self._submit(next(iter(self._open.values())))
            self._finish(self._under_way[0])
        return self._free.pop()

    def _submit(self, part: OpenPart) -> None:
        """Starts writing an open part."""
        array, end = (
            part.array,
            min(round_up(part.end, CHECKSUM_NBYTES), part.array.extent.nbytes),
        )
        self._fill(part, part.end, end)
        part.end = end
        # A disk may reorder two writes of the same bytes
        self._finish_those_with(array, part.start, end)
        part.ticket = self._store.start_write(array, part.start, part.lease, end - part.start)
        del self._open[array]
        self._under_way.append(part)

    def _fill(self, part: OpenPart, begin: int, end: int) -> None:
        """Fills bytes ``begin`` to ``end`` of the part's array, all in one block, from disk."""
        if begin == end:
            return
        array, offset = part.array, round_down(begin, CHECKSUM_NBYTES)
        nbytes = min(CHECKSUM_NBYTES, array.extent.nbytes - offset)
        self._finish_those_with(array, offset, offset + nbytes)
        lease = self._store.take_lease(self._service, nbytes)
        try:
            block = self._store.read_block(array, offset, lease, nbytes)
            part.memory[begin - part.start : end - part.start] = block[
                begin - offset : end - offset
            ]
        finally:
            lease.release()

    def _finish_those_with(self, array: StateArray, start: int, end: int) -> None:
        for part in list(self._under_way):
            if part.holds(array, start, end):
                self._finish(part)
        low, high = self._borrowed.get(array, (0, 0))
        if start < high and low < end:
            self._store.finish_borrowed()
            self._borrowed.clear()

    def _finish(self, part: OpenPart) -> None:
        part.ticket.wait()  # on Ctrl-C or an error it is still running: see close()
        self._under_way.remove(part)
        self._free.append(part)


ArrayIO = ArrayStore | WriteBehind  # reads and writes the arrays of a flat param
