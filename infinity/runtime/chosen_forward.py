"""Chosen forward: runs the forward of experts, or of an embedding, with the rows that it reads.

Only while that forward runs are their parameters ordinary ones. At other times they are at rest,
also while the unit is held, so that hooks and forwards around it find all rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..forwards.replaced_forward import ReplacedForward
from ..state.unit import ParamUnit
from .job import Job
from .scoped_call import UNCOMPILED


def install_chosen_forwards(
    job: Job, modules: Iterable[tuple[nn.Module, ParamUnit]]
) -> list[ReplacedForward]:
    """Replaces the forwards of ``modules`` whose units bring rows. Returns their removers."""
    return [
        ReplacedForward(module, _forward_of(job, module, unit))
        for module, unit in modules
        if unit.arrival.experts is not None
    ]


def _forward_of(job: Job, module: nn.Module, unit: ParamUnit) -> Callable[..., Any]:
    me = weakref.ref(module)  # which refers to its forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        module, experts = me(), unit.arrival.experts
        of_class = type(module).forward
        if experts is None or not job.prefetcher.is_held(unit):
            # A call past the hooks: each use of a parameter brings all rows.
            return of_class(module, *args, **kwargs)
        experts.want_chosen(module, args, kwargs)
        unit.complete(job.store)
        unit.exposure.show()
        try:
            return of_class(module, *args, **kwargs)
        finally:
            unit.exposure.end()

    return torch.compiler.disable(forward, reason=UNCOMPILED)
