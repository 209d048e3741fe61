"""Arrival: copies one unit's weights into its device buffers, and gathers the other ranks' shards
there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ... import native
from ...errors import InfinityError
from ...ranks.collectives import Collectives
from ...ranks.pending import Pending
from ..homes.arrays import StateArray, whole_blocks
from ..homes.store import ArrayStore
from ..machine.device import PAST, Copy, Device, Event
from ..machine.tiers import Tier
from .flat_layout import FlatLayout
from .flat_param import FlatParam
from .home_arrays import COPY, Update
from .rows import MANY, ChosenRows, Rows, Spans
from .staged_reads import PIECE_NBYTES, StagedReads
from .unit_buffers import Second, UnitBuffers


class Arrival:
    """The last copy of one unit's weights to the device, and the gather that follows it.

    event
        The end of the copy, and then that of the gather: another stream comes after it, too.
    rows
        Those that are brought; None: all weights are.
    """

    def __init__(
        self,
        name: str,
        flat_params: Sequence[FlatParam],
        buffers: UnitBuffers,
        second: Second,
        collectives: Collectives,
        device: Device,
    ):
        self._name, self._flat_params, self._device = name, flat_params, device
        self._buffers, self.second, self._collectives = buffers, second, collectives
        self.event: Event = PAST
        self.rows: ChosenRows | None = None
        self._pending: list[Pending] = []  # running gathers

    def start(
        self,
        store: ArrayStore,
        weights: Sequence[StateArray],
        reads: StagedReads | None,
        *,
        in_node: bool,
    ) -> None:
        """Starts copying this rank's shards, and gathering the other ranks'.

        ``weights``: the weights at home; ``reads``: those of their bytes, if they are on disk.
        ``in_node``: only the ranks of this machine are needed, with what is near.
        """
        if reads is None:
            self.choose()
        transfer = Copy("host->device", self._nbytes(self.spans), self._name)
        # The optimizer stepped device weights on a queue that only compute has waited for.
        there = any(weight.tier is Tier.DEVICE for weight in weights)

        def copy() -> None:
            for buffer in self._buffers.all:
                buffer.fill()
            if in_node:
                self.second.copy_out(self._buffers.flats)
            else:
                self._copy_own(store, weights, reads, self.spans)

        self.event = self._device.put(
            "in", copy, after=[self._device.now()] if there else (), transfer=transfer
        )

        if self._collectives.ranks.size > 1:

            def gather() -> None:
                """Gathers the other ranks' shards, after this rank's copy, on the same queue."""
                for i, (flat_param, flat) in enumerate(zip(self._flat_params, self._buffers.flats)):
                    pending = self._collectives.gather(
                        flat.view(torch.uint8) if flat_param.spec.exact else flat,
                        f"{self._name} ({i})",
                        regions=flat_param.homes.weight_regions,
                        in_node=in_node,
                    )
                    if pending is not None:
                        self._pending.append(pending)
                        if pending.borrowed is not None:
                            flat_param.homes.read_until(COPY, pending.borrowed)

            self.event = self._device.put("in", gather)
        if self.event is not PAST:
            for flat_param in self._flat_params:
                flat_param.homes.read_until(COPY, self.event)

    def bring_rows(self, choose: Callable[[Sequence[FlatLayout]], ChosenRows]) -> None:
        """Brings only the rows that ``choose``, called with the flat params' layouts, chooses, if
        no other rank has the same ones, and no other stage is at another update."""
        ranks = self._collectives.ranks
        if ranks.data_channels or ranks.pp_group is not None:
            return
        self.rows = choose([flat.layout for flat in self._flat_params])
        for flat_param in self._flat_params:
            flat_param.homes.update_by_rows(self.rows)

    def stop_choosing(self) -> None:
        """Brings all rows from now on if the device is a home of them, or of their state."""
        if any(a.tier is Tier.DEVICE for flat in self._flat_params for a in flat.arrays.values()):
            self.rows = None
            for flat_param in self._flat_params:
                flat_param.homes.rows = None

    @property
    def comes_ahead(self) -> bool:
        """Whether it is known, ahead of the next use, what to bring."""
        return self.rows is None or self.rows.come_ahead

    @property
    def spans(self) -> Spans | None:
        """The elements to bring; None: all."""
        return None if self.rows is None else self.rows.places(self.rows.there)

    def is_current(self, updates: Sequence[Update | None]) -> bool:
        """Tells whether the weights that the next use is expected to need are at home. ``updates``:
        the running ones."""
        if self.rows is None:
            return all(update is None or update.done for update in updates)
        rows = self.rows.expected
        return all(flat.homes.has(rows) for flat in self._flat_params)

    def begin_pass(self) -> None:
        """Begins a pass, in which chosen rows come unless others hold the device memory."""
        if self.rows is not None:
            self.rows.begin_pass(are_held=self._buffers.is_held)

    def choose(self, updates: Sequence[Update | None] = ()) -> list[Update | None]:
        """Begins to bring the rows that are expected. Returns those of the ``updates`` that a read
        of the home has to wait for. Rows are brought up to date here, so it waits for none."""
        if self.rows is None:
            return list(updates)
        self.rows.choose()
        if self._reads_nearly_all():
            self.rows.there = None
        self._catch_up(self.rows.there)
        return [None] * len(updates)

    def _reads_nearly_all(self) -> bool:
        """Whether the disk's blocks that have the chosen rows are nearly all of them."""
        weights = [flat.weight for flat in self._flat_params]
        on_disk = [
            (weight, of_flat)
            for weight, of_flat in zip(weights, self.spans or ())
            if weight.tier is Tier.NVME
        ]
        blocks = (end - begin for entry in on_disk for begin, end in whole_blocks(*entry))
        return bool(on_disk) and sum(blocks) > MANY * sum(weight.nbytes for weight, _ in on_disk)

    def _catch_up(self, rows: Rows) -> None:
        for flat_param in self._flat_params:
            flat_param.homes.wait(rows)

    def take_missing(self) -> Rows:
        """Takes the rows that the use which begins needs, and that are not there: for
        :meth:`add`."""
        return frozenset() if self.rows is None else self.rows.take_missing()

    def add(
        self,
        rows: Rows,
        store: ArrayStore,
        weights: Sequence[StateArray],
        slots: list[native.Lease],
    ) -> None:
        """Brings ``rows`` to those that are there. Blocks on the disk, from where they come through
        ``slots``."""
        self._catch_up(rows)
        spans = self.rows.places(rows)
        reads = StagedReads(slots) if slots else None
        try:
            if reads is not None:
                after, pieces = [None] * len(weights), self._device.overlaps
                reads.start(store, weights, after, in_pieces=pieces, spans=spans)
            transfer = Copy("host->device", self._nbytes(spans), self._name)
            copy = partial(self._copy_own, store, weights, reads, spans)
            event = self._device.put("in", copy, transfer=transfer)
        except BaseException:
            if reads is not None:
                reads.first_error()
                reads.release()
            raise
        if slots:
            store.staging.take_back(slots, event)
        self._device.follow(event, "host->device", self._name)

    @property
    def lacks_rows(self) -> bool:
        """Whether only some rows are on the device. Others than the class have seen none then."""
        return self.rows is not None and self.rows.there is not None

    def _nbytes(self, spans: Spans | None) -> int:
        if spans is None:
            return sum(flat.shard_nbytes for flat in self._flat_params)
        return sum(
            (end - begin) * flat.spec.dtype.itemsize
            for flat, of_flat in zip(self._flat_params, spans)
            for begin, end in of_flat
        )

    def _copy_own(
        self,
        store: ArrayStore,
        weights: Sequence[StateArray],
        reads: StagedReads | None,
        spans: Spans | None,
    ) -> None:
        """Copies this rank's shards, or the elements ``spans`` of them."""
        flats = self._buffers.flats
        if reads is not None:
            reads.copy(store, self._flat_params, flats, self._name)
        elif spans is not None:
            for weight, flat, of_flat in zip(weights, flats, spans):
                for begin, end in of_flat:
                    _bring(store, weight, begin, flat[begin:end])
        else:
            for flat_param, weight, flat in zip(self._flat_params, weights, flats):
                begin, end = flat_param.layout.home_range("weight")
                # Makes no view if this rank has all of it: units can be many and small.
                shard = flat if end - begin == flat.numel() else flat[begin:end]
                _bring(store, weight, 0, shard)

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
        if self._collectives.ranks.size > 1:  # else the caller may go on, and so may other ranks
            self._collectives.complete_started()
        try:
            self.event.wait()
        except (InfinityError, RuntimeError):
            pass  # the caller raises the first error
        self.event = PAST

    def forget_gathers(self) -> None:
        """Forgets running gathers. Their collectives still write to the device memory."""
        if self.rows is not None:
            self.rows.forget()
        for pending in self._pending:
            pending.drop()
        self._pending = []


def _bring(store: ArrayStore, home: StateArray, begin: int, there: torch.Tensor) -> None:
    """Copies elements of ``home`` from ``begin``; from a disk in pieces, and blocks."""
    end = begin + there.numel()
    if home.flat is not None:
        there.copy_(home.flat[begin:end], non_blocking=True)
    elif there.is_cpu:
        store.read(home, begin, end, out=there)
    else:
        for part in there.split(PIECE_NBYTES // there.itemsize):
            part.copy_(store.read(home, begin, begin + len(part)))
            begin += len(part)
