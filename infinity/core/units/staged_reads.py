"""StagedReads: one unit's weights on their way from disk, through staging slots."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ... import native
from ...errors import CorruptionError, InfinityError, StorageError
from ..homes.arrays import StateArray, whole_blocks
from ..homes.staging import Fetch
from ..homes.store import ArrayStore
from .flat_param import FlatParam
from .home_arrays import Update
from .rows import Spans

# Reads in pieces of this size overlap with copies to a device. Whole checksum blocks.
PIECE_NBYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class ReadPiece:
    """A part of a flat param on its way from the disk into the flat param's slot."""

    flat_param: int  # index in the unit
    begin: int  # byte of the shard
    read: Fetch


class StagedReads:
    """The reads of one unit into ``slots``, one for each flat param, until they go back.
    ``ready``: when they were wanted and the slots free, for a timeline."""

    def __init__(self, slots: list[native.Lease], ready: float = 0.0):
        self.slots, self._ready = slots, ready
        self.pieces: list[ReadPiece] = []
        self.times: tuple[float, float] | None = None  # start and end of what was copied

    def start(
        self,
        store: ArrayStore,
        weights: Sequence[StateArray],
        after: Sequence[Update | None],
        *,
        in_pieces: bool,
        spans: Spans | None = None,
    ) -> None:
        """Starts reading ``spans`` (None: all) of this rank's shards at home, ``weights``, each
        ``after`` an update of it. ``in_pieces``: each piece can be used as soon as it is there."""
        for index, (weight, slot, update) in enumerate(zip(weights, self.slots, after)):
            size = PIECE_NBYTES if in_pieces or store.staging.needs_pieces else weight.nbytes
            for first, last in whole_blocks(weight, None if spans is None else spans[index]):
                for begin in range(first, last, size):
                    nbytes = min(size, last - begin)
                    read = store.staging.fetch(weight, begin, slot, nbytes, at=begin, after=update)
                    self.pieces.append(ReadPiece(index, begin, read))

    @property
    def done(self) -> bool:
        """Whether all reads are over."""
        return all(piece.read.done for piece in self.pieces)

    def first_error(self) -> Exception | None:
        """Waits for all reads. Returns the first error, if any."""
        error: Exception | None = None
        for piece in self.pieces:
            try:
                piece.read.wait()
            except Exception as failure:  # noqa: BLE001 - told by the caller
                error = error or failure
        return error

    def cancel(self) -> Exception | None:
        """Cancels reads that have not started, and waits for the others. Returns the first error of
        a disk, if any."""
        error: Exception | None = None
        for piece in self.pieces:
            piece.read.cancel()
        for piece in self.pieces:
            try:
                piece.read.wait()
            except InfinityError as failure:
                cancelled = isinstance(failure, StorageError) and failure.errno == errno.ECANCELED
                # These bytes are unused, and may have been overwritten during the read. If the disk
                # holds wrong bytes, the next read finds out.
                error = error or (
                    None if cancelled or isinstance(failure, CorruptionError) else failure
                )
        return error

    def copy(
        self,
        store: ArrayStore,
        flat_params: Sequence[FlatParam],
        flats: Sequence[torch.Tensor],
        name: str,
    ) -> None:
        """Copies each piece to its place in ``flats`` as it arrives. After an error waits for the
        remaining reads. ``name``: of the unit, for the timeline."""
        try:
            for piece in self.pieces:
                self._copy_piece(
                    store, flat_params[piece.flat_param], flats[piece.flat_param], piece, name
                )
        except BaseException:
            self.first_error()
            raise

    def _copy_piece(
        self,
        store: ArrayStore,
        flat_param: FlatParam,
        flat: torch.Tensor,
        piece: ReadPiece,
        name: str,
    ) -> None:
        if not piece.read.done:
            with store.traffic.stalled("nvme->host", name):
                piece.read.wait()
        piece.read.wait()  # raises the error of a failed read
        start, end = piece.read.times
        store.traffic.tell(piece.read.lane, name, start, end, ready=self._ready or None)
        self.times = (
            (min(start, self.times[0]), max(end, self.times[1])) if self.times else (start, end)
        )
        source = piece.read.values(flat_param.spec.dtype)
        first = (
            flat_param.layout.home_range("weight")[0]
            + piece.begin // flat_param.spec.dtype.itemsize
        )
        flat[first : first + source.numel()].copy_(source, non_blocking=True)

    def release(self) -> None:
        """Releases the slots, once no read is running."""
        for slot in self.slots:
            slot.release()
