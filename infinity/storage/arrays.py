"""StateArray: names one flat array, its tier, and where its bytes are.

ArrayIO is what reads and writes such arrays; bytes move between them and tensors on the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from .. import native
from ..machine.tiers import Tier


@dataclass(eq=False)
class StateArray:
    """One flat array at home. ``flat`` is a tensor over it where the home is memory, None on NVMe, where ``extent`` has whole blocks: what
    follows the array in the last one is nobody's."""

    tier: Tier
    dtype: torch.dtype
    numel: int
    extent: native.Extent
    flat: torch.Tensor | None = None
    charge: native.Charge | None = None
    region: native.Region | None = None  # the memory that ``flat`` is over, where torch has not allocated it

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class ArrayIO(Protocol):
    """Reads and writes the arrays of a shard."""

    def read(self, array: StateArray, begin: int, end: int) -> torch.Tensor:
        """Reads as :meth:`ShardStore.read` does."""

    def write(self, array: StateArray, begin: int, source: torch.Tensor, *, version: int, stays: bool = False) -> None:
        """Writes as :meth:`ShardStore.write` does. ``stays``: ``source`` does not change until all is at home."""

    def guarding(self) -> AbstractContextManager[None]:
        """Guards a block as :meth:`ShardStore.guarding` does."""


def bytes_of(pool: native.PinnedPool, lease: native.Lease, nbytes: int) -> torch.Tensor:
    """Makes a tensor over the first ``nbytes`` of ``lease``."""
    return native.tensor_at(pool.region, lease.address, nbytes, torch.uint8)
