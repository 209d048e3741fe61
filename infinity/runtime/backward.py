"""Backward: holds units while a backward of the model needs them, and lands their gradients.

awaited    a unit that the backward holds, until all its gradients have landed
lockstep   with slices on several ranks, all of them must gather the same units in the same order, whatever gradients each gets. So
           a unit is then held until the backward has come two units further, and not until its gradients have landed

A unit is held from the first time a tensor saved from it is asked for (or a gradient reaches its owner's output). What is held at the
end of the outermost task is let go: unused parameters get no gradient, and nothing else would tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ..errors import UsageError
from ..gradients.record import GradState
from ..state.apart import apart, has_bytes, refuse_without_bytes
from ..state.dtensors import is_distributed, part_of
from ..state.handle import ParamHandle, handle_of, raw_grad, set_raw_grad
from ..state.operations import Operation
from ..state.unit import ParamUnit
from .job import Job
from .tasks import AutogradTasks


class Backward:
    """The backward that is running. Used from the thread that autograd runs it in."""

    def __init__(self, job: Job, recover: Callable[[], None]):
        """``recover``: puts right what an exception left, where a backward is the first to come."""
        self.job, self._pass, self._recover = job, job.running, recover
        self.tasks = AutogradTasks(job.scopes, job.running)
        self._without_grad: dict[ParamUnit, set[ParamHandle]] = {}  # seen to get none in an earlier one
        self._listeners: list[Callable[[ParamUnit], None]] = []

    @property
    def in_lockstep(self) -> bool:
        """Whether other ranks gather with this one in mid-backward."""
        return self.job.reducer is not None and self.job.reducer.waits_elsewhere

    # --- units ---

    def gather(self, unit: ParamUnit) -> int | None:
        """Holds ``unit`` in a backward. Returns how many reductions all ranks could start, where they met for its gather."""
        self.job.handed.refuse_in_backward(unit)
        reducer = self.job.reducer
        return self.job.prefetcher.hold(unit, backward=True, offered=reducer.offered if reducer is not None else 0)

    def hold(self, unit: ParamUnit) -> None:
        """Holds ``unit``, which the running backward needs."""
        self.job.uses.check(Operation.BACKWARD, "this backward")
        refuse_without_bytes("a backward")
        self.join()
        if unit in self._pass.awaited:
            self._pass.awaited[unit] = self._pass.awaited.pop(unit)  # the last one used
            return
        if self.in_lockstep:
            for other in list(self._pass.awaited)[:-1]:
                self.let_go(other)
        trained = zip(unit.handles, (param for shard in unit.shards for param in shard.params))
        expected = {h for h, p in trained if h.grad is not None and p.requires_grad} - self._without_grad.get(unit, set())
        with self.job.store.guarding():
            least = self.gather(unit)
            if self.job.reducer is not None:
                self.job.reducer.come_to_unit(least)
        self._pass.awaited[unit] = expected
        if self.in_lockstep:
            self._pass.expected.setdefault(unit, expected)
        self._pass.since[unit] = time.perf_counter()

    def let_go(self, unit: ParamUnit) -> None:
        """Lets ``unit`` go, with which the backward is done."""
        if unit in self._pass.awaited:
            del self._pass.awaited[unit]
            self.job.traffic.mark("backward", unit.name, self._pass.since.pop(unit))
            self.job.prefetcher.unhold(unit)
            self.job.gradients.homes.close_all(unit.shards)

    def give_way(self) -> bool:
        """Lets the unit go that the backward has not used for longest: the device window is full.

        It comes back when it is needed after all. What waits that long is mostly a unit with a parameter that gets no
        gradient, or a tied one whose other use is yet to come. False when there is none.
        """
        for unit in self._pass.awaited:
            if not any(unit in frame.units for frame in self._pass.frames):
                self.let_go(unit)
                return True
        return False

    # --- gradients ---

    @apart
    def landed(self, param: torch.Tensor) -> None:
        """Sends home a gradient that autograd accumulated in ``param``."""
        handle = handle_of(param)
        grad = raw_grad(param)  # before anything is put right: this one is of the backward that runs
        refuse_without_bytes("a backward")
        if grad is not None and not has_bytes(grad):
            set_raw_grad(param, None)
            raise UsageError(
                f"the gradient of {handle.name} is a {type(grad).__name__} on {grad.device}, which has no bytes to send home: run the backward with "
                "real tensors, or of a model that is not wrapped."
            )
        self.join()
        if grad is None:
            return  # of a weight that runs in tiles: it has landed
        self.job.gradients.changes.begin(handle)
        if is_distributed(grad):
            grad = part_of(param, grad, f"the gradient of {handle.name}")  # partial sums over the mesh are added
        set_raw_grad(param, None)
        with self.job.store.guarding():
            self.job.gradients.land(handle, grad)
        self._pass.reached.add(handle.unit)
        self._without_grad.get(handle.unit, set()).discard(handle)
        awaited = (self._pass.expected if self.in_lockstep else self._pass.awaited).get(handle.unit)
        if awaited is not None:
            awaited.discard(handle)
            if not awaited:
                self._complete(handle.unit)

    def _complete(self, unit: ParamUnit) -> None:
        """Goes on with a unit whose gradients of this backward have all landed."""
        if not self.in_lockstep:
            self.let_go(unit)
        if self.job.reducer is not None:
            self.job.reducer.ready(unit)
        elif not self._pass.is_joined:
            self._tell(unit)

    def land_by_hand(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Sends home a gradient that was computed without being accumulated, between the backwards of a joined pass."""
        handle = handle_of(param)
        self.job.gradients.changes.begin(handle)
        with self.job.store.guarding():
            self.job.gradients.land(handle, part_of(param, grad, f"the gradient of {handle.name}"))
        self._without_grad.get(handle.unit, set()).discard(handle)
        self._pass.backward_count += 1

    def landed_at_home(self, unit: ParamUnit) -> None:
        """Tells the listeners that ``unit``'s gradients have landed for good: averages over all ranks, or sums of a joined pass."""
        landed = any(handle.grad.state is GradState.LANDED for handle in unit.handles if handle.grad)
        if landed and not self.job.prefetcher.is_held(unit):
            self._tell(unit)

    def listen(self, listener: Callable[[ParamUnit], None]) -> Callable[[], None]:
        """Calls ``listener`` with every unit whose gradients have all landed, in mid-backward. Returns what ends that."""
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def _tell(self, unit: ParamUnit) -> None:
        for listener in tuple(self._listeners):
            listener(unit)

    # --- its beginning and its end ---

    def join(self) -> None:
        """Has the running task, if there is one, end what this backward holds."""
        self.tasks.join(self)

    def begin_task(self) -> None:
        """Puts right what came before the outermost task, if that was cut short."""
        self._recover()

    @apart
    def end_task(self) -> None:
        """Lets go of what is still held as the outermost task ends: it got no gradient for some of its parameters."""
        for unit, missing in (self._pass.awaited | self._pass.expected).items():
            if unit in self._pass.reached:  # else this was torch.autograd.grad, which accumulates nothing
                self._without_grad[unit] = self._without_grad.get(unit, set()) | missing
        for unit in list(self._pass.awaited):
            self.let_go(unit)
        self._pass.expected.clear()
        self._pass.reached.clear()
        self._end()

    def _end(self) -> None:
        """Ends the backward: every gradient is on its way home, or waits for those of the same pass."""
        job = self.job
        if self._pass.is_joined:
            self._pass.backward_count += 1
            job.gradients.end_one_of_several()
            return
        if job.reducer is not None:
            with job.store.guarding():
                job.reducer.end_backward()
        self.end_joined()

    def end_joined(self) -> None:
        """Ends one backward, or those of a joined pass, whose gradients have landed."""
        job = self.job
        job.steps.count_backwards(job.steps.backwards + 1)
        job.gradients.end_backward()
        job.gradients.homes.close_all([shard for unit in job.units for shard in unit.shards])
        if not self._pass.frames:
            job.prefetcher.release_idle()
