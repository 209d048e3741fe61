"""Stepper: plans the step of each flat param, and submits it to the updater."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ... import native
from ...errors import UsageError
from ..grads.record import GradState, has_landed
from ..params.books import OptimizerBooks
from ..units.flat_param import FlatParam
from ..units.handle import ParamHandle
from ..units.home_arrays import Draft
from ..units.unit import ParamUnit
from .context import StepContext
from .counters import Numbers
from .device_step import DeviceUpdate, Span, steps_on_device
from .known import Known
from .spans import Spans, next_step, runs_of


@dataclass(eq=False)
class FlatParamStep:
    """The step of one flat param."""

    flat_param: FlatParam
    label: int  # of its unit
    version: int  # of the weights after it
    landed: list[tuple[ParamHandle, int]]  # whose gradients are applied, and the new step counts
    draft: Draft
    update: native.UnitUpdate | None = None  # the processor's part
    device_step: Callable[[], DeviceUpdate] | None = None  # the device's part
    device_update: DeviceUpdate | None = None
    has_begun: bool = False  # on the device, whose progress is unknown after an interrupt
    counted: dict[ParamHandle, Numbers] = field(default_factory=dict)  # the new counters
    spans: list[Span] = field(default_factory=list)  # of landed gradients, unless by rows
    # By rows: parameter -> hyperparameters for rows without a gradient, step count, other rows
    zeros: dict[int, tuple[native.Hyperparameters, int, Iterable[int]]] = field(
        default_factory=dict
    )


class Stepper:
    """Steps units by one rule and the hyperparameters of an optimizer's groups. Used from the
    thread that runs the step.

    ``group_of``: the parameters to step, each with the index of its group.
    """

    # Whether no write has begun that a second call of :meth:`carry_out` would have to complete
    has_changed_nothing = False

    def __init__(
        self,
        context: StepContext,
        known: Known,
        param_groups: list[dict[str, Any]],
        group_index_of: Mapping[ParamHandle, int],
        books: OptimizerBooks,
    ):
        self._context, self._known, self._books = context, known, books
        self._spans = Spans(known, param_groups, group_index_of, books)
        counted = param_groups if known.counts_in_groups else ()
        self._numbers = [(param_group, next_step(param_group)) for param_group in counted]

    def try_settings(self) -> None:
        """Raises for settings with which a step would fail, before anything is planned: none."""

    def plan_switch(self, unit: ParamUnit) -> list[FlatParamStep]:
        """Raises UsageError: no kernel has a class's ``train`` or ``eval``."""
        raise UsageError(
            f"train() and eval() of an optimizer that steps as {self._known.name}: its update runs"
            " in the engine's kernels, which have neither. unwrap_model first."
        )

    def plan(self, unit: ParamUnit, version: int, clip: float = 1.0) -> list[FlatParamStep]:
        """Plans the step of ``unit``. Sends landed gradients home, and changes nothing else."""
        context, planned, in_place = self._context, [], False
        for flat in filter(context.steps_flat_param, unit.flat_params):
            draft = flat.homes.draft()
            # Fresh bytes need all weights: parameters without a gradient are copied there.
            stepped = self._spans.stepped(flat)
            if draft.fresh is not None or stepped:
                planned.append((flat, draft, stepped))
                in_place |= draft.fresh is None
        if in_place:  # else gathered weights stay valid
            context.release([unit])
        if context.steps.streaming:
            context.gradients.assigned.settle_early(unit.handles)
        steps = []
        for flat_param, draft, stepped in planned:
            flat_param.homes.wait_running()
            for handle in flat_param.handles if clip != 1.0 else ():
                if has_landed(handle):
                    context.gradients.values.prepare_factor(handle, clip)
            after = context.gradients.homes.close_flat_param(flat_param)
            landed = [(handle, handle.step + 1) for handle in stepped]
            step = FlatParamStep(flat_param, unit.index, version, landed, draft)
            if self._known.counters is not None:
                step.counted = {handle: self._spans.counted(handle)[1] for handle in stepped}
            if flat_param.homes.rows is not None and draft.fresh is None:
                self._plan_rows(step, after, clip)
            else:
                step.spans = list(self._spans.of(flat_param, clip))
                self._plan_update(step, after)
            for listener in context.events.update_planned:
                listener(step, self._known.rule)
            steps.append(step)
        return steps

    def carry_out(self, steps: list[FlatParamStep]) -> None:
        """Runs the planned ``steps``. After an interrupt it can be called again, and does the rest,
        unless a step was interrupted on the device: that halts the engine."""
        context = self._context
        # First: the next forward waits for these, and the device's take longer to submit.
        context.updates.updater.submit_all(
            [step.update for step in steps if step.update is not None]
        )
        for step in reversed(steps):  # as gradients land
            if step.device_step is not None and step.device_update is None:
                if step.has_begun:
                    raise context.uses.halt("a step was cut short on the device")
                step.has_begun = True
                step.device_update = step.device_step()
        for step in steps:
            ticket = step.update.ticket if step.update is not None else None
            for listener in context.events.update_submitted:
                ticket = listener(step, ticket)
            if step.device_update is not None:
                step.device_update.ticket = ticket
            homes, replay = step.flat_param.homes, None
            for index, (zeros, number, rows) in step.zeros.items():
                homes.rows.note_step(index, rows, zeros, number)
                replay = homes.replay(context.updates.updater, self._known.rule, step.version)
            if (update := step.device_update or ticket) is not None or replay is not None:
                homes.commit(step.draft, update, replay)
            for handle, number in step.landed:
                handle.step = number
                if step.counted:
                    self._books.put_own(handle.param, step.counted.get(handle, {}))
                handle.changed()
                handle.grad.move(GradState.CONSUMED)

    def finish(self) -> None:
        """Sets the step counts of groups, if the class counts there. Idempotent."""
        for param_group, number in self._numbers:
            param_group["step"] = number

    def _plan_rows(self, step: FlatParamStep, after: list[native.Ticket], clip: float) -> None:
        """Plans a step by rows: an update of those that have a gradient, with what they have
        missed, and a record of what the others miss."""
        homes, last = step.flat_param.homes, () if clip == 1.0 else (clip,)
        runs: list[native.Run] = []
        for handle, number in step.landed:
            factors, rows = (*handle.grad.factors, *last), handle.grad.rows
            chosen = range(homes.rows.count) if rows is None else rows
            hyper, zeros = (
                self._spans.hyperparameters(*self._spans.key(handle, scales))
                for scales in (factors, ())
            )
            runs += homes.rows.runs(handle.index, chosen, hyper, number)
            step.zeros[handle.index] = zeros, number, chosen
        if runs:
            step.update = self._processor_update(step, runs, after)

    def _plan_update(self, step: FlatParamStep, after: list[native.Ticket]) -> None:
        """Plans the update of the spans where the flat param's state is. Of state on the host, the
        device may take a part of an update in place. Fresh bytes get all weights."""
        flat_param, is_fresh, spans = step.flat_param, step.draft.fresh is not None, step.spans
        stepper, first = self._context.updates.stepper, flat_param.layout.shard_numel
        is_there = stepper is not None and steps_on_device(flat_param)
        if is_there:
            first = 0
        elif stepper is not None and not is_fresh:
            first = stepper.fraction.first_own(flat_param)
        on_device = [(max(begin, first), end, hyper) for begin, end, hyper in spans if end > first]
        on_host = [(begin, min(end, first), hyper) for begin, end, hyper in spans if begin < first]
        if on_host or (is_fresh and not is_there):
            step.update = self._processor_update(step, runs_of(on_host), after)
        if on_device or (is_fresh and is_there):
            step.device_step = partial(
                stepper.step,
                flat_param,
                flat_param.homes.native_layout(self._known.rule),
                on_device,
                step.draft,
                version=step.version,
                after=self._context.gradients.homes.queue.of(flat_param),
            )

    def _processor_update(
        self, step: FlatParamStep, runs: list[native.Run], after: list[native.Ticket]
    ) -> native.UnitUpdate:
        """Makes the processor's update of ``runs`` of a flat param."""
        draft, copied = step.draft, self._context.device.ticket(step.draft.events)
        update = step.flat_param.homes.update_of(
            self._known.rule,
            runs,
            [*after, *draft.tickets, *([] if copied is None else [copied])],
            label=step.label,
            version=step.version,
            fresh=draft.fresh,
        )
        update.asked = 0.0 if draft.fresh is not None else self._context.updates.asked
        return update
