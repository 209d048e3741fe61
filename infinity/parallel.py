"""Parallel: shards models over the axes of a DeviceMesh, by torch's own DTensor.

model = infinity.parallel.tensor_parallel(model, mesh["tp"])
model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ext.dtensor.plans import find_plan
    from .ext.dtensor.tensors import tensor_parallel
    from .ext.experts_parallel.experts import expert_parallel
    from .ext.pipeline.costs import measure_costs
    from .ext.pipeline.pipelines import Pipeline, pipeline
    from .ext.pipeline.schedules import attach
    from .ext.restarts.restarts import init_process_group
    from .ext.sequence.sequence_parts import sequence_parallel
    from .ext.versions_2bw.continuous import WithoutFlush, without_flush

__all__ = [
    "Pipeline",
    "WithoutFlush",
    "attach",
    "expert_parallel",
    "find_plan",
    "init_process_group",
    "measure_costs",
    "pipeline",
    "sequence_parallel",
    "tensor_parallel",
    "without_flush",
]

_HOMES = {
    "Pipeline": "ext.pipeline.pipelines",
    "attach": "ext.pipeline.schedules",
    "expert_parallel": "ext.experts_parallel.experts",
    "measure_costs": "ext.pipeline.costs",
    "pipeline": "ext.pipeline.pipelines",
    "find_plan": "ext.dtensor.plans",
    "init_process_group": "ext.restarts.restarts",
    "sequence_parallel": "ext.sequence.sequence_parts",
    "tensor_parallel": "ext.dtensor.tensors",
    "WithoutFlush": "ext.versions_2bw.continuous",
    "without_flush": "ext.versions_2bw.continuous",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __package__), name)
    globals()[name] = value
    return value
