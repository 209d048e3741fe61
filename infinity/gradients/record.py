"""GradRecord: holds the state of one parameter's gradient.

    ABSENT     None in torch's words; the next gradient is copied
    LANDED     at home: the next gradient is added, the next step applies it
    CONSUMED   applied by a step; only reading and zeroing are left, and adding where the model was part of another's loss
    TORN       a backward failed after it had begun to change this gradient; only zeroing is left, what lands is dropped

factor     a multiplication of the gradient that was asked for and not done yet: the optimizer kernel does it, rounding
           as the in-place multiplication would have
average    with other ranks, the mean of what all of them landed; each has its slice of it at home
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from .. import native
from ..errors import UsageError
from ..machine.device import Event, PAST
from ..state.handle import ParamHandle

if TYPE_CHECKING:
    from .tensor import LandedGrad


class GradState(Enum):
    """What a parameter's gradient is."""

    ABSENT = auto()
    LANDED = auto()
    CONSUMED = auto()
    TORN = auto()


@dataclass(eq=False)
class GradRecord:
    """One parameter's gradient."""

    state: GradState = GradState.ABSENT
    factors: list[float] = field(default_factory=list)
    stand_in: LandedGrad | None = None
    norm: tuple[float, torch.Tensor] | None = None  # order, and the norm of what is at home; None where it is not known
    stand_in_norm: tuple[float, torch.Tensor] | None = None  # the same over all ranks, as long as ``norm`` is known
    landing: Event = PAST  # when the norm is known
    averaged: bool = False  # over the ranks; with others only this rank's slice is true then
    viewed: bool = False  # a view was handed out, through which the bytes may change unheard: norms are taken anew


@dataclass(eq=False)
class OpenedShard:
    """A shard's gradients in a staging slot."""

    slot: native.Lease
    flat: torch.Tensor
    dirty: bool = False


def refuse_torn(handle: ParamHandle) -> None:
    """Raises UsageError for a gradient that a failed backward left half done."""
    if handle.grad.state is GradState.TORN:
        raise UsageError(
            f"the gradient of {handle.name} is half done, for a backward that added to it was cut short by an exception. Call "
            "optimizer.zero_grad() and run forward and backward again."
        )
