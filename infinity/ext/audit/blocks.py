"""Blocks: compares what a block saves for the backward with what computing it again gives.

[Note: why at the saved tensors] A checkpoint ends a recomputation as soon as it has what the
backward needs: the block's output is not computed again. What the forward saved is all that the
backward reads of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...core.params.outside_modes import makes_hooks
from ...core.params.tensors import fingerprint
from ...core.run.job import Job
from ...core.run.saved_weights import SavedWeight
from ...torch_private import current_task, is_of_transform
from .findings import BLOCKS, Findings
from .rotation import SEED, Rotation

# The nodes of autograd whose forward is not the same twice on an accelerator
NOT_DETERMINISTIC = frozenset(
    [
        *("CumsumBackward0", "CumprodBackward0", "IndexAddBackward0", "IndexPutBackward0"),
        *("IndexReduceBackward0", "KthvalueBackward0", "MedianBackward1", "PutBackward0"),
        *("ScatterAddBackward0", "ScatterReduceBackward0", "ScatterReduceBackward1"),
        *("BincountBackward0", "HistcBackward0", "NllLoss2DBackward0", "CtcLossBackward0"),
    ]
)


@dataclass(eq=False, frozen=True)
class Noted:
    """A saved tensor, and the fingerprint of what was saved."""

    saved: Any
    digest: int
    number: int  # among those that its forward saved
    nbytes: int


class Blocks:
    """The chosen blocks of the running pass."""

    def __init__(self, job: Job, share: float, findings: Findings):
        self._units, self._running, self._findings = job.units, job.running, findings
        self._steps = job.steps
        self._rotation = Rotation(len(job.units), share, SEED + 3)
        self._passes = 0
        self._chosen: set[Any] = set()

    def pass_begun(self, *_: Any) -> None:
        """Chooses the blocks of a pass."""
        self._chosen = {self._units[index] for index in self._rotation.at(self._passes)}
        self._passes += 1

    @makes_hooks
    def packing(self, hooks: tuple[Callable, Callable]) -> tuple[Callable, Callable]:
        """Returns hooks around ``hooks`` for the forward of a chosen block that a checkpoint
        runs."""
        inner, outer = hooks
        frames = self._running.frames
        if (
            not (self._chosen and frames and getattr(inner, "is_counted", False))
            or getattr(inner, "is_audited", False)
            or current_task() != -1
            or self._chosen.isdisjoint(frames[-1].units)
        ):
            return hooks
        name, step, findings = frames[-1].units[0].name, self._steps.index + 1, self._findings
        first, saved_before = _next_node(), [0]

        def pack(tensor: torch.Tensor) -> Any:
            saved = inner(tensor)
            if (
                isinstance(saved, SavedWeight)
                or type(tensor) is not torch.Tensor
                or tensor.layout is not torch.strided
                or is_of_transform(tensor)
            ):
                return saved
            if not tensor.is_cpu and (name := next(_not_deterministic(tensor, first), None)):
                findings.leave_out(f"blocks with {name} on {tensor.device.type}")
                return saved
            saved_before[0] += 1
            return Noted(saved, fingerprint(tensor.detach()), saved_before[0], tensor.nbytes)

        def unpack(saved: Any) -> torch.Tensor:
            if not isinstance(saved, Noted):
                return outer(saved)
            value = outer(saved.saved)
            findings.count(BLOCKS, saved.nbytes)
            if fingerprint(value.detach()) != saved.digest:
                raise findings.fail(
                    f"computing block {name} again for the backward, before step {step}, gave other"
                    f" bits than its forward: saved tensor {saved.number}, {value.dtype} of shape"
                    f" {tuple(value.shape)}. If the block draws numbers, or changes what it reads,"
                    " that is the cause"
                )
            return value

        pack.__dict__.update(vars(inner), is_audited=True)
        return pack, unpack


def _next_node() -> int:
    """Returns the number of the next node of autograd in this thread."""
    with torch.enable_grad():
        return torch.zeros((), requires_grad=True, device="cpu").neg().grad_fn._sequence_nr() + 1


def _not_deterministic(tensor: torch.Tensor, first: int) -> Iterator[str]:
    """Yields the names of operations since ``first`` that ``tensor`` comes from, and that are not
    deterministic."""
    pending, seen = [tensor.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        if node.name() in NOT_DETERMINISTIC:
            yield node.name()
        pending += [each for each, _ in node.next_functions]
