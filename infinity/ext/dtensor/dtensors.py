"""DTensors: reads and replaces the local part of a parameter that tensor parallelism has sharded
over a DeviceMesh.

A distributed parameter stays the DTensor that its owner made. Arrays, homes and kernels see its
local part only; the rest is on other ranks.

local part   the elements of a distributed parameter that this rank computes with
placement    how one axis of the mesh divides the global tensor: Shard, or Replicate
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError:  # a build of torch without torch.distributed

    class DTensor:  # type: ignore[no-redef]
        """Replaces a class that this build lacks; it has no instances."""

    Partial = Replicate = Shard = distribute_tensor = DTensorSpec = TensorMeta = (
        compute_local_shape_and_global_offset
    ) = None

from ...errors import ConfigError, UsageError


def is_distributed(tensor: Any) -> bool:
    """Tells whether ``tensor`` is a DTensor."""
    return isinstance(tensor, DTensor)


def ranks_over(tensor: torch.Tensor) -> list[int]:
    """Lists the ranks over which ``tensor`` is distributed; none for a plain one."""
    return tensor.device_mesh.mesh.flatten().tolist() if isinstance(tensor, DTensor) else []


def is_distributed_parameter(tensor: Any) -> bool:
    """Tells whether ``tensor`` is a Parameter that is exactly a DTensor over a plain local
    tensor."""
    return (
        type(tensor) is DTensor
        and isinstance(tensor, torch.nn.Parameter)
        and type(tensor._local_tensor) is torch.Tensor
    )


def check_placements(name: str, param: torch.Tensor) -> None:
    """Raises ConfigError for a distributed parameter with a placement other than Shard or
    Replicate."""
    if not is_distributed(param):
        return
    for placement in param.placements:
        if type(placement) is not Shard and type(placement) is not Replicate:
            kind = type(placement).__name__.lstrip("_")
            remedy = (
                "reduce it first: param.redistribute(placements=[Replicate()])"
                if isinstance(placement, Partial)
                else (
                    "of fully_shard's, give wrap_model the model before it, for the engine shards"
                    " over the data ranks itself; of a plan that cuts packed weights in stripes"
                    " (packed_colwise), cut the model by infinity.parallel.expert_parallel(model,"
                    " mesh, cut_rest=True)"
                )
            )
            raise ConfigError(
                f"parameter {name} is a DTensor with placement {kind} on {param.device_mesh}: only"
                f" Shard and Replicate can be trained here; {remedy}."
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local part of a DTensor, and any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns ``local`` as a DTensor with the placements of distributed ``param``; itself for a
    plain one."""
    if not isinstance(param, DTensor):
        return local
    lies = param._spec.tensor_meta
    # Not DTensor.from_local, which makes a view of a possible proxy.
    spec = DTensorSpec(
        param.device_mesh, param.placements, TensorMeta(lies.shape, lies.stride, local.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


def global_of(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Gathers the global tensor of which ``local`` is this rank's part. Every rank of ``param``'s
    mesh calls this. Returns ``local`` itself for a plain ``param``."""
    value = like(param, local)
    return value.full_tensor() if isinstance(value, DTensor) else value


def over(spec: Any, local: torch.Tensor) -> torch.Tensor:
    """Returns the DTensor of ``local`` with ``spec`` from :func:`spec_of`; ``local`` itself if that
    is None."""
    return local if spec is None else DTensor(local, spec, requires_grad=False)


def spec_of(tensor: torch.Tensor) -> Any:
    """Returns the spec that makes a local part a DTensor again; None for a plain tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None


PLAIN = "_infinity_plain"  # attribute of a class at rest: the class of the user's library


def plain_class(param: torch.Tensor) -> type:
    """Returns the class of ``param`` when it is not managed."""
    if isinstance(param, DTensor):
        return DTensor
    return getattr(type(param), PLAIN, torch.nn.Parameter)


def set_bytes(param: torch.Tensor, view: torch.Tensor) -> None:
    """Makes ``param``, or its local part, a view of ``view``'s memory."""
    if isinstance(param, DTensor):
        # With its own version counter, as the setter of a plain parameter does.
        param._local_tensor = view.data
    else:
        param.data = view


def part_of(param: torch.Tensor, value: torch.Tensor, what: str) -> torch.Tensor:
    """Returns the local part of ``value``, a tensor of ``param``'s global shape with any
    placements, sharded or gathered as ``param`` is.

    A collective over ``param``'s mesh if the placements differ. Raises UsageError for a value of
    another mesh or shape.
    """
    if not isinstance(param, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        if value.shape != param.shape:
            raise UsageError(
                f"{what}: a tensor of shape {tuple(value.shape)} for a distributed one of"
                f" {tuple(param.shape)}"
            )
        return distribute_tensor(
            value.to(param.device), param.device_mesh, param.placements, src_data_rank=None
        )._local_tensor
    if value.device_mesh != param.device_mesh:
        raise UsageError(f"{what}: a DTensor on {value.device_mesh} for one on {param.device_mesh}")
    if value.placements != param.placements:
        value = value.redistribute(placements=param.placements)
    return value._local_tensor


def counts_here(param: torch.Tensor) -> bool:
    """Tells whether this rank's copy of ``param`` is counted: the first one of the mesh's
    replicas."""
    if not isinstance(param, DTensor):
        return True
    coordinate = param.device_mesh.get_coordinate() or ()
    return all(
        at == 0
        for at, placement in zip(coordinate, param.placements)
        if isinstance(placement, Replicate)
    )


def empty_parameter_like(param: torch.Tensor) -> torch.nn.Parameter:
    """Makes a distributed parameter like ``param``, which is on meta, with a local part without
    storage."""
    local = torch.empty_like(param._local_tensor, device="cpu")
    local.untyped_storage().resize_(0)
    return torch.nn.Parameter(
        DTensor(local, param._spec, requires_grad=False), requires_grad=param.requires_grad
    )


def span_of(param: torch.Tensor) -> int:
    """Counts the elements reserved for ``param``: those of the largest local part on any rank of
    its mesh.

    So all ranks place the same parameters at the same offsets, whatever the remainders of the
    division.
    """
    if not isinstance(param, DTensor):
        return param.numel()
    shape = list(param.shape)
    for size, placement in zip(param.device_mesh.shape, param.placements):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return math.prod(shape)


def part_offset(param: torch.Tensor) -> tuple[int, ...]:
    """Returns the first element of this rank's local part, in every dimension of the global
    tensor."""
    if not isinstance(param, DTensor):
        return (0,) * param.dim()
    return tuple(
        compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)[1]
    )


def let_scalers_mix() -> None:
    """Makes torch's GradScaler accept a mix of DTensor and plain gradients. Idempotent."""
    if DTensorSpec is None:
        return
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    handlers = DTensor._op_dispatcher._custom_op_handlers
    theirs = handlers[op]
    if getattr(theirs, "is_infinity", False):
        return

    def unscale(op_call: Any, args: tuple, kwargs: dict) -> None:
        grads, *others = args
        plain = [grad for grad in grads if not isinstance(grad, DTensor)]
        if plain:
            op_call(plain, *others)
        if len(plain) < len(grads):
            theirs(
                op_call, ([grad for grad in grads if isinstance(grad, DTensor)], *others), kwargs
            )

    unscale.is_infinity = True
    handlers[op] = unscale


def mesh_of_parameters(params: Iterable[torch.Tensor]) -> Any:
    """Returns the whole job's mesh, the root of a distributed parameter's mesh. None without
    any."""
    for param in params:
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            root = getattr(mesh, "_get_root_mesh", lambda: None)()
            return root if root is not None and root.mesh_dim_names else mesh
    return None


def is_common(param: torch.Tensor) -> bool:
    """Tells whether every rank of the mesh has the whole of ``param``."""
    return not isinstance(param, DTensor) or all(
        isinstance(placement, Replicate) for placement in param.placements
    )


def takes_parts(model: torch.nn.Module) -> bool:
    """Tells whether each rank of the mesh gets another part of ``model``'s input (sequence
    parallelism from the first layer on): its first distributed layer takes a Shard."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if (layouts := _layouts_of(hook)) is not None:
                return any(isinstance(layout, Shard) for layout in layouts if layout is not None)
    return False


def _layouts_of(hook: Any) -> tuple | None:
    """Returns the input placements in a hook of torch's distributed layers; None for another
    hook."""
    found = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    found += [argument for each in found if isinstance(each, partial) for argument in each.args]
    for each in found:
        # torch's hooks hold the layouts, or the style that has them.
        layouts = getattr(each, "input_layouts", each)
        if isinstance(layouts, (tuple, list)) and any(
            isinstance(layout, (Shard, Replicate)) for layout in layouts
        ):
            return tuple(layouts)
    return None


def describe_placements(param: torch.Tensor) -> str:
    """Describes the placements of ``param``; empty for a plain one."""
    return (
        f" {param.placements} over {tuple(param.device_mesh.shape)}"
        if isinstance(param, DTensor)
        else ""
    )
