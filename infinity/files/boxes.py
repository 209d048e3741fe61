"""Boxes: n-dimensional parts of a tensor, and runs of elements that are contiguous in memory.

box     a part of a tensor: an offset and a shape, one number each for every dimension
order   the dimensions of a tensor from the slowest to the fastest, in memory
run     elements that are consecutive in that order: at most 2d - 1 boxes of a d-dimensional tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Box:
    """Part of a tensor: its first element in every dimension, and its size there."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def moved(self, by: Sequence[int], sign: int = 1) -> Box:
        """Returns the box moved by ``by``, or back with ``sign`` -1."""
        return Box(tuple(at + sign * step for at, step in zip(self.offset, by)), self.shape)

    def common(self, other: Box) -> Box | None:
        """Returns the intersection; None if it is empty."""
        begins = [max(a, b) for a, b in zip(self.offset, other.offset)]
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape)
        ]
        if any(begin >= end for begin, end in zip(begins, ends)):
            return None
        return Box(tuple(begins), tuple(end - begin for begin, end in zip(begins, ends)))

    def within(self, shape: Sequence[int]) -> bool:
        """Returns whether the box is a part of a tensor of ``shape``."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            0 <= at and 0 <= n and at + n <= extent
            for at, n, extent in zip(self.offset, self.shape, shape)
        )

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Returns this box of ``values``, as a view."""
        return values[tuple(slice(at, at + n) for at, n in zip(self.offset, self.shape))]


def order_of(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of a dense tensor's dimensions in memory, the slowest first."""
    return tuple(
        sorted(range(len(shape)), key=lambda dim: (-stride[dim] if shape[dim] != 1 else 0, dim))
    )


def boxes_of_run(
    shape: Sequence[int], order: Sequence[int], begin: int, end: int
) -> Iterator[tuple[Box, int]]:
    """Yields the boxes of elements ``begin`` to ``end``, counted in ``order``, of a tensor of
    ``shape``, each with the index of its first element."""
    back = [list(order).index(dim) for dim in range(len(shape))]
    for offset, extent, first in _runs([shape[dim] for dim in order], begin, end):
        yield Box(tuple(offset[dim] for dim in back), tuple(extent[dim] for dim in back)), first


def _runs(shape: list[int], begin: int, end: int) -> Iterator[tuple[list[int], list[int], int]]:
    """Yields the same for a row-major tensor."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield [begin][: len(shape)], [end - begin][: len(shape)], begin
        return
    row = math.prod(shape[1:])
    first, last = begin // row, -(-end // row)  # rows that the run touches
    whole_first, whole_last = -(-begin // row), end // row  # rows that it covers
    if whole_first >= whole_last:  # parts of one or two rows
        for at in range(first, last):
            for offset, extent, start in _runs(
                shape[1:], max(0, begin - at * row), min(row, end - at * row)
            ):
                yield [at, *offset], [1, *extent], at * row + start
        return
    for offset, extent, start in (
        _runs(shape[1:], begin - first * row, row) if first < whole_first else ()
    ):
        yield [first, *offset], [1, *extent], first * row + start
    yield (
        [whole_first, *[0] * (len(shape) - 1)],
        [whole_last - whole_first, *shape[1:]],
        whole_first * row,
    )
    for offset, extent, start in (
        _runs(shape[1:], 0, end - whole_last * row) if whole_last < last else ()
    ):
        yield [whole_last, *offset], [1, *extent], whole_last * row + start


def view_of_run(flat: torch.Tensor, box: Box, order: Sequence[int]) -> torch.Tensor:
    """Returns ``flat``, the elements of ``box`` in ``order``, as a tensor of the box's shape."""
    back = [list(order).index(dim) for dim in range(len(order))]
    return flat.view([box.shape[dim] for dim in order]).permute(back)


def cover(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Returns whether ``boxes`` cover a tensor of ``shape``, each element exactly once."""
    filled = [box for box in boxes if box.numel]
    if not all(box.within(shape) for box in boxes) or sum(box.numel for box in filled) != math.prod(
        shape
    ):
        return False
    if not shape:
        return True
    filled.sort(key=lambda box: box.offset)
    for number, box in enumerate(filled):
        for other in filled[number + 1 :]:
            if other.offset[0] >= box.offset[0] + box.shape[0]:
                break  # and so do all later boxes
            if box.common(other) is not None:
                return False
    return True
