"""OptimizerStep: makes the steps of one optimizer, each in one change of the journal.

A step is first planned, which changes nothing, then submitted to the updater in one call, and then
entered into the books. After an interrupt the next use of the engine completes a planned step
(:mod:`infinity.core.run.journal`). So a step is never made partly, nor twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...errors import UsageError
from ..grads.record import GradState, refuse_torn
from ..params.books import OptimizerBooks
from ..run.operations import Operation
from ..units.unit import ParamUnit
from .context import StepContext
from .known import Known
from .members import Members
from .spans import numbers_of
from .step_inputs import StepInputs
from .stepper import Stepper

ParamGroups = list[dict[str, Any]]


class OptimizerStep:
    """Steps all units at once, or each one in the backward. Used from the thread that runs backward
    or the step. ``param_groups``: the optimizer's param_groups, which users may replace."""

    def __init__(
        self,
        context: StepContext,
        known: Known,
        members: Members,
        optimizer: torch.optim.Optimizer,
        books: OptimizerBooks,
    ):
        """``optimizer``, ``books``: the optimizer and its state."""
        self.context, self._known, self.members = context, known, members
        self.optimizer, self.books = optimizer, books
        self.changed: dict[int, dict[str, Any]] = {}  # by a class step, in the groups

    def _stepper(self, param_groups: ParamGroups, method: str = "step") -> Any:
        """Makes what steps by ``param_groups``, or what runs a ``method`` of the class."""
        if (stepper := self._known.stepper(self, param_groups, method)) is not None:
            return stepper
        group_index_of = self.members.group_index_of
        return Stepper(self.context, self._known, param_groups, group_index_of, self.books)

    @torch.no_grad()
    def switch(self, param_groups: ParamGroups, method: str) -> None:
        """Runs a method of the class that needs no gradient, on all parameters."""
        context, stepper = self.context, self._stepper(param_groups, method)
        self.changed.clear()
        steps = [step for unit in context.units for step in stepper.plan_switch(unit)]

        def change() -> None:
            stepper.carry_out(steps)
            stepper.finish()

        with context.store.guard:
            context.journal.carry_out(change)

    # --- a step ---

    def prepare(self) -> None:
        """Averages the gradients. Raises UsageError if they cannot be stepped."""
        context = self.context
        for unit in context.in_use():
            stepped = any(map(context.steps_flat_param, unit.flat_params))
            if stepped and unit.in_use is None and not unit.computes_at_home:
                raise UsageError(
                    f"optimizer.step() inside a forward that computes with weights of {unit.name},"
                    " which it changes: call it when the forward is over."
                )
        context.updates.asked = time.perf_counter()
        context.gradients.average(context.steps_flat_param)
        if not context.steps.begun:
            self.members.reopen_consumed()
        for handle in context.trained:
            if handle.grad.state is GradState.TORN:
                refuse_torn(handle)
        for listener in context.events.step_begun:
            listener()

    def make(self, param_groups: ParamGroups, clip: float) -> None:
        """Steps all units, after :meth:`prepare`. ``clip``: the factor of all gradients. It is a
        part of the plan and no change of the gradients, so an interrupted step can be repeated."""
        context, begun, units = self.context, self.context.steps.begun, self._in_order()
        if not begun:
            context.updates.begin_step(units)
            self.changed.clear()
        version = context.steps.index if begun else context.steps.index + 1
        stepper = self._stepper(param_groups)
        stepper.try_settings()
        with context.store.guard:
            # Tickets are watched in the order in which they are made: as gradients land.
            planned = {
                unit: stepper.plan(unit, version, clip)
                for unit in (reversed(units) if context.device.overlaps else units)
            }
            steps = [step for unit in units for step in planned[unit]]
            change = partial(self._finish, stepper, steps, version)
            try:
                context.journal.carry_out(change, partial(self._meet, param_groups, clip))
            except Exception:
                # An error of the class's own code, whose cause may be a setting: no step is left.
                if stepper.has_changed_nothing and context.collectives.ranks.alone:
                    context.journal.cancel(change)
                raise
        for unit in context.in_use():  # a forward goes on with its new weights
            unit.wait_for_update()
        context.end_step(context.optimizer_index)
        context.lents.refresh()

    def _in_order(self) -> list[ParamUnit]:
        """Returns the units in the order of the next forward, then the others, which a step to
        fresh bytes copies."""
        units = self.context.units
        first = [index for index in self.context.schedule.first() if index < len(units)]
        indices = set(first)
        return [
            *(units[index] for index in first),
            *(unit for unit in units if unit.index not in indices),
        ]

    def _meet(self, param_groups: ParamGroups, clip: float, then: Callable[[], None]) -> None:
        """Meets the other ranks, which step as soon as all are there. Differences raise before
        that."""
        context = self.context
        if context.collectives.ranks.alone:
            then()
            return
        counters = []
        if (kind := self._known.counters) is not None:
            counters = [
                numbers_of(kind, param_groups[index], handle, self.books)
                for handle, index in self.members.group_index_of.items()
            ]
        inputs = StepInputs(context, param_groups, self.members.group_index_of, clip, counters)
        ranks = context.collectives.ranks
        meets_stages = ranks.pp_group is not None and not context.stages_differ()
        context.collectives.meet_for_step(
            inputs.common if ranks.unit_sync_channels else "",  # a digest of all that trains
            inputs.own,
            over_stages=(inputs.of_stages, inputs) if meets_stages else None,
            trace=context.schedule.expected_after_step(),
            also=context.events.step_compared,
            then=then,
        )

    def _finish(self, stepper: Any, steps: list, version: int) -> None:
        stepper.carry_out(steps)
        stepper.finish()
        self.context.borrowed.forget_edits()
        self.context.gradients.clips.clear()
        self.context.steps.finish(version)

    # --- in the backward ---

    def check_stream(self) -> None:
        """Raises UsageError if units cannot be stepped in the backward."""
        context = self.context
        context.uses.check(Operation.STEP_IN_BACKWARD)
        if not context.is_only():
            raise UsageError(
                "step_in_backward of one of several optimizers: a backward has the gradients of all"
                " of them. Call step() of each after it."
            )
        if context.config.max_grad_norm is not None:
            raise UsageError(
                "step_in_backward: max_grad_norm needs the norm of all gradients before the first"
                " unit is stepped. Leave out one of the two."
            )
        self._known.check_stream(context.collectives.ranks.size)

    def begin_stream(self) -> None:
        """Begins a step whose units are stepped in the backward. Raises UsageError for a consumed
        gradient."""
        self.members.check_unconsumed()
        self.context.updates.begin_step(self._in_order())
        self.changed.clear()
        self.context.steps.stream()

    def end_stream(self) -> None:
        """Ends the backward of such a step."""
        context = self.context
        if context.is_cut_short() or context.gradients.changes.are_open:
            context.uses.interrupt()  # of a failure that was caught inside the block
        else:
            context.steps.end_stream()

    @torch.no_grad()
    def unit_landed(self, unit: ParamUnit, param_groups: ParamGroups) -> None:
        """Steps a unit whose gradients have landed and which the backward has left. Not one with
        frozen parameters: the backward may still need them, and a unit's values change
        together."""
        context = self.context
        params = [param for flat in unit.flat_params for param in flat.params]
        if all(flat.spec.stepped for flat in unit.flat_params) and all(
            param.requires_grad for param in params
        ):
            stepper = self._stepper(param_groups)
            context.journal.carry_out(
                partial(stepper.carry_out, stepper.plan(unit, context.steps.index))
            )
