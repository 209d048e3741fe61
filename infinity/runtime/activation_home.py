"""ActivationHome: sends saved storages home, and brings them back before the backward needs them.

saved     one storage that autograd saved a tensor of: its bytes go home once, however many of its
          views are saved
staging   memory for activations on their way to and from the disk
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from .. import native
from ..errors import CapacityError, UsageError
from ..machine.device import PAST, Copy, Event
from ..machine.in_flight import InFlight
from ..machine.tiers import Tier
from ..storage.arrays import StateArray, bytes_of
from ..storage.store import ShardStore
from ..storage.transfers import Window
from .saved_tensor import Saved, blocks, raw_bytes, release_saved

IN_FLIGHT_NBYTES = 256 * 1024 * 1024  # activations on their way home; more of them wait
READ_AHEAD = 2  # storages that are read before the backward asks for them


@dataclass(frozen=True)
class _CopiedPart:
    """A part of a storage on its way into staging memory, and to disk from there."""

    begin: int
    nbytes: int
    lease: native.Lease
    whole: torch.Tensor  # over the lease, in checksum blocks
    event: Event


class ActivationHome:
    """Buffers at home for saved storages, and the transfers in both directions."""

    def __init__(self, store: ShardStore, tier: Tier, staging: native.PinnedPool | None):
        self._store, self._tier, self._staging = store, tier, staging
        self._device = store.device
        self._in_flight = InFlight(IN_FLIGHT_NBYTES)  # activations on their way home
        self._in_use: dict[int, Event] = {}  # by home address: the last copy that reads the buffer
        # By queue: its last copy; after it no copy uses any buffer.
        self._last: dict[str, Event] = {}
        # Buffers in use, with the transfers that may still use them, keyed by a weak reference to
        # the saved storage. C code appends a dead reference to _left, so an interrupt cannot leak a
        # buffer.
        self._places: dict[weakref.ref[Saved], tuple[StateArray, list[native.Ticket]]] = {}
        self._left: deque[weakref.ref[Saved]] = deque()
        self._arrays: list[StateArray] = []  # all host memory that was ever taken
        # Free buffers among those; on disk the store manages the space.
        self._free: list[StateArray] = []
        # In the order of saving; the backward needs the last ones first.
        self._order: list[weakref.ref[Saved]] = []

    def rebuild(self) -> None:
        """Frees every buffer whose saved storage is gone, after an exception. Only while nothing is
        in flight."""
        self._order = [ref for ref in self._order if ref() is not None]
        self._in_flight, self._in_use, self._last = self._in_flight.emptied(), {}, {}
        for ref in self._order:
            if (saved := ref()) is not None:
                saved.read = saved.coming = None
        self._reclaim()
        # By identity: a buffer that was taken but never filed has no user.
        taken = {id(array) for array, _ in self._places.values()}
        self._free = [array for array in self._arrays if id(array) not in taken]
        if self._staging is not None:
            self._store.drain(self._staging)

    # --- space ---

    def take(self, nbytes: int) -> StateArray:
        """Allocates ``nbytes`` at home. Raises CapacityError over the tier's budget."""
        self._reclaim()
        size = blocks(nbytes)
        fitting = [array for array in self._free if size <= array.nbytes <= size + size // 8]
        if fitting:
            best = min(fitting, key=lambda array: array.nbytes)
            self._free.remove(best)
            return best
        try:
            array = self._store.arrays.allocate_more(self._tier, size, "activations")
            if array.tier is not Tier.NVME:
                self._arrays.append(array)
            return array
        except CapacityError as error:
            if self._free:  # other sizes: freed to make room for this one
                for event in self._last.values():
                    event.wait()
                while self._free:
                    array = self._free.pop()
                    self._arrays.remove(array)
                    self._store.arrays.free_more(array)
                return self.take(nbytes)
            raise CapacityError(
                f"activations: {error} Give more, run fewer samples at once (micro_batch),"
                " recompute more of the forward (gradient checkpointing), or choose another home:"
                " Config(activations=...)."
            ) from error

    def keep(self, saved: Saved) -> None:
        """Registers the buffer of ``saved``, which is reused once ``saved`` is freed."""
        self._places[weakref.ref(saved, self._left.append)] = saved.place, saved.writes

    def _reclaim(self) -> None:
        """Frees the buffers whose saved storages are gone."""
        while self._left:
            ref = self._left[0]
            if ref in self._places:
                place, transfers = self._places.pop(ref)
                if place.tier is Tier.NVME:
                    self._store.arrays.free_more(place, after=transfers)
                else:
                    self._free.append(place)
            self._left.popleft()

    def _send(self, saved: Saved, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        source = raw_bytes(storage)[saved.begin : saved.begin + saved.nbytes]
        array = saved.place
        if array.tier is not Tier.NVME:
            behind = [self._device.now(), self._in_use.pop(array.extent.address, PAST)]
            transfer = Copy("device->host", saved.nbytes, "activations")
            target = array.flat[: saved.nbytes]
            event = self._device.put(
                "out",
                lambda: target.copy_(source, non_blocking=True),
                behind=behind,
                transfer=transfer,
            )
            saved.sent = self._last["out"] = event
            if event is not PAST:
                saved.source = tensor.detach(), tensor._version
                self._in_flight.keep(source, event, partial(release_saved, weakref.ref(saved)))
            return
        saved.checksum = 0
        # One part is written while the next one is copied.
        with Window(2, partial(self._write, saved)) as copies:
            for begin, end in self._parts(saved):
                copies.make_room()
                copies.add(self._copy_out(begin, source[begin:end]))

    def _copy_out(self, begin: int, source: torch.Tensor) -> _CopiedPart:
        """Starts copying a part of a storage from the device into staging memory."""
        nbytes = source.numel()
        lease = self._lease(blocks(nbytes))
        whole = self._staged(lease, blocks(nbytes))
        whole[nbytes:] = 0
        transfer = Copy("device->host", nbytes, "activations")
        event = self._device.put(
            "out",
            lambda: whole[:nbytes].copy_(source, non_blocking=True),
            behind=[self._device.now()],
            transfer=transfer,
        )
        return _CopiedPart(begin, nbytes, lease, whole, event)

    def _write(self, saved: Saved, part: _CopiedPart) -> None:
        """Starts writing a part to disk once it is in staging memory. Blocks on the copy."""
        if not part.event.done:
            with self._store.traffic.stalled("device->host", "activations"):
                part.event.wait()
        part.event.wait()  # raises the copy's error
        if self._device.is_host:
            saved.checksum = native.crc32c(part.whole[: part.nbytes], saved.checksum)
        saved.writes.append(
            self._store.start_write(saved.place, part.begin, part.lease, part.whole.numel())
        )

    def _bring(self, saved: Saved) -> torch.UntypedStorage:
        storage = saved.bytes_on_device()
        if storage is not None:
            return storage
        if self._store.io is None:
            raise UsageError(
                "this backward needs activations that went with the engine: run it before"
                " unwrap_model"
            )
        with self._store.guarding():
            if saved.place.tier is not Tier.NVME:
                storage = self._copy_back(saved)
            else:
                storage = torch.UntypedStorage(saved.nbytes, device=self._device.where)
                self._read(saved, raw_bytes(storage))
        saved.came_back(storage)
        return storage

    def _copy_back(self, saved: Saved) -> torch.UntypedStorage:
        """Copies a storage back from the host. If copies overlap compute, also starts copying the
        storages that the backward needs next."""
        saved.check_source()
        if saved.coming is None:
            self._set_out(saved)
        storage, event = saved.coming
        saved.coming = None
        if self._device.overlaps:
            for other in self._before(saved):
                if (
                    other.coming is None
                    and other.bytes_on_device() is None
                    and not other.was_changed()
                ):
                    self._set_out(other)
        event.precede()
        return storage

    def _set_out(self, saved: Saved) -> None:
        """Starts copying to the device. The target was allocated on the compute stream, so the copy
        waits for earlier compute on it."""
        target, source = (
            torch.empty(saved.nbytes, dtype=torch.uint8, device=self._device.where),
            saved.place.flat[: saved.nbytes],
        )
        transfer = Copy("host->device", saved.nbytes, "activations")
        behind = [self._device.now(), saved.sent]
        event = self._device.put(
            "in", lambda: target.copy_(source, non_blocking=True), behind=behind, transfer=transfer
        )
        # The copy writes to it even if no backward uses the result.
        self._in_flight.keep(target, event)
        self._in_use[saved.place.extent.address] = self._last["in"] = event
        saved.coming = target.untyped_storage(), event

    def _before(self, saved: Saved) -> Iterator[Saved]:
        """Yields the storages saved just before ``saved`` that are still in use: the backward needs
        them next."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        index = next(
            (i for i in range(len(self._order) - 1, -1, -1) if self._order[i]() is saved), 0
        )
        for ref in self._order[max(0, index - READ_AHEAD) : index][::-1]:
            other = ref()
            if other is not None:
                yield other

    def _read(self, saved: Saved, target: torch.Tensor) -> None:
        if saved.read is None and saved.nbytes <= self._largest:
            self._start_read(saved, self._lease(blocks(saved.nbytes)))
        self._read_ahead(saved)
        if saved.read is not None:
            (ticket, lease), saved.read = saved.read, None
            self._finish_read(saved, 0, saved.nbytes, ticket, lease, target)
            return
        for begin, end in self._parts(saved):
            lease = self._lease(blocks(end - begin))
            ticket = self._store.start_read(saved.place, begin, lease, blocks(end - begin))
            self._finish_read(saved, begin, end, ticket, lease, target)

    def _start_read(self, saved: Saved, lease: native.Lease) -> None:
        read = self._store.start_read(saved.place, 0, lease, blocks(saved.nbytes))
        saved.writes.append(read)  # its buffer must not be overwritten before the read is done
        saved.read = read, lease

    def _finish_read(
        self, saved: Saved, begin: int, end: int, ticket, lease, target: torch.Tensor
    ) -> None:
        with self._store.traffic.stalled("nvme->host", "activations"):
            ticket.wait()
        nbytes = blocks(end - begin)
        self._store.traffic.mark("nvme->host", "activations", *ticket.times)
        with self._store.traffic.copying("host->device", end - begin, "activations"):
            target[begin:end] = self._staged(lease, nbytes)[: end - begin]
        lease.release()

    def _read_ahead(self, saved: Saved) -> None:
        """Starts reading what was saved just before ``saved``: the backward needs it next."""
        for other in self._before(saved):
            if other.read is not None or other.nbytes > self._largest:
                continue
            lease = self._staging.try_lease(blocks(other.nbytes))
            if lease is None:
                return
            self._start_read(other, lease)

    @property
    def _largest(self) -> int:
        """Largest number of bytes staged at once: a quarter, so that transfers overlap. Whole
        checksum blocks."""
        quarter = self._staging.capacity_nbytes // 4
        return max(
            native.CHECKSUM_NBYTES, quarter // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES
        )

    def _parts(self, saved: Saved) -> Iterator[tuple[int, int]]:
        for begin in range(0, saved.nbytes, self._largest):
            yield begin, min(saved.nbytes, begin + self._largest)

    def _staged(self, lease: native.Lease, nbytes: int) -> torch.Tensor:
        return bytes_of(self._staging, lease, nbytes)

    def _lease(self, nbytes: int) -> native.Lease:
        """Leases staging memory. Waits for running transfers, then drops storages that were read
        ahead."""
        if (lease := self._staging.try_lease(nbytes)) is not None:
            return lease
        with self._store.traffic.stalled("host->nvme", "activations"):
            return self._store.take_lease(self._staging, nbytes, self._drop_read_ahead)

    def _drop_read_ahead(self) -> bool:
        """Drops one storage that was read ahead of its use. Returns False if there is none."""
        for ref in self._order:
            other = ref()
            if other is not None and other.read is not None:
                other.read = None
                return True
        return False
