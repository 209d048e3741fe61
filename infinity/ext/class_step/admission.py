"""Admission: starts training parameters that were frozen at wrap time, or that another optimizer
has stepped until now.

latecomer   a parameter that is admitted
taken       a latecomer that another optimizer has stepped. Its moments begin anew
growth      the arrays that a flat param with latecomers lacks. They are flat and span all of its
            parameters, of which only the latecomers are stepped

All steps that can fail come first and change nothing. The change itself is then completed, even if
it is interrupted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ... import native
from ...core.homes.arrays import StateArray
from ...core.homes.store import ArrayStore
from ...core.homes.write_behind import ArrayIO
from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import Tier
from ...core.plan.budgets import measured_free
from ...core.plan.memory_plan import MemoryPlan, term_of
from ...core.plan.unit_sizes import FlatParamSize, UnitSize
from ...core.run.job import Job, wait_idle
from ...core.run.resources import Resources
from ...core.units.flat_param import FlatParam
from ...core.units.flat_param_spec import SCALES, FlatParamSpec
from ...core.units.handle import ParamHandle, handle_of, raw_grad
from ...core.units.home_arrays import HomeArrays
from ...core.units.unit import ParamUnit
from ...errors import CapacityError, UsageError

INSTEAD = (
    "Give the optimizer all parameters before wrap_model, and freeze those that are trained later"
    " with requires_grad_(False): what is frozen gets no step. Or unwrap_model first, add the"
    " group, and wrap again."
)
ZEROED_AT_ONCE = 4 * 1024 * 1024  # elements


@dataclass
class Growth:
    """The spec and arrays that one flat param gains."""

    unit: ParamUnit
    spec: FlatParamSpec
    arrays: dict[str, StateArray] = field(default_factory=dict)


def admit(
    job: Job,
    resources: Resources,
    params: Iterable[torch.Tensor],
    *,
    moments_of: Callable[[FlatParam], Mapping[str, torch.dtype]],
    hook: Callable[[torch.Tensor], None],
    then: Callable[[], None],
    optimizer_index: int = 0,
    needs: Any = None,
    asked: str = "add_param_group",
    takes: bool = False,
) -> None:
    """Steps ``params``: see :meth:`Engine.admit`. Blocks until all bytes are at home."""
    handles = _latecomers(job, params, optimizer_index, asked, takes=takes)
    growths: dict[FlatParam, Growth] = {}
    for handle in handles:
        spec = (flat_param := handle.flat_param).spec
        if not spec.stepped or spec.optimizer != optimizer_index:
            moments = moments_of(flat_param)
            spec = spec.trained(job.config.master, moments, optimizer_index, needs=needs)
            growths[flat_param] = Growth(handle.unit, spec)
    _refuse_elsewhere(job, handles, growths, asked)
    sizes = [_grown(size, unit, growths) for size, unit in zip(job.planned.sizes, job.units)]
    wait_idle(job)
    for flat_param in growths:
        flat_param.homes.wait_readers()  # a save, an audit
    job.gradients.homes.settle()
    job.prefetcher.release_all(job.units)
    _check_room(job, growths, asked)
    try:
        for flat_param, growth in growths.items():
            _allocate(job, flat_param, growth)
        updater = resources.make_updater() if resources.refit(sizes) else None
    except BaseException:
        for growth in growths.values():
            for array in growth.arrays.values():
                job.store.allocator.free_more(array)
        raise
    plan = replace(job.planned.plan, terms=_terms(job.planned.plan, growths))

    def change() -> None:
        if updater is not None and job.updates.updater is not updater:
            job.updates.use(updater, job.device, job.planned.plan.device_slot_nbytes)
        job.gradients.homes.stage_in(resources.grad_staging)
        for flat_param, growth in growths.items():
            if flat_param.spec.stepped and flat_param.spec.optimizer != optimizer_index:
                _begin_anew(job, flat_param, growth)
            flat_param.homes.grow(growth.spec, growth.arrays)
        for handle in handles:
            if handle.grad is None:
                hook(handle.param)
                job.gradients.values.track(handle)
                job.trained.append(handle)
        job.planned.sizes, job.planned.plan = sizes, plan
        then()

    native.insist(change)


def _latecomers(
    job: Job, params: Iterable[torch.Tensor], optimizer_index: int, asked: str, *, takes: bool
) -> list[ParamHandle]:
    """Returns the handles of ``params``. Raises UsageError if a parameter allows no admission."""
    handles = []
    for param in params:
        handle = handle_of(param)
        if handle is None or handle.engine.uses is not job.uses:
            raise UsageError(
                f"{asked}: a parameter of shape {tuple(param.shape)} is not one that"
                " wrap_model has taken home with this optimizer, so its state has no home."
                f" {INSTEAD}"
            )
        handles.append(handle)
    wanted = set(handles)
    for handle in handles:
        spec = handle.flat_param.spec
        others = [each for each in handle.flat_param.handles if each.grad and each not in wanted]
        if spec.stepped and spec.optimizer != optimizer_index and (others or not takes):
            beside = f", as {others[0].name}" if others else ""
            raise UsageError(
                f"{asked}: {handle.name} is stored with parameters of another optimizer of"
                f" this model{beside}. {INSTEAD}"
            )
        if handle.grad is None and raw_grad(handle.param) is not None:
            raise UsageError(
                f"{asked}: {handle.name} has a gradient from before: set it to None first"
            )
    return handles


def _refuse_elsewhere(
    job: Job, handles: Iterable[ParamHandle], growths: Mapping[FlatParam, Growth], asked: str
) -> None:
    """Raises UsageError for parameters that were frozen, or whose state needs more arrays, over
    several ranks or off the processor."""
    grows = any(_lacking(flat_param, growth.spec) for flat_param, growth in growths.items())
    if not grows and all(handle.grad is not None for handle in handles):
        return
    if not job.ranks.alone:
        raise UsageError(
            f"{asked} after wrap_model, with several ranks: not available in this version."
            f" {INSTEAD}"
        )
    if not job.device.is_host:
        raise UsageError(
            f"{asked} after wrap_model, computing on {job.device.where}: not available in"
            f" this version. {INSTEAD}"
        )


def _lacking(flat_param: FlatParam, spec: FlatParamSpec) -> dict[str, torch.dtype]:
    """Returns the arrays of ``spec``, with their dtypes, that ``flat_param`` does not have."""
    there = {name: array.dtype for name, array in flat_param.arrays.items()}
    return {name: dtype for name, dtype in spec.array_dtypes().items() if there.get(name) != dtype}


def _begin_anew(job: Job, flat_param: FlatParam, growth: Growth) -> None:
    """Zeroes the moments that a flat param keeps for its new optimizer, and their counts."""
    for name in (*growth.spec.moments, *SCALES.values()):
        if name in flat_param.arrays and name not in growth.arrays:
            _fill(job, flat_param.arrays[name], _zeros(flat_param.arrays[name].dtype))
    for handle in flat_param.handles:
        handle.step, handle.keeps_moments = 0, False


def _grown(size: UnitSize, unit: ParamUnit, growths: Mapping[FlatParam, Growth]) -> UnitSize:
    flat_params = zip(size.flat_params, unit.flat_params)
    return replace(
        size,
        flat_params=tuple(
            replace(one, spec=growths[flat_param].spec) if flat_param in growths else one
            for one, flat_param in flat_params
        ),
    )


def _sizes(plan: MemoryPlan, growths: Mapping[FlatParam, Growth]) -> list[tuple[Tier, str, int]]:
    """Lists tier, array name and bytes of every array that is missing."""
    sizes = []
    for flat_param, growth in growths.items():
        tiers, size = (
            plan.tiers_of(growth.unit.index),
            FlatParamSize(growth.spec, flat_param.layout.numel),
        )
        sizes += [
            (tiers[name], name, size.nbytes(name)) for name in _lacking(flat_param, growth.spec)
        ]
    return sizes


def _check_room(job: Job, growths: Mapping[FlatParam, Growth], asked: str) -> None:
    """Raises CapacityError if free memory or a budget does not hold the whole growth."""
    needed, budgeted = Counter[Tier](), Counter[Tier]()
    for tier, _, nbytes in _sizes(job.planned.plan, growths):
        needed[Tier.HOST if tier is Tier.DEVICE else tier] += nbytes  # the CPU is the device
        budgeted[tier] += nbytes
    for tier, nbytes in needed.items():
        free = measured_free(tier, job.config, job.device)
        if nbytes > free:
            raise CapacityError(
                f"{asked}: gradients and optimizer state of these parameters, and of those"
                f" stored in the same arrays, need {format_nbytes(nbytes)} on {tier}, of which"
                f" {format_nbytes(free)} may be used. Free as much, or give them a farther home:"
                " Config(optimizer='nvme', nvme_paths=[...])"
            )
    for tier, nbytes in budgeted.items():
        job.store.allocator.make_room(tier, nbytes, f"{asked} of these parameters")


def _terms(plan: MemoryPlan, growths: Mapping[FlatParam, Growth]) -> dict[Tier, dict[str, int]]:
    terms = {tier: dict(of_tier) for tier, of_tier in plan.terms.items()}
    for tier, name, nbytes in _sizes(plan, growths):
        terms[tier][term_of(name)] = terms[tier].get(term_of(name), 0) + nbytes
    return terms


def _allocate(job: Job, flat_param: FlatParam, growth: Growth) -> None:
    """Allocates the arrays: moments are zero, masters are copies of the weights."""
    store, unit = job.store, growth.unit
    growth.arrays = allocate_missing(
        store,
        flat_param.homes,
        growth.spec,
        job.planned.plan.tiers_of(unit.index),
        f"unit {unit.name}",
    )
    for name, array in growth.arrays.items():
        if name == "master" and growth.spec.master == native.Master.FLOAT32:
            _fill(job, array, partial(_masters, store, flat_param))
        elif array.tier is Tier.NVME:  # disk space may hold old bytes
            _fill(job, array, _zeros(array.dtype))


def allocate_missing(
    store: ArrayStore, homes: HomeArrays, spec: FlatParamSpec, tiers: dict[str, Tier], what: str
) -> dict[str, StateArray]:
    """Allocates the arrays of ``spec`` that ``homes`` lacks, zeroed, for :meth:`HomeArrays.grow`.
    Raises CapacityError with everything freed."""
    made: dict[str, StateArray] = {}
    try:
        for name, dtype in spec.array_dtypes().items():
            if name not in homes.arrays or homes.arrays[name].dtype != dtype:
                begin, end = homes.layout.home_range(name)
                made[name] = store.allocator.allocate_later(
                    tiers[name], dtype, end - begin, f"{name} of {what}"
                )
    except BaseException:
        for array in made.values():
            store.allocator.free_more(array)
        raise
    return made


def _fill(job: Job, array: StateArray, make: Callable[[int, int], torch.Tensor]) -> None:
    for begin in range(0, array.numel, ZEROED_AT_ONCE):
        end = min(array.numel, begin + ZEROED_AT_ONCE)
        job.store.write(array, begin, make(begin, end), version=job.steps.index)


def _zeros(dtype: torch.dtype) -> Callable[[int, int], torch.Tensor]:
    return lambda begin, end: torch.zeros(end - begin, dtype=dtype, device="cpu")


def _masters(store: ArrayIO, flat_param: FlatParam, begin: int, end: int) -> torch.Tensor:
    return store.read(flat_param.weight, begin, end).to(torch.float32)
