"""Replicas: DistributedDataParallel and DataParallel that only pass calls on, for the engine
averages the gradients over the ranks."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.units.forms import is_plain
from ...core.units.handle import handle_of
from ...errors import ConfigError, UsageError

NOT_PASSED_ON = ("register_comm_hook", "join")  # methods of DistributedDataParallel


def replicas_of(root: nn.Module) -> Any:
    """Returns the mesh in which every rank has all of ``root``; None for one rank, or for
    parameters that are divided already."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    params = list(root.parameters())
    if not all(is_plain(param) for param in params):
        return None
    kind = "cpu" if dist.get_backend() == "gloo" else params[0].device.type
    names = ("dp_replicate", "dp_shard")
    return dist.init_device_mesh(kind, (dist.get_world_size(), 1), mesh_dim_names=names)


def refuse_sharded(root: nn.Module) -> None:
    """Raises ConfigError if FSDP has divided parameters of ``root``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    kinds = fsdp.FullyShardedDataParallel, fsdp.FSDPModule
    if any(isinstance(each, kinds) for each in root.modules()):
        raise ConfigError(
            f"FSDP has divided the parameters of {type(root).__name__}: run the script without it."
            " With DistributedDataParallel, or none, `infinity run --shard parameters` gives each"
            " rank its shard."
        )


def pass_on(replace: Callable[[type, str, Callable[..., Any]], None]) -> None:
    """Replaces methods by ``replace(owner, name, make)``, which calls ``make`` with the own one."""
    ddp = nn.parallel.DistributedDataParallel
    replace(ddp, "__init__", _init)
    replace(ddp, "forward", lambda own: _forward)
    replace(ddp, "no_sync", lambda own: _no_sync)
    for name in NOT_PASSED_ON:
        replace(ddp, name, _refused)
    replace(nn.DataParallel, "forward", lambda own: _of_all_devices)


def _init(own: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(own)

    def __init__(replica: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(replica, *args, **kwargs)
        bound.apply_defaults()
        group = bound.arguments.get("process_group")
        if bound.arguments.get("device_mesh") is not None or (
            group is not None and group is not dist.group.WORLD
        ):
            raise ConfigError(
                "DistributedDataParallel has a process_group or device_mesh of its own: infinity"
                " run averages gradients over all ranks. Leave it out, or call infinity.wrap_model"
                " with a mesh."
            )
        nn.Module.__init__(replica)
        replica.module = bound.arguments["module"]
        replica.device_ids = bound.arguments.get("device_ids")
        replica.broadcast_buffers = bound.arguments.get("broadcast_buffers", True)
        # Scripts switch it; each backward is averaged, so that the sum is the same
        replica.require_backward_grad_sync = True
        _share(replica.module.state_dict(keep_vars=True).values())

    return __init__


def _share(tensors: Any) -> None:
    """Sends the first rank's values to all."""
    with torch.no_grad():
        for each in tensors:
            if torch.is_tensor(each) and handle_of(each) is None:
                dist.broadcast(each.detach(), 0)


def _forward(replica: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        trained = next((each for each in replica.parameters() if each.requires_grad), None)
        if trained is not None and handle_of(trained) is None:
            raise UsageError(
                f"a forward with gradients of {type(replica.module).__name__}, before an optimizer"
                " of torch.optim has its parameters: no gradient would be averaged over the ranks."
                " Make the optimizer first, or run it under torch.no_grad()."
            )
    if replica.broadcast_buffers:
        _share(replica.module.buffers())
    return replica.module(*args, **kwargs)


@contextlib.contextmanager
def _no_sync(replica: Any) -> Iterator[None]:
    """Does nothing: each backward is averaged, and the sum of averages is the average."""
    yield


def _refused(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(replica: Any, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"DistributedDataParallel.{own.__name__}() under infinity run: the engine averages the"
            " gradients itself, in a way of its own. Leave the call out."
        )

    return call


def _of_all_devices(replica: nn.DataParallel, *args: Any, **kwargs: Any) -> Any:
    """Runs the whole batch on one device: a rank has one."""
    return replica.module(*args, **kwargs)
