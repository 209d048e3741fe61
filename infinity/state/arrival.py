"""Arrival: copies one unit's weights into its device buffers, and gathers the other ranks' shards
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
from ..storage.store import ArrayStore
from .flat_param import FlatParam
from .staged_reads import StagedReads
from .unit_buffers import NodeShards, UnitBuffers


class Arrival:
    """The last copy of one unit's weights to the device, and the gather that follows it.

    event
        The end of the copy, and then that of the gather: another stream comes after it, too.
    """

    def __init__(
        self,
        name: str,
        flat_params: Sequence[FlatParam],
        buffers: UnitBuffers,
        second: NodeShards,
        collectives: Collectives,
        device: Device,
    ):
        self._name, self._flat_params, self._device = name, flat_params, device
        self._buffers, self._second, self._collectives = buffers, second, collectives
        self.event: Event = PAST
        self._pending: list[Pending] = []  # running gathers

    def start(
        self,
        store: ArrayStore,
        homes: Sequence[StateArray],
        reads: StagedReads | None,
        *,
        in_node: bool,
    ) -> None:
        """Starts copying this rank's shards, and gathering the other ranks'.

        ``homes``: the weights at home; ``reads``: those of their bytes, if they are on disk.
        ``in_node``: only the ranks of this machine are needed, with the node shards.
        """
        transfer = Copy(
            "host->device",
            sum(flat.shard_nbytes for flat in self._flat_params),
            self._name,
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
            for flat_param in self._flat_params:
                flat_param.homes.lend(self.event)

    def _copy_in(
        self,
        store: ArrayStore,
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
            reads.copy(store, self._flat_params, flats, self._name)
        else:
            for flat_param, home, flat in zip(self._flat_params, homes, flats):
                begin, end = flat_param.layout.own("weight")
                # Makes no view if this rank has all of it: units can be many and small.
                own = flat if end - begin == flat.numel() else flat[begin:end]
                own.copy_(home.flat, non_blocking=True)

    def _gather_in(self, in_node: bool) -> None:
        """Gathers the other ranks' shards, after this rank's copy, on the same queue."""
        for i, (flat_param, flat) in enumerate(zip(self._flat_params, self._buffers.flats)):
            what = f"{self._name} ({i})"
            if in_node:
                pending = self._collectives.bulk.gather_in_node(flat, what)
            else:
                pending = self._collectives.bulk.gather(
                    flat, what, homes=flat_param.homes.weight_regions
                )
            if pending is not None:
                self._pending.append(pending)
                if pending.borrowed is not None:
                    flat_param.homes.lend(pending.borrowed)

    def finish(self, store: ArrayStore) -> None:
        """Orders later compute after the weights. May block on other ranks."""
        self._device.follow(self.event, "host->device", self._name)
        if self._pending:
            with self._device.stalled("all-gather", self._name):
                for pending in self._pending:
                    pending.wait()
            self.event = self._device.now()
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
