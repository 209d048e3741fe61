"""StepInputs: describes the inputs of a step, so that ranks with different ones raise before any of
them steps.

common       equal on all ranks with the same units: hyperparameters, counts, which gradients
             there are, users' changes of them, and the values if all ranks have these whole
own          values written to tensors of which other ranks have other local parts
over stages  equal on all pipeline stages, which have other units: whether there are gradients,
             how they were clipped, and a table that two stages share
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import UsageError
from ..grads.record import GradState
from ..units.handle import ParamHandle
from .context import StepContext

OF_PARAMETERS = ("params", "param_names")  # keys of a group that differ between stages
NOTHING_LEAST, NOTHING_MOST = 2**62, -1  # of a missing value: neutral for minimum and maximum
REMEDIES = {
    "the gradients": (
        "Stages of one pipeline step together: call zero_grad() on all of them, or on none."
    ),
    "the clipping": "Clip the gradients of all stages by the same norm.",
    "the shared table": (
        "Two stages have it, and train it as one: make the same change of its value, its gradient,"
        " its optimizer state and requires_grad on both, or load a checkpoint."
    ),
}


def settings_of(param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups' hyperparameters in a form that compares equal across ranks."""
    return [
        {key: _plainly(value) for key, value in param_group.items() if key not in OF_PARAMETERS}
        for param_group in param_groups
    ]


def _plainly(value: Any) -> Any:
    """Returns ``value`` in a form that compares equal across ranks: the type's name if it is not a
    number or text."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plainly(item) for item in value]
    return (
        value
        if value is None or isinstance(value, (bool, int, float, str))
        else type(value).__name__
    )


class StepInputs:
    """The inputs of one step. ``clip``: the factor of all gradients; ``counters``: of the rule."""

    def __init__(
        self,
        context: StepContext,
        param_groups: list[dict[str, Any]],
        group_index_of: Mapping[ParamHandle, int],
        clip: float,
        counters: Sequence[Mapping[str, torch.Tensor]] = (),
    ):
        self._context, self._group_index_of, self._clip = context, group_index_of, clip
        self._counters = [{name: float(value) for name, value in of.items()} for of in counters]
        self._settings = settings_of(param_groups)
        rates = (group_index.get("lr") for group_index in param_groups)  # Adafactor's may be None
        self._rates = ", ".join("its own" if lr is None else f"{float(lr):g}" for lr in rates)

    @property
    def common(self) -> str:
        """Compared over ranks with the same units or other local parts of them."""
        edits = self._context.borrowed.edits
        inputs: list = [self._clip, *self._settings, edits, *self._counters]
        for handle in self._context.trained:
            inputs.append(
                (
                    handle.step,
                    handle.grad.state.name,
                    handle.grad.edits,
                    self._group_index_of.get(handle),
                )
            )
        return self._said(inputs)

    @property
    def own(self) -> str:
        """Compared over ranks with the same units only."""
        changed = [
            (handle.name, edits)
            for handle in self._context.trained
            if (edits := handle.grad.own_edits)
        ]
        values = [*changed, *self._context.borrowed.own_edits]
        return (
            f", with values of {_digest(values)} put into gradients or optimizer.state"
            if values
            else ""
        )

    @property
    def of_stages(self) -> str:
        """Compared over pipeline stages."""
        return self._said([self._clip, *self._settings])

    def _said(self, inputs: list) -> str:
        return (
            f"a step ({_digest(inputs)} stands for all settings, clipping, gradients and"
            f" optimizer.state) with learning rates {self._rates}"
        )

    # --- over stages ---

    def _over_stages(self) -> dict[str, int | None]:
        """Returns numbers that must be equal on all stages; None for what this one does not
        have."""
        context = self._context
        # A unit stepped in the backward has CONSUMED gradients. Zeros of zero_grad() have no
        # backward.
        has_gradients = any(
            handle.grad.state in (GradState.LANDED, GradState.CONSUMED)
            for handle in self._group_index_of
        )
        trains = has_gradients or any(handle.param.requires_grad for handle in self._group_index_of)
        of_gradients = has_gradients, context.steps.backwards > 0
        tied = [handle for handle in context.trained if handle.is_tied]
        return {
            "the gradients": _number(of_gradients) if trains else None,
            "the clipping": _number(context.gradients.clips) if has_gradients else None,
            "the shared table": (
                _number([self._of_tied(handle) for handle in tied]) if tied else None
            ),
        }

    def _of_tied(self, handle: ParamHandle) -> tuple:
        group_index = self._group_index_of.get(handle)
        of_gradient = handle.grad.state.name, handle.grad.edits, handle.grad.own_edits
        of_group = self._settings[group_index] if group_index is not None else None
        return (
            handle.step,
            handle.edits,
            of_gradient,
            of_group,
            self._context.borrowed.edits_of(handle),
            handle.param.requires_grad,
        )

    def values(self) -> list[int]:
        """Makes the numbers that stages compare: two per entry, for its minimum and its maximum."""
        said = self._over_stages().values()
        return [
            value
            for number in said
            for value in ((NOTHING_LEAST, NOTHING_MOST) if number is None else (number, number))
        ]

    def agrees(self, spans: list[tuple[int, int]]) -> bool:
        """Returns whether the ``spans`` of all stages' numbers show that they are equal."""
        return not self._differing(spans)

    def _differing(self, spans: list[tuple[int, int]]) -> list[str]:
        pairs = zip(spans[::2], spans[1::2])
        return [
            name
            for name, ((least, _), (_, most)) in zip(REMEDIES, pairs)
            if most != NOTHING_MOST and least != most
        ]

    def check(self, spans: list[tuple[int, int]]) -> None:
        """Raises UsageError, on all stages, if ``spans`` show a difference."""
        if not (differing := self._differing(spans)):
            return
        name, collectives = differing[0], self._context.collectives
        ranks = collectives.ranks
        here = ranks.world_rank, self._over_stages()[name]
        have = [
            (rank, number)
            for rank, number in collectives.collect(here, "differences at a step", [ranks.pp_group])
            if number is not None
        ]
        first = have[0]
        # The difference may be gone by now
        other = next((entry for entry in have if entry[1] != first[1]), have[-1])
        raise UsageError(
            f"step(): {name} of rank {first[0]} and of rank {other[0]} differ. {REMEDIES[name]}"
        )


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _number(value: Any) -> int:
    return int(_digest(value)[:15], 16)
