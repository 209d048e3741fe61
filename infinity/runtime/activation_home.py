"""ActivationHome: sends saved storages home, and brings them back before the backward needs them.

saved     one storage that autograd saved a tensor of: its bytes go home once, however many of its views are saved
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
from .saved_tensor import Saved, blocks, raw_bytes, release_saved

IN_FLIGHT_NBYTES = 256 * 1024 * 1024  # of activations that are on their way home; more wait
READ_AHEAD = 2  # storages that are read before the backward asks for them


@dataclass(frozen=True)
class _CopiedPart:
    """A part of a storage on its way into staging memory, and to disk from there."""

    begin: int
    nbytes: int
    lease: native.Lease
    whole: torch.Tensor  # over the lease, in blocks
    event: Event


class ActivationHome:
    """Places at home for saved storages, and the transfers there and back."""

    def __init__(self, store: ShardStore, tier: Tier, staging: native.PinnedPool | None):
        self._store, self._tier, self._staging = store, tier, staging
        self._device = store.device
        self._in_flight = InFlight(IN_FLIGHT_NBYTES)  # activations that are still sent home
        self._in_use: dict[int, Event] = {}  # when a place at home (by address) is no longer read
        self._last: dict[str, Event] = {}  # of each queue: when no copy uses any place
        # Places at home by what tells that nobody refers to their bytes any longer, with the transfers that may still use them.
        # It is told by C code alone: whatever is interrupted just then, no place is lost.
        self._places: dict[weakref.ref[Saved], tuple[StateArray, list[native.Ticket]]] = {}
        self._left: deque[weakref.ref[Saved]] = deque()
        self._arrays: list[StateArray] = []  # all memory on the host that was ever taken
        self._free: list[StateArray] = []  # of that; on the disk the store keeps the space
        self._order: list[weakref.ref[Saved]] = []  # as they were saved: the backward needs the last ones first

    def rebuild(self) -> None:
        """Frees every place that nobody refers to any more, whatever an exception left of the books. Only while nothing is in flight."""
        self._order = [ref for ref in self._order if ref() is not None]
        self._in_flight, self._in_use, self._last = self._in_flight.emptied(), {}, {}
        for ref in self._order:
            if (saved := ref()) is not None:
                saved.read = saved.coming = None
        self._reclaim()
        # By identity: a place that was taken and never filed is nobody's.
        taken = {id(array) for array, _ in self._places.values()}
        self._free = [array for array in self._arrays if id(array) not in taken]
        if self._staging is not None:
            self._store.drain(self._staging)

    # --- space ---

    def take(self, nbytes: int) -> StateArray:
        """Takes space at home for ``nbytes``. Raises CapacityError over the tier's budget."""
        self._reclaim()
        size = blocks(nbytes)
        fitting = [array for array in self._free if size <= array.nbytes <= size + size // 8]
        if fitting:
            best = min(fitting, key=lambda array: array.nbytes)
            self._free.remove(best)
            return best
        try:
            array = self._store.allocate_more(self._tier, size, "activations")
            if array.tier is not Tier.NVME:
                self._arrays.append(array)
            return array
        except CapacityError as error:
            if self._free:  # of other sizes: given up for one of this
                for event in self._last.values():
                    event.wait()
                while self._free:
                    array = self._free.pop()
                    self._arrays.remove(array)
                    self._store.free_more(array)
                return self.take(nbytes)
            raise CapacityError(
                f"activations: {error} Give more, run fewer samples at once (micro_batch), recompute more of the forward "
                "(gradient checkpointing), or choose another home: Config(activations=...)."
            ) from error

    def keep(self, saved: Saved) -> None:
        """Takes the place of ``saved`` back once nothing refers to that any longer."""
        self._places[weakref.ref(saved, self._left.append)] = saved.place, saved.writes

    def _reclaim(self) -> None:
        """Places whose bytes nobody refers to any longer are free for others."""
        while self._left:
            ref = self._left[0]
            if ref in self._places:
                place, transfers = self._places.pop(ref)
                if place.tier is Tier.NVME:
                    self._store.free_more(place, after=transfers)
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
            event = self._device.put("out", lambda: target.copy_(source, non_blocking=True), behind=behind, transfer=transfer)
            saved.sent = self._last["out"] = event
            if event is not PAST:
                saved.source = tensor.detach(), tensor._version
                self._in_flight.keep(source, event, partial(release_saved, weakref.ref(saved)))
            return
        saved.checksum = 0
        copied: _CopiedPart | None = None  # while the next one is
        for begin, end in self._parts(saved):
            part = self._copy_out(begin, source[begin:end])
            if copied is not None:
                self._write(saved, copied)
            copied = part
        if copied is not None:
            self._write(saved, copied)

    def _copy_out(self, begin: int, source: torch.Tensor) -> _CopiedPart:
        """Starts copying a part of a storage into staging memory, which the device copies to by itself."""
        nbytes = source.numel()
        lease = self._lease(blocks(nbytes))
        whole = self._staged(lease, blocks(nbytes))
        whole[nbytes:] = 0
        transfer = Copy("device->host", nbytes, "activations")
        event = self._device.put(
            "out", lambda: whole[:nbytes].copy_(source, non_blocking=True), behind=[self._device.now()], transfer=transfer
        )
        return _CopiedPart(begin, nbytes, lease, whole, event)

    def _write(self, saved: Saved, part: _CopiedPart) -> None:
        """Sends a part to disk once it is in staging memory."""
        if not part.event.done:
            with self._store.traffic.stalled("device->host", "activations"):
                part.event.wait()
        part.event.wait()  # raises what went wrong
        if self._device.is_host:
            saved.checksum = native.crc32c(part.whole[: part.nbytes], saved.checksum)
        saved.writes.append(self._store.start_write(saved.place, part.begin, part.lease, part.whole.numel()))

    def _bring(self, saved: Saved) -> torch.UntypedStorage:
        storage = saved.bytes_on_device()
        if storage is not None:
            return storage
        if self._store.io is None:
            raise UsageError("this backward needs activations that went with the engine: run it before unwrap_model")
        with self._store.guarding():
            if saved.place.tier is not Tier.NVME:
                storage = self._copy_back(saved)
            else:
                storage = torch.UntypedStorage(saved.nbytes, device=self._device.where)
                self._read(saved, raw_bytes(storage))
        saved.came_back(storage)
        return storage

    def _copy_back(self, saved: Saved) -> torch.UntypedStorage:
        """From the host. Where copies run beside the compute, those that the backward asks for next set out too."""
        saved.check_source()
        if saved.coming is None:
            self._set_out(saved)
        storage, event = saved.coming
        saved.coming = None
        if self._device.overlaps:
            for other in self._before(saved):
                if other.coming is None and other.bytes_on_device() is None and not other.was_changed():
                    self._set_out(other)
        event.precede()
        return storage

    def _set_out(self, saved: Saved) -> None:
        """Starts copying to the device. The memory is the compute's: the copy comes after what it did with it before."""
        target, source = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._device.where), saved.place.flat[: saved.nbytes]
        transfer = Copy("host->device", saved.nbytes, "activations")
        behind = [self._device.now(), saved.sent]
        event = self._device.put("in", lambda: target.copy_(source, non_blocking=True), behind=behind, transfer=transfer)
        self._in_flight.keep(target, event)  # should nobody want it in the end, it is written all the same
        self._in_use[saved.place.extent.address] = self._last["in"] = event
        saved.coming = target.untyped_storage(), event

    def _before(self, saved: Saved) -> Iterator[Saved]:
        """Yields what was saved just before ``saved``, as far as it is still wanted: the backward asks for it next."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        index = next((i for i in range(len(self._order) - 1, -1, -1) if self._order[i]() is saved), 0)
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
        saved.writes.append(read)  # the place is not to be written anew before
        saved.read = read, lease

    def _finish_read(self, saved: Saved, begin: int, end: int, ticket, lease, target: torch.Tensor) -> None:
        with self._store.traffic.stalled("nvme->host", "activations"):
            ticket.wait()
        nbytes = blocks(end - begin)
        self._store.traffic.mark("nvme->host", "activations", *ticket.times)
        with self._store.traffic.copying("host->device", end - begin, "activations"):
            target[begin:end] = self._staged(lease, nbytes)[: end - begin]
        lease.release()

    def _read_ahead(self, saved: Saved) -> None:
        """Starts reading what was saved just before ``saved``: the backward will ask for it next."""
        for other in self._before(saved):
            if other.read is not None or other.nbytes > self._largest:
                continue
            lease = self._staging.try_lease(blocks(other.nbytes))
            if lease is None:
                return
            self._start_read(other, lease)

    @property
    def _largest(self) -> int:
        """Bytes that are staged at once: a quarter, so that transfers overlap. Whole checksum blocks."""
        quarter = self._staging.capacity_nbytes // 4
        return max(native.CHECKSUM_NBYTES, quarter // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES)

    def _parts(self, saved: Saved) -> Iterator[tuple[int, int]]:
        for begin in range(0, saved.nbytes, self._largest):
            yield begin, min(saved.nbytes, begin + self._largest)

    def _staged(self, lease: native.Lease, nbytes: int) -> torch.Tensor:
        return bytes_of(self._staging, lease, nbytes)

    def _lease(self, nbytes: int) -> native.Lease:
        """Staging memory: waits for what is on its way, then takes back what was read ahead."""
        if (lease := self._staging.try_lease(nbytes)) is not None:
            return lease
        with self._store.traffic.stalled("host->nvme", "activations"):
            return self._store.take_lease(self._staging, nbytes, self._drop_read_ahead)

    def _drop_read_ahead(self) -> bool:
        """Takes back one read ahead of its use. False when there is none."""
        for ref in self._order:
            other = ref()
            if other is not None and other.read is not None:
                other.read = None
                return True
        return False
