"""ActivationStore: what a forward saves for its backward, at home on the host or on NVMe.

saved     one storage that autograd saved a tensor of: its bytes go home once, however many of its views are saved
spill     with ``activations="auto"`` and a device budget: only what the budget has no room for leaves the device
staging   memory for activations on their way to and from the disk

Whole storages move, and come back under the same views: strides and offsets are those of the saved tensors, so the
backward computes with the same bits. A storage lives at home as long as autograd's graph refers to it. Space at home
is taken when it is first needed and kept for the next step, which needs the same.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import native
from .errors import CapacityError, UsageError
from .layout import round_up
from .store import ShardStore, StateArray
from .tiers import Tier

SMALLEST_NBYTES = 64 * 1024  # what is smaller stays: moving it would cost more than it frees
LARGEST_EXCESS = 4  # a storage is moved whole unless the saved view is less than this part of it
READ_AHEAD = 2  # storages that are read before the backward asks for them


def blocks(nbytes: int) -> int:
    """``nbytes`` in whole disk blocks."""
    return round_up(nbytes, native.BLOCK_NBYTES)


class Saved:
    """One storage at home."""

    def __init__(self, store: ActivationStore, storage: torch.UntypedStorage):
        self.nbytes = storage.nbytes()
        self.place: Place | None = store.take(self.nbytes)
        self.read: tuple[native.Ticket, native.Lease] | None = None  # under way into staging
        self._store = weakref.ref(store)
        self._there: StorageWeakRef | None = None  # where the bytes are on the device again

    def bytes_on_device(self) -> torch.UntypedStorage | None:
        """The storage that has the bytes again, while anything holds it."""
        if self._there is None or self._there.expired():
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self._there.cdata)

    def came_back(self, storage: torch.UntypedStorage) -> None:
        self._there = StorageWeakRef(storage)

    def __del__(self):
        store = self._store()
        if store is not None and self.place is not None:
            store.give_back(self)


@dataclass(frozen=True)
class View:
    """A saved tensor: which storage, and how it lies in it."""

    saved: Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Place:
    """Space at home, with the writes that put bytes there."""

    array: StateArray
    writes: list[native.Ticket] = field(default_factory=list)

    def settle(self) -> None:
        """Waits until the bytes are at home."""
        for write in self.writes:
            write.wait()
        self.writes.clear()


class ActivationStore:
    """Takes saved tensors home and brings them back. Used from the threads that run forward and backward."""

    def __init__(self, store: ShardStore, tier: Tier, staging: native.PinnedPool | None, *, spare_nbytes: int | None):
        self._store, self._tier, self._staging = store, tier, staging
        self._spare_nbytes = spare_nbytes  # what may stay on the device; None: nothing, and home has to have room
        self._kept_nbytes = 0
        self._stays: set[int] = set()
        self._free: dict[int, list[Place]] = defaultdict(list)
        self._order: list[weakref.ref[Saved]] = []  # as they were saved: the backward needs the last ones first
        self._known: dict[int, tuple[StorageWeakRef, int, weakref.ref[Saved]]] = {}  # by storage: its version, its bytes
        self._transfers: deque[tuple[native.Ticket, native.Lease]] = deque()  # whose staging memory nobody waits for

    # --- the hooks ---

    def begin(self, stays: set[int]) -> None:
        """A forward starts. ``stays``: storages (by address) that are not activations: buffers, foreign parameters."""
        self._stays = stays
        self._kept_nbytes = 0
        self._order = [ref for ref in self._order if ref() is not None]
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}

    def hooks(self, outer: tuple[Callable, Callable] | None) -> tuple[Callable, Callable]:
        """Pack and unpack for autograd; what they do not take goes to ``outer``."""
        outer_pack, outer_unpack = outer if outer is not None else (None, None)

        def pack(tensor: torch.Tensor) -> Any:
            if self._is_taken(tensor):
                saved = self._saved(tensor)
                if saved is not None:
                    return View(saved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
            return outer_pack(tensor) if outer_pack else tensor

        def unpack(packed: Any) -> torch.Tensor:
            if not isinstance(packed, View):
                return outer_unpack(packed) if outer_unpack else packed
            storage = self._bring(packed.saved)
            return torch.empty(0, dtype=packed.dtype, device="cpu").set_(
                storage, packed.offset, packed.size, packed.stride
            )

        return pack, unpack

    def _is_taken(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
            return False
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < SMALLEST_NBYTES or nbytes > LARGEST_EXCESS * max(1, tensor.nbytes):
            return False
        return storage._cdata not in self._stays

    def _saved(self, tensor: torch.Tensor) -> Saved | None:
        """The storage's bytes at home; None where the budget has room for them on the device."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and not known[0].expired() and known[1] == tensor._version:
            saved = known[2]()
            if saved is not None:
                return saved
        if self._kept_nbytes + storage.nbytes() <= (self._spare_nbytes or 0):
            self._kept_nbytes += storage.nbytes()
            return None
        with self._store.guarding():
            try:
                saved = Saved(self, storage)
            except CapacityError:
                if self._spare_nbytes is None:
                    raise
                return None
            self._send(saved, storage)
        self._known[storage._cdata] = (StorageWeakRef(storage), tensor._version, weakref.ref(saved))
        self._order.append(weakref.ref(saved))
        return saved

    # --- space ---

    def take(self, nbytes: int) -> Place:
        """Space at home for ``nbytes``. Raises CapacityError over the tier's budget."""
        size = blocks(nbytes)
        if self._free[size]:
            return self._free[size].pop()
        try:
            return Place(self._store.allocate_more(self._tier, size, "activations"))
        except CapacityError as error:
            raise CapacityError(
                f"activations: {error} Give more, run fewer samples at once (micro_batch), recompute more of the forward "
                "(gradient checkpointing), or choose another home: Config(activations=...)."
            ) from error

    def give_back(self, saved: Saved) -> None:
        """Nothing refers to ``saved`` any longer: its space is free for others."""
        place, saved.place = saved.place, None
        if saved.read is not None:
            self._transfers.append(saved.read)
        self._free[place.array.nbytes].append(place)

    # --- moving ---

    def _send(self, saved: Saved, storage: torch.UntypedStorage) -> None:
        source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        array = saved.place.array
        if array.tier is not Tier.NVME:
            with self._store.traffic.copying("device->host", saved.nbytes, "activations"):
                array.flat[: saved.nbytes] = source
            return
        saved.place.settle()  # of its last use
        for begin, end in self._parts(saved):
            lease = self._lease(blocks(end - begin))
            whole = self._staged(lease, blocks(end - begin))
            with self._store.traffic.copying("device->host", end - begin, "activations"):
                whole[: end - begin] = source[begin:end]
                whole[end - begin :] = 0
            write = self._store.engine.write(array.extent, begin, lease.address, whole.numel())
            saved.place.writes.append(write)
            self._transfers.append((write, lease))

    def _bring(self, saved: Saved) -> torch.UntypedStorage:
        storage = saved.bytes_on_device()
        if storage is not None:
            return storage
        with self._store.guarding():
            storage = torch.UntypedStorage(saved.nbytes, device="cpu")
            target = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            array = saved.place.array
            if array.tier is not Tier.NVME:
                with self._store.traffic.copying("host->device", saved.nbytes, "activations"):
                    target.copy_(array.flat[: saved.nbytes])
            else:
                self._read(saved, target)
        saved.came_back(storage)
        return storage

    def _read(self, saved: Saved, target: torch.Tensor) -> None:
        if saved.read is None and saved.nbytes <= self._largest:
            self._start_read(saved, self._lease(saved.place.array.nbytes))
        self._read_ahead(saved)
        if saved.read is not None:
            (ticket, lease), saved.read = saved.read, None
            try:
                self._finish_read(saved, 0, saved.nbytes, ticket, lease, target)
            finally:
                lease.release()
            return
        saved.place.settle()
        for begin, end in self._parts(saved):
            lease = self._lease(blocks(end - begin))
            try:
                ticket = self._store.engine.read(saved.place.array.extent, begin, lease.address, blocks(end - begin))
                self._finish_read(saved, begin, end, ticket, lease, target)
            finally:
                lease.release()

    def _start_read(self, saved: Saved, lease: native.Lease) -> None:
        array, writes = saved.place.array, saved.place.writes
        after = writes[-1] if writes else None  # what is staged at once was written at once
        saved.read = self._store.engine.read(array.extent, 0, lease.address, array.nbytes, after=after), lease

    def _finish_read(self, saved: Saved, begin: int, end: int, ticket, lease, target: torch.Tensor) -> None:
        with self._store.traffic.stalled("nvme->host", "activations"):
            ticket.wait()
        nbytes = blocks(end - begin)
        self._store.verify(saved.place.array, lease.address, nbytes, offset=begin)
        self._store.traffic.mark("nvme->host", "activations", *ticket.times)
        with self._store.traffic.copying("host->device", end - begin, "activations"):
            target[begin:end] = self._staged(lease, nbytes)[: end - begin]

    def _read_ahead(self, saved: Saved) -> None:
        """Starts reading what was saved just before ``saved``: the backward will ask for it next."""
        index = next((i for i in range(len(self._order) - 1, -1, -1) if self._order[i]() is saved), 0)
        for ref in self._order[max(0, index - READ_AHEAD) : index][::-1]:
            other = ref()
            if other is None or other.place is None or other.read is not None or other.nbytes > self._largest:
                continue
            self._collect()
            lease = self._staging.try_lease(other.place.array.nbytes)
            if lease is None:
                return
            self._start_read(other, lease)

    # --- staging ---

    @property
    def _largest(self) -> int:
        """Bytes that are staged at once: a quarter, so that transfers overlap. Whole checksum blocks."""
        quarter = self._staging.capacity_nbytes // 4
        return max(native.CHECKSUM_NBYTES, quarter // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES)

    def _parts(self, saved: Saved) -> Iterator[tuple[int, int]]:
        for begin in range(0, saved.nbytes, self._largest):
            yield begin, min(saved.nbytes, begin + self._largest)

    def _staged(self, lease: native.Lease, nbytes: int) -> torch.Tensor:
        return native.tensor_at(self._staging.region, lease.address, nbytes, torch.uint8)

    def _lease(self, nbytes: int) -> native.Lease:
        while True:
            self._collect()
            lease = self._staging.try_lease(nbytes)
            if lease is not None:
                return lease
            if self._transfers:
                with self._store.traffic.stalled("host->nvme", "activations"):
                    self._finish(*self._transfers.popleft())
            elif not self._drop_read_ahead():
                raise UsageError("the staging memory of activations is smaller than its plan")

    def _collect(self) -> None:
        """Gives back the staging memory of transfers that have ended."""
        while self._transfers and self._transfers[0][0].done:
            self._finish(*self._transfers.popleft())

    def _finish(self, ticket: native.Ticket, lease: native.Lease) -> None:
        try:
            ticket.wait()
        finally:
            lease.release()

    def _drop_read_ahead(self) -> bool:
        """Takes back one read ahead of its use. False when there is none."""
        for ref in self._order:
            other = ref()
            if other is not None and other.read is not None:
                (ticket, lease), other.read = other.read, None
                self._finish(ticket, lease)
                return True
        return False

