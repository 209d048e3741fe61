"""DTensors: reads and replaces the local part of a parameter that tensor parallelism has sharded
over a DeviceMesh.

A distributed parameter stays the DTensor that its owner made. Arrays, homes and kernels see its
local part only; the rest is on other ranks.

local part   the elements of a distributed parameter that this rank computes with
placement    how one axis of the mesh divides the global tensor: Shard, or Replicate
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...core.units.forms import Division, Form
from ...errors import ConfigError, UsageError
from .stored import DTensor, StoredDTensor


class MeshDivision(Division):
    """The division of a DTensor over its mesh."""

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        """The ranks of the mesh."""
        return tuple(self._tensor.device_mesh.mesh.flatten().tolist())

    @property
    def mesh(self) -> Any:  # type: ignore[override]
        """The root of the tensor's mesh, if that has names."""
        mesh = self._tensor.device_mesh
        root = getattr(mesh, "_get_root_mesh", lambda: None)()
        return root if root is not None and root.mesh_dim_names else mesh

    @property
    def is_common(self) -> bool:  # type: ignore[override]
        """Whether all placements are Replicate."""
        return all(isinstance(placement, Replicate) for placement in self._tensor.placements)

    @property
    def copy(self) -> int:  # type: ignore[override]
        """0 for the first of the mesh's replicas, else another number."""
        coordinate = self._tensor.device_mesh.get_coordinate() or ()
        return sum(
            at
            for at, placement in zip(coordinate, self._tensor.placements)
            if isinstance(placement, Replicate)
        )

    @property
    def told(self) -> str:  # type: ignore[override]
        """The placements, and the shape of the mesh."""
        return f" {self._tensor.placements} over {tuple(self._tensor.device_mesh.shape)}"

    @property
    def span(self) -> int:
        """The elements of the largest local part, by each Shard rounded up."""
        shape = list(self._tensor.shape)
        for size, placement in zip(self._tensor.device_mesh.shape, self._tensor.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] = -(-shape[placement.dim] // size)
        return math.prod(shape)

    @property
    def offset(self) -> tuple[int, ...]:
        """The first element, as torch divides."""
        tensor = self._tensor
        return tuple(
            compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )[1]
        )


class DTensorForm(Form):
    """The form of DTensors: a local part, and the spec of its mesh and placements."""

    classes = DTensor, StoredDTensor
    division = MeshDivision

    def __init__(self) -> None:
        let_scalers_mix()

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ConfigError for a buffer, and for a parameter with a placement other than Shard or
        Replicate."""
        if not isinstance(tensor, torch.nn.Parameter):
            raise ConfigError(
                f"buffer {name} is a DTensor: buffers have to be whole on every rank; take"
                " buffer.full_tensor()"
            )
        for placement in tensor.placements:  # type: ignore[attr-defined]
            if type(placement) is not Shard and type(placement) is not Replicate:
                _refuse_placement(name, tensor, placement)

    def moves(self, tensor: torch.Tensor) -> bool:
        """Tells whether ``tensor`` is a Parameter that is exactly a DTensor over a plain local
        tensor."""
        return (
            type(tensor) is DTensor
            and isinstance(tensor, torch.nn.Parameter)
            and type(tensor._local_tensor) is torch.Tensor
        )

    def local(self, tensor: Any) -> torch.Tensor:
        """Returns the local tensor itself, not a view for autograd."""
        return tensor._local_tensor

    def spec(self, tensor: Any) -> Any:
        """Returns mesh, placements, and the shape, strides and dtype of the whole."""
        return tensor._spec

    def build(self, spec: Any, local: torch.Tensor) -> torch.Tensor:
        """Makes a DTensor, which requires no gradient."""
        lies = spec.tensor_meta
        if lies.dtype != local.dtype:
            meta = TensorMeta(lies.shape, lies.stride, local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, meta)
        # Not DTensor.from_local, which makes a view of a possible proxy.
        return DTensor(local, spec, requires_grad=False)

    def show(self, param: Any, view: torch.Tensor) -> None:
        """Makes the local tensor a view with its own version counter, as the setter of a plain
        parameter's data does."""
        param._local_tensor = view.data

    def part(self, param: Any, value: torch.Tensor, what: str) -> torch.Tensor:
        """Cuts a whole value; redistributes a DTensor of other placements, which is a collective
        over its mesh. Raises UsageError for a value of another mesh or shape."""
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
            raise UsageError(
                f"{what}: a DTensor on {value.device_mesh} for one on {param.device_mesh}"
            )
        if value.placements != param.placements:
            value = value.redistribute(placements=param.placements)
        return value._local_tensor

    def whole(self, tensor: Any) -> torch.Tensor:
        """Gathers the global tensor. Every rank of its mesh calls this."""
        return tensor.full_tensor()


def _refuse_placement(name: str, param: Any, placement: Any) -> None:
    kind = type(placement).__name__.lstrip("_")
    remedy = (
        "reduce it first: param.redistribute(placements=[Replicate()])"
        if isinstance(placement, Partial)
        else (
            "of fully_shard's, give wrap_model the model before it, for the engine shards over the"
            " data ranks itself; of a plan that cuts packed weights in stripes (packed_colwise),"
            " cut the model by infinity.parallel.expert_parallel(model, mesh, cut_rest=True)"
        )
    )
    raise ConfigError(
        f"parameter {name} is a DTensor with placement {kind} on {param.device_mesh}: only"
        f" Shard and Replicate can be trained here; {remedy}."
    )


def let_scalers_mix() -> None:
    """Makes torch's GradScaler accept a mix of DTensor and plain gradients. Idempotent."""
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
    values = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    values += [argument for each in values if isinstance(each, partial) for argument in each.args]
    for each in values:
        # torch's hooks hold the layouts, or the style that has them.
        layouts = getattr(each, "input_layouts", each)
        if isinstance(layouts, (tuple, list)) and any(
            isinstance(layout, (Shard, Replicate)) for layout in layouts
        ):
            return tuple(layouts)
    return None
