"""FileWriter: writes safetensors files past the page cache while their bytes are still being made, and knows their checksums.

slot   a piece of staging memory: filled, then the disk's until it has written it. Files of one save take turns at the same slots
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from .. import native
from ..machine import processors
from ..machine.sizes import round_up
from .weight_files import FILE_DTYPES

SLOT_NBYTES = 4 * 1024 * 1024
SLOTS = 16
ALIGNMENT = 8  # bytes, of the first tensor in a file
NAMES = {dtype: name for name, dtype in FILE_DTYPES.items() if dtype is not None}


def make_slots(nbytes: int) -> native.PinnedPool:
    """Makes the staging memory of a save that writes files of ``nbytes`` or less: at most ``SLOTS`` slots, at least two."""
    count = min(SLOTS, max(2, -(-nbytes // SLOT_NBYTES) + 1))
    return native.PinnedPool(native.Region(count * SLOT_NBYTES, huge_pages=True, touch_threads=0))


class FileWriter:
    """One file on its way to the disk. Used as a context: left without :meth:`finish`, the file is there and of no use."""

    def __init__(self, path: Path, nbytes: int, slots: native.PinnedPool):
        """Makes the file and reserves its space. Raises OSError where that is refused."""
        self._path, self._nbytes, self._slots = path, nbytes, slots
        size = round_up(nbytes, native.BLOCK_NBYTES)  # what direct I/O writes; cut at the end
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        self._engine = native.make_io_engine(work_threads=processors.for_checksums())
        self._extent = native.Extent.in_file(self._engine.open_file(str(path)), 0, size)
        self._tickets: deque[native.Ticket] = deque()
        self._lease: native.Lease | None = None
        self._begin = self._end = 0  # of the bytes in the slot that is being filled
        self._lent: list[torch.Tensor] = []  # bytes that the disk reads where they are
        self._rest = torch.empty(0, dtype=torch.uint8)  # behind the last whole block of a checksum

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._lease = None
        self._engine.shut_down()

    def write(self, raw: torch.Tensor, *, stays: bool = False) -> None:
        """Writes flat uint8 ``raw`` behind what came before; it may change afterwards but where it ``stays`` until :meth:`finish`,
        which saves a copy of most of it where blocks of the file are blocks in memory. Waits for a slot only. Raises StorageError."""
        if stays and (raw.data_ptr() - self._end) % native.BLOCK_NBYTES == 0:
            begin = -self._end % native.CHECKSUM_NBYTES
            end = begin + (raw.numel() - begin) // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES
            if begin < end:
                self._copy(raw[:begin])
                self._lend(raw[begin:end])
                raw = raw[end:]
        self._copy(raw)

    def _copy(self, raw: torch.Tensor) -> None:
        while raw.numel():
            if self._lease is None:
                self._lease = self._free_slot()
            count = min(raw.numel(), self._begin + SLOT_NBYTES - self._end)
            at = self._end - self._begin
            native.copy_flat(self._slot()[at : at + count], raw[:count])
            raw, self._end = raw[count:], self._end + count
            if self._end == self._begin + SLOT_NBYTES:
                self._submit()

    def _lend(self, raw: torch.Tensor) -> None:
        """Has the disk read ``raw``, whole blocks of a checksum, where it is. Behind whole blocks, too."""
        self.seal()
        self._lent.append(raw)
        for begin in range(0, raw.numel(), SLOT_NBYTES):
            piece = raw[begin : begin + SLOT_NBYTES]
            self._tickets.append(self._engine.write(self._extent, self._end, piece.data_ptr(), piece.numel()))
            self._begin = self._end = self._end + piece.numel()
        self._rest = raw[:0]

    def seal(self) -> None:
        """Sends the last bytes on their way: no slot is this file's any more, but the disk's. Raises StorageError."""
        if self._end > self._begin:
            self._submit()

    def finish(self) -> dict[str, int]:
        """Returns when the disk has all of it, which a sync makes lasting: how many bytes they are, and their CRC-32C, which was joined
        from those of the blocks as they went."""
        self.seal()
        while self._tickets:
            self._tickets[0].wait()
            self._tickets.popleft()
        blocks = self._nbytes // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES
        checksum = native.crc32c(self._rest, self._extent.checksum(blocks))
        self._engine.shut_down()
        if self._nbytes < self._extent.nbytes:  # costs a read and a write
            os.truncate(self._path, self._nbytes)
        return {"nbytes": self._nbytes, "crc32c": checksum}

    def _slot(self) -> torch.Tensor:
        return native.tensor_at(self._slots.region, self._lease.address, SLOT_NBYTES, torch.uint8)

    def _free_slot(self) -> native.Lease:
        while (lease := self._slots.try_lease(SLOT_NBYTES)) is None:
            while self._tickets and self._tickets[0].done:
                self._tickets.popleft().wait()  # raises what went wrong: the disk keeps that slot
            self._slots.wait_for_transfer()
        return lease

    def _submit(self) -> None:
        count = self._end - self._begin
        size, slot = round_up(count, native.BLOCK_NBYTES), self._slot()
        slot[count:size] = 0
        self._rest = slot[count // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES : count].clone()
        self._tickets.append(self._engine.write(self._extent, self._begin, self._lease.address, size, lease=self._lease))
        self._lease = None  # the disk's
        self._begin = self._end


def start_file(
    path: Path, tensors: Mapping[str, torch.Tensor], slots: native.PinnedPool, *, metadata: Mapping[str, str], stay: bool = False
) -> FileWriter:
    """Starts a safetensors file of ``tensors`` with ``metadata`` in its header; all bytes are handed over when this returns. ``stay``: the
    tensors do not change until the file is finished."""
    names = sorted(tensors, key=lambda name: _place_of(tensors[name], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        tensor, begin = tensors[name], at
        at += tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # A file of whole blocks, which need not be cut, wherever its tensors are then aligned as the library has them.
    text += b" " * (-(8 + len(text) + at) % native.BLOCK_NBYTES if at % ALIGNMENT == 0 else -len(text) % ALIGNMENT)
    writer = FileWriter(path, 8 + len(text) + at, slots)
    try:
        writer.write(torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8))
        for name in names:
            if tensors[name].nbytes:
                writer.write(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8), stays=stay)
        writer.seal()  # before another file wants a slot
    except BaseException:
        writer.__exit__()
        raise
    return writer


def _place_of(tensor: torch.Tensor, name: str) -> tuple[bool, int, str]:
    """Sorts the tensors of a file. As the library has them: the widest first, so that each lies at a multiple of its elements. Those of
    whole blocks are at the end, where the file's blocks are theirs."""
    return tensor.nbytes % native.BLOCK_NBYTES == 0, -tensor.dtype.itemsize, name
