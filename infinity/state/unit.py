"""ParamUnit: moves parameters that are needed together between their home and the device."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .. import native
from ..distributed.pending import Pending
from ..errors import CorruptionError, InfinityError, StorageError, UsageError
from ..machine.device import PAST, Copy, Device, Event
from ..machine.ledger import Ledger
from ..machine.tiers import Tier
from ..storage.staging import Fetch
from ..storage.store import ShardStore
from .residency import MOVES, Residency
from .shard import ParamShard
from .unit_buffers import UnitBuffers

# Reads in pieces of this size overlap with copies to a device. Whole checksum blocks.
PIECE_NBYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class ReadPiece:
    """A part of a shard on its way from the disk into the shard's slot."""

    shard: int  # index in the unit
    begin: int  # byte of the slice
    read: Fetch


class ParamUnit(UnitBuffers):
    """One unit: its shards, its residency, and the moves between residencies."""

    def __init__(
        self, index: int, name: str, shards: list[ParamShard], device: Device | None = None
    ):
        super().__init__(index, name, shards, device)
        # The last moves; None: dropped by rebuild.
        self._history: deque[tuple[Residency, Residency | None]] = deque(maxlen=6)
        self._slots: list[native.Lease] = []
        self._pieces: list[ReadPiece] = []
        self._charge: native.Charge | None = None
        self._pending: list[Pending] = []  # running gathers
        self.arriving: Event = PAST  # the end of the copy to the device
        self._read_times: tuple[float, float] | None = None  # start and end of the last read
        # Reductions that every rank offered at the last gather's rendezvous.
        self._least_offered: int | None = None
        self.older: ParamUnit | None = None  # the weights before the last update, if they are kept
        self.uses_older = False  # whether forwards use those now

    @property
    def in_use(self) -> ParamUnit:
        """The unit that a hold gathers: itself, or its weights before the last update."""
        return self.older if self.uses_older and self.older is not None else self

    def watch(self, param: torch.nn.Parameter, data: torch.Tensor) -> None:
        """Watches for changes through ``param.data``, of the version in use."""
        UnitBuffers.watch(self.in_use, param, data)

    @property
    def copies_while_fetching(self) -> bool:
        """Whether a copy to the device can begin before the whole unit is read. Not with several
        ranks: their actions must not depend on the progress of reads."""
        return self._device.overlaps and self._ranks.size == 1

    @property
    def is_ready(self) -> bool:
        """Whether the weights can be copied to the device without waiting for a disk or the last
        step."""
        if self.is_staged_from_disk:
            return self.residency is not Residency.STORED and all(
                piece.read.done for piece in self._pieces
            )
        return all(shard.homes.update is None or shard.homes.update.done for shard in self.shards)

    # --- moves ---

    def fetch(self, store: ShardStore, slots: list[native.Lease]) -> None:
        """Starts reading into ``slots``, one per shard (STORED -> FETCHING), after the last step's
        writes."""
        self._move(Residency.FETCHING)
        self._slots = slots
        for index, (shard, slot) in enumerate(zip(self.shards, slots)):
            size = (
                PIECE_NBYTES
                if self.copies_while_fetching or store.staging.needs_pieces
                else shard.slice_nbytes
            )
            for begin in range(0, shard.slice_nbytes, size):
                nbytes = min(size, shard.slice_nbytes - begin)
                read = store.staging.fetch(
                    shard.weight, begin, slot, nbytes, at=begin, after=shard.homes.update
                )
                self._pieces.append(ReadPiece(index, begin, read))

    def stage(self) -> None:
        """Waits for the reads (FETCHING -> STAGED). After a failed read frees the slots and raises
        its error."""
        error = _first_error(self._pieces)
        self._move(Residency.STAGED if error is None else Residency.STORED)
        if error is not None:
            self._release_slots()
            raise error

    def drop(self, store: ShardStore) -> None:
        """Drops the bytes unused (FETCHING or STAGED -> STORED). Cancels reads that have not
        started, and waits for the others."""
        if self.residency not in (Residency.FETCHING, Residency.STAGED):
            raise self._illegal("be dropped")
        error: Exception | None = None
        for piece in self._pieces:
            piece.read.cancel()
        for piece in self._pieces:
            try:
                piece.read.wait()
            except InfinityError as failure:
                cancelled = isinstance(failure, StorageError) and failure.errno == errno.ECANCELED
                # These bytes are unused, and may have been overwritten during the read. If the disk
                # holds wrong bytes, the next read finds out.
                error = error or (
                    None if cancelled or isinstance(failure, CorruptionError) else failure
                )
        self._move(Residency.STORED)
        self._release_slots()
        if error is not None:
            raise error

    def gather(self, store: ShardStore, ledger: Ledger) -> None:
        """Gathers the unit (STAGED, or STORED for a memory home, -> RESIDENT). Blocks."""
        self.start_gather(store, ledger)
        self.finish_gather(store)

    def start_gather(self, store: ShardStore, ledger: Ledger, *, offered: int = 0) -> int | None:
        """Starts a gather (STAGED, or STORED for a memory home, -> GATHERING): copies this rank's
        slice to the device, and starts gathering the other ranks'. FETCHING -> GATHERING if copies
        overlap reads: each piece is verified and copied as it arrives.

        ``offered``: see :meth:`Collectives.gather`. Returns the number that all ranks offered, or
        None if they did not meet.
        """
        self._least_offered = None
        from_disk = self.is_staged_from_disk
        fetching = self.residency is Residency.FETCHING and self.copies_while_fetching
        if not fetching and self.residency is not (
            Residency.STAGED if from_disk else Residency.STORED
        ):
            raise self._illegal("be gathered")
        for buffer in self.buffers:
            buffer.check_left()
        charge = ledger.reserve(Tier.DEVICE, self.weight_nbytes, f"unit {self.name}", passing=True)
        self._move(Residency.GATHERING)
        self._charge = charge
        try:
            transfer = Copy(
                "host->device", sum(shard.slice_nbytes for shard in self.shards), self.name
            )
            # The optimizer stepped device homes on a queue that only compute has waited for.
            there = any(shard.weight.tier is Tier.DEVICE for shard in self.shards)
            copy = partial(self._copy_in, store, self._slots if from_disk else (), self._pieces)
            self.arriving = self._device.put(
                "in", copy, behind=[self._device.now()] if there else (), transfer=transfer
            )
            if self.is_sliced:
                self.arriving = self._device.put("in", partial(self._gather_in, offered))
            if self.arriving is not PAST:
                for shard in self.shards:
                    shard.homes.lend(self.arriving)
        except BaseException:
            self._fail_gather()
            raise
        store.staging.take_back(self._slots, self.arriving)
        self._slots, self._pieces = [], []
        return self._least_offered

    def _copy_in(
        self, store: ShardStore, slots: Sequence[native.Lease], pieces: Sequence[ReadPiece]
    ) -> None:
        """Copies this rank's bytes from staging ``slots`` or a memory home to the device."""
        for i, (shard, buffer) in enumerate(zip(self.shards, self.buffers)):
            buffer.fill()
            flat = buffer.flat
            if self.has_second_slice:
                self._in_node(flat).copy_(self._second[i])
            elif not slots:
                flat[slice(*shard.layout.own("weight"))].copy_(shard.weight.flat, non_blocking=True)
        try:
            for piece in pieces if slots else ():
                self._copy_piece(store, piece)
        except BaseException:
            _first_error(pieces)  # waits for the remaining reads
            raise

    def _copy_piece(self, store: ShardStore, piece: ReadPiece) -> None:
        shard, flat = self.shards[piece.shard], self.flats[piece.shard]
        if not piece.read.done:
            with store.traffic.stalled("nvme->host", self.name):
                piece.read.wait()
        piece.read.wait()  # raises the error of a failed read
        start, end = piece.read.times
        store.traffic.mark(piece.read.lane, self.name, start, end)
        self._read_times = (
            (min(start, self._read_times[0]), max(end, self._read_times[1]))
            if self._read_times
            else (start, end)
        )
        source = piece.read.values(shard.spec.dtype)
        first = shard.layout.own("weight")[0] + piece.begin // shard.spec.dtype.itemsize
        flat[first : first + source.numel()].copy_(source, non_blocking=True)

    def _gather_in(self, offered: int) -> None:
        """Gathers the other ranks' slices, after this rank's copy, on the same queue."""
        for i, (shard, flat) in enumerate(zip(self.shards, self.flats)):
            what = f"{self.name} ({i})"
            if self.has_second_slice:
                pending = self._collectives.gather_in_node(flat, what, offered=offered)
            else:
                pending = self._collectives.gather(
                    flat, what, offered=offered, homes=shard.homes.weight_regions
                )
            if pending is not None:
                self._pending.append(pending)
                if pending.lent is not None:
                    shard.homes.lend(pending.lent)
                self._least_offered = pending.least_offered

    def finish_gather(self, store: ShardStore) -> None:
        """Ends a gather (GATHERING -> RESIDENT): later compute is ordered after it. May block on
        other ranks."""
        try:
            if self.arriving is not PAST:
                with store.traffic.stalled("host->device", self.name):
                    self.arriving.precede()
            if self._pending:
                with store.traffic.stalled("all-gather", self.name):
                    for pending in self._pending:
                        pending.wait()
        except BaseException:
            self._fail_gather()
            raise
        self._pending = []
        self._move(Residency.RESIDENT)
        if self._ranks.node is not None and not self.has_second_slice:
            for second, flat in zip(self._second, self.flats):
                second.copy_(self._in_node(flat))
            self._second_version = self.version

    def _fail_gather(self) -> None:
        _first_error(self._pieces)
        for pending in self._pending:  # running collectives still write to device memory
            pending.drop()
        self._collectives.drop_lost()
        self._pending = []
        try:
            self.arriving.wait()
        except (InfinityError, RuntimeError):
            pass  # the caller raises the first error
        self.arriving = PAST
        self._move(Residency.STORED)
        self._empty(self._charge)

    def release(self) -> None:
        """Frees the device memory (RESIDENT -> STORED). Home has the bytes: a forward's edits were
        written when its hold was taken off."""
        if self.residency is not Residency.RESIDENT or self.stays:
            raise self._illegal("be released")
        self._move(Residency.STORED)
        self._empty(self._charge)

    def change_places(self, other: ParamUnit) -> None:
        """Swaps buffers, with their content, with ``other``, a unit of the same parameters. Both
        are STORED or RESIDENT, and nothing computes with either."""
        for unit in (self, other):
            if unit.residency not in (Residency.STORED, Residency.RESIDENT):
                raise unit._illegal("change places")
        # One statement, so that no interrupt can lose a buffer. Recovery resets the fields below.
        self.buffers, other.buffers = other.buffers, self.buffers
        for name in ("residency", "arriving", "_charge", "_last_use"):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, its)
            setattr(other, name, mine)

    def rebuild(self) -> None:
        """Resets the unit to its home state after an exception. Only while nothing is in flight.
        The ledger drops the charges."""
        for pending in self._pending:  # running collectives still write to the storages
            pending.drop()
        self._slots, self._pieces, self._pending, self._charge = [], [], [], None
        self.arriving = self._last_use = PAST
        self._read_times, self._second_version = None, -1
        self._edits.forget()
        self._history.append((self.residency, None))
        self.conceal()
        self._align()
        if self.stays:
            self.residency = Residency.RESIDENT
        else:
            self.residency = Residency.STORED
            self._empty_storages()

    def _empty(self, charge: native.Charge) -> None:
        self._empty_storages()
        self._release_slots()
        charge.release()
        self._charge = None

    def _release_slots(self) -> None:
        for slot in self._slots:
            slot.release()
        self._slots, self._pieces = [], []

    def take_read_times(self) -> tuple[float, float] | None:
        """Returns the start and the end of the last read, and clears them."""
        times, self._read_times = self._read_times, None
        return times

    def _move(self, to: Residency) -> None:
        if to not in MOVES[self.residency]:
            raise self._illegal(f"go to {to.name}")
        self._history.append((self.residency, to))
        self.residency = to

    def _illegal(self, what: str) -> UsageError:
        moves = (
            ", ".join(
                f"{begin.name}{' given up' if to is None else f'->{to.name}'}"
                for begin, to in self._history
            )
            or "none"
        )
        return UsageError(
            f"unit {self.name} is {self.residency.name} and cannot {what}; its last moves: {moves}"
        )


def _first_error(pieces: Sequence[ReadPiece]) -> Exception | None:
    """Waits for all reads. Returns the first error, if any."""
    error: Exception | None = None
    for piece in pieces:
        try:
            piece.read.wait()
        except Exception as failure:  # noqa: BLE001 - told by the caller
            error = error or failure
    return error
