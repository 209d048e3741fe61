"""Parallel: cuts models over the axes of a DeviceMesh, by torch's own DTensor.

model = infinity.parallel.tensor_parallel(model, mesh["tp"])
model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .costs import measure_costs
    from .expert_parallel import expert_parallel
    from .pipeline import Pipeline, pipeline
    from .plans import find_plan
    from .schedules import attach
    from .tensor_parallel import tensor_parallel

__all__ = ["Pipeline", "attach", "expert_parallel", "find_plan", "measure_costs", "pipeline", "tensor_parallel"]

_HOMES = {
    "Pipeline": "pipeline",
    "attach": "schedules",
    "expert_parallel": "expert_parallel",
    "measure_costs": "costs",
    "pipeline": "pipeline",
    "find_plan": "plans",
    "tensor_parallel": "tensor_parallel",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # also over the submodule of the same name
    return value
