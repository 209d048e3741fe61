"""Aside: lets a model run as plain torch where nothing of it moves.

If all state is at home on the device, the engine's hooks move nothing. So it measures its first
steps, and then **stands aside**: modules run without its hooks, and gradients stay in ``p.grad``.
``optimizer.step()`` copies them home and runs the same kernels, so the bits are the same. If that
is slower, the engine comes back.

Any other use (a save, a state dict, ``infinity.accumulate``) and an exception in a pass bring the
engine back before anything else happens, with the gradients that are pending.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...config import Config
from ...core.grads.record import GradRecord, GradState
from ...core.machine.device import Device
from ...core.machine.limits import memory_left
from ...core.machine.tiers import Tier
from ...core.params.outside_modes import makes_hooks
from ...core.run.engine import Engine
from ...core.run.hooks import ForwardHooks, LandingHooks
from ...core.run.job import Job
from ...core.run.operations import Operation, OperationKind
from ...core.run.pass_state import Frame
from ...core.run.registry import RECORD, Wrapped
from ...core.run.scoped_call import ScopedCall
from ...core.seams import Events, Extension
from ...core.units.encoding import same_bits
from ...core.units.handle import (
    DisableTorchFunction,
    ParamHandle,
    drop_raw_grads,
    raw_grad,
    raw_hooks,
    set_raw_grad,
    set_raw_hooks,
)
from ...core.units.unit import flat_params_of
from ...core.wrap.parts import parts_of
from ...ranks.collectives import Collectives

logger = logging.getLogger(__name__)

SKIPPED, MEASURED = 3, 5  # steps after each change
SLOWER = 1.05  # times the seconds with the engine: then it comes back
LEFT_FREE = 2  # of the room for gradients that autograd makes: as much again stays free
# What the engine does without coming back.
STAYING = {Operation.FORWARD, Operation.STEP, Operation.ZERO_GRAD}
STEPPED = "_infinity_stepped"  # attribute of a gradient: its version as a step applied it
TRACKING = -2  # the key of a hook on a parameter
_ASIDE: weakref.WeakSet[Aside] = weakref.WeakSet()


class Aside(Extension):
    """The choice of one job, and its gradients in the meantime. Used from the thread that runs the
    model."""

    may_stand_aside = True

    def __init__(self) -> None:
        self._job: weakref.ref[Job] | None = None
        self._since, self._seconds = 0, list[float]()  # steps, and of each measured one
        self._least: dict[bool, float] = {}  # seconds of a step; True: aside
        self._has_told = self._returns = False
        self._homes: list[tuple[ParamHandle, torch.Tensor]] = []  # of gradients
        self._model: weakref.ref[nn.Module] | None = None
        self._roots: list[_Root] = []
        _ASIDE.add(self)

    @classmethod
    def begin(
        cls, config: Config, device: Device, collectives: Collectives, events: Events
    ) -> Aside | None:
        """Returns the extension of a job of one rank."""
        return cls() if collectives.ranks.alone else None

    def install(self, job: Job, model: nn.Module) -> None:
        """Adds listeners for uses and steps, if the job is on the device."""
        if not _is_on_the_device(job):
            return
        self._job, self._model = weakref.ref(job), weakref.ref(model)
        job.events.use_begun.append(self._use_begun)
        job.events.recovering.append(self._recovering)
        job.events.step_begun.append(self._bring)
        job.events.step_ended.append(self._step_ended)

    def drop(self, job: Job) -> None:
        """Comes back after an exception, which has put the parameters to rest."""
        if self._job is not None:
            self._forget(job)

    @property
    def _aside(self) -> Job | None:
        """The job, if the engine stands aside."""
        job = self._job() if self._job is not None else None
        return job if job is not None and job.running.stands_aside else None

    # --- the choice ---

    def _step_ended(self, _index: int) -> None:
        """Waits for the updates, since the next forward does not. Measures, and chooses."""
        if (job := self._job()) is None:
            return
        if is_aside := job.running.stands_aside:
            for unit in job.units:
                unit.wait_for_update()
            self._mark_stepped()
        self._since += 1
        if self._since > SKIPPED:
            self._seconds.append(job.updates.clock.step_seconds)
        if len(self._seconds) < MEASURED:
            return
        self._least[is_aside] = min(self._seconds)
        self._since, self._seconds = 0, []
        own, aside = self._least[False], self._least.get(True, 0.0)
        if is_aside and aside > SLOWER * own:
            self._come_back(job)
        elif not is_aside and aside <= SLOWER * own and _may_stand_aside(job):
            self._stand_aside(job)
        if is_aside and not self._has_told:
            self._has_told = True
            logger.info(
                "a step takes %.4g s as plain torch, and %.4g s with the engine around it: %s",
                aside,
                own,
                "it stays"
                if aside > SLOWER * own
                else "it stands aside until it is asked for anything",
            )

    # --- there and back ---

    def _stand_aside(self, job: Job) -> None:
        """Shows every parameter as an ordinary one, with its gradient, in place of the hooks of
        forwards and landings."""
        for unit in job.units:
            job.prefetcher.hold(unit, in_pass=False)
        self._homes = []
        for handle in job.trained:
            home = job.gradients.homes.view(handle, write=True)
            self._homes.append((handle, home))
            if handle.grad.state is not GradState.ABSENT:
                value = job.gradients.values.value(handle, write=True)  # with its factors
                set_raw_grad(handle.param, value.clone())
            handle.has_raw_grad = True
        self._mark_stepped()
        record = self._model().__dict__[RECORD]
        self._roots = [_Root(root, job) for root in parts_of(record.model)]
        for hooks in self._replaced(record):
            hooks.remove()
        _track_backwards([handle.param for handle in job.trained], record.engine)
        job.running.stands_aside = True

    def _replaced(self, record: Wrapped) -> list[ForwardHooks | ScopedCall | LandingHooks]:
        """Lists the hooks that are removed meanwhile: calls of roots stay uses of the engine."""
        roots = parts_of(record.model)
        return [
            hooks
            for hooks in record.removers
            if isinstance(hooks, (ForwardHooks, LandingHooks))
            or (isinstance(hooks, ScopedCall) and hooks.module() not in roots)
        ]

    def _mark_stepped(self) -> None:
        for handle, grad in self._raw():
            if grad is not None and handle.grad.state is GradState.CONSUMED:
                setattr(grad, STEPPED, grad._version)

    def _raw(self) -> list[tuple[ParamHandle, torch.Tensor | None]]:
        with DisableTorchFunction():
            return [(each, torch.Tensor.grad.__get__(each.param)) for each, _ in self._homes]

    def _come_back(self, job: Job, *, recovers: bool = False) -> None:
        """Puts the parameters to rest, with the gradients at home. ``recovers``: a recovery follows
        at once, which takes the holds off. So it does if this was interrupted: the next use does
        all of it again, and the holds may be taken off in part."""
        if self._returns:
            job.uses.interrupt()
        elif not recovers:
            self._returns = True
        stepped = [
            handle
            for handle, home in self._homes
            if (grad := raw_grad(handle.param)) is not None
            and getattr(grad, STEPPED, None) == grad._version
            and same_bits(grad, home).all()  # `grad.data` counts no change
        ]
        self._bring()
        for handle in stepped:
            handle.grad.move(GradState.CONSUMED)
        for handle, grad in self._raw():
            if grad is not None:  # a tensor that a user holds stays ``p.grad``
                if handle.grad.state is GradState.LANDED and not grad.any():
                    # Those of ``zero_grad(set_to_none=False)`` are no loss
                    handle.grad.norm = math.inf, torch.zeros((), device=grad.device)
                job.gradients.assigned.watch(handle, grad, grad.detach())
        for unit in () if job.scopes.interrupted or recovers else job.units:
            job.prefetcher.unhold(unit, in_pass=False)
        self._forget(job)
        job.running.stands_aside = False
        drop_raw_grads([handle.param for handle in job.trained])

    def _forget(self, job: Job) -> None:
        """Puts the hooks back. Idempotent."""
        for root in self._roots:
            root.remove()
        _track_no_more([handle.param for handle in job.trained])
        model = self._model()
        if model is not None and (record := model.__dict__.get(RECORD)) is not None:
            for hooks in self._replaced(record):
                hooks.put()
        for handle in job.trained:
            handle.has_raw_grad = False
        self._since, self._seconds, self._returns = 0, [], False
        self._homes, self._roots = [], []

    def rest(self) -> None:
        """Puts the parameters to rest in a forked child, which lacks their memory."""
        if (job := self._aside) is not None:
            for unit in job.units:
                unit.exposure.end()
            self._forget(job)
            job.running.stands_aside = False

    def _use_begun(self, operation: OperationKind | None) -> None:
        if (operation not in STAYING or self._returns) and (job := self._aside) is not None:
            self._come_back(job)

    def _recovering(self) -> None:
        """Brings the gradients home before an exception is recovered from. Those of a backward that
        was cut short are torn."""
        if (job := self._aside) is None:
            return
        was_cut_short = bool(job.running.tokens)
        self._come_back(job, recovers=True)
        for handle in job.trained if was_cut_short else ():
            if handle.grad.state is GradState.LANDED:
                job.gradients.changes.begin(handle)

    @torch.no_grad()
    def _bring(self) -> None:
        """Copies the gradients home, for a step. Raises UsageError for a sparse one, and drops
        it."""
        if (job := self._aside) is None:
            return
        homes, grads = list[torch.Tensor](), list[torch.Tensor]()
        for (handle, grad), (_, home) in zip(self._raw(), self._homes):
            if grad is not None and grad.is_sparse:
                set_raw_grad(handle.param, None)
                job.gradients.land(handle, grad)  # which raises
            if grad is not None:
                homes.append(home)
                grads.append(grad)
        if grads:
            torch._foreach_copy_(homes, grads)
        for handle, grad in self._raw():
            if grad is not None or handle.grad.state is not GradState.ABSENT:
                handle.grad = GradRecord()
            if grad is not None:
                handle.grad.move(GradState.LANDED)


class _Root(ForwardHooks):
    """Tells a job which forward of a root runs."""

    def __init__(self, root: nn.Module, job: Job):
        running, scopes = job.running, job.scopes  # the job would be kept by itself

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            running.frames.append(Frame(module, [], hooks=scopes.hooks))

        def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if running.frames and running.frames[-1].module is module:
                running.frames.pop()

        super().__init__(root, before, after)


@makes_hooks
def _track_backwards(params: Iterable[torch.Tensor], engine: Engine) -> None:
    """Has the engine know of a backward as it accumulates the first gradient, so that one which is
    cut short is recovered from."""
    me = weakref.ref(engine)

    def track(_param: torch.Tensor) -> None:
        if (alive := me()) is not None and not alive.job.running.tokens:
            alive.backward.track_task()

    for param in params:
        hooks = raw_hooks(param)
        if hooks is None:
            set_raw_hooks(param, OrderedDict({TRACKING: track}))
        else:
            hooks[TRACKING] = track


def _track_no_more(params: Iterable[torch.Tensor]) -> None:
    for param in params:
        (raw_hooks(param) or {}).pop(TRACKING, None)


def _rest_in_a_child() -> None:
    for each in list(_ASIDE):
        each.rest()


os.register_at_fork(after_in_child=_rest_in_a_child)


def _may_stand_aside(job: Job) -> bool:
    """Tells whether plain torch would do as the engine does: all of the job is on the device, no
    feature needs a pass, and nothing of it is in a user's hands."""
    config, running, flats = job.config, job.running, flat_params_of(job.units)
    stepped = [flat for flat in flats if flat.spec.stepped]
    return (
        all(extension.may_stand_aside for extension in job.extensions)
        and job.activations is None
        and not (config.compile or config.micro_batch or config.fused_loss)
        and _is_on_the_device(job)
        and not any(unit.older or unit.arrival.rows is not None for unit in job.units)
        and not any(size.at_once_nbytes for size in job.planned.sizes)
        and all(flat.spec.needs is None for flat in stepped)
        and all(flat.spec.grad_dtype is flat.spec.dtype for flat in stepped)
        and len({flat.spec.optimizer for flat in stepped}) == 1
        and not (running.frames or running.is_accumulating or job.steps.begun)
        and not any(handle.borrowed or handle.grad.assigned for handle in job.trained)
        and not job.lents.are_held
        and not _has_compiled()
        and _has_room(job, sum(flat.arrays["grad"].nbytes for flat in stepped))
    )


def _is_on_the_device(job: Job) -> bool:
    flats = flat_params_of(job.units)
    homes = {array.tier for flat in flats for array in flat.arrays.values()}
    return all(job.prefetcher.never_moves) and homes <= {Tier.DEVICE}


def _has_room(job: Job, nbytes: int) -> bool:
    """Tells whether the device has room for ``nbytes`` of gradients beside those at home, which
    autograd makes, and as much again."""
    memory = job.device.memory
    return LEFT_FREE * nbytes <= (memory_left() if memory is None else memory.unused_nbytes())


def _has_compiled() -> bool:
    """Tells whether torch has compiled anything in this process: then its graphs end at the
    engine's hooks, as others' would not."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])
