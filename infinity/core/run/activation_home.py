"""ActivationHome: keeps saved storages at home, in host memory or on disk.

saved     one storage that autograd saved a tensor of: its bytes go home once, however many of its
          views are saved
"""

from __future__ import annotations

import weakref
from collections import deque

import torch

from ... import native
from ...errors import CapacityError, UsageError
from ..homes.arrays import StateArray
from ..homes.store import ArrayStore
from ..machine.device import note_used
from ..machine.sizes import format_nbytes
from ..machine.tiers import Tier
from .activation_copies import ActivationCopies
from .activation_disk import ActivationsOnDisk
from .saved_tensor import Saved, SavingOrder, blocks, raw_bytes


class ActivationHome:
    """Buffers at home for saved storages. Used from the threads that run forward and backward."""

    def __init__(
        self,
        store: ArrayStore,
        tier: Tier,
        staging: native.PinnedPool | None,
        most_nbytes: int | None = None,
        in_flight_nbytes: int | None = None,
    ):
        """``most_nbytes``: of host memory, beside the tier's budget; None: no limit.
        ``in_flight_nbytes``: that may be on their way to and from it, if the device has little
        room."""
        self._store, self._tier, self._most_nbytes = store, tier, most_nbytes
        self._device = store.device
        self._order = SavingOrder()
        self._copies = ActivationCopies(store.device, self._order, in_flight_nbytes)
        self._disk = ActivationsOnDisk(store, staging, self._order) if staging is not None else None
        # Buffers in use, with the transfers that may still use them, keyed by a weak reference to
        # the saved storage. C code appends a dead reference to _dead, so an interrupt cannot leak a
        # buffer.
        self._places: dict[weakref.ref[Saved], tuple[StateArray, list[native.Ticket]]] = {}
        self._dead: deque[weakref.ref[Saved]] = deque()
        self._arrays: list[StateArray] = []  # all host memory that was ever taken
        # Free buffers among those; on disk the store manages the space.
        self._free: list[StateArray] = []

    def limit_in_flight(self, nbytes: int) -> None:
        """Sets how many bytes may be on their way."""
        self._copies.limit(nbytes)

    def rebuild(self) -> None:
        """Frees every buffer whose saved storage is gone, after an exception. Only while nothing is
        in flight."""
        self._order.forget_freed()
        self._copies.forget()
        for saved in self._order:
            saved.read = saved.coming = None
        self._reclaim()
        # By identity: a buffer that was taken but never filed has no user.
        taken = {id(array) for array, _ in self._places.values()}
        self._free = [array for array in self._arrays if id(array) not in taken]
        if self._disk is not None:
            self._disk.drain()

    def forget_freed(self) -> None:
        """Forgets the storages that autograd has freed, at the beginning of a forward."""
        self._order.forget_freed()

    # --- space ---

    def save(self, begin: int, nbytes: int) -> Saved:
        """Makes a saved storage with a buffer of ``nbytes`` at home, which is reused once it is
        freed. Raises CapacityError over the tier's budget."""
        saved = Saved(self._take(nbytes), begin, nbytes)
        self._places[weakref.ref(saved, self._dead.append)] = saved.array, saved.writes
        return saved

    def _taken_nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def room_nbytes(self) -> float:
        """Returns the bytes that activations may have at home, with those that they have."""
        account = self._store.ledger.accounts[self._tier]
        if account.budget_nbytes is not None:
            return self._taken_nbytes() + account.budget_nbytes - account.planned_nbytes
        return float("inf") if self._most_nbytes is None else self._most_nbytes

    def _take(self, nbytes: int) -> StateArray:
        """Allocates ``nbytes`` at home. Raises CapacityError over the tier's budget."""
        self._reclaim()
        size = blocks(nbytes)
        fitting = [array for array in self._free if size <= array.nbytes <= size + size // 8]
        if fitting:
            best = min(fitting, key=lambda array: array.nbytes)
            self._free.remove(best)
            return best
        try:
            most, taken = self._most_nbytes, self._taken_nbytes()
            if most is not None and taken + size > most:
                raise CapacityError(
                    f"host_memory was not given, and what the plan left of what was free is"
                    f" {format_nbytes(most)}: {format_nbytes(taken)} are in use, and"
                    f" {format_nbytes(size)} more are needed. Free as much"
                )
            array = self._store.allocator.allocate_more(self._tier, size, "activations")
            if array.tier is not Tier.NVME:
                self._arrays.append(array)
            return array
        except CapacityError as error:
            if self._free:  # other sizes: freed to make room for this one
                self._copies.wait()
                while self._free:
                    array = self._free.pop()
                    self._arrays.remove(array)
                    self._store.allocator.free_more(array)
                return self._take(nbytes)
            raise CapacityError(
                f"activations: {error} or run fewer samples at once (micro_batch),"
                " recompute more of the forward (gradient checkpointing), or choose another home:"
                " Config(activations=...)"
            ) from error

    def _reclaim(self) -> None:
        """Frees the buffers whose saved storages are gone."""
        while self._dead:
            ref = self._dead[0]
            if ref in self._places:
                array, transfers = self._places.pop(ref)
                if array.tier is Tier.NVME:
                    self._store.allocator.free_more(array, after=transfers)
                else:
                    self._free.append(array)
            self._dead.popleft()

    # --- transfers ---

    def send(self, saved: Saved, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        """Sends the bytes of ``saved`` home: a part of ``storage``, of which ``tensor`` was
        saved."""
        source = raw_bytes(storage)[saved.begin : saved.begin + saved.nbytes]
        if saved.array.tier is Tier.NVME:
            self._disk.send(saved, source)
        else:
            self._copies.send(saved, source, tensor)
        self._order.append(saved)

    def bring(self, saved: Saved) -> torch.UntypedStorage:
        """Returns a storage on the device with the bytes of ``saved``, for compute of the current
        stream. May block on the disk."""
        storage = saved.bytes_on_device()
        if storage is None:
            storage = self._load(saved)
        else:
            saved.arrived.precede()  # perhaps only another stream waited for the copy
        if not self._device.is_host:
            note_used(raw_bytes(storage))
        return storage

    def _load(self, saved: Saved) -> torch.UntypedStorage:
        if self._store.io is None:
            raise UsageError(
                "this backward needs activations that went with the engine: run it before"
                " unwrap_model"
            )
        with self._store.guard:
            if saved.array.tier is not Tier.NVME:
                storage = self._copies.bring(saved)
            else:
                storage = torch.UntypedStorage(saved.nbytes, device=self._device.where)
                self._disk.read(saved, raw_bytes(storage))
        saved.came_back(storage)
        return storage
