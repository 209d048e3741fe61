"""Jobs of ranks that assign tensors to ``p.grad`` (see `ranks`)."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
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


def hooked(shard: str) -> dict[str, list[str]]:
    """Names of what differs from DistributedDataParallel after steps with hooks that scale, clip or
    replace accumulated gradients, and of what differs between a pass for each backward and one."""
    told, by_pass = [], {}
    for number, change in enumerate((_scaled, _clipped, _replaced)):
        for in_one_pass in (False, True):
            # With ZeRO-1 gradients are averaged after the last backward, in a pass or not.
            waits = in_one_pass or shard == "optimizer"
            plain = _with_hooks(change, None, waits=waits, before=False)
            ours = _with_hooks(change, shard, waits=in_one_pass, before=bool(number % 2))
            told += models.differing(plain, ours)
            by_pass[in_one_pass] = ours
    return {"different": told, "by pass": models.differing(by_pass[False], by_pass[True])}


def _scaled(param: torch.Tensor) -> None:
    param.grad.mul_(0.5)


def _clipped(param: torch.Tensor) -> None:
    torch.nn.utils.clip_grad_norm_([param], 0.01)


def _replaced(param: torch.Tensor) -> None:
    param.grad = param.grad.clamp(-0.02, 0.02)


def _with_hooks(
    change: Any, shard: str | None, *, waits: bool, before: bool
) -> dict[str, torch.Tensor]:
    """Weights, and the gradients that the hooks had. ``shard``: None is DistributedDataParallel;
    ``waits``: one pass for a step; ``before``: hooked before the wrap."""
    torch.manual_seed(3)
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), {}

    def note_and_change(param: torch.Tensor) -> None:
        seen[f"gradient {len(seen)}"] = param.grad.detach().clone()
        change(param)

    def hook() -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(note_and_change)

    if before:
        hook()
    if shard is None:
        trained = nn.parallel.DistributedDataParallel(model)
        one_pass = trained.no_sync if waits else nullcontext
    else:
        config = {"params": "host", "optimizer": "host", "shard": shard}
        trained, optimizer = infinity.wrap_model(model, optimizer, config)
        one_pass = partial(infinity.accumulate, trained) if waits else nullcontext
    if not before:
        hook()
    for step, count in enumerate((1, 3)):
        inputs = [
            torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + 2 * k + rank))
            for k in range(count)
        ]
        with one_pass():
            for each in inputs[: -1 if shard is None else None]:
                trained(each).square().sum().backward()
        if shard is None:  # the last backward after no_sync averages
            trained(inputs[-1]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name.removeprefix("module."): v for name, v in trained.state_dict().items()}
    found = cloned(weights) | seen
    if shard is not None:
        infinity.unwrap_model(trained, optimizer)
    return found
