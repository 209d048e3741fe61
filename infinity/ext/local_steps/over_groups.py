"""OverGroups: averages gradients between groups that train apart, before every step.

That is what a period of one with a plain average asks for. The mean of steps that were already
rounded would have other bits than the step of the mean; these are the bits of data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ...core.grads.record import GradState, has_landed
from ...core.run.operations import State
from ...core.step.context import StepContext
from ...core.units.handle import ParamHandle
from ...errors import UsageError
from .slow_axis import Exchange, SlowAxis


class OverGroups:
    """Averages the gradients of one optimizer: a hook before its steps. Every rank of every group
    makes the same steps."""

    def __init__(self, context: StepContext, axis: SlowAxis):
        self._context, self._axis = context, axis

    @torch.no_grad()
    def __call__(self, *_: object) -> None:
        """Averages the landed gradients, in fp32, in the order of the groups. Blocks. Raises
        UsageError inside a step that is made unit by unit."""
        context = self._context
        if context.uses.is_in(State.UNWRAPPED):
            return  # the plain optimizer has the same hooks
        with context.uses.begin():
            if context.steps.begun:
                raise UsageError(
                    "step_in_backward with LocalSteps(every=1): gradients are averaged over the"
                    " groups before the first unit is stepped. Call step() after the backward."
                )
            landed = [has_landed(handle) for handle in context.trained]
            if context.steps.untold == context.steps.index and not any(landed):
                return  # recovery has made this step
            with context.store.guard:
                context.gradients.average()
                self._average(self._landed_anywhere())

    def _landed_anywhere(self) -> dict[str, list[ParamHandle]]:
        """Returns the parameters for which any group has a gradient, by unit."""
        trained = self._context.trained
        mine = [has_landed(handle) for handle in trained]
        everyones = self._axis.collect(mine, "which gradients each group has")
        landed: dict[str, list[ParamHandle]] = {}
        for handle, *has in zip(trained, *everyones):
            if any(has):
                landed.setdefault(handle.unit.name, []).append(handle)
        return landed

    def _average(self, handles_of: dict[str, list[ParamHandle]]) -> None:
        """Averages unit by unit, with one exchange ahead."""
        running: list[tuple[list[ParamHandle], Exchange]] = []
        for name, handles in handles_of.items():
            what = f"gradients of {name} over groups"
            exchange = self._axis.start(self._pack(handles), (self._context.steps.index, 1), what)
            exchange.begin()
            running.append((handles, exchange))
            if len(running) > 1:
                self._land(*running.pop(0))
        for each in running:
            self._land(*each)

    def _pack(self, handles: list[ParamHandle]) -> torch.Tensor:
        sizes = [_own_numel(handle) for handle in handles]
        flat = torch.zeros(-(-sum(sizes) // 256) * 256, device="cpu")
        for handle, part in zip(handles, flat.split([*sizes, flat.numel() - sum(sizes)])):
            if has_landed(handle):
                self._change(handle, partial(_copy, part))
        return flat

    def _land(self, handles: list[ParamHandle], exchange: Exchange) -> None:
        mean, gradients = exchange.mean(), self._context.gradients
        sizes = [_own_numel(handle) for handle in handles]
        for handle, part in zip(handles, mean.split([*sizes, mean.numel() - sum(sizes)])):
            gradients.changes.begin(handle)
            if handle.grad.state is GradState.ABSENT:
                gradients.land_average(handle, part.to(gradients.homes.device.where))
            else:
                self._change(handle, lambda own, part=part: own.copy_(part))
        gradients.changes.end()

    def _change(self, handle: ParamHandle, change: Callable[[torch.Tensor], object]) -> None:
        """Runs ``change`` on this rank's elements of a gradient, flat, in storage order."""

        def flat(own: torch.Tensor) -> None:
            change(own.as_strided((own.numel(),), (1,), own.storage_offset()))

        self._context.gradients.values.change_own(handle, flat)


def _copy(part: torch.Tensor, own: torch.Tensor) -> None:
    part.copy_(own)


def _own_numel(handle: ParamHandle) -> int:
    begin, end = handle.flat_param.layout.shard_part(handle.index)
    return end - begin
