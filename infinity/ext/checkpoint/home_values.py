"""HomeValues: elements of an array at home, which are read while they are written to a file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ... import native
from ...core.homes.arrays import StateArray
from ...core.homes.store import ArrayStore
from ...files.boxes import Box, view_of_run

PIECE_NBYTES = 8 * 1024 * 1024  # read from a disk or a device at once


@dataclass(frozen=True, eq=False)
class HomeValues:
    """The elements of ``array`` from ``begin`` on, as a tensor of ``shape`` whose dimensions are in
    memory in the given ``order``."""

    store: ArrayStore
    array: StateArray
    begin: int
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.array.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_stable(self) -> bool:
        """Whether the pieces are views of host memory, which do not change before the home."""
        return self.array.flat is not None and self.array.flat.is_cpu and self._is_in_order

    @property
    def _is_in_order(self) -> bool:
        return list(self.order) == sorted(self.order)

    def pieces(self, service: native.PinnedPool | None = None) -> Iterator[torch.Tensor]:
        """Yields the elements in row-major order as flat parts, one in memory at a time. Reads from
        a disk through ``service``, or else the store's own. Raises StorageError or
        CorruptionError."""
        begin, end = self.begin, self.begin + math.prod(self.shape)
        if self.array.flat is not None and self.array.flat.is_cpu:
            yield self._in_order(self.array.flat[begin:end])
        elif self._is_in_order:
            step = PIECE_NBYTES // self.dtype.itemsize
            for at in range(begin, end, step):
                yield self.store.read(self.array, at, min(end, at + step), service=service)
        elif begin < end:
            yield self._in_order(self.store.read(self.array, begin, end, service=service))

    def copy(self) -> torch.Tensor:
        """Reads all elements into a tensor of their own."""
        pieces = list(self.pieces())
        return torch.cat(pieces).view(self.shape) if pieces else self._empty()

    def _empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")

    def _in_order(self, flat: torch.Tensor) -> torch.Tensor:
        box = Box((0,) * len(self.shape), self.shape)
        return view_of_run(flat, box, self.order).contiguous().view(-1)
