"""FlatLayout: the place of each parameter of a shard in its one flat buffer.

Offsets are multiples of 64 elements, so every parameter is as aligned as torch would allocate it,
and starts at a block of 8-bit moments. The length is padded to 4096 elements per rank. So each
rank's slice is whole disk blocks, for any element size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..machine.sizes import round_up
from .dtensors import local_of, span_of

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
    """The placements of a shard's parameters, in order, and the padded length of the whole."""

    placements: tuple[Placement, ...]
    numel: int

    @classmethod
    def of(cls, params: Sequence[torch.Tensor], slices: int = 1) -> FlatLayout:
        """Lays ``params`` out one after the other, padded to be divisible into ``slices``."""
        placements, offset = [], 0
        for param in params:
            local = local_of(param)
            stride = tuple(local.stride())
            if not is_dense(local.shape, stride):
                stride = torch.empty(local.shape, device="meta").stride()
            placements.append(Placement(offset, local.shape, tuple(stride)))
            offset = round_up(offset + span_of(param), PARAM_ALIGNMENT)
        return cls(tuple(placements), round_up(max(offset, 1), SHARD_ALIGNMENT * slices))
