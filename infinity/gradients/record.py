"""GradRecord: holds the state of one parameter's gradient.

    ABSENT     None in torch's words; the next gradient is copied
    LANDED     at home: the next gradient is added, the next step applies it
    CONSUMED   applied by a step; only reading and zeroing are left, and adding where the model was part of another's loss
    TORN       a backward failed after it had begun to change this gradient; only zeroing is left, what lands is dropped

sample     a few elements of all that has landed on this rank, where other ranks have to have the same
factor     a multiplication of the gradient that was asked for and not done yet: the optimizer kernel does it, rounding
           as the in-place multiplication would have
average    with other ranks, the mean of what all of them landed; each has its slice of it at home
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from ..errors import InternalError, UsageError
from ..machine.device import PAST, Event
from ..state.handle import ParamHandle
from ..state.tensors import checksum_of
from .assigned import Assigned

SAMPLED = 64  # elements of a gradient


class GradState(Enum):
    """What a parameter's gradient is."""

    ABSENT = auto()
    LANDED = auto()
    CONSUMED = auto()
    TORN = auto()


# Back to ABSENT nothing moves: a gradient that is cleared, or torn, gets a new record. A step that stands in the journal is carried
# to its end whatever became of its gradients meanwhile, so CONSUMED is reached from everywhere.
MOVES = {
    GradState.ABSENT: {GradState.LANDED, GradState.CONSUMED},
    GradState.LANDED: {GradState.LANDED, GradState.CONSUMED},
    GradState.CONSUMED: {GradState.LANDED, GradState.CONSUMED},  # another model's loss adds to it
    GradState.TORN: {GradState.CONSUMED},
}


@dataclass(eq=False)
class GradRecord:
    """One parameter's gradient."""

    _state: GradState = GradState.ABSENT
    factors: list[float] = field(default_factory=list)
    stand_in: torch.Tensor | None = None  # the LandedGrad
    shown: torch.Tensor | None = None  # what p.grad is: the stand-in, or a DTensor around it
    norm: tuple[float, torch.Tensor] | None = None  # order, and the norm of what is at home; None where it is not known
    stand_in_norm: tuple[float, torch.Tensor] | None = None  # the same over all ranks, as long as ``norm`` is known
    landing: Event = PAST  # when the norm is known
    averaged: bool = False  # over the ranks; with others only this rank's slice is true then
    sample: torch.Tensor | None = None  # fp32; None where nothing has landed, or nobody asked for it
    edits: int = 0  # a digest of what users have changed it by: of factors, and of values that all ranks have whole
    own_edits: int = 0  # of values that other ranks have other parts of
    assigned: Assigned | None = None  # the tensor that was assigned; None: there is none, or it is let go
    viewed: bool = False  # a view was handed out, through which the bytes may change unheard: norms are taken anew

    @property
    def state(self) -> GradState:
        """What the gradient is."""
        return self._state

    def take_sample(self, grad: torch.Tensor) -> None:
        """Adds a few elements of ``grad``, which lands, to the sample."""
        self.sample = sample_of(grad) if self.sample is None else self.sample.add_(sample_of(grad))

    def note_edit(self, by: torch.Tensor | float, *, is_own: bool) -> None:
        """Notes what a user has changed it by: a factor, or the values that are its now."""
        values = by if isinstance(by, torch.Tensor) else torch.tensor(by, dtype=torch.float64, device="cpu")
        if is_own:
            self.own_edits = checksum_of(values, self.own_edits)
        else:
            self.edits = checksum_of(values, self.edits)

    def move(self, to: GradState) -> None:
        """Makes the gradient ``to``. Raises InternalError for a move that is not in the table."""
        if to not in MOVES[self._state]:
            raise InternalError(f"a gradient that is {self._state.name} cannot become {to.name}")
        self._state = to


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Takes a few elements of ``tensor``, at equal distances: fp32, flat."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].to(torch.float32, copy=True)


def has_landed(handle: ParamHandle) -> bool:
    """Tells whether a step would apply a gradient of the parameter; of one that is not stepped there is none."""
    return handle.grad is not None and handle.grad.state is GradState.LANDED


def would_be_lost(handle: ParamHandle) -> bool:
    """Tells whether a gradient waits for its step that is more than the zeros of ``zero_grad(set_to_none=False)``. Every change of a gradient
    forgets the norm that is known of it; of the largest element no smaller one is rounded away."""
    if not has_landed(handle):
        return False
    record = handle.grad
    record.landing.precede()
    known_zero = record.norm is not None and record.norm[0] == math.inf and record.norm[1].item() == 0
    return not known_zero or record.viewed or bool(record.factors)


def refuse_torn(handle: ParamHandle) -> None:
    """Raises UsageError for a gradient that a failed backward left half done."""
    if handle.grad.state is GradState.TORN:
        raise UsageError(
            f"the gradient of {handle.name} is half done, for a backward that added to it was cut short by an exception. Call "
            "optimizer.zero_grad() and run forward and backward again."
        )


def writable(handle: ParamHandle) -> ParamHandle:
    """Returns ``handle``. Raises UsageError where changing its gradient would have no effect, or the gradient is half done."""
    refuse_torn(handle)
    if handle.grad.state is GradState.CONSUMED:
        raise UsageError(
            f"{handle.name}.grad was consumed by optimizer.step(): it can be read, but "
            "changing it in place has no effect. Change gradients before step(), call zero_grad() first, or assign what the next "
            "step is to begin with: param.grad = param.grad * 0.5."
        )
    if handle.grad.assigned is not None:  # and is not changed along
        handle.grad.assigned.leave_behind()
    return handle
