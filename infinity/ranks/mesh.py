"""Mesh: which ranks train together, from a DeviceMesh or the default process group.

dp              the data axis: every rank has another part of the batch and a shard of every array
dp_shard, fsdp  the same, in a job with replicas
cp, sp          data ranks with other parts of the same sequences
dp_replicate    ranks with the same shard; only gradients pass between them
tp              ranks with other local parts of the same tensors, and the same batch. Each has its
                own shard group of data ranks
ep              ranks with other experts of the same layers, and the same batch: like tp. If tokens
                travel to the experts, each has its own batch: then a data axis that divides experts
pp              ranks with other stages of the same model, and the same batch. Each has its own
                shard group, too

A slice of a mesh with an axis of another name is one job of several: groups that train apart.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core.machine import numa
from ..errors import ConfigError, InfinityError
from . import failure_report
from .attempt import Attempt
from .axes import SEQUENCE_AXES, members_of, rank_rows
from .channel import Channel
from .parallel_dims import ExpertGroup, ParallelDims
from .pending import ranks_lost
from .transfer import end_groups, expect_ranks, group_timeout
from .tree import Tree, family_of


def parallel_dims(mesh: Any, *, divides_experts: bool = False) -> ParallelDims:
    """Reads the data ranks from ``mesh`` (None: the default process group, if there is one).
    ``divides_experts``: its ep axis is a data axis.

    Creates process groups, so every rank calls this. Raises ConfigError for a mesh that does not
    fit the job.
    """
    if not dist.is_available() or not dist.is_initialized():
        if mesh is not None:
            raise ConfigError(
                "mesh: torch.distributed is not initialised: call init_process_group first"
            )
        if (world := _launched()) > 1:
            raise ConfigError(
                f"this is rank {os.environ.get('RANK', '?')} of {world} that were launched together"
                " (WORLD_SIZE), but torch.distributed is not initialised, so that each would train"
                " a model of its own. Call torch.distributed.init_process_group() before"
                " wrap_model or, where the ranks are meant to be apart, remove WORLD_SIZE from the"
                " environment."
            )
        return ParallelDims()
    if len(members := members_of(mesh)) == 1:
        rank_rows(mesh, divides_experts=divides_experts)  # raises for a mesh that does not fit
        return ParallelDims(local_size=_local_size() if dist.get_world_size() > 1 else 1)
    process_groups: list[dist.ProcessGroup] = []
    try:
        # Rows: [stages, parts, replicas, shards]
        rows, wrap, divides_experts = _agree_on_rows(mesh, members, divides_experts)
        failure_report.join(
            dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        )
        expect_ranks()
        return _join(mesh, rows, wrap, divides_experts, process_groups)
    except BaseException as error:
        end_groups(process_groups)
        if isinstance(error, RuntimeError) and not isinstance(error, InfinityError):
            raise ranks_lost("wrap_model", error) from error
        raise


def _join(
    mesh: Any,
    rows: torch.Tensor,
    wrap: str,
    divides_experts: bool,
    process_groups: list[dist.ProcessGroup],
) -> ParallelDims:
    """Makes this rank's channels. Appends their groups to ``own_groups``. ``rows``: [stages, parts,
    replicas, shards]."""
    me, local_size = dist.get_rank(), _local_size()
    stage, part, replica, rank = (int(at) for at in (rows == me).nonzero()[0])
    here = rows[stage]
    row, column, others = (
        line.tolist() for line in (here[part, replica], here[part, :, rank], here[:, replica, rank])
    )

    def channel(ranks: list[int], what: str) -> Channel | None:
        return _channel(ranks, f"{what} of wrap {wrap}", process_groups) if len(ranks) > 1 else None

    # Each rank makes only its own groups: no collective of the whole job for each.
    shard_group = None
    if len(row) > 1:
        # Two groups over the same ranks: reductions do not wait behind gathers.
        reductions = gloo_group(row, f"reductions of wrap {wrap}")
        shard_group = _channel(row, f"gathers of wrap {wrap}", process_groups, reductions)
        process_groups.append(reductions)
    replicate_group = channel(column, "replicas")
    is_grid = shard_group is not None and replicate_group is not None
    grid_group = channel(sorted(here[part].flatten().tolist()) if is_grid else [], "data")
    tp_group = channel(others, "parts")
    cp_group = channel(_sequence_of(mesh), "sequences")
    pp_group = channel(rows[:, part, replica, rank].tolist(), "stages")
    expert_group = _expert_group(mesh, row, wrap, process_groups) if divides_experts else None
    allowed = numa.bind(int(os.environ.get("LOCAL_RANK", 0)), local_size)
    return ParallelDims(
        wrap=wrap,
        rank=rank,
        size=len(row),
        local_size=local_size,
        shard_group=shard_group,
        replicate_group=replicate_group,
        grid_group=grid_group,
        tp_group=tp_group,
        cp_group=cp_group,
        pp_group=pp_group,
        expert_group=expert_group,
        allowed_processors=frozenset(allowed) if allowed is not None else None,
        process_groups=process_groups,
    )


def _line(mesh: Any, axis: int) -> list[int]:
    """Lists the ranks along an axis of ``mesh``, through this one."""
    lines = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.mesh.size(axis)).tolist()
    return next(line for line in lines if dist.get_rank() in line)


def _sequence_of(mesh: Any) -> list[int]:
    """Lists the ranks with other parts of this rank's sequences; empty if there are none."""
    for axis, name in enumerate((mesh.mesh_dim_names or ()) if mesh is not None else ()):
        if name in SEQUENCE_AXES and mesh.mesh.size(axis) > 1:
            return sorted(_line(mesh, axis))
    return []


def expert_groups(mesh: Any, row: Sequence[int]) -> list[list[int]]:
    """Splits a shard group (ascending ranks) by equal experts: by the coordinate of the ep axis."""
    axis = (
        mesh.mesh_dim_names.index("ep")
        if mesh is not None and "ep" in (mesh.mesh_dim_names or ())
        else None
    )
    if axis is None:
        return [list(row)]
    coordinates = {
        int(rank): at for at, layer in enumerate(mesh.mesh.unbind(axis)) for rank in layer.flatten()
    }
    return [[rank for rank in row if coordinates[rank] == at] for at in range(mesh.mesh.size(axis))]


def _expert_group(
    mesh: Any, row: list[int], wrap: str, process_groups: list[dist.ProcessGroup]
) -> ExpertGroup | None:
    """Finds the ranks of ``row`` with the same experts as this one. None if experts are not
    divided."""
    me, parts = dist.get_rank(), expert_groups(mesh, row)
    if len(parts) == 1:
        return None
    members, channel = next(part for part in parts if me in part), None
    if len(members) > 1:
        reductions = gloo_group(members, f"reductions of experts of wrap {wrap}")
        channel = _channel(
            members, f"gathers of experts of wrap {wrap}", process_groups, reductions
        )
        process_groups.append(reductions)
    places = tuple(row.index(rank) for rank in members)
    over = tuple(_line(mesh, mesh.mesh_dim_names.index("ep")))
    return ExpertGroup(
        rank=members.index(me), size=len(members), places=places, over=over, channel=channel
    )


def _channel(
    ranks: list[int],
    what: str,
    process_groups: list[dist.ProcessGroup],
    reductions: dist.ProcessGroup | None = None,
) -> Channel:
    """Makes a channel of ``ranks`` (ascending). Appends its groups to ``own_groups``."""
    process_groups.append(group := gloo_group(ranks, what))
    families = [
        (
            gloo_group([ranks[index] for index in family], f"{what}: sync points below {family[0]}")
            if family
            else None
        )
        for family in family_of(ranks.index(dist.get_rank()), len(ranks))
    ]
    process_groups += [family for family in families if family is not None]
    alarms = dist.PrefixStore(
        f"infinity/alarms of {what}, ranks {ranks}", dist.distributed_c10d._get_default_store()
    )
    return Channel(group, Tree(*families), reductions=reductions, alarms=alarms)


def join_node(ranks: ParallelDims, mesh: Any) -> ParallelDims:
    """Adds the channel of this machine's ranks, if a shard group spans several machines with
    equally many of its ranks each.

    Creates process groups, so every rank calls this.
    """
    if ranks.size == 1:
        return ranks
    me, nodes_of_rows, node_channel = dist.get_rank(), [], None
    for row in (
        rank_rows(mesh, divides_experts=ranks.expert_group is not None).flatten(0, 2).tolist()
    ):
        nodes: dict[int, list[int]] = {}
        for rank in row:
            # Torchrun numbers ranks machine by machine
            nodes.setdefault(rank // ranks.local_size, []).append(rank)
        if len({len(members) for members in nodes.values()}) > 1 or not 1 < len(nodes) < len(row):
            continue
        for members in nodes.values():
            nodes_of_rows.append(tuple(members))
            if me in members:
                node_channel = _channel(
                    list(members), f"a machine of wrap {ranks.wrap}", ranks.process_groups
                )
    return dataclasses.replace(ranks, nodes=tuple(nodes_of_rows), node_group=node_channel)


def _agree_on_rows(
    mesh: Any, members: Sequence[int], divides_experts: bool
) -> tuple[torch.Tensor, str, bool]:
    """Reads the shard groups from ``mesh`` on every rank. Returns them, the name of this attempt,
    and whether any rank's model has divided experts: a pipeline stage may have none.

    Uses only the store, before any group exists: a rank with another mesh, or an invalid one, would
    make other groups than its peers wait for. Raises ConfigError on all ranks then.
    """
    with Attempt(members) as attempt:
        attempt.add("divides", int(divides_experts))
        attempt.barrier("published")
        divides_experts = attempt.total("divides") > 0
        rows = rank_rows(mesh, divides_experts=divides_experts)
        attempt.tell(f"{rows.tolist()} of {mesh}")
        attempt.barrier("read")
        first = attempt.value_of(members[0])
        if not first.startswith(f"{rows.tolist()} of "):
            attempt.refuse(
                f"mesh: rank {members[0]} was given {first}, rank {dist.get_rank()}"
                f" {rows.tolist()} of {mesh}: give every rank the same",
                of_all=True,
            )
        attempt.barrier("compared")
        return rows, attempt.name, divides_experts


def gloo_group(ranks: list[int], what: str) -> dist.ProcessGroup:
    """Makes a gloo group for host memory. Only ``ranks`` call this. ``what``: unique among the
    job's groups.

    If the default group is bound to a device, torch would split its communicator, a collective of
    ranks outside, too. The ranks inside would wait for them in vain.
    """
    c10d = dist.distributed_c10d
    default, bound = c10d._get_default_group(), None
    # torch would name such a group by its ranks and the process's count of groups. Ranks with
    # another count would not find each other, and a destroyed group's addresses would be reused.
    name = f"infinity: {what}, ranks {'_'.join(map(str, ranks))}"
    name_of, c10d._process_group_name = c10d._process_group_name, lambda *_, **__: name
    try:
        bound = getattr(default, "bound_device_id", None)
        if bound is not None:
            default.bound_device_id = None
        return dist.new_group(
            ranks, timeout=group_timeout(), backend="gloo", use_local_synchronization=True
        )
    finally:
        c10d._process_group_name = name_of
        if bound is not None:
            default.bound_device_id = bound


def join_device(ranks: ParallelDims, mesh: Any, backend: str | None) -> None:
    """Sends bulk bytes over ``backend``, which reaches the compute device's memory. Each barrier
    stays on gloo.

    Creates process groups, so every rank calls this. Raises ConfigError if there is no such
    backend.
    """
    if backend is None:
        raise ConfigError(
            "torch.distributed has no backend for the device that computes: compute on the CPU, or"
            " in one process"
        )
    me, timeout = dist.get_rank(), group_timeout()
    # Other jobs make no groups of this one.
    is_part = len(members_of(mesh)) < dist.get_world_size()

    def group_of(members: Sequence[int]) -> dist.ProcessGroup | None:
        if is_part and me not in members:
            return None
        group = dist.new_group(
            list(members), timeout=timeout, backend=backend, use_local_synchronization=is_part
        )
        if me not in members:
            return None
        ranks.process_groups.append(group)
        return group

    for rows in rank_rows(mesh, divides_experts=ranks.expert_group is not None).flatten(0, 1):
        for row in rows.tolist() if rows.size(1) > 1 else []:
            gathers, reductions = group_of(row), group_of(row)
            if gathers is not None:
                ranks.shard_group.carry(gathers, reductions)
            for part in (
                expert_groups(mesh, row)
                if ranks.expert_group is not None and ranks.expert_group.size > 1
                else []
            ):
                gathers, reductions = group_of(part), group_of(part)
                if gathers is not None:
                    ranks.expert_group.channel.carry(gathers, reductions)
        for column in rows.T.tolist() if rows.size(0) > 1 else []:
            if (group := group_of(column)) is not None:
                ranks.replicate_group.carry(group)
    for members in ranks.nodes:
        if (group := group_of(members)) is not None:
            ranks.node_group.carry(group)


def _launched() -> int:
    """Returns how many ranks a launcher started, this one included."""
    try:
        return int(os.environ.get("WORLD_SIZE") or 1)
    except ValueError:
        return 1


def _local_size() -> int:
    """Returns how many ranks are on this machine, as torchrun reports it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
