"""Join: gives a model that is wrapped already more optimizers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...config import Config
from ...core.run.engine import Engine
from ...core.run.job import Job
from ...core.run.operations import Operation
from ...core.run.registry import Wrapped, engine_of, wrapped
from ...core.seams import Events, Extension
from ...core.step.optimizer import InfinityOptimizer
from ...core.step.recognised import (
    Optimizers,
    Recognised,
    as_given,
    check_count,
    check_together,
    like_given,
)
from ...core.units.flat_param import FlatParam
from ...core.units.handle import ParamHandle, handle_of, managed
from ...core.wrap.checks import check_kind
from ...core.wrap.make_optimizer import make_optimizer, moved_by
from ...errors import ConfigError
from .admission import admit

ASKED = "wrap_model with another optimizer"


class LaterOptimizers(Extension):
    """Optimizers that a model gets once it is wrapped."""

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> None:
        events.joining.append(join)
        events.making_room.append(admit)


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: Config | Mapping[str, Any] | str | os.PathLike | None,
) -> Any:
    """Gives a wrapped ``model`` more optimizers. What others of it step as well, the new ones step
    from then on, with moments of their own; its gradients stay.

    Returns what stands for ``optimizer``, in its form. Raises ConfigError for parameters that are
    another model's or in two of ``optimizer``, and for other settings in ``config``; UsageError or
    CapacityError as ``add_param_group`` does, and where arrays are shared with a parameter that
    another optimizer keeps.
    """
    engine, record = engine_of(model), wrapped(model)
    job, plain = engine.job, as_given(optimizer)
    _check_config(config, job.config)
    for each in plain:
        check_kind(each)
    optimizers = Optimizers(plain, lambda param: handle_of(param) is not None)
    handles = [managed(param) for each in optimizers for param in moved_by(each)]
    for handle in handles:
        if handle.engine.uses is not job.uses:
            raise ConfigError(f"{ASKED}: {handle.name} is of another wrapped model")
    names: dict[torch.Tensor, list[str]] = {handle.param: handle.names for handle in handles}
    before = _optimizer_indices(job, ())
    check_together(plain, names, job.config)
    check_count(len(optimizers) + len(_optimizer_indices(job, handles)), job.config)
    indices = enumerate(optimizers, start=record.count)
    stepping = [_admit(engine, job, record, each, index) for index, each in indices]
    record.add(stepping, optimizers.plain, before - _optimizer_indices(job, ()))
    return like_given(optimizers.results(stepping), optimizer)


def _optimizer_indices(job: Job, without: Sequence[ParamHandle]) -> set[int]:
    """Returns the indices of the optimizers that step parameters, ``without`` some of these."""
    left_out = set(without)
    return {h.flat_param.spec.optimizer for h in job.trained if h not in left_out}


def _admit(
    engine: Engine, job: Job, record: Wrapped, given: Recognised, optimizer_index: int
) -> InfinityOptimizer:
    """Takes over one optimizer: its parameters get memory for gradients and state."""
    params, known = moved_by(given), given.known

    def moments_of(flat_param: FlatParam) -> dict[str, torch.dtype]:
        dtypes = {known.dtype_at_wrap(each) for each in flat_param.params} - {None}
        by_class = "fp32" if "fp32" in dtypes else next(iter(dtypes), None)
        return known.arrays_of(given.moments, job.config, by_class)

    def release() -> None:
        for each in record.optimizers:
            each.state.give_up(params)
        job.borrowed.forget()

    with job.uses.operation(Operation.ADD_PARAM_GROUP):
        engine.admit(
            params,
            optimizer_index=optimizer_index,
            moments_of=moments_of,
            needs=known.needs,
            then=release,
            asked=ASKED,
            takes=True,
        )
        for param in params:
            handle, state = managed(param), given.optimizer.state.get(param, {})
            for name, array in given.moments.items():
                if state.get(name) is not None:
                    handle.flat_param.write_moment(
                        job.store, array, handle.index, state[name], version=job.steps.index
                    )
    return make_optimizer(engine, given, optimizer_index)


def _check_config(config: Any, ours: Config) -> None:
    """Raises ConfigError for settings that the model was not wrapped with."""
    made, default = Config.make(config if config is not None else {}), Config()
    for field in dataclasses.fields(Config):
        value = getattr(made, field.name)
        if value not in (getattr(default, field.name), getattr(ours, field.name)):
            raise ConfigError(
                f"{ASKED}: {field.name}={value!r}, but this model was wrapped with"
                f" {getattr(ours, field.name)!r}. Leave the configuration out."
            )
