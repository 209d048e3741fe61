"""Content: names everything that a checkpoint holds of a model and its optimizer.

Tensors are stored per parameter, under its name:  ``weight/<name>`` in the dtype the model computes in,
``master/<name>`` (low halves or fp32) where there is one, ``exp_avg/<name>`` and ``exp_avg_sq/<name>``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..optim.optimizer import InfinityOptimizer
from ..runtime.engine import Engine
from ..runtime.registry import engine_of
from ..state.handle import ParamHandle, handle_of
from ..state.shard_spec import ARRAYS
from ..state.unit import ParamUnit

SAVED = [name for name in ARRAYS if name != "grad"]


def flat_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def engine_of_pair(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Engine:
    engine = engine_of(model)
    if optimizer is not None and (not isinstance(optimizer, InfinityOptimizer) or optimizer._engine is not engine):
        raise UsageError("this optimizer is not the one that wrap_model returned with this model")
    return engine


def unit_tensors(engine: Engine, unit: ParamUnit) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Reads the unit's tensors, flat, as far as they are at home here, and the element that each part begins with."""
    tensors, begins = {}, {}
    for handle in unit.handles:
        shard = handle.shard
        for name in SAVED:
            # Elements in the order of their strides: what is read back is what lies at home, whatever the layout.
            if name in shard.arrays and (name in ("weight", "master") or handle.step):
                begin = shard.own_part(name, handle.index)[0] - shard.part(name, handle.index)[0]
                part = shard.read_own_part(engine.store, name, handle.index)
                empty = not shard.layout.placements[handle.index].numel
                if part.numel() or (empty and engine.ranks.rank == 0):
                    tensors[f"{name}/{handle.name}"] = part
                    begins[f"{name}/{handle.name}"] = begin
    return tensors, begins


def describe_parameter(handle: ParamHandle) -> dict[str, Any]:
    spec, place = handle.shard.spec, handle.shard.layout.placements[handle.index]
    return {
        "shape": list(place.shape),
        "stride": list(place.stride),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "master": spec.master.name if spec.stepped else None,
        "moments": str(spec.moment_dtype).removeprefix("torch."),
        "step": handle.step,
    }


def describe_groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]] | None:
    if optimizer is None:
        return None
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [handle_of(param).name for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}


def persistent_buffers(model: nn.Module) -> list[str]:
    names = []
    for path, module in model.named_modules():
        there = (name for name, buffer in module._buffers.items() if buffer is not None)
        kept = [name for name in there if name not in module._non_persistent_buffers_set]
        names += [f"{path}.{name}" if path else name for name in kept]
    return [name for name in names if name in buffers_of(model)]


def unmanaged_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param for name, param in model.named_parameters() if handle_of(param) is None}
