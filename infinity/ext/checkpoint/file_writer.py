"""FileWriter: writes safetensors files past the page cache while their bytes are produced, and
computes their checksums.

slot   a piece of staging memory: filled, then in use by the disk until it is written. Files of one
       save share the slots
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from ... import native
from ...core.machine import processors
from ...core.machine.sizes import round_up
from ...files.weight_files import FILE_DTYPES
from .home_values import HomeValues

SLOT_NBYTES = 4 * 1024 * 1024
SLOTS = 16
ALIGNMENT = 8  # bytes; of the first tensor in a file
NAMES = {dtype: name for name, dtype in FILE_DTYPES.items() if dtype is not None}


def make_slots(nbytes: int) -> native.PinnedPool:
    """Makes the staging memory of a save that writes files of ``nbytes`` or less: at most ``SLOTS``
    slots, at least two."""
    count = min(SLOTS, max(2, -(-nbytes // SLOT_NBYTES) + 1))
    return native.PinnedPool(native.Region(count * SLOT_NBYTES, huge_pages=True, touch_threads=0))


class FileWriter:
    """One file being written. Use it as a context: without :meth:`finish`, an unusable file is
    left."""

    def __init__(self, path: Path, nbytes: int, slots: native.PinnedPool):
        """Creates the file and reserves its space. Raises OSError if that fails."""
        self._path, self._nbytes, self._slots = path, nbytes, slots
        # Direct I/O writes whole blocks; truncated at the end.
        size = round_up(nbytes, native.BLOCK_NBYTES)
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        self._io = native.make_io_engine(work_threads=processors.for_checksums())
        self._extent = native.Extent.in_file(self._io.open_file(str(path)), 0, size)
        self._tickets: deque[native.Ticket] = deque()
        self._lease: native.Lease | None = None
        self._begin = self._end = 0  # file offsets of the bytes in the current slot
        self._borrowed: list[torch.Tensor] = []  # memory that the disk writes from without a copy
        self._rest = torch.empty(0, dtype=torch.uint8)  # bytes after the last whole checksum block

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._lease = None
        self._io.shut_down()

    def write(self, raw: torch.Tensor, *, stable: bool = False) -> None:
        """Appends flat uint8 ``raw``, which may change afterwards. With ``stable`` it must not
        change until :meth:`finish`; that avoids most of the copy if file blocks and memory blocks
        are aligned. Waits for a slot only. Raises StorageError."""
        if stable and (raw.data_ptr() - self._end) % native.BLOCK_NBYTES == 0:
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
        """Submits ``raw``, whole checksum blocks, to the disk without a copy. The file's end is at
        a whole block, too."""
        self.seal()
        self._borrowed.append(raw)
        for begin in range(0, raw.numel(), SLOT_NBYTES):
            piece = raw[begin : begin + SLOT_NBYTES]
            self._tickets.append(
                self._io.write(self._extent, self._end, piece.data_ptr(), piece.numel())
            )
            self._begin = self._end = self._end + piece.numel()
        self._rest = raw[:0]

    def seal(self) -> None:
        """Submits the last bytes: after this the file holds no slot of its own. Raises
        StorageError."""
        if self._end > self._begin:
            self._submit()

    def finish(self) -> dict[str, int]:
        """Blocks until the disk has all bytes; a sync makes them durable. Returns their number, and
        their CRC-32C, combined from those of the blocks."""
        self.seal()
        while self._tickets:
            self._tickets[0].wait()
            self._tickets.popleft()
        blocks = self._nbytes // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES
        checksum = native.crc32c(self._rest, self._extent.checksum(blocks))
        self._io.shut_down()
        if self._nbytes < self._extent.nbytes:  # costs a read and a write
            os.truncate(self._path, self._nbytes)
        return {"nbytes": self._nbytes, "crc32c": checksum}

    def _slot(self) -> torch.Tensor:
        return native.tensor_at(self._slots.region, self._lease.address, SLOT_NBYTES, torch.uint8)

    def _free_slot(self) -> native.Lease:
        while (lease := self._slots.try_lease(SLOT_NBYTES)) is None:
            while self._tickets and self._tickets[0].done:
                # Raises the transfer's error: the disk keeps that slot.
                self._tickets.popleft().wait()
            self._slots.wait_for_transfer()
        return lease

    def _submit(self) -> None:
        count = self._end - self._begin
        size, slot = round_up(count, native.BLOCK_NBYTES), self._slot()
        slot[count:size] = 0
        self._rest = slot[count // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES : count].clone()
        self._tickets.append(
            self._io.write(self._extent, self._begin, self._lease.address, size, lease=self._lease)
        )
        self._lease = None  # the transfer owns it now
        self._begin = self._end


def start_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor | HomeValues],
    slots: native.PinnedPool,
    *,
    metadata: Mapping[str, str],
    service: native.PinnedPool | None = None,
) -> FileWriter:
    """Starts a safetensors file of ``tensors`` with ``metadata`` in its header. All bytes are
    submitted when this returns. Values in host homes must not change until the file is finished;
    those on disks are read through ``service`` (None: their store's own)."""
    names = sorted(tensors, key=lambda name: _place_of(tensors[name], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        tensor, begin = tensors[name], at
        at += tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, at],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad to a file of whole blocks, which needs no truncation, if its tensors stay aligned.
    text += b" " * (
        -(8 + len(text) + at) % native.BLOCK_NBYTES
        if at % ALIGNMENT == 0
        else -len(text) % ALIGNMENT
    )
    writer = FileWriter(path, 8 + len(text) + at, slots)
    try:
        writer.write(
            torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        )
        for name in names:
            value = tensors[name]
            if not value.nbytes:
                continue
            if isinstance(value, HomeValues):
                for piece in value.pieces(service):
                    writer.write(piece.view(torch.uint8), stable=value.is_stable)
                    del piece  # before the next one is read
            else:
                writer.write(value.detach().cpu().contiguous().view(-1).view(torch.uint8))
        writer.seal()  # before another file needs a slot
    except BaseException:
        writer.__exit__()
        raise
    return writer


def _place_of(tensor: torch.Tensor | HomeValues, name: str) -> tuple[bool, int, str]:
    """Returns a tensor's sort key in a file. As in the safetensors library the widest elements come
    first, so that each tensor is aligned to its elements. Tensors of whole blocks come last,
    aligned to the file's blocks."""
    return tensor.nbytes % native.BLOCK_NBYTES == 0, -tensor.dtype.itemsize, name
