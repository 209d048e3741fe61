"""GradChanges: tracks which gradients are being changed, so that interrupted ones are marked torn.

changing   gradients that the running backward, or a multiplication, has begun to change
factor     a requested multiplication that the optimizer kernel applies later, rounding as the
           in-place multiplication would have
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..units.handle import ParamHandle
from .record import GradRecord, GradState


def multiply(grad: torch.Tensor, factors: Iterable[float]) -> torch.Tensor:
    """Multiplies ``grad`` in place by one factor after the other, rounding each time. Returns
    it."""
    for factor in factors:
        grad.mul_(factor)
    return grad


class GradChanges:
    """The gradients that are being changed. Used from the thread that runs backward or the step."""

    def __init__(self) -> None:
        self.end()
        # Handles whose gradient the last exception tore; it may have been zeroed since.
        self.torn: set[ParamHandle] = set()

    def end(self) -> None:
        """Ends all changes: they are complete."""
        self._changing: set[ParamHandle] = set()
        # Marks the gradient of a handle as about to change.
        self.begin: Callable[[ParamHandle], None] = self._changing.add

    @property
    def are_open(self) -> bool:
        """Whether a change of gradients has begun and not ended."""
        return bool(self._changing)

    def apply_factors(self, handle: ParamHandle, homes: Iterable[torch.Tensor]) -> None:
        """Multiplies ``homes``, the bytes of this rank's shard, by the pending factors."""
        factors = handle.grad.factors
        if factors:
            # Not in a backward, which keeps its mark to its end
            outside = handle not in self._changing
            self._changing.add(handle)
            for home in homes:
                multiply(home, factors)
            factors.clear()
            if outside:
                self._changing.discard(handle)

    def tear(self) -> None:
        """Marks the gradients whose change an exception interrupted as torn."""
        self.torn = {h for h in self._changing if h.grad.state is not GradState.CONSUMED}
        for handle in self.torn:
            handle.grad = GradRecord(GradState.TORN)
        self.end()
