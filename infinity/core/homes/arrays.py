"""StateArray: one flat array, its tier, and the location of its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ... import native
from ..machine.sizes import round_down, round_up
from ..machine.tiers import Tier


@dataclass(eq=False)
class StateArray:
    """One flat array at home. ``flat`` is a tensor over it if the home is memory, None on NVMe.
    There ``extent`` has whole blocks: the rest of the last one is unused."""

    tier: Tier
    dtype: torch.dtype
    numel: int
    extent: native.Extent
    flat: torch.Tensor | None = None
    charge: native.Charge | None = None
    region: native.Region | None = None  # the memory below ``flat``, if not allocated by torch

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def bytes_of(pool: native.PinnedPool, lease: native.Lease, nbytes: int) -> torch.Tensor:
    """Returns a tensor over the first ``nbytes`` of ``lease``."""
    return native.tensor_at(pool.region, lease.address, nbytes, torch.uint8)


def whole_blocks(
    array: StateArray, spans: Sequence[tuple[int, int]] | None
) -> Iterator[tuple[int, int]]:
    """Yields begin and end, in bytes, of the whole checksum blocks that have ``spans``."""
    if spans is None:
        yield 0, array.nbytes
        return
    size, block = array.dtype.itemsize, native.CHECKSUM_NBYTES
    last = 0
    for begin, end in sorted(spans):
        first = max(last, round_down(begin * size, block))
        last = max(last, min(array.nbytes, round_up(end * size, block)))
        if first < last:
            yield first, last
