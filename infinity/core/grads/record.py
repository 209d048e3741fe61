"""GradRecord: holds the state of one parameter's gradient.

    ABSENT     None in torch; the next gradient is copied
    LANDED     at home: the next gradient is added, the next step applies it
    CONSUMED   applied by a step: it can be read and zeroed, added to, and stepped again
    TORN       a failed backward had begun to change it: only zeroing is left, landings are dropped

sample     a few elements of all that has landed on this rank, if other ranks must have the same
factor     a requested multiplication that the optimizer kernel applies later, rounding as the
           in-place multiplication would have
average    with several ranks, the mean of their gradients; each has its shard of it at home
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from ...errors import InternalError, UsageError
from ..machine.device import PAST, Event
from ..params.assigned import Assigned
from ..params.tensors import checksum_of
from ..run.operations import Operation
from ..units.handle import ParamHandle

SAMPLED = 64  # elements of a gradient


class GradState(Enum):
    """What state a parameter's gradient is in."""

    __hash__ = object.__hash__  # in C: it is looked up at every move

    ABSENT = auto()
    LANDED = auto()
    CONSUMED = auto()
    TORN = auto()


# No move leads back to ABSENT: a cleared or torn gradient gets a new record. A step in the journal
# is carried to its end whatever became of its gradients meanwhile. So CONSUMED is reached from
# every state.
MOVES = {
    GradState.ABSENT: {GradState.LANDED, GradState.CONSUMED},
    GradState.LANDED: {GradState.LANDED, GradState.CONSUMED},
    GradState.CONSUMED: {GradState.LANDED, GradState.CONSUMED},
    GradState.TORN: {GradState.CONSUMED},
}


@dataclass(eq=False)
class GradRecord:
    """One parameter's gradient."""

    state: GradState = GradState.ABSENT  # changed by :meth:`move` alone
    factors: list[float] = field(default_factory=list)
    proxy: torch.Tensor | None = None  # the GradProxy
    shown: torch.Tensor | None = None  # what p.grad is: the proxy, or a DTensor around it
    # Order, and norm of the bytes at home; None: unknown
    norm: tuple[float, torch.Tensor] | None = None
    # The same over all ranks, valid while ``norm`` is known
    proxy_norm: tuple[float, torch.Tensor] | None = None
    landing: Event = PAST  # when the norm is known
    adds: bool = False  # whether the average that lands is added to one before
    averaged: bool = False  # over the ranks: then only this rank's shard is valid
    sample: torch.Tensor | None = None  # fp32; None: nothing has landed, or it was not requested
    edits: int = 0  # digest of users' changes: factors, and values common to all ranks
    own_edits: int = 0  # digest of values of which other ranks have other local parts
    assigned: Assigned | None = None  # None: no assigned tensor, or it was released
    with_graph: torch.Tensor | None = None  # what p.grad is after a backward with create_graph
    # Of weights updated by rows: those whose gradient may not be zero; None: all
    rows: frozenset[int] | None = None
    are_others_zero: bool = True  # the other rows' bytes at home; else they are undefined

    def take_sample(self, grad: torch.Tensor) -> None:
        """Adds a few elements of the landing gradient ``grad`` to the sample."""
        self.sample = sample_of(grad) if self.sample is None else self.sample.add_(sample_of(grad))

    def note_edit(self, by: torch.Tensor | float, *, is_own: bool) -> None:
        """Adds a user's change to the digests. ``by``: a factor, or the new values. ``is_own``:
        values of which other ranks have other local parts."""
        values = (
            by
            if isinstance(by, torch.Tensor)
            else torch.tensor(by, dtype=torch.float64, device="cpu")
        )
        if is_own:
            self.own_edits = checksum_of(values, self.own_edits)
        else:
            self.edits = checksum_of(values, self.edits)

    def move(self, to: GradState) -> None:
        """Moves to state ``to``. Raises InternalError for a move that is not in the table."""
        if to not in MOVES[self.state]:
            raise InternalError(f"a gradient that is {self.state.name} cannot become {to.name}")
        self.state = to


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns about ``SAMPLED`` elements of ``tensor`` at equal distances: fp32, flat."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].to(torch.float32, copy=True)


def has_landed(handle: ParamHandle) -> bool:
    """Returns whether a step would apply the parameter's gradient. False for a parameter that is
    not stepped."""
    return handle.grad is not None and handle.grad.state is GradState.LANDED


def refuse_torn(handle: ParamHandle) -> None:
    """Raises UsageError for a gradient that a failed backward left incomplete."""
    if handle.grad.state is GradState.TORN:
        raise UsageError(
            f"the gradient of {handle.name} is half done, for a backward that added to it was cut"
            " short by an exception. Call optimizer.zero_grad() and run forward and backward"
            " again."
        )


def writable(handle: ParamHandle) -> ParamHandle:
    """Returns ``handle``, whose gradient is changed in place. Raises UsageError if any gradient of
    its model is torn, so that no loop ends in its middle; or if a step that is not over has applied
    it."""
    for other in (handle, *handle.engine.gradients.changes.torn):
        refuse_torn(other)
    if handle.grad.state is GradState.CONSUMED:
        handle.engine.uses.check(Operation.SET_GRAD, f"changing {handle.name}.grad")
    if handle.grad.assigned is not None:  # it is not changed along
        handle.grad.assigned.outdate()
    return handle
