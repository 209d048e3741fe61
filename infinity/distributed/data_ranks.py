"""DataRanks: says which ranks share a model's arrays and its batch, and what each of them keeps.

slice      a rank's equal part of every flat array
replica    a rank elsewhere that holds the same slice (hybrid sharding)
row        the ranks that have the other slices
tensor     the ranks that have the other parts of the same tensors (tensor parallelism), and the same batch
stages     the ranks that have the other stages of the same model (pipeline parallelism), and the same batch
divided    of experts: each data rank of an ep axis has others, and tokens travel to them. Their parameters have rows of their own: the
           data ranks with the same experts
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch.distributed as dist

from .channel import Channel


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertRow:
    """The ranks of this rank's row that have the same experts, where the row divides them."""

    rank: int
    size: int
    places: tuple[int, ...]  # of these ranks in the whole row
    over: tuple[int, ...]  # the ranks of the ep axis, this one among them: each has other experts
    channel: Channel | None  # None: this rank is the only one


@dataclass(frozen=True, kw_only=True, eq=False)
class DataRanks:
    """The data ranks of one job, as this rank sees them. The default is a job of one rank.

    rank, size
        Of those that share the arrays: this rank's slice is number ``rank`` of ``size``.
    """

    wrap: int = 0  # how many of the job came before this one
    rank: int = 0
    size: int = 1
    local_size: int = 1  # ranks on this machine: they share its memory and its disks
    machine_share: Fraction = Fraction(1)  # of which this rank has such a part
    shard: str = "parameters"  # what is sliced besides: "optimizer" < "gradients" < "parameters"
    compresses: bool = False  # whether gathered weights pass as 8-bit codes
    reduction: str = "ordered"  # how gradients are added up: in the order of the ranks, or as the "fast"est transport does
    row: Channel | None = None  # the ranks that have the other slices
    replicas: Channel | None = None
    both: Channel | None = None  # all data ranks, where there are a row and replicas
    tensor: Channel | None = None  # the ranks that have the other parts of each tensor
    sequences: Channel | None = None  # data ranks that have the other parts of the same sequences (cp)
    stages: Channel | None = None  # the ranks that have the other stages of the model
    stage_prefix: str = ""  # of this stage's names of parameters and buffers, where stages call some the same
    experts: ExpertRow | None = None  # where the row divides the model's experts
    divided: int = 1  # ranks among which a row divides what it has of these tensors: more than one as experts see the ranks
    node: Channel | None = None  # this machine's ranks, where gathered weights are shared out among them too
    nodes: tuple[tuple[int, ...], ...] = ()  # ranks of each machine of each row, where weights are shared out
    allowed_processors: frozenset[int] | None = None  # before this rank was bound to a NUMA node
    own_groups: list[dist.ProcessGroup] = field(default_factory=list)  # made for this job, and ended with it

    @property
    def alone(self) -> bool:
        """Whether there is no other rank at all."""
        return not self.places

    @property
    def world_rank(self) -> int:
        """This rank among all of the job."""
        return 0 if self.alone else dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: it writes what there is one of."""
        return self.rank == 0 and self.writes and self.part == 0 and self.stage == 0

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have other elements of the model, of which norms are put together."""
        return self.tensor is not None or self.stages is not None or self.experts is not None

    @property
    def part(self) -> int:
        """Which part of the tensors this rank has."""
        return self.tensor.rank if self.tensor is not None else 0

    @property
    def parts(self) -> int:
        """Parts that the tensors are cut into."""
        return self.tensor.size if self.tensor is not None else 1

    @property
    def stage(self) -> int:
        """Which coordinate of the pipeline this rank has."""
        return self.stages.rank if self.stages is not None else 0

    @property
    def writes(self) -> bool:
        """Whether this rank writes its slice: of replicas the first does."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def data_rank(self) -> int:
        """This rank among all data ranks, in the order of :meth:`Collectives.collect`."""
        return self.rank + (self.size * self.replicas.rank if self.replicas is not None else 0)

    @property
    def job_rank(self) -> int:
        """This rank among all of the job, in the order of :meth:`Collectives.collect`."""
        return self.data_rank + self.data_size * (self.part + self.parts * self.stage)

    @property
    def data_size(self) -> int:
        """Ranks that each have a part of the batch."""
        return self.size * self.divided * (self.replicas.size if self.replicas is not None else 1)

    @property
    def as_experts_see(self) -> DataRanks:
        """The same ranks as divided experts see them: their row is that of the ranks which have them too. All meet where they did, and each
        has a part of the batch."""
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
        """On which this rank comes together with all others: its row's, then its replicas', its tensors' other parts', its model's other
        stages'."""
        return [*self.unit_channels, *([self.stages] if self.stages is not None else [])]

    @property
    def all_channels(self) -> list[Channel]:
        """Every channel that was made for this rank."""
        of_experts = self.experts.channel if self.experts is not None else None
        found = (self.row, self.replicas, self.both, self.tensor, self.sequences, self.stages, self.node, of_experts)
        return [channel for channel in found if channel is not None]

    @property
    def data(self) -> Channel | None:
        """Where all data ranks meet; None where there are no others."""
        return self.both or self.row or self.replicas

    @property
    def sharing(self) -> list[Channel]:
        """Where the data ranks meet that have the same values of these tensors."""
        return self.data_channels if self.divided > 1 else [channel for channel in [self.data] if channel is not None]

    @property
    def places(self) -> list[Channel]:
        """The channels on which this rank meets all others: data ranks, ranks with other parts of its
        tensors, of its sequences, and ranks with other stages."""
        return [channel for channel in (self.data, self.tensor, self.sequences, self.stages) if channel is not None]

    @property
    def unit_places(self) -> list[Channel]:
        """Where it meets those that have the same units, or other parts of them."""
        return [channel for channel in (self.data, self.tensor) if channel is not None]

    def place_of(self, channel: Channel) -> Channel:
        """Returns where the ranks of ``channel`` meet before something passes over it: of data ranks all meet in one place."""
        return self.data if channel in self.data_channels else channel

    @property
    def unit_channels(self) -> list[Channel]:
        """On which it comes together with the ranks that have the same units, or other parts of them."""
        return [*self.data_channels, *([self.tensor] if self.tensor is not None else [])]

    @property
    def data_channels(self) -> list[Channel]:
        """On which it comes together with the other data ranks, which have the same part of every tensor."""
        return [channel for channel in (self.row, self.replicas) if channel is not None]
