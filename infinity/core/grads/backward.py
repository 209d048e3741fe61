"""Backward: holds units while a backward of the model needs them, and sends their gradients home.

awaited    a unit that the backward holds until all its gradients have landed
in order   with shards on several ranks, all ranks gather the same units in the same order,
           whichever gradients each gets (`gathers_with_ranks`)

A unit is held from the first use of a tensor saved from it, or from the gradient of its owner's
output. If ranks gather in order, the backward releases it two units further on, even if gradients
are missing.
Units still held at the end of the outermost task are released then, because unused parameters get
no gradient and so no hook runs for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from ... import native
from ...errors import CapacityError, UsageError
from ...torch_private import current_task, is_of_transform, running_node
from ..machine.sizes import round_up
from ..machine.tiers import Tier
from ..params.outside_modes import has_bytes, outside_modes, refuse_without_bytes
from ..plan.unit_sizes import SUMMED_AT_ONCE
from ..run.job import Job
from ..run.operations import Operation
from ..run.tasks import AutogradTasks
from ..units.forms import is_plain, part_of
from ..units.handle import (
    HANDLE,
    DisableTorchFunction,
    ParamHandle,
    managed,
    raw_grad,
    set_raw_grad,
    take_raw_grad,
)
from ..units.unit import ParamUnit, flat_params_of
from .record import has_landed


class Backward:
    """The running backward. Used from the thread that autograd runs it in."""

    def __init__(self, job: Job, recover: Callable[[], None]):
        """``recover``: recovers from an exception, if a backward is the first use after it."""
        self.job, self._pass, self._recover = job, job.running, recover
        self.tasks = AutogradTasks(job.scopes, job.running)
        # Parameters without a gradient in an earlier backward.
        self._without_grad: dict[ParamUnit, set[ParamHandle]] = {}
        # The node of the graph that runs, and the units whose weights it has taken out.
        self._node: tuple[int, int] | None = None
        self._taken: set[ParamUnit] = set()

    @property
    def gathers_with_ranks(self) -> bool:
        """Whether other ranks gather with this one in mid-backward."""
        return self.job.reducer is not None and self.job.reducer.gathers_meanwhile

    # --- units ---

    def gather(self, unit: ParamUnit, *, shows: bool = True) -> None:
        """Holds ``unit`` in a backward, whose gradients may be none of its. ``shows``: a forward of
        an owner runs again. May block on disk and on other ranks."""
        self.job.lents.refuse_in_backward(unit)
        # A checkpoint ends its forward by an exception, which is none of an earlier task.
        self.track_task()
        if unit not in self._pass.awaited:
            self._pass.gradients = None  # the last unit's have landed
        self.job.prefetcher.hold(unit, backward=True, shows=shows)

    def _taken_by_node(self) -> Collection[ParamUnit]:
        """Returns the units of which the running node has taken weights out."""
        return self._taken if running_node() == self._node else ()

    def hold(self, unit: ParamUnit, *, for_node: bool = False) -> None:
        """Holds ``unit`` until its gradients of the running backward have landed. May block on disk
        and on other ranks. ``for_node``: also until the node of the graph that takes a weight of it
        out is over, which takes out all of its weights before it computes."""
        if for_node:
            if (node := running_node()) != self._node:
                self._node = node
                self._taken.clear()
            self._taken.add(unit)
        if unit not in self._pass.awaited or current_task() not in self._pass.tokens:
            self.job.uses.check(Operation.BACKWARD, "this backward")
            refuse_without_bytes("a backward")
            self.track_task()
        awaited = self._pass.awaited  # of this task, after a recovery from an earlier one
        if unit in awaited:
            awaited[unit] = awaited.pop(unit)  # most recently used
            if unit.arrival.rows is not None:
                self.job.prefetcher.complete(unit)
            return
        if self.gathers_with_ranks:
            taken = self._taken_by_node()
            for other in [held for held in self._pass.awaited if held not in taken][:-1]:
                self.unhold(other)
        with DisableTorchFunction():  # parameters at rest are asked as plain ones
            expected = {
                handle
                for flat in unit.flat_params
                for handle, param in zip(flat.handles, flat.params)
                if handle.grad is not None and param.requires_grad
            }
        expected -= self._without_grad.get(unit, set())
        with self.job.store.guard:
            self.gather(unit, shows=self.job.prefetcher.saves_weights)
            self._pass.gradients = self._make_gradient_room(unit)
            # After the gather, which compute waits for: a transport may run them in turn.
            if self.job.reducer is not None:
                self.job.reducer.reach(unit)
        awaited[unit] = expected
        if self.gathers_with_ranks:
            self._pass.expected.setdefault(unit, expected)
        self._pass.since[unit] = time.perf_counter()

    def expect_cast(self, unit: ParamUnit, dtype: torch.dtype) -> None:
        """Makes room for gradients of ``unit``, which autocast multiplied by in ``dtype``. Its
        copies are saved, so the backward does not hold the unit. A gradient is made in both
        dtypes."""
        largest = (
            shape.numel() * (flat.spec.dtype.itemsize + dtype.itemsize)
            for flat in self.job.planned.sizes[unit.index].flat_params
            if flat.spec.stepped and flat.spec.dtype is torch.float32
            for shape in flat.shapes
        )
        if unit not in self._pass.awaited:
            self._expect(unit, max(largest, default=0))

    def expect_sum(self, handle: ParamHandle) -> None:
        """Makes room for the sum of a table's whole gradients, as autograd makes it. The plan has
        one of them: uses by hand are not known before."""
        self._expect(
            handle.unit,
            SUMMED_AT_ONCE * handle.param.numel() * handle.flat_param.spec.dtype.itemsize,
        )

    def _expect(self, unit: ParamUnit, nbytes: int) -> None:
        """Makes room for ``nbytes`` of gradients of ``unit``, or as many as are planned. More than
        these are planned from now on, as far as the budget goes."""
        self.track_task()
        job, planned = self.job, self.job.planned
        sizes = planned.sizes
        if (
            job.device.is_host
            and job.reducer is None
            and nbytes > sizes[unit.index].autograd_nbytes
        ):
            more = round_up(
                max(0, nbytes - max(size.autograd_nbytes for size in sizes)), native.BLOCK_NBYTES
            )
            if (room := job.ledger.room(Tier.DEVICE, planned=True)) is not None:
                more = min(more, room)
            planned.sizes = list(sizes)
            planned.sizes[unit.index] = replace(sizes[unit.index], autograd_nbytes=nbytes)
            planned.plan = planned.plan.with_gradients(more)
            job.ledger.accounts[Tier.DEVICE].planned_nbytes += more
            job.prefetcher.autograd_nbytes += more
        self._pass.gradients = None
        with job.store.guard:
            self._pass.gradients = self._make_gradient_room(unit)

    def _make_gradient_room(self, unit: ParamUnit) -> native.Charge | None:
        """Charges the device for the gradients that autograd makes of ``unit``. An accelerator's
        are charged as they land. Ranks evict nothing for them."""
        if not self.job.device.is_host:
            return None
        nbytes = self.job.planned.sizes[unit.index].autograd_nbytes
        if self.job.reducer is None:
            self.job.prefetcher.make_gradient_room(nbytes)
        purpose = f"the gradients of {unit.name}"
        try:
            return self.job.ledger.reserve(Tier.DEVICE, nbytes, purpose, passing=True)
        except CapacityError:
            self.job.prefetcher.refuse([unit], nbytes)
            raise

    def unhold(self, unit: ParamUnit) -> None:
        """Takes the backward's hold off ``unit``, and closes its gradients' homes."""
        if unit in self._pass.awaited:
            del self._pass.awaited[unit]
            self.job.traffic.tell("backward", unit.name, self._pass.since.pop(unit))
            self.job.prefetcher.unhold(unit, shows=self.job.prefetcher.saves_weights)
            self.job.gradients.homes.close_all(unit.flat_params)

    def give_way(self) -> bool:
        """Takes the hold off the unit that the backward has not used for longest, because the
        device window is full.

        The unit is gathered again if it is needed. Mostly it has a parameter without a gradient, or
        a tied one whose other use is yet to come. Returns False if the backward can spare no unit.
        """
        taken = self._taken_by_node()
        for unit in self._pass.awaited:
            if unit not in taken and not any(unit in frame.units for frame in self._pass.frames):
                self.unhold(unit)
                return True
        return False

    # --- gradients ---

    def accumulated(self, param: torch.Tensor, hooks: Mapping[Any, Callable]) -> None:
        """Sends home a gradient that autograd accumulated in ``param``, as :meth:`landed`, and
        calls users' ``hooks`` on it, in between or before.

        A hook sees what torch's sees, the sum of all backwards since ``zero_grad()``. On one rank
        that is the gradient at home. On several ranks, and between the backwards of an accumulation
        pass, it is this rank's sum, which then replaces what had landed before.
        """
        handle, land = managed(param), outside_modes(self._land)
        if not outside_modes(self._begins)(handle, grad := take_raw_grad(param)):
            return
        self.job.gradients.changes.begin(handle)
        set_raw_grad(param, grad)  # for the hooks
        sums_first = self._pass.is_accumulating or not self.job.ranks.alone
        if sums_first:
            # With tensor parallelism hooks of transformers sum what comes over the mesh, once.
            if self.job.ranks.tp_group is None:
                self._sum_before(handle, param)
        else:
            land(handle, take_raw_grad(param))
        try:
            handle.has_raw_grad = sums_first
            for hook in tuple(hooks.values()):
                if hook(param) is not None:
                    raise RuntimeError("Tensor post accumulate grad hooks should return None.")
        finally:
            handle.has_raw_grad = False
        if sums_first and (grad := take_raw_grad(param)) is not None:
            land(handle, grad)
        outside_modes(self._has_landed)(handle)

    @outside_modes
    def landed(self, param: torch.Tensor) -> None:
        """Sends home a gradient that autograd accumulated in ``param``, which no user's hook
        sees."""
        handle = param.__dict__[HANDLE]
        # Before recovery clears gradients: this one belongs to the running backward.
        if self._begins(handle, grad := take_raw_grad(param)):
            self._land(handle, grad)
            self._has_landed(handle)

    def _begins(self, handle: ParamHandle, grad: torch.Tensor | None) -> bool:
        """Prepares for a landing. Returns False if autograd accumulated nothing."""
        if current_task() not in self._pass.tokens:
            refuse_without_bytes("a backward")
            self.track_task()
        if grad is None:
            return False  # a weight that runs in tiles: its gradient has landed
        is_odd = type(grad) is not torch.Tensor or grad.is_meta or is_of_transform(grad)
        if is_odd and not has_bytes(grad):
            raise UsageError(
                f"the gradient of {handle.name} is a {type(grad).__name__} on {grad.device}, which"
                " has no bytes to send home: run the backward with real tensors, or of a model"
                " that is not wrapped."
            )
        return True

    @outside_modes
    def _sum_before(self, handle: ParamHandle, param: torch.Tensor) -> None:
        """Makes what autograd accumulated the sum with this rank's gradients before, which are no
        longer there."""
        grad = raw_grad(param)
        if is_plain(grad):
            with self.job.store.guard:
                set_raw_grad(param, self.job.gradients.take_sum(handle, grad))

    def _land(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Sends home what autograd accumulated."""
        if type(grad) is not torch.Tensor and not is_plain(grad):
            # Sums partial gradients over the ranks.
            self.job.gradients.changes.begin(handle)
            grad = part_of(handle.param, grad, f"the gradient of {handle.name}")
        with self.job.store.guard:
            self.job.gradients.land(handle, grad)

    def _has_landed(self, handle: ParamHandle) -> None:
        """Counts a landed gradient. Releases and reduces its unit after the last one."""
        unit, running = handle.unit, self._pass
        running.reached.add(unit)
        if (without := self._without_grad.get(unit)) is not None:
            without.discard(handle)
        gathers = self.gathers_with_ranks
        awaited = (running.expected if gathers else running.awaited).get(unit)
        if awaited is not None:
            awaited.discard(handle)
            if awaited:
                return
            if not gathers:
                self.unhold(unit)
            if self.job.reducer is not None:
                self.job.reducer.ready(unit)
            elif not running.is_accumulating:
                self._tell(unit)

    def land_by_hand(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Sends home a gradient that autograd did not accumulate, between the backwards of an
        accumulation pass."""
        handle = managed(param)
        self.job.gradients.changes.begin(handle)
        with self.job.store.guard:
            self.job.gradients.land(handle, part_of(param, grad, f"the gradient of {handle.name}"))
        self._without_grad.get(handle.unit, set()).discard(handle)
        self._pass.backward_count += 1

    def notify_if_final(self, unit: ParamUnit) -> None:
        """Calls the listeners when ``unit``'s gradients are final: averaged over all ranks, or
        summed over an accumulation pass."""
        if any(map(has_landed, unit.handles)) and not self.job.prefetcher.is_held(unit):
            self._tell(unit)

    def _tell(self, unit: ParamUnit) -> None:
        # In a reentrant checkpoint's own backward a unit's other uses may be yet to come.
        if self.job.steps.streaming and len(self._pass.tokens) > 1:
            return
        for listener in tuple(self.job.events.unit_landed):
            listener(unit)

    # --- beginning and end ---

    def track_task(self) -> None:
        """Tracks the running autograd task, if any, so that its end releases what this backward
        holds. May block on another thread, and recovers from an interrupted use."""
        self.tasks.track(self.begin_task, self.end_task)

    def begin_task(self) -> None:
        """Recovers from an interrupted use, before the outermost task."""
        self._recover()

    @outside_modes
    def end_task(self) -> None:
        """Ends the outermost task: takes off its holds, notes the parameters that got no gradient,
        and ends the reductions. Every rank calls this; it may block on them."""
        with self.job.store.guard:
            for handle in self.job.gradients.end_meetings():
                self._has_landed(handle)
        for unit, missing in (self._pass.awaited | self._pass.expected).items():
            # Else this was torch.autograd.grad, which accumulates nothing.
            if unit in self._pass.reached:
                self._without_grad[unit] = self._without_grad.get(unit, set()) | missing
        for unit in list(self._pass.awaited):
            self.unhold(unit)
        self._pass.gradients = self._node = None
        self._taken.clear()
        self._pass.expected.clear()
        self._pass.reached.clear()
        # Every gradient is on its way home from here on, or waits for the rest of a pass.
        job = self.job
        job.collectives.wait_for_ordered()
        if self._pass.is_accumulating:
            self._pass.backward_count += 1  # its gradients stay incomplete until the last one
            return
        if job.reducer is not None:
            with job.store.guard:
                job.reducer.end_backward()
        self.end_accumulation()

    def end_accumulation(self) -> None:
        """Ends one backward, or those of an accumulation pass, whose gradients have landed."""
        job = self.job
        job.steps.count_backwards(job.steps.backwards + 1)
        job.gradients.end_backward()
        job.gradients.homes.close_all(flat_params_of(job.units))
        if not self._pass.frames:
            job.prefetcher.release_idle()
