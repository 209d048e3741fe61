"""Arrival: copies one unit's weights into its device buffers, and gathers the other ranks' slices
there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..distributed.collectives import Collectives
from ..distributed.pending import Pending
from ..errors import InfinityError
from ..machine.device import PAST, Copy, Device, Event
from ..machine.tiers import Tier
from ..storage.arrays import StateArray
from ..storage.store import ShardStore
from .shard import ParamShard
from .staged_reads import StagedReads
from .unit_buffers import SecondSlices, UnitBuffers


class Arrival:
    """The last copy of one unit's weights to the device, and the gather that follows it.

    event
        The end of the copy.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[ParamShard],
        buffers: UnitBuffers,
        second: SecondSlices,
        collectives: Collectives,
        device: Device,
    ):
        self._name, self._shards, self._device = name, shards, device
        self._buffers, self._second, self._collectives = buffers, second, collectives
        self.event: Event = PAST
        self._pending: list[Pending] = []  # running gathers

    def start(
        self,
        store: ShardStore,
        homes: Sequence[StateArray],
        reads: StagedReads | None,
        *,
        in_node: bool,
    ) -> None:
        """Starts copying this rank's slices, and gathering the other ranks'.

        ``homes``: the weights at home; ``reads``: those of their bytes, if they are on disk.
        ``in_node``: only the ranks of this machine are needed, with the second slices.
        """
        transfer = Copy(
            "host->device", sum(shard.slice_nbytes for shard in self._shards), self._name
        )
        # The optimizer stepped device homes on a queue that only compute has waited for.
        there = any(home.tier is Tier.DEVICE for home in homes)
        copy = partial(self._copy_in, store, homes, reads, in_node)
        self.event = self._device.put(
            "in", copy, behind=[self._device.now()] if there else (), transfer=transfer
        )
        if self._collectives.ranks.size > 1:
            self.event = self._device.put("in", partial(self._gather_in, in_node))
        if self.event is not PAST:
            for shard in self._shards:
                shard.homes.lend(self.event)

    def _copy_in(
        self,
        store: ShardStore,
        homes: Sequence[StateArray],
        reads: StagedReads | None,
        in_node: bool,
    ) -> None:
        for buffer in self._buffers:
            buffer.fill()
        flats = self._buffers.flats
        if in_node:
            self._second.copy_out(flats)
        elif reads is not None:
            reads.copy(store, self._shards, flats, self._name)
        else:
            for shard, home, flat in zip(self._shards, homes, flats):
                flat[slice(*shard.layout.own("weight"))].copy_(home.flat, non_blocking=True)

    def _gather_in(self, in_node: bool) -> None:
        """Gathers the other ranks' slices, after this rank's copy, on the same queue."""
        for i, (shard, flat) in enumerate(zip(self._shards, self._buffers.flats)):
            what = f"{self._name} ({i})"
            if in_node:
                pending = self._collectives.bulk.gather_in_node(flat, what)
            else:
                pending = self._collectives.bulk.gather(
                    flat, what, homes=shard.homes.weight_regions
                )
            if pending is not None:
                self._pending.append(pending)
                if pending.lent is not None:
                    shard.homes.lend(pending.lent)

    def finish(self, store: ShardStore) -> None:
        """Orders later compute after the weights. May block on other ranks."""
        if self.event is not PAST:
            with store.traffic.stalled("host->device", self._name):
                self.event.precede()
        if self._pending:
            with store.traffic.stalled("all-gather", self._name):
                for pending in self._pending:
                    pending.wait()
        self._pending = []

    def give_up(self) -> None:
        """Waits until nothing writes to the buffers, after an error, and ignores further ones."""
        self.forget_gathers()
        self._collectives.bulk.drop_lost()
        try:
            self.event.wait()
        except (InfinityError, RuntimeError):
            pass  # the caller raises the first error
        self.event = PAST

    def forget_gathers(self) -> None:
        """Forgets running gathers. Their collectives still write to the device memory."""
        for pending in self._pending:
            pending.drop()
        self._pending = []
