"""StateArray: one flat array, its tier, and the location of its bytes.

ArrayIO is the interface to read and write such arrays from and to tensors on the host.
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


class ArrayIO(Protocol):
    """Reads and writes the arrays of a flat param."""

    def read(self, array: StateArray, begin: int, end: int) -> torch.Tensor:
        """Reads as :meth:`ArrayStore.read` does."""

    def write(
        self,
        array: StateArray,
        begin: int,
        source: torch.Tensor,
        *,
        version: int,
        stays: bool = False,
    ) -> None:
        """Writes as :meth:`ArrayStore.write`. ``stays``: ``source`` stays as it is until home."""

    def guarding(self) -> AbstractContextManager[None]:
        """Guards a block as :meth:`ArrayStore.guarding` does."""


def bytes_of(pool: native.PinnedPool, lease: native.Lease, nbytes: int) -> torch.Tensor:
    """Returns a tensor over the first ``nbytes`` of ``lease``."""
    return native.tensor_at(pool.region, lease.address, nbytes, torch.uint8)
