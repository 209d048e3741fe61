"""Jobs of ranks that assign tensors to ``p.grad`` (see `ranks`)."""

from __future__ import annotations

from typing import Any

import models
import torch
import torch.distributed as dist
from rank_jobs import adamw, batch, build, cloned
from torch import nn

import infinity


def assigned(shard: str) -> dict[str, Any]:
    """Tensors that are assigned to ``p.grad`` and changed later: by a flat buffer, and after the
    gradient has parted from one."""
    config = {"params": "host", "optimizer": "host", "shard": shard}
    weights, said = [], []
    for flat_buffer in (True, False):
        model = build()
        model, optimizer = infinity.wrap_model(model, adamw(model), config)
        params = list(model.parameters())
        for step in range(2):
            models.loss_of(model, batch(step, 0, dist.get_rank())).backward()
            if flat_buffer:
                flat = torch.cat([param.grad.reshape(-1) for param in params])
                for param, view in zip(params, flat.split([param.numel() for param in params])):
                    param.grad = view.view(param.shape)
                flat.clamp_(-1e-3, 1e-3)
            else:
                torch.nn.utils.clip_grad_value_(params, 1e-3)
            torch.nn.utils.clip_grad_norm_(params, 1e-2)
            optimizer.step()
            optimizer.zero_grad()
        # Zeroed and left behind by a backward, which is no change of the buffer's user.
        models.loss_of(model, batch(2, 0, dist.get_rank())).backward()
        if flat_buffer:
            flat = torch.zeros_like(flat)
            for param, view in zip(params, flat.split([param.numel() for param in params])):
                param.grad = view.view(param.shape)
        optimizer.zero_grad(set_to_none=False)
        models.loss_of(model, batch(2, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(cloned(model.state_dict()))
        if flat_buffer:
            for parts in ("a backward", "a change", "a step"):
                said.append(_changed_after(parts, model, optimizer))
            said += _given_to_two(model, optimizer)
        infinity.unwrap_model(model, optimizer)
    return {"different": models.differing(*weights), "said": said}


def _changed_after(parts: str, model: nn.Module, optimizer: Any) -> str:
    """What the engine says to an assigned tensor that is changed after the gradient has parted from
    it."""
    param = model.norm.weight
    param.grad = tensor = torch.ones(param.shape)
    try:
        if parts == "a backward":
            models.loss_of(model, batch(0, 0, dist.get_rank())).backward()
        elif parts == "a change":
            param.grad.mul_(2)
        else:
            optimizer.step()
        tensor.zero_()
        if parts == "a step":
            param.grad.clone()
        else:
            optimizer.step()
        return "nothing"
    except infinity.UsageError as error:
        return str(error)
    finally:
        optimizer.zero_grad()


def _given_to_two(model: nn.Module, optimizer: Any) -> list[str]:
    """What the engine says to a tensor, and to a gradient, that becomes two parameters' gradient.
    Copies are taken."""
    first, second = model.blocks[0].norm1.weight, model.blocks[1].norm1.weight
    said = []
    first.grad = tensor = torch.ones(first.shape)
    second.grad = tensor.clone()
    for given in (tensor, first.grad):
        try:
            second.grad = given
            said.append("nothing")
        except infinity.UsageError as error:
            said.append(
                f"assigned twice: {error}" if "gradient.clone()" in str(error) else str(error)
            )
    first.grad.mul_(2)
    if not torch.equal(second.grad.clone(), tensor):
        said.append("a copy followed")
    optimizer.zero_grad()
    return said
