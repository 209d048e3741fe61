"""Chosen forward: runs the forward of experts, or of an embedding, with the rows that it reads.

Only while that forward runs are their parameters ordinary ones. At other times they are at rest,
also while the unit is held, so that hooks and forwards around it find all rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from ...core.run.job import Job
from ...core.run.replaced_forward import ReplacedForward
from ...core.run.scoped_call import UNCOMPILED
from ...core.seams import Events, Extension
from ...core.units.unit import ParamUnit
from .experts import OWN_FORWARD, exchanges_of


class ChosenForwards(Extension):
    """The forwards of one model's modules whose units bring rows."""

    may_stand_aside = True

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> ChosenForwards:
        return cls()

    def replace_forwards(
        self, job: Job, model: Any, find: Any, blocks: Any
    ) -> list[ReplacedForward]:
        choices = ((unit, unit.arrival.rows) for unit in job.units)
        return [
            replaced
            for unit, experts in choices
            if experts is not None
            for replaced in _replaced(job, experts.module, unit)
        ]


def _replaced(job: Job, module: nn.Module, unit: ParamUnit) -> list[ReplacedForward]:
    """Replaces the forward of ``module`` and, if an exchange of tokens comes first, that of its
    class, which the exchange calls."""
    inner = [(each, _of_class(job, module, unit), OWN_FORWARD) for each in exchanges_of(module)]
    replaced = ((module, _forward_of(job, module, unit), "forward"), *inner)
    return [ReplacedForward(*each) for each in replaced]


def _forward_of(job: Job, module: nn.Module, unit: ParamUnit) -> Callable[..., Any]:
    me = weakref.ref(module)  # which refers to its forward
    around = module.__dict__.get("forward")  # the class's, with an exchange of tokens

    def forward(*args: Any, **kwargs: Any) -> Any:
        module, experts = me(), unit.arrival.rows
        own = partial(type(module).forward, module) if around is None else around
        if experts is None or not job.prefetcher.is_held(unit):
            # A call past the hooks: each use of a parameter brings all rows.
            return own(*args, **kwargs)
        experts.want_for(module, args, kwargs)
        job.prefetcher.complete(unit)
        unit.exposure.show()
        try:
            with experts.reading(experts.there):
                return own(*args, **kwargs)
        finally:
            unit.exposure.end()

    if around is not None:
        update_wrapper(forward, around)  # by which the exchange is found
    return torch.compiler.disable(forward, reason=UNCOMPILED)


def _of_class(job: Job, module: nn.Module, unit: ParamUnit) -> Callable[..., Any]:
    me = weakref.ref(module)  # which refers to what brings its tokens

    def experts_forward(*args: Any, **kwargs: Any) -> Any:
        module, experts = me(), unit.arrival.rows
        if experts is not None and job.prefetcher.is_held(unit):
            experts.want_arrived(module, args, kwargs)
            job.prefetcher.complete(unit)
        return type(module).forward(module, *args, **kwargs)

    return experts_forward
