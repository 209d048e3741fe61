"""LandingNorms: computes the norms of gradients as they land, once a norm was requested.

The bytes are in cache then, which saves a second read, perhaps from disk.
"""

from __future__ import annotations

import torch

from ...ranks.parallel_dims import ParallelDims


class LandingNorms:
    """The order of the requested norms, and how to compute them."""

    def __init__(self, ranks: ParallelDims):
        self._is_cut = ranks.is_cut
        self.order: float | None = None  # None: no norm was requested

    def ask(self, order: float) -> None:
        """Requests norms of ``order`` from now on."""
        self.order = order

    def of(self, values: torch.Tensor, order: float) -> torch.Tensor:
        """Computes the norm of a whole gradient as torch does. In fp32 if it is combined with the
        norms of other ranks."""
        if self._is_cut or not values.numel():
            return self.of_shard(values, order)
        return torch.linalg.vector_norm(values, order)

    @staticmethod
    def of_shard(values: torch.Tensor, order: float) -> torch.Tensor:
        """Computes the norm of this rank's shard of a gradient, in fp32."""
        if not values.numel():  # an empty local part has no maximum
            return torch.zeros((), dtype=torch.float32, device=values.device)
        return torch.linalg.vector_norm(values, order, dtype=torch.float32)
