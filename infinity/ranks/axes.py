"""Axes: reads from a DeviceMesh which ranks are one job, and what they are to each other.

The names are listed in :mod:`.mesh`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError

# Only one of the first three may be larger than 1
SHARD_AXES = ("dp", "dp_shard", "fsdp", "cp", "sp")
SEQUENCE_AXES = ("cp", "sp")
DATA_AXES = ("dp_replicate", *SHARD_AXES)
OTHER_AXES = ("pp", "tp", "ep")  # only one of the last two may be larger than 1


def members_of(mesh: Any) -> list[int]:
    """Returns the global ranks of the job, ascending: all, unless ``mesh`` is a slice of a mesh of
    all ranks whose other axes are unknown here. Then the other slices are jobs of their own."""
    everyone = list(range(dist.get_world_size()))
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        return everyone
    root, members = mesh._get_root_mesh(), sorted(mesh.mesh.flatten().tolist())
    left_out = {*(root.mesh_dim_names or ())} - {*(mesh.mesh_dim_names or ())}
    is_whole = sorted(root.mesh.flatten().tolist()) == everyone
    is_slice = is_whole and left_out and not left_out & {*DATA_AXES, *OTHER_AXES}
    return members if is_slice else everyone


def rank_rows(mesh: Any, *, divides_experts: bool = False) -> torch.Tensor:
    """Returns the global ranks, [stages, parts, replicas, shards]: a stage is a coordinate of the
    pp axis, a part one of tp, or of ep unless experts are divided. Raises ConfigError naming the
    axes that do not fit."""
    members = members_of(mesh)
    if mesh is None:
        return torch.tensor(members).reshape(1, 1, 1, -1)
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise ConfigError(
            f"mesh is a {type(mesh).__name__}: give a torch.distributed.device_mesh.DeviceMesh, or"
            " None"
        )
    names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ())
    if mesh.ndim == 1 and names[0] not in (*DATA_AXES, *OTHER_AXES):
        names = ("dp",)
    sizes = dict(zip(names, mesh.mesh.shape))
    axes = (
        ", ".join(f"{name}={size}" for name, size in sizes.items())
        or f"{mesh.ndim} axes without names"
    )
    unknown = [name for name in sizes if name not in (*DATA_AXES, *OTHER_AXES)]
    if unknown or len(sizes) != mesh.ndim:
        raise ConfigError(
            f"mesh: axes must be named {', '.join((*DATA_AXES, *OTHER_AXES))}; this one has {axes}"
        )
    _check_axes(sizes, axes, divides_experts)
    if sorted(mesh.mesh.flatten().tolist()) != members:
        raise ConfigError(
            f"mesh: {axes} makes {mesh.mesh.numel()} ranks, but the job has {len(members)}"
        )
    others = [name for name in OTHER_AXES if name != "ep" or not divides_experts]
    outer = [names.index(name) for name in (*others, "dp_replicate") if name in sizes]
    order = outer + [i for i in range(mesh.ndim) if i not in outer]
    # Ascending, because torch sorts the ranks of a group.
    parts = sizes.get("tp", 1) * (1 if divides_experts else sizes.get("ep", 1))
    shape = (sizes.get("pp", 1), parts, sizes.get("dp_replicate", 1), -1)
    return mesh.mesh.permute(order).reshape(shape).sort(-1).values


def _check_axes(sizes: dict[str, int], axes: str, divides_experts: bool) -> None:
    """Raises ConfigError for axes that cannot stand beside each other."""
    if sizes.get("dp", 1) > 1 and sizes.keys() & {"dp_replicate", "dp_shard", "fsdp"}:
        raise ConfigError(
            "mesh: dp is the same as dp_replicate x dp_shard, so it cannot stand beside them; this"
            f" one has {axes}"
        )
    if sizes.get("dp_shard", 1) > 1 and sizes.get("fsdp", 1) > 1:
        raise ConfigError(f"mesh: fsdp is another name of dp_shard; this one has {axes}")
    if sizes.get("tp", 1) > 1 and sizes.get("ep", 1) > 1 and divides_experts:
        raise ConfigError(
            "mesh: experts whose tokens travel beside tensor parallelism are not available in this"
            f" version; this one has {axes}. Give ep the ranks of tp, or let the ranks of tp share"
            " a batch and its experts: expert_parallel(model, mesh['tp'], cut_rest=True)."
        )
    if sizes.get("tp", 1) > 1 and sizes.get("ep", 1) > 1:
        raise ConfigError(
            "mesh: the ranks that share a batch hold other experts too, so there is one axis for"
            f" both; this one has {axes}. Give it as tp, and cut the model with"
            " infinity.parallel.expert_parallel(model, mesh['tp'], cut_rest=True)."
        )
