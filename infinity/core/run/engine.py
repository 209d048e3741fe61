"""Engine: runs one wrapped model, by the parts of its job.

The engine knows parameters and units, not modules. Hooks on the modules hold the engine, so it
lives as long as the model or its optimizer. Everything it owns is freed when both are gone.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ... import native
from ...errors import UsageError
from ..grads.backward import Backward
from ..params import mistakes
from ..params.touches import Touches
from ..step.context import StepContext
from ..units.added import always_rests, tensors_of
from ..units.forms import is_plain
from ..units.handle import ParamHandle, handle_of
from ..units.unit import ParamUnit
from .accumulation_pass import AccumulationPass
from .context import ForwardContext
from .job import Job, wait_idle
from .one_thread import refuse_at_the_end
from .operations import Operation, OperationKind, State
from .pass_state import define_states
from .passes import Passes
from .recovery import is_interrupted, recover
from .resources import Resources


class Engine:
    """Runs one wrapped model. Parameters, hooks and replacement forwards call it.

    ``free`` frees everything that the job holds, and does not refer to this object.
    """

    def __init__(self, job: Job, resources: Resources, free: Callable[[], None]):
        self.job, self._resources = job, resources
        # What parameters and gradients use by their engine.
        self.uses, self.steps = job.uses, job.steps
        self.gradients, self.device = job.gradients, job.device
        me = weakref.ref(self)
        self.backward = Backward(job, recover=lambda: me().recover())
        self.passes = Passes(job, self.backward)
        self.accumulation = AccumulationPass(job, self.backward)
        self._touches = Touches(job, lambda handle, name: me().refusal(handle, name))
        # insist: a finalizer runs once, so Ctrl-C must not end it early.
        finalizer = self._finalizer = weakref.finalize(self, native.insist, free)
        job.uses.define({State.UNWRAPPED: lambda: not finalizer.alive})
        define_states(job.uses, job.running, job.steps)
        for extension in job.extensions:
            job.uses.define(extension.rights(job))

    def make_step_context(self, index: int = 0) -> StepContext:
        """Makes the context of the optimizer ``index``. Its callbacks may keep this object
        alive; this object does not keep the context."""
        job, running = self.job, self.job.running
        return StepContext(
            optimizer_index=index,
            is_only=lambda: all(h.flat_param.spec.optimizer == index for h in job.trained),
            config=job.config,
            units=job.units,
            collectives=job.collectives,
            device=job.device,
            store=job.store,
            uses=job.uses,
            journal=job.journal,
            schedule=job.schedule,
            steps=job.steps,
            gradients=job.gradients,
            updates=job.updates,
            borrowed=job.borrowed,
            lents=job.lents,
            events=job.events,
            is_cut_short=lambda: running.is_cut_short,
            in_use=lambda: [
                u for frame in running.frames for u in (*frame.units, *frame.used_outside)
            ],
            stages_differ=lambda: running.stages_differ,
            release=job.prefetcher.release_all,
            end_step=self.end_step,
            admit=partial(self.admit, optimizer_index=index),
        )

    def make_forward_context(self) -> ForwardContext:
        """Makes the context of replacement forwards. It keeps this object alive."""
        job, passes = self.job, self.passes
        return ForwardContext(
            owner=self,
            journal=job.journal,
            device=job.device,
            ledger=job.ledger,
            traffic=job.traffic,
            store=job.store,
            gradients=job.gradients,
            is_recomputed=lambda: passes.is_recomputed,
            saving_tensors=passes.saving_tensors,
            running_again=passes.running_again,
            track_backward=self.backward.track_task,
            expect_sum=self.backward.expect_sum,
        )

    def attach(self, names: dict[torch.Tensor, list[str]]) -> None:
        """Makes the parameters managed ones. Their values are at home: this needs no space and no
        disk."""
        for unit in self.job.units:
            for flat_param in unit.flat_params:
                flat_param.names[:] = [names[param][0] for param in flat_param.params]
                for index, param in enumerate(flat_param.params):
                    handle = ParamHandle(names[param], unit, flat_param, index, self)
                    if flat_param.spec.stepped:
                        self.gradients.values.track(handle)
                        self.job.trained.append(handle)
                    param._infinity = handle
                    flat_param.handles.append(handle)
            unit.attach()
            unit.buffers.list_in(self.job.storages, unit)

    def units_of(self, block: torch.nn.Module) -> list[ParamUnit]:
        """Lists the units that have parameters of ``block`` and are gathered whole."""
        handles = filter(None, map(handle_of, tensors_of(block)))
        units = sorted({handle.unit for handle in handles}, key=lambda unit: unit.index)
        return [unit for unit in units if not self.job.planned.sizes[unit.index].at_once_nbytes]

    # --- uses of the engine ---

    @torch.compiler.disable  # a compiled function may use the engine
    def prepare(self, operation: OperationKind | None) -> None:
        """Recovers from an exception, at the start of an outermost use. Raises if the job is
        halted."""
        refuse_at_the_end()
        for listener in self.job.events.use_begun:
            listener(operation)
        repairing = operation is not None and operation.call.loads_all
        self.recover(finishing=not repairing)
        if (error := self.uses.halted_error()) is not None and not repairing:
            # Other ranks must not wait for this one.
            self.job.collectives.fail(error, for_now=True)
            raise error
        for listener in () if repairing else self.job.events.use_ready:
            listener()
        self.job.lents.begin_use(repairing=repairing)

    @property
    def is_open(self) -> bool:
        """Whether the homes exist: until unwrap_model, or the end of the process."""
        return self._finalizer.alive

    def recover(self, *, finishing: bool = True) -> None:
        """Recovers if an exception has left something to repair. Only while no other use is
        running.

        ``finishing``: also finish the journal; else the next use does, unless all state is loaded
        first.
        """
        if self.is_open and is_interrupted(self.job):
            for listener in self.job.events.recovering:
                listener()
            recover(self.job, finishing=finishing)

    # --- called by parameters ---

    @property
    def computing(self) -> bool:
        """Whether a forward or backward of the model is running."""
        return self.passes.computing

    def touch(self, handle: ParamHandle, operation: str) -> None:
        """Gathers a parameter at home that is used inside a forward or backward, until its end.
        Raises UsageError outside."""
        self.job.store.check_process()
        if not self.computing:
            raise self.refusal(handle, operation)
        if (chosen := handle.unit.arrival.rows) is not None:
            chosen.want_touched(handle.param)
        # No view leaves of what always rests, so the hold of the unit's owner is enough. Of a
        # rank's part of divided rows it has to be: other ranks lack a longer one, and would gather
        # otherwise.
        is_part = chosen is not None and not is_plain(handle.param)
        if not (self.passes.holds(handle.unit) and (is_part or always_rests(handle.param))):
            self.passes.hold_for_frame(handle.unit)
        self.job.prefetcher.complete(handle.unit)

    def touching(
        self, handles: Sequence[ParamHandle], operation: str, *, writes: bool
    ) -> AbstractContextManager:
        """Returns a block in which the parameters are resident, for one operation outside of their
        owners. ``writes``: ``operation`` may change them, which goes home at the end. Raises
        UsageError if it is refused now."""
        if self.computing:
            self.job.store.check_process()
            return self.passes.using(handles, writes=writes)
        return self._touches.holding(handles, operation, writes=writes)

    def put_to_rest(self, handle: ParamHandle) -> None:
        """Releases a parameter that is not in use from the device: someone who asks for its storage
        could read and write past torch's operations."""
        if not self.computing:
            self._touches.put_to_rest(handle)

    def refusal(self, handle: ParamHandle, operation: str) -> UsageError:
        """Makes the error for using a parameter at home."""
        own_name = handle.name.removeprefix(self.job.prefix)
        instead = mistakes.advice(handle.param) or mistakes.USE_FULL_PARAMS.format(own_name)
        return UsageError(
            f"{operation} on parameter {handle.name}, which is at home on"
            f" {handle.flat_param.weight.tier}. {instead}"
        )

    def saving_tensors(self) -> AbstractContextManager:
        """Returns a block in which autograd saves weights as references."""
        return self.passes.saving_tensors()

    def write_value(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Writes the value of ``p.copy_(value)`` home, master included, outside a forward."""
        job, values = self.job, {handle: value}
        with self.uses.operation(Operation.WRITE_VALUE), job.lents.loading(job.edits, values):
            job.edits.write_value(handle, value)

    def read_value(self, handle: ParamHandle) -> torch.Tensor:
        """Reads the value at home, outside a forward. Every rank calls this if ranks have
        shards."""
        with self.uses.begin():
            self.job.lents.settle()
            return handle.flat_param.read_value(self.job.store, handle.index)

    def admit(
        self, params: Iterable[torch.Tensor], *, asked: str = "add_param_group", **how: Any
    ) -> None:
        """Steps ``params``, frozen until now, and makes room for that. ``how``: as
        :func:`infinity.ext.class_step.admission.admit` takes it. Raises UsageError or
        CapacityError, which say what was ``asked``, with nothing changed."""
        for listener in self.job.events.admitting:
            listener(asked)
        if not self.job.events.making_room:
            raise UsageError(
                f"{asked}: infinity/ext/class_step, which makes room for it, is not there."
                " unwrap_model first, add the parameters, and wrap again."
            )
        make_room = self.job.events.making_room[0]
        make_room(self.job, self._resources, params, asked=asked, hook=self.passes.hook, **how)

    # --- what the optimizer asks ---

    def end_step(self, index: int = 0) -> None:
        """Ends a step of the optimizer ``index``, whose updates are submitted. Starts reading
        the next forward's first units from disk."""
        self.job.prefetcher.fetch_ahead(self.job.schedule.first(), time.perf_counter())
        self.job.schedule.end_step()
        self.job.updates.end_step(index)
        for listener in self.job.events.step_ended:
            listener(self.steps.index)

    def wait_idle(self) -> None:
        """Waits until every byte is at home, including users' changes to state dicts and to
        optimizer state. Blocks on disk. Raises the error of a failed transfer or update."""
        wait_idle(self.job)

    def finish_background(self) -> None:
        """Waits until what runs beside the training is over, as a save. Raises its error, once.
        Every rank calls this."""
        for listener in tuple(self.job.events.finishing):
            listener()

    def shut_down(self) -> None:
        """Frees all memory, descriptors and files."""
        self._finalizer()
        self._resources = None
        self.job.updates.close()
