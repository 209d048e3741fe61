"""FlatLayout: the place of each parameter of a flat param in its flat arrays, whole and on each
rank.

Offsets are multiples of 64 elements, so every parameter is as aligned as torch would allocate it,
and starts at a block of 8-bit moments. The length is padded to 4096 elements per rank. So each
rank's shard is whole disk blocks, for any element size.

shard   a rank's equal part of every array's flat elements; with one rank, all of them
part    the elements of an array that belong to one parameter
own     at home on this rank: its shard, or the whole gradient under ZeRO-1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...ranks.parallel_dims import ParallelDims
from ..machine.sizes import round_up
from .flat_param_spec import block_numel
from .forms import division_of, local_of

PARAM_ALIGNMENT = 64  # elements
SHARD_ALIGNMENT = 4096  # elements


def is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Tells whether the strides visit ``numel`` consecutive elements once each, in any order of
    dimensions."""
    expected = 1
    for extent, step in sorted(
        ((n, s) for n, s in zip(shape, stride) if n != 1), key=lambda pair: pair[1]
    ):
        if step != expected:
            return False
        expected *= extent
    return True


@dataclass(frozen=True)
class Placement:
    """One parameter's place in the flat buffer, in elements; the strides are the parameter's
    own."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def end(self) -> int:
        return self.offset + self.numel

    @property
    def is_row_major(self) -> bool:
        """Whether the elements are stored in row-major order."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Makes the parameter's view of ``flat``."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class FlatLayout:
    """The placements of a flat param's parameters, in order, and the padded length of the whole,
    which ``ranks`` divide. Ranges are (begin, end), in elements of the array in question."""

    placements: tuple[Placement, ...]
    numel: int
    ranks: ParallelDims = ParallelDims()

    @classmethod
    def of(cls, params: Sequence[torch.Tensor], ranks: ParallelDims | None = None) -> FlatLayout:
        """Lays ``params`` out one after the other, padded to be divisible over ``ranks``."""
        ranks = ranks or ParallelDims()
        placements, offset = [], 0
        for param in params:
            local = local_of(param)
            stride = tuple(local.stride())
            if not is_dense(local.shape, stride):
                stride = torch.empty(local.shape, device="meta").stride()
            placements.append(Placement(offset, local.shape, tuple(stride)))
            offset = round_up(offset + division_of(param).span, PARAM_ALIGNMENT)
        numel = round_up(max(offset, 1), SHARD_ALIGNMENT * ranks.size)
        return cls(tuple(placements), numel, ranks)

    @cached_property  # read several times for each use of a unit
    def shard_numel(self) -> int:
        """Elements of a rank's shard."""
        return self.numel // self.ranks.size

    @cached_property
    def own_shard(self) -> tuple[int, int]:
        """The elements that the optimizer steps here."""
        return self.ranks.rank * self.shard_numel, (self.ranks.rank + 1) * self.shard_numel

    def shard_part(self, index: int, rank: int | None = None) -> tuple[int, int]:
        """Returns the elements, maybe none, of parameter ``index`` in its rank's shard."""
        placement = self.placements[index]
        first = (self.ranks.rank if rank is None else rank) * self.shard_numel
        begin, end = max(placement.offset, first), min(placement.end, first + self.shard_numel)
        return begin, max(begin, end)

    @cached_property  # read in each step
    def shard_parts(self) -> list[tuple[int, int]]:
        """The elements of each parameter in this rank's shard."""
        return [self.shard_part(index) for index in range(len(self.placements))]

    def home_range(self, name: str, rank: int | None = None) -> tuple[int, int]:
        """Returns the elements of the whole array ``name`` at home here (or on ``rank``)."""
        if name == "grad" and self.ranks.keeps_gradients:
            return 0, self.numel
        numel = self.shard_numel // block_numel(name)
        rank = self.ranks.rank if rank is None else rank
        return rank * numel, (rank + 1) * numel

    def part(self, name: str, index: int) -> tuple[int, int]:
        """Returns the elements of parameter ``index`` in the whole array ``name``."""
        placement, block = self.placements[index], block_numel(name)
        return placement.offset // block, -(-placement.end // block)

    def own_part(self, name: str, index: int) -> tuple[int, int]:
        """Returns the elements, maybe none, of :meth:`part` that are at home here."""
        (begin, end), (low, high) = self.part(name, index), self.home_range(name)
        begin, end = max(begin, low), min(end, high)
        return begin, max(begin, end)

    def part_at_home(self, name: str, index: int) -> tuple[int, int]:
        """Returns :meth:`own_part` in elements of the array at home."""
        begin, end = self.own_part(name, index)
        first = self.home_range(name)[0]
        return begin - first, end - first

    def part_of_param(self, name: str, index: int) -> tuple[int, int]:
        """Returns :meth:`own_part` in elements of the parameter's part."""
        begin, end = self.own_part(name, index)
        first = self.part(name, index)[0]
        return begin - first, end - first
