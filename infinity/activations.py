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
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import native
from .device import PAST, Borrowed, Freight, Moment
from .errors import CapacityError, UsageError
from .layout import round_up
from .recompute import Choice
from .store import ShardStore, StateArray
from .tiers import Tier

if TYPE_CHECKING:
    from .recompute import ActivationPlanner, PlannedBlock

SMALLEST_NBYTES = 64 * 1024  # what is smaller stays: moving it would cost more than it frees
LARGEST_EXCESS = 4  # a storage is moved whole unless it is more than so many times what the saved view needs
ALIGNMENT = 64  # bytes: a part of a storage starts where its bytes lie as they did
BORROWED_NBYTES = 256 * 1024 * 1024  # of activations that are on their way home; more wait
READ_AHEAD = 2  # storages that are read before the backward asks for them


def blocks(nbytes: int) -> int:
    """``nbytes`` in whole blocks of a checksum, of which any part can be written."""
    return round_up(nbytes, native.CHECKSUM_NBYTES)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _span(tensor: torch.Tensor, storage_nbytes: int) -> tuple[int, int]:
    """First byte and number of bytes of the storage that are to be saved for ``tensor``."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.storage_offset() * tensor.itemsize // ALIGNMENT * ALIGNMENT
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize
    return (begin, end - begin) if storage_nbytes > LARGEST_EXCESS * (end - begin) else (0, storage_nbytes)


class Kept:
    """A saved tensor that stays as it is, with torch's own check for changes in place, which hooks would switch off."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.detach()  # the tensor itself would keep the graph that keeps it
        self._version = tensor._version

    def tensor(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError, as torch does, when it was changed since."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(self._tensor.shape)}] is at version {self._tensor._version}; expected "
                f"version {self._version} instead."
            )
        return self._tensor


class WithinBudget:
    """A saved tensor that the device's budget has room for, counted for as long as it is saved. ``packed`` stands for it."""

    __slots__ = ("packed", "_store", "_nbytes")

    def __init__(self, packed: Any, store: ActivationStore, nbytes: int):
        self.packed, self._store, self._nbytes = packed, store, nbytes
        store.kept_nbytes += nbytes

    def __del__(self):
        self._store.kept_nbytes -= self._nbytes


class Saved:
    """Bytes of one storage at home: all of it, or the part that one view needs."""

    def __init__(self, store: ActivationStore, begin: int, nbytes: int):
        self.place: StateArray | None = None
        self.read: tuple[native.Ticket, native.Lease] | None = None  # under way into staging
        self.writes: list[native.Ticket] = []
        self.sent: Moment = PAST  # when the bytes are at home
        self.source: tuple[torch.Tensor, int] | None = None  # what they are of, and its count of changes, until then
        self.changed = False  # in that time
        self.coming: tuple[torch.UntypedStorage, Moment] | None = None  # on their way back
        self.begin, self.nbytes = begin, nbytes
        self.checksum = 0  # of bytes on disk, to tell whether they are still those of the storage
        self._store = weakref.ref(store)
        self._there: StorageWeakRef | None = None  # where the bytes are on the device again
        self.place = store.take(nbytes)

    def bytes_on_device(self) -> torch.UntypedStorage | None:
        """The storage that has the bytes again, while anything holds it."""
        if self._there is None or self._there.expired():
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self._there.cdata)

    def was_changed(self) -> bool:
        """Whether the tensor was changed while it was on its way home, so that its bytes there may be either."""
        self.changed |= self.source is not None and self.source[0]._version != self.source[1]
        return self.changed

    def check_source(self) -> None:
        """Raises RuntimeError, as torch does, when it was changed."""
        if self.was_changed():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation while it was "
                "sent home: leave it as it is until the backward, or set Config(activations='device')."
            )

    def came_back(self, storage: torch.UntypedStorage) -> None:
        """``storage`` has the bytes."""
        self._there = StorageWeakRef(storage)

    def settle(self) -> None:
        """Waits until the bytes are at home."""
        for write in self.writes:
            write.wait()
        self.writes.clear()

    def __del__(self):
        store = self._store()
        if store is not None and self.place is not None:
            store.give_back(self)


@dataclass(frozen=True)
class View:
    """A saved tensor: which bytes, and how it lies in them."""

    saved: Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements, in the storage that was saved
    conj: bool
    neg: bool

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in ``storage`` that has its bytes again."""
        offset = self.offset - self.saved.begin // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor


def _let_go(saved: weakref.ref[Saved]) -> None:
    """The bytes are at home: what they were of may be changed."""
    if (there := saved()) is not None:
        there.was_changed()
        there.source = None


class ActivationStore:
    """Takes saved tensors home and brings them back. Used from the threads that run forward and backward."""

    def __init__(self, store: ShardStore, tier: Tier, staging: native.PinnedPool | None, *, spare_nbytes: int | None):
        self._store, self._tier, self._staging = store, tier, staging
        self._device = store.device
        self._borrowed = Borrowed(BORROWED_NBYTES)  # activations that are still sent home
        self._in_use: dict[int, Moment] = {}  # when a place at home (by address) is no longer read
        self._last: dict[str, Moment] = {}  # of each queue: when no copy uses any place
        self.planner: ActivationPlanner | None = None
        self.block: PlannedBlock | None = None  # whose forward runs
        self.outside_nbytes = 0  # that this pass saved outside of blocks
        self.spare_nbytes = spare_nbytes  # what may stay on the device; None: nothing, and home has to have room
        self.kept_nbytes = 0  # that do
        self._stays: set[int] = set()
        self._free: list[StateArray] = []  # on the host; on the disk the store keeps the space
        self._order: list[weakref.ref[Saved]] = []  # as they were saved: the backward needs the last ones first
        # By storage: its bytes at home, and torch's count of changes when they were sent.
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[Saved], int]] = {}
        self._transfers: deque[tuple[native.Ticket, native.Lease]] = deque()  # whose staging memory nobody waits for

    # --- the hooks ---

    def begin(self, stays: set[int]) -> None:
        """A forward starts. ``stays``: storages (by address) that are not activations: buffers, foreign parameters."""
        self._stays = stays
        if self.planner is not None:
            self.planner.begin()
        self.outside_nbytes, self.block = 0, None
        self._order = [ref for ref in self._order if ref() is not None]
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}

    def hooks(self, outer: tuple[Callable, Callable] | None) -> tuple[Callable, Callable]:
        """Pack and unpack for autograd; what they do not take goes to ``outer``."""
        outer_pack, outer_unpack = outer if outer is not None else (None, None)

        @torch.compiler.disable
        def pack(tensor: torch.Tensor) -> Any:
            if self._is_taken(tensor):
                packed = self._pack(tensor)
                if packed is not None:
                    return packed
                nbytes = tensor.untyped_storage().nbytes()
                return WithinBudget(outer_pack(tensor) if outer_pack else Kept(tensor), self, nbytes)
            return outer_pack(tensor) if outer_pack else Kept(tensor)

        @torch.compiler.disable
        def unpack(packed: Any) -> torch.Tensor:
            packed = packed.packed if isinstance(packed, WithinBudget) else packed
            if isinstance(packed, View):
                return packed.over(self._bring(packed.saved))
            return packed.tensor() if isinstance(packed, Kept) else outer_unpack(packed)

        return pack, unpack

    def _is_taken(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.device != self._device.where or type(tensor) is not torch.Tensor:
            return False
        if tensor.is_nested or not tensor.numel() or tensor.nbytes < SMALLEST_NBYTES // LARGEST_EXCESS:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= SMALLEST_NBYTES and storage._cdata not in self._stays

    def _pack(self, tensor: torch.Tensor) -> View | None:
        """What stands for ``tensor``; None where it stays: there is room for it, or none at home and none is needed."""
        storage = tensor.untyped_storage()
        begin, nbytes = _span(tensor, storage.nbytes())
        saved = self._known_bytes(tensor)
        if self.block is not None:
            self.block.saves(storage)
        else:
            self.outside_nbytes += storage.nbytes()
        if saved is None:
            is_sent = self.block is not None and self.block.choice is Choice.SEND
            if not is_sent and self.kept_nbytes + storage.nbytes() <= (self.spare_nbytes or 0):
                return None
            with self._store.guarding():
                try:
                    saved = Saved(self, begin, nbytes)
                except CapacityError:
                    if self.spare_nbytes is None:
                        raise
                    return None
                self._send(saved, storage, tensor)
            if nbytes == storage.nbytes():
                self._known[storage._cdata] = (StorageWeakRef(storage), weakref.ref(saved), tensor._version)
            self._order.append(weakref.ref(saved))
        return View(saved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())

    def _known_bytes(self, tensor: torch.Tensor) -> Saved | None:
        """The whole storage's bytes, where they are at home already and have not changed since. Torch does not count every
        change (not those through ``.data`` or NumPy), so the bytes are looked at; on a device elsewhere, where that would
        cost as much as sending them, torch's count has to do, as it has to for autograd's own check."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        saved = known[1]() if known is not None and not known[0].expired() else None
        if saved is None:
            return None
        if not self._device.is_host:
            return saved if known[2] == tensor._version else None
        source = _bytes_of(storage)
        if saved.place.tier is Tier.NVME:
            return saved if native.crc32c(source) == saved.checksum else None
        return saved if torch.equal(saved.place.flat[: saved.nbytes], source) else None

    # --- space ---

    def take(self, nbytes: int) -> StateArray:
        """Space at home for ``nbytes``. Raises CapacityError over the tier's budget."""
        size = blocks(nbytes)
        fitting = [array for array in self._free if size <= array.nbytes <= size + size // 8]
        if fitting:
            best = min(fitting, key=lambda array: array.nbytes)
            self._free.remove(best)
            return best
        try:
            return self._store.allocate_more(self._tier, size, "activations")
        except CapacityError as error:
            free, self._free = self._free, []  # at once: what the collector finds meanwhile is added
            if free:  # of other sizes: given up for one of this
                for moment in self._last.values():
                    moment.wait()
                for array in free:
                    self._store.free_more(array)
                return self.take(nbytes)
            raise CapacityError(
                f"activations: {error} Give more, run fewer samples at once (micro_batch), recompute more of the forward "
                "(gradient checkpointing), or choose another home: Config(activations=...)."
            ) from error

    def give_back(self, saved: Saved) -> None:
        """Nothing refers to ``saved`` any longer: its space is free for others."""
        place, saved.place = saved.place, None
        if saved.coming is not None:  # nobody wanted it
            storage, moment = saved.coming
            self._borrowed.keep(_bytes_of(storage), moment)
        if saved.read is not None:
            self._transfers.append(saved.read)
        if place.tier is Tier.NVME:
            self._store.free_more(place, after=[*saved.writes, *([saved.read[0]] if saved.read else [])])
        else:
            self._free.append(place)

    # --- moving ---

    def _send(self, saved: Saved, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        source = _bytes_of(storage)[saved.begin : saved.begin + saved.nbytes]
        array = saved.place
        if array.tier is not Tier.NVME:
            behind = [self._device.now(), self._in_use.pop(array.extent.address, PAST)]
            freight = Freight("device->host", saved.nbytes, "activations")
            target = array.flat[: saved.nbytes]
            moment = self._device.put("out", lambda: target.copy_(source, non_blocking=True), behind=behind, freight=freight)
            saved.sent = self._last["out"] = moment
            if moment is not PAST:
                saved.source = tensor.detach(), tensor._version
                self._borrowed.keep(source, moment, partial(_let_go, weakref.ref(saved)))
            return
        if not self._device.is_host:  # checksums are the processor's: it has to have the bytes
            with self._store.traffic.copying("device->host", saved.nbytes, "activations"):
                source = source.cpu()
        saved.checksum = native.crc32c(source)
        for begin, end in self._parts(saved):
            lease = self._lease(blocks(end - begin))
            whole = self._staged(lease, blocks(end - begin))
            with self._store.traffic.copying("device->host", end - begin, "activations"):
                whole[: end - begin] = source[begin:end]
                whole[end - begin :] = 0
            write = self._store.engine.write(array.extent, begin, lease.address, whole.numel())
            saved.writes.append(write)
            self._transfers.append((write, lease))

    def _bring(self, saved: Saved) -> torch.UntypedStorage:
        storage = saved.bytes_on_device()
        if storage is not None:
            return storage
        if self._store.engine is None:
            raise UsageError("this backward needs activations that went with the engine: run it before unwrap_model")
        with self._store.guarding():
            if saved.place.tier is not Tier.NVME:
                storage = self._copy_back(saved)
            else:
                storage = torch.UntypedStorage(saved.nbytes, device=self._device.where)
                self._read(saved, _bytes_of(storage))
        saved.came_back(storage)
        return storage

    def _copy_back(self, saved: Saved) -> torch.UntypedStorage:
        """From the host. Where copies run beside the compute, those that the backward asks for next set out too."""
        saved.check_source()
        if saved.coming is None:
            self._set_out(saved)
        storage, moment = saved.coming
        saved.coming = None
        if self._device.overlaps:
            for other in self._before(saved):
                if other.coming is None and other.bytes_on_device() is None and not other.was_changed():
                    self._set_out(other)
        moment.precede()
        return storage

    def _set_out(self, saved: Saved) -> None:
        """Starts copying to the device. The memory is the compute's: the copy comes after what it did with it before."""
        target, source = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._device.where), saved.place.flat[: saved.nbytes]
        freight = Freight("host->device", saved.nbytes, "activations")
        behind = [self._device.now(), saved.sent]
        moment = self._device.put("in", lambda: target.copy_(source, non_blocking=True), behind=behind, freight=freight)
        self._in_use[saved.place.extent.address] = self._last["in"] = moment
        saved.coming = target.untyped_storage(), moment

    def _before(self, saved: Saved) -> Iterator[Saved]:
        """What was saved just before ``saved``, as far as it is still wanted: the backward asks for it next."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        index = next((i for i in range(len(self._order) - 1, -1, -1) if self._order[i]() is saved), 0)
        for ref in self._order[max(0, index - READ_AHEAD) : index][::-1]:
            other = ref()
            if other is not None and other.place is not None:
                yield other

    def _read(self, saved: Saved, target: torch.Tensor) -> None:
        if saved.read is None and saved.nbytes <= self._largest:
            self._start_read(saved, self._lease(blocks(saved.nbytes)))
        self._read_ahead(saved)
        if saved.read is not None:
            (ticket, lease), saved.read = saved.read, None
            try:
                self._finish_read(saved, 0, saved.nbytes, ticket, lease, target)
            finally:
                lease.release()
            return
        saved.settle()
        for begin, end in self._parts(saved):
            lease = self._lease(blocks(end - begin))
            try:
                ticket = self._store.engine.read(saved.place.extent, begin, lease.address, blocks(end - begin))
                self._finish_read(saved, begin, end, ticket, lease, target)
            finally:
                lease.release()

    def _start_read(self, saved: Saved, lease: native.Lease) -> None:
        after = saved.writes[-1] if saved.writes else None  # what is staged at once was written at once
        nbytes = blocks(saved.nbytes)
        saved.read = self._store.engine.read(saved.place.extent, 0, lease.address, nbytes, after=after), lease

    def _finish_read(self, saved: Saved, begin: int, end: int, ticket, lease, target: torch.Tensor) -> None:
        with self._store.traffic.stalled("nvme->host", "activations"):
            ticket.wait()
        nbytes = blocks(end - begin)
        self._store.verify(saved.place, lease.address, nbytes, offset=begin)
        self._store.traffic.mark("nvme->host", "activations", *ticket.times)
        with self._store.traffic.copying("host->device", end - begin, "activations"):
            target[begin:end] = self._staged(lease, nbytes)[: end - begin]

    def _read_ahead(self, saved: Saved) -> None:
        """Starts reading what was saved just before ``saved``: the backward will ask for it next."""
        for other in self._before(saved):
            if other.read is not None or other.nbytes > self._largest:
                continue
            self._collect()
            lease = self._staging.try_lease(blocks(other.nbytes))
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

