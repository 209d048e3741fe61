"""ParallelDims: which ranks share a model's arrays and its batch, and what each of them keeps.

shard              a rank's equal part of every flat array
shard group        the ranks whose shards together make up the arrays
replicate group    the ranks that hold the same shard (hybrid sharding)
dp group           all data ranks: shard groups and replicate groups together
tp group           tensor parallelism: ranks with other local parts of the same tensors, same batch
cp group           context parallelism: data ranks with other parts of the same sequences
pp group           pipeline parallelism: ranks with the other stages of the model, same batch
ep                 expert parallelism: each data rank of an ep axis has other experts, and tokens go
                   to them. Experts have their own shard groups: data ranks with the same experts
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from .channel import Channel


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertGroup:
    """The ranks of this rank's shard group that have the same experts, if the group divides
    them."""

    rank: int
    size: int
    places: tuple[int, ...]  # of these ranks in the whole shard group
    over: tuple[int, ...]  # the ranks of the ep axis, this one included: each has other experts
    channel: Channel | None  # None: this rank is the only one


@dataclass(frozen=True, kw_only=True, eq=False)
class ParallelDims:
    """The data ranks of one job, from the view of this rank. The default is a job of one rank.

    rank, size
        Of the shard group: this rank has shard number ``rank`` of ``size``.
    """

    wrap: str = "0"  # the name of the attempt that made it: no other one has it
    rank: int = 0
    size: int = 1
    local_size: int = 1  # ranks on this machine, which share its memory and disks
    shard: str = "parameters"  # also sharded: "optimizer" < "gradients" < "parameters"
    encoding: Any = None  # in which gathered weights are sent, with losses; None: as they are
    shard_group: Channel | None = None
    replicate_group: Channel | None = None
    # All data ranks, if there are both a shard group and a replicate group.
    grid_group: Channel | None = None
    tp_group: Channel | None = None
    cp_group: Channel | None = None
    pp_group: Channel | None = None
    expert_group: ExpertGroup | None = None  # if the shard group divides experts
    ep_size: int = 1  # ranks over which these tensors are divided; > 1 in `as_experts_see`
    node_group: Channel | None = None  # this machine's ranks, if they share gathered weights
    nodes: tuple[
        tuple[int, ...], ...
    ] = ()  # ranks per machine and shard group, if machines share weights
    allowed_processors: frozenset[int] | None = None  # before the binding to a NUMA node
    # Made for this job and destroyed with it
    process_groups: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank at all."""
        return not self.sync_channels

    @property
    def world_rank(self) -> int:
        """This rank's global rank."""
        return 0 if self.alone else dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what exists once for the job."""
        return self.rank == 0 and self.writes and self.tp_rank == 0 and self.pp_rank == 0

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have other elements of the model, so that norms must be combined."""
        return (
            self.tp_group is not None or self.pp_group is not None or self.expert_group is not None
        )

    @property
    def tp_rank(self) -> int:
        """This rank's number in the tensor-parallel group."""
        return self.tp_group.rank if self.tp_group is not None else 0

    @property
    def tp_size(self) -> int:
        """The size of the tensor-parallel group."""
        return self.tp_group.size if self.tp_group is not None else 1

    @property
    def pp_rank(self) -> int:
        """This rank's coordinate in the pipeline."""
        return self.pp_group.rank if self.pp_group is not None else 0

    @property
    def writes(self) -> bool:
        """Whether this rank writes its shard: only the first replica does."""
        return self.replicate_group is None or self.replicate_group.rank == 0

    @property
    def data_rank(self) -> int:
        """This rank's number among data ranks, in the order of :meth:`Collectives.collect`."""
        return self.rank + (
            self.size * self.replicate_group.rank if self.replicate_group is not None else 0
        )

    @property
    def job_rank(self) -> int:
        """This rank's number in the job, in the order of :meth:`Collectives.collect`."""
        return self.data_rank + self.data_size * (self.tp_rank + self.tp_size * self.pp_rank)

    @property
    def data_size(self) -> int:
        """The number of ranks that each have a part of the batch."""
        return (
            self.size
            * self.ep_size
            * (self.replicate_group.size if self.replicate_group is not None else 1)
        )

    @property
    def as_experts_see(self) -> ParallelDims:
        """The same ranks for divided experts: the shard group is the ranks with the same experts.
        All data ranks still meet in one channel, and each has a part of the batch."""
        group = self.expert_group
        if group is None:
            return self
        narrowed = {"rank": group.rank, "size": group.size, "shard_group": group.channel}
        dropped = {
            "grid_group": self.dp_group,
            "expert_group": None,
            "node_group": None,
            "nodes": (),
        }
        return replace(self, **narrowed, ep_size=len(group.over), **dropped)

    @property
    def keeps_weights(self) -> bool:
        """Whether a weight, once gathered, stays until the step (ZeRO-1 and 2)."""
        return self.size > 1 and self.shard != "parameters"

    @property
    def keeps_gradients(self) -> bool:
        """Whether every rank has its whole gradient at home until the step (ZeRO-1)."""
        return self.size > 1 and self.shard == "optimizer"

    @property
    def can_reduce_flags(self) -> bool:
        """Whether flags that pass within the shard group reach every rank with these units."""
        return self.size > 1 and self.replicate_group is None and self.tp_group is None

    @property
    def channels(self) -> list[Channel]:
        """The channels that together reach all ranks: shard group, replicas, tensor-parallel group,
        pipeline group."""
        return [*filter(None, (*self.unit_channels, self.pp_group))]

    @property
    def all_channels(self) -> list[Channel]:
        """Every channel that was made for this rank."""
        experts = self.expert_group.channel if self.expert_group is not None else None
        others = (self.grid_group, self.cp_group, self.node_group, experts)
        return [*self.channels, *filter(None, others)]

    @property
    def dp_group(self) -> Channel | None:
        """The channel on which all data ranks meet; None if this is the only one."""
        return self.grid_group or self.shard_group or self.replicate_group

    @property
    def sharing(self) -> list[Channel]:
        """The channels of the data ranks that have the same values of these tensors."""
        return self.data_channels if self.ep_size > 1 else [*filter(None, (self.dp_group,))]

    @property
    def sync_channels(self) -> list[Channel]:
        """The channels on which this rank meets all others: data, tensor-parallel, sequence and
        pipeline ranks."""
        return [*filter(None, (self.dp_group, self.tp_group, self.cp_group, self.pp_group))]

    @property
    def unit_sync_channels(self) -> list[Channel]:
        """The channels on which it meets ranks with the same units, or other local parts of
        them."""
        return [*filter(None, (self.dp_group, self.tp_group))]

    def sync_channel_of(self, channel: Channel) -> Channel:
        """Returns the channel on which the ranks of ``channel`` meet before a transfer over it. All
        data ranks meet on one."""
        return self.dp_group if channel in self.data_channels else channel

    @property
    def unit_channels(self) -> list[Channel]:
        """The channels for transfers between ranks with the same units, or other local parts of
        them."""
        return [*filter(None, (*self.data_channels, self.tp_group))]

    @property
    def data_channels(self) -> list[Channel]:
        """The channels for transfers between data ranks, which have the same local part of every
        tensor."""
        return [*filter(None, (self.shard_group, self.replicate_group))]
