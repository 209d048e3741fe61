"""DataRanks: which ranks share a model's arrays and its batch, and what each of them keeps.

shard      a rank's equal part of every flat array
replica    a rank elsewhere that holds the same shard (hybrid sharding)
row        the shard group: ranks whose shards together make up the arrays
tensor     the tensor-parallel group: ranks with other local parts of the same tensors, same batch
stages     the pipeline group: ranks with the other stages of the same model, and the same batch
divided    expert parallelism: each data rank of an ep axis has other experts, and tokens go to
           them. Expert parameters have their own shard groups: data ranks with the same experts
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch.distributed as dist

from .channel import Channel


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertRow:
    """The ranks of this rank's shard group that have the same experts, if the group divides
    them."""

    rank: int
    size: int
    places: tuple[int, ...]  # of these ranks in the whole shard group
    over: tuple[int, ...]  # the ranks of the ep axis, this one included: each has other experts
    channel: Channel | None  # None: this rank is the only one


@dataclass(frozen=True, kw_only=True, eq=False)
class DataRanks:
    """The data ranks of one job, from the view of this rank. The default is a job of one rank.

    rank, size
        Of the shard group: this rank has shard number ``rank`` of ``size``.
    """

    wrap: int = 0  # wraps of the job before this one
    rank: int = 0
    size: int = 1
    local_size: int = 1  # ranks on this machine, which share its memory and disks
    machine_share: Fraction = Fraction(1)  # this rank's fraction of the machine's budget
    shard: str = "parameters"  # also sharded: "optimizer" < "gradients" < "parameters"
    compresses: bool = False  # gathered weights are sent as 8-bit codes
    reduction: str = "ordered"  # sums of gradients: "ordered" by rank, or "fast" in the transport
    row: Channel | None = None  # the shard group
    replicas: Channel | None = None
    both: Channel | None = None  # all data ranks, if there are a shard group and replicas
    tensor: Channel | None = None  # the tensor-parallel group
    sequences: Channel | None = None  # data ranks with other parts of the same sequences (cp)
    stages: Channel | None = None  # the pipeline group
    stage_prefix: str = ""  # prefix of this stage's names, if stages use the same
    experts: ExpertRow | None = None  # if the shard group divides experts
    divided: int = 1  # ranks over which these tensors are divided; > 1 in `as_experts_see`
    node: Channel | None = None  # this machine's ranks, if they share gathered weights
    nodes: tuple[tuple[int, ...], ...] = ()  # ranks per machine and row, if machines share weights
    allowed_processors: frozenset[int] | None = None  # before the binding to a NUMA node
    # Made for this job and destroyed with it
    own_groups: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank at all."""
        return not self.places

    @property
    def world_rank(self) -> int:
        """This rank's global rank."""
        return 0 if self.alone else dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what exists once for the job."""
        return self.rank == 0 and self.writes and self.part == 0 and self.stage == 0

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have other elements of the model, so that norms must be combined."""
        return self.tensor is not None or self.stages is not None or self.experts is not None

    @property
    def part(self) -> int:
        """This rank's number in the tensor-parallel group."""
        return self.tensor.rank if self.tensor is not None else 0

    @property
    def parts(self) -> int:
        """The size of the tensor-parallel group."""
        return self.tensor.size if self.tensor is not None else 1

    @property
    def stage(self) -> int:
        """This rank's coordinate in the pipeline."""
        return self.stages.rank if self.stages is not None else 0

    @property
    def writes(self) -> bool:
        """Whether this rank writes its shard: only the first replica does."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def data_rank(self) -> int:
        """This rank's number among data ranks, in the order of :meth:`Collectives.collect`."""
        return self.rank + (self.size * self.replicas.rank if self.replicas is not None else 0)

    @property
    def job_rank(self) -> int:
        """This rank's number in the job, in the order of :meth:`Collectives.collect`."""
        return self.data_rank + self.data_size * (self.part + self.parts * self.stage)

    @property
    def data_size(self) -> int:
        """The number of ranks that each have a part of the batch."""
        return self.size * self.divided * (self.replicas.size if self.replicas is not None else 1)

    @property
    def as_experts_see(self) -> DataRanks:
        """The same ranks for divided experts: the shard group is the ranks with the same experts.
        All data ranks still meet in one channel, and each has a part of the batch."""
        row = self.experts
        if row is None:
            return self
        own = {"rank": row.rank, "size": row.size, "row": row.channel, "divided": len(row.over)}
        return replace(self, **own, both=self.data, experts=None, node=None, nodes=())

    @property
    def keeps_weights(self) -> bool:
        """Whether a weight, once gathered, stays until the step (ZeRO-1 and 2)."""
        return self.size > 1 and self.shard != "parameters"

    @property
    def keeps_gradients(self) -> bool:
        """Whether every rank has its whole gradient at home until the step (ZeRO-1)."""
        return self.size > 1 and self.shard == "optimizer"

    @property
    def channels(self) -> list[Channel]:
        """The channels that together reach all ranks: shard group, replicas, tensor-parallel group,
        pipeline group."""
        return [*self.unit_channels, *([self.stages] if self.stages is not None else [])]

    @property
    def all_channels(self) -> list[Channel]:
        """Every channel that was made for this rank."""
        of_experts = self.experts.channel if self.experts is not None else None
        found = (
            self.row,
            self.replicas,
            self.both,
            self.tensor,
            self.sequences,
            self.stages,
            self.node,
            of_experts,
        )
        return [channel for channel in found if channel is not None]

    @property
    def data(self) -> Channel | None:
        """The channel on which all data ranks meet; None if this is the only one."""
        return self.both or self.row or self.replicas

    @property
    def sharing(self) -> list[Channel]:
        """The channels of the data ranks that have the same values of these tensors."""
        return (
            self.data_channels
            if self.divided > 1
            else [channel for channel in [self.data] if channel is not None]
        )

    @property
    def places(self) -> list[Channel]:
        """The channels on which this rank meets all others: data, tensor-parallel, sequence and
        pipeline ranks."""
        return [
            channel
            for channel in (self.data, self.tensor, self.sequences, self.stages)
            if channel is not None
        ]

    @property
    def unit_places(self) -> list[Channel]:
        """The channels on which it meets ranks with the same units, or other local parts of
        them."""
        return [channel for channel in (self.data, self.tensor) if channel is not None]

    def place_of(self, channel: Channel) -> Channel:
        """Returns the channel on which the ranks of ``channel`` meet before a transfer over it. All
        data ranks meet on one."""
        return self.data if channel in self.data_channels else channel

    @property
    def unit_channels(self) -> list[Channel]:
        """The channels for transfers between ranks with the same units, or other local parts of
        them."""
        return [*self.data_channels, *([self.tensor] if self.tensor is not None else [])]

    @property
    def data_channels(self) -> list[Channel]:
        """The channels for transfers between data ranks, which have the same local part of every
        tensor."""
        return [channel for channel in (self.row, self.replicas) if channel is not None]
