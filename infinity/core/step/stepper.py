"""Stepper: plans the step of each flat param, and submits it to the updater."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ... import native
from ..grads.record import GradState, has_landed
from ..homes.arrays import StateArray
from ..params.books import OptimizerBooks
from ..units.flat_param import FlatParam
from ..units.handle import ParamHandle, handle_of
from ..units.home_arrays import Update
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
    version: int  # of the weights after it
    landed: list[tuple[ParamHandle, int]]  # whose gradients are applied, and the new step counts
    newer: StateArray | None = None  # receives the new weights; None: in place
    update: native.UnitUpdate | None = None  # the processor's part
    device_step: Callable[[], DeviceUpdate] | None = None  # the device's part
    device_update: DeviceUpdate | None = None
    has_begun: bool = False  # on the device, whose progress is unknown after an interrupt
    counted: dict[ParamHandle, Numbers] = field(default_factory=dict)  # the new counters
    # Of experts: parameter -> hyperparameters for rows without a gradient, step count, other rows
    zeros: dict[int, tuple[native.Hyperparameters, int, Iterable[int]]] = field(
        default_factory=dict
    )


class Stepper:
    """Steps units by one rule and the hyperparameters of an optimizer's groups. Used from the
    thread that runs the step.

    ``group_of``: the parameters to step, each with the index of its group.
    """

    def __init__(
        self,
        context: StepContext,
        known: Known,
        groups: list[dict[str, Any]],
        group_of: Mapping[ParamHandle, int],
        books: OptimizerBooks,
    ):
        self._context, self._known, self._books = context, known, books
        self._spans = Spans(known, groups, group_of, books)
        counted = groups if known.counts_in_groups else ()
        self._numbers = [(group, next_step(group)) for group in counted]

    def plan(self, unit: ParamUnit, version: int, clip: float = 1.0) -> list[FlatParamStep]:
        """Plans the step of ``unit``. Sends landed gradients home, and changes nothing else."""
        context, beside = self._context, self._context.keeps_stale()
        # A second buffer needs all flat params: parameters without a gradient are copied there.
        planned = [
            flat
            for flat in unit.flat_params
            if context.steps_flat_param(flat) and (beside or self._has_landed(flat))
        ]
        if planned and not beside:  # if beside, gathered weights stay valid
            context.release([unit])
        if context.steps.streaming:
            context.gradients.assigned.settle_early(unit.handles)
        steps = []
        for flat_param in planned:
            handles = [handle_of(param) for param in flat_param.params]
            flat_param.homes.wait_running()
            for handle in handles if clip != 1.0 else ():
                if has_landed(handle):
                    context.gradients.values.prepare_factor(handle, clip)
            after = context.gradients.homes.close_flat_param(flat_param)
            stepped = [handle for handle in handles if self._spans.is_stepped(handle)]
            step = FlatParamStep(flat_param, version, [(h, h.step + 1) for h in stepped])
            step.counted = {handle: self._spans.counted(handle)[1] for handle in stepped}
            if flat_param.homes.rows is not None and not beside:
                self._plan_rows(step, after, clip, label=unit.index)
                steps.append(step)
                continue
            spans = list(self._spans.of(flat_param, clip))
            if beside:
                step.newer = flat_param.homes.beside
                self._plan_beside(step, spans, after, label=unit.index, version=version)
            elif spans:  # without spans other ranks have these parameters in their shards
                self._plan_update(step, spans, after, label=unit.index, version=version)
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
            if step.device_update is not None:
                step.device_update.ticket = step.update.ticket if step.update is not None else None
                self._enter(step, step.device_update)
            elif step.update is not None or step.zeros:
                self._enter(step, step.update.ticket if step.update is not None else None)
            for handle, number in step.landed:
                handle.step = number
                self._books.put_own(handle.param, step.counted.get(handle, {}))
                handle.changed()
                handle.grad.move(GradState.CONSUMED)

    def finish(self) -> None:
        """Sets the step counts of groups, if the class counts there. Idempotent."""
        for group, number in self._numbers:
            group["step"] = number

    def _enter(self, step: FlatParamStep, update: Update | None) -> None:
        """Records a submitted update in its flat param."""
        homes = step.flat_param.homes
        if step.zeros:
            for index, (zeros, number, rows) in step.zeros.items():
                homes.rows.note_step(index, rows, zeros, number)
            updater = self._context.updates.updater
            homes.leave_behind(update, updater, self._known.rule, step.version)
        elif step.newer is None:
            step.flat_param.homes.submit(update)
        else:
            step.flat_param.homes.advance(update, step.newer)

    def _has_landed(self, flat_param: FlatParam) -> bool:
        return any(self._spans.is_stepped(handle) for handle in flat_param.handles)

    def _plan_rows(
        self,
        step: FlatParamStep,
        after: list[native.Ticket],
        clip: float,
        *,
        label: int,
    ) -> None:
        """Plans the step of experts: an update of those that have a gradient, with what they have
        missed, and a record of what the others miss."""
        homes, last = step.flat_param.homes, () if clip == 1.0 else (clip,)
        runs: list[native.Run] = []
        for handle, number in step.landed:
            factors, rows = (*handle.grad.factors, *last), handle.grad.rows
            chosen = range(homes.rows.count) if rows is None else rows
            hyper, zeros = (
                self._spans.hyperparameters(*self._spans.key(handle, each))
                for each in (factors, ())
            )
            runs += homes.rows.runs(handle.index, chosen, hyper, number)
            step.zeros[handle.index] = zeros, number, chosen
        if runs:
            step.update = self._processor_update(
                step.flat_param, runs, after, label=label, version=step.version
            )

    def _plan_update(
        self,
        step: FlatParamStep,
        spans: list[Span],
        after: list[native.Ticket],
        *,
        label: int,
        version: int,
    ) -> None:
        """Plans the update of ``spans`` where the flat param's state is. Of state on the host, the
        device may take a part."""
        context, flat_param = self._context, step.flat_param
        stepper = context.updates.stepper
        if stepper is None:
            step.update = self._processor_update(
                flat_param, runs_of(spans), after, label=label, version=version
            )
            return
        first = 0 if steps_on_device(flat_param) else stepper.share.first_own(flat_param)
        own = [(max(begin, first), end, hyper) for begin, end, hyper in spans if end > first]
        rest = [(begin, min(end, first), hyper) for begin, end, hyper in spans if begin < first]
        if rest:
            step.update = self._processor_update(
                flat_param, runs_of(rest), after, label=label, version=version
            )
        if own:
            behind = context.gradients.homes.landing_of(flat_param)
            step.device_step = partial(
                stepper.step,
                flat_param,
                flat_param.homes.native_layout(self._known.rule),
                own,
                version=version,
                behind=behind,
            )

    def _plan_beside(
        self,
        step: FlatParamStep,
        spans: list[Span],
        after: list[native.Ticket],
        *,
        label: int,
        version: int,
    ) -> None:
        """Plans the same, out of place: new weights go to a second buffer; no split between CPU and
        GPU."""
        context, flat_param = self._context, step.flat_param
        stepper = context.updates.stepper
        if stepper is None or not steps_on_device(flat_param):
            step.update = self._processor_update(
                flat_param, runs_of(spans), after, label=label, version=version, newer=step.newer
            )
            return
        behind = context.gradients.homes.landing_of(flat_param)
        layout = flat_param.homes.native_layout(self._known.rule)
        step.device_step = partial(
            stepper.step,
            flat_param,
            layout,
            spans,
            version=version,
            behind=behind,
            newer=step.newer,
        )

    def _processor_update(
        self,
        flat_param: FlatParam,
        runs: list[native.Run],
        after: list[native.Ticket],
        *,
        label: int,
        version: int,
        newer: StateArray | None = None,
    ) -> native.UnitUpdate:
        """Makes the processor's update of ``runs`` of a flat param. ``newer``: for the new weights;
        None: in place."""
        # A copy to the device, or a save, may still read bytes that change
        homes = flat_param.homes
        readers = self._context.device.ticket([homes.last_read]), homes.saved
        after = [*after, *(ticket for ticket in readers if ticket is not None)]
        update = flat_param.homes.update_of(
            self._known.rule, runs, after, label=label, version=version, newer=newer
        )
        update.asked = 0.0 if newer is not None else self._context.updates.asked
        return update
