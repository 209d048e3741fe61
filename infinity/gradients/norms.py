"""LandingNorms: takes norms of gradients as they land, of the order that somebody has asked for.

The bytes are near then: they need not be read once more, from a disk perhaps.
"""

from __future__ import annotations

import torch

from ..distributed.data_ranks import DataRanks


class LandingNorms:
    """The order of the norms that are asked for, and how they are taken."""

    def __init__(self, ranks: DataRanks):
        self._is_cut = ranks.is_cut
        self.order: float | None = None  # None: nobody has asked

    def ask(self, order: float) -> None:
        """Has norms of ``order`` taken from now on."""
        self.order = order

    def of(self, values: torch.Tensor, order: float) -> torch.Tensor:
        """Takes the norm of all elements of a gradient as torch does; in fp32 where it is put together with those of other ranks."""
        if not values.numel():  # of a part that has no element, of which a largest one is not defined
            return torch.zeros((), dtype=torch.float32, device=values.device)
        return torch.linalg.vector_norm(values, order, dtype=torch.float32 if self._is_cut else None)

    @staticmethod
    def of_slice(values: torch.Tensor, order: float) -> torch.Tensor:
        """Takes the norm of this rank's elements of a gradient, in fp32."""
        if not values.numel():
            return torch.zeros((), dtype=torch.float32, device=values.device)
        return torch.linalg.vector_norm(values, order, dtype=torch.float32)
