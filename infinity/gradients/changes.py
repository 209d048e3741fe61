"""GradChanges: knows which gradients are being changed, so that those cut short are found torn.

changing   gradients that the running backward, or a multiplication, has begun to change
factor     a multiplication of the gradient that was asked for and not done yet: the optimizer kernel does it, rounding
           as the in-place multiplication would have
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..state.handle import ParamHandle
from .record import GradRecord, GradState


def multiply(grad: torch.Tensor, factors: Iterable[float]) -> torch.Tensor:
    """Multiplies ``grad`` in place, by one factor after the other: rounded each time. Returns it."""
    for factor in factors:
        grad.mul_(factor)
    return grad


class GradChanges:
    """The gradients that are being changed. Used from the thread that runs backward or the step."""

    def __init__(self) -> None:
        self._changing: set[ParamHandle] = set()

    def begin(self, handle: ParamHandle) -> None:
        """Marks the gradient of ``handle``, which is about to change."""
        self._changing.add(handle)

    def end(self) -> None:
        """Ends all changes: what was begun is whole."""
        self._changing = set()

    @property
    def are_open(self) -> bool:
        """Whether something has begun to change gradients, and is not done."""
        return bool(self._changing)

    def apply_factors(self, handle: ParamHandle, home: torch.Tensor) -> None:
        """Does the multiplications that were asked for, on ``home``, the bytes of this rank's elements."""
        factors = handle.grad.factors
        if factors:
            outside = handle not in self._changing  # of a backward, which has changed the gradient until its end
            self._changing.add(handle)
            multiply(home, factors)
            factors.clear()
            if outside:
                self._changing.discard(handle)

    def tear(self) -> None:
        """Makes torn what was begun when an exception struck."""
        for handle in self._changing:
            if handle.grad.state is not GradState.CONSUMED:
                handle.grad = GradRecord(GradState.TORN)
        self._changing = set()
