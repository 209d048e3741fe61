"""Members: tells which group of an optimizer steps each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

import torch

from ...errors import UsageError
from ..grads.record import GradState
from ..units.flat_param import FlatParam
from ..units.handle import ParamHandle, handle_of
from .context import StepContext


class Members:
    """Which group steps each parameter, read at each step."""

    def __init__(self, context: StepContext, *, has_outside: bool = True):
        """``has_outside``: something steps what the engine does not move
        (:class:`~infinity.core.seams.OutsideSteps`)."""
        self._context, self._has_outside = context, has_outside
        self._params: list[list[torch.Tensor]] = []
        self.group_index_of: dict[ParamHandle, int] = {}
        self._flat_params: set[FlatParam] = set()  # of those

    def read(self, param_groups: list[dict[str, Any]]) -> None:
        """Reads the groups. Raises UsageError, with nothing changed, for unknown parameters."""
        lists = [group["params"] for group in param_groups]
        is_same = len(lists) == len(self._params) and all(
            len(now) == len(before) and all(map(is_, now, before))
            for now, before in zip(lists, self._params)
        )
        if is_same and all(map(self._context.steps_flat_param, self._flat_params)):
            return
        group_index_of: dict[ParamHandle, int] = {}
        for index, params in enumerate(lists):
            for param in params:
                if handle_of(param) is None and self._has_outside:
                    continue
                handle = self._stepped(param, index)
                if handle in group_index_of:
                    raise UsageError(
                        f"{handle.name} is in the optimizer's groups {group_index_of[handle]} and"
                        f" {index}"
                        if group_index_of[handle] != index
                        else f"{handle.name} is twice in the optimizer's group {index}"
                    )
                group_index_of[handle] = index
        self._params, self.group_index_of = [list(params) for params in lists], group_index_of
        self._flat_params = {handle.flat_param for handle in group_index_of}

    @property
    def are_consumed(self) -> bool:
        """Whether a step has used any of their gradients."""
        return any(handle.grad.state is GradState.CONSUMED for handle in self.group_index_of)

    def check_unconsumed(self) -> None:
        """Raises UsageError if a step has used a gradient that was not changed since."""
        for handle in self._consumed():
            raise UsageError(
                f"step_in_backward with the gradient of {handle.name} from the last step: part of"
                " the units would be stepped before this backward adds to it. Call"
                " optimizer.zero_grad() before the block."
            )

    def reopen_consumed(self) -> None:
        """Lets the gradients that the last step used, and that were not cleared since, be stepped
        again, as in torch. Raises UsageError if they cannot be."""
        for handle in self._consumed():
            self._context.gradients.reopen(handle)

    def _consumed(self) -> Iterator[ParamHandle]:
        for handle in self.group_index_of:
            if handle.grad.state is GradState.CONSUMED and not handle.has_raw_grad:
                # An assigned tensor may have changed.
                self._context.gradients.assigned.settle(handle)
            if handle.grad.state is GradState.CONSUMED and not handle.has_raw_grad:
                yield handle

    def _stepped(self, param: torch.Tensor, index: int) -> ParamHandle:
        if (handle := handle_of(param)) is None:
            raise UsageError(
                f"the optimizer's group {index} has a parameter of shape {tuple(param.shape)} that"
                " is not at home, and no extension steps it: take it out of the group"
            )
        if handle.engine.uses is not self._context.uses:
            raise UsageError(
                f"the optimizer's group {index} has {handle.name} of another wrapped model, so its"
                " state has no home here. Give each model an optimizer, or wrap both as one:"
                " wrap_model(torch.nn.ModuleList([first, second]), optimizer)."
            )
        if handle.grad is None:
            raise UsageError(
                f"the optimizer's group {index} has {handle.name}, which was in no group when the"
                " model was wrapped: give it to optimizer.add_param_group() before its first"
                " backward"
            )
        if not self._context.steps_flat_param(handle.flat_param):
            raise UsageError(
                f"the optimizer's group {index} has {handle.name}, whose state is another"
                " optimizer's of this model. If wrap_model has given it to that one since, step"
                " that one alone, or take the parameter out of this group. To move it,"
                " unwrap_model first, move it, and wrap again."
            )
        return handle
