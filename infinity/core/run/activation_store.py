"""ActivationStore: tensors that a forward saves for its backward, at home on the host or on NVMe.

saved     one storage that autograd saved a tensor of: its bytes go home once, however many of its
          views are saved
spill     with ``activations="auto"`` and a device budget: storages leave the device only when its
          budget has no room
staging   memory for activations on their way to and from the disk

Storages move whole, unless the saved view needs a small part only. They come back under the same
views, with the strides and offsets of the saved tensors, so the backward computes with the same
bits. A storage stays at home as long as autograd's graph refers to it. Its space is kept for the
next step, which needs the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ... import native
from ...errors import CapacityError
from ...torch_private import uncompiled
from ..homes.store import ArrayStore
from ..machine.tiers import Tier
from .activation_home import ActivationHome
from .saved_tensor import (
    LARGEST_EXCESS,
    Saved,
    SavedTensor,
    View,
    WithinBudget,
    raw_bytes,
    storage_span,
)

SMALLEST_NBYTES = 64 * 1024  # smaller storages stay: moving them costs more than it frees
FRACTION_IN_FLIGHT = 1 / 16  # of what may be kept: as much may be on its way home, or back


class ActivationStore:
    """Sends saved tensors home and brings them back. Used from the threads that run forward and
    backward."""

    def __init__(
        self,
        store: ArrayStore,
        tier: Tier,
        staging: native.PinnedPool | None,
        *,
        spare_nbytes: int | None,
        most_nbytes: int | None = None,
    ):
        """``spare_nbytes``: of the device, that may be kept; ``most_nbytes``: of the host, that may
        be taken. None: the tier's budget alone limits it."""
        self._store, self._device = store, store.device
        in_flight = None if spare_nbytes is None else int(spare_nbytes * FRACTION_IN_FLIGHT)
        self.home = ActivationHome(store, tier, staging, most_nbytes, in_flight)
        # Places the activations of each block. It has ``begin()``, called as a forward begins,
        # ``block``, the one that runs, ``saves(storage)``, ``measures_room``, ``is_sending`` and
        # ``reserved_nbytes``, and is told ``found_no_room``.
        self.planner: Any = None
        # May stay on the device; None: nothing may, and home must have room.
        self.spare_nbytes = spare_nbytes
        self._on_device = native.Account()  # the bytes that do
        # By storage: its charge, once for all its saved views
        self._charges: dict[int, tuple[StorageWeakRef, weakref.ref[native.Charge]]] = {}
        self._excluded: set[int] = set()
        # By storage: its bytes at home, and the tensor's version when they were sent.
        self._saved: dict[int, tuple[StorageWeakRef, weakref.ref[Saved], int]] = {}

    # --- the hooks ---

    def begin(self, excluded: set[int]) -> None:
        """Begins a forward. ``excluded``: storages (by address) that are not activations: buffers,
        foreign parameters."""
        self._excluded = excluded
        if self.planner is not None:
            self.planner.begin()
        self.home.forget_freed()
        self._saved = {key: entry for key, entry in self._saved.items() if not entry[0].expired()}
        self._charges = {key: entry for key, entry in self._charges.items() if entry[1]()}

    def hooks(self, outer: tuple[Callable, Callable] | None) -> tuple[Callable, Callable]:
        """Makes pack and unpack for autograd; tensors that they do not take go to ``outer``."""
        outer_pack, outer_unpack = outer or (SavedTensor.of, SavedTensor.tensor)

        def pack(tensor: torch.Tensor) -> Any:
            if self._is_taken(tensor):
                packed = self._pack(tensor)
                if packed is not None:
                    return packed
                storage = tensor.untyped_storage()
                charge = self._charge_of(storage) or self._on_device.charge(storage.nbytes())
                self._charges[storage._cdata] = StorageWeakRef(storage), weakref.ref(charge)
                return WithinBudget(outer_pack(tensor), charge)
            return outer_pack(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            packed = packed.packed if isinstance(packed, WithinBudget) else packed
            if isinstance(packed, View):
                return packed.over(self.home.bring(packed.saved))
            return outer_unpack(packed)

        return uncompiled(pack), uncompiled(unpack)

    @property
    def kept_nbytes(self) -> int:
        """Bytes that stay on the device because its budget has room."""
        return self._on_device.charged_nbytes

    def rebuild(self) -> None:
        """Frees every buffer whose saved storage is gone, after an exception. Only while nothing is
        in flight."""
        self._saved = {}
        self.home.rebuild()

    def _is_taken(self, tensor: torch.Tensor) -> bool:
        if (
            tensor.layout is not torch.strided
            or tensor.device != self._device.where
            or type(tensor) is not torch.Tensor
            or tensor.is_nested
            or not tensor.numel()
        ):
            return False
        storage = tensor.untyped_storage()
        if storage._cdata in self._excluded:
            return False
        is_taken = (
            tensor.nbytes >= SMALLEST_NBYTES // LARGEST_EXCESS
            and storage.nbytes() >= SMALLEST_NBYTES
        )
        # Small ones are charged to no budget, but take of measured room.
        if (planner := self.planner) is not None and (is_taken or planner.measures_room):
            planner.saves(storage)
        return is_taken

    def _charge_of(self, storage: torch.UntypedStorage) -> native.Charge | None:
        """Returns the charge of a storage that is kept."""
        entry = self._charges.get(storage._cdata)
        return entry[1]() if entry is not None and not entry[0].expired() else None

    def _pack(self, tensor: torch.Tensor) -> View | None:
        """Returns the view that replaces ``tensor`` in the graph. Returns None if the tensor stays
        on the device, because its budget has room, or because home has none and need not."""
        storage = tensor.untyped_storage()
        begin, nbytes = storage_span(tensor, storage.nbytes())
        saved = self._saved_bytes(tensor)
        if saved is None:
            planner = self.planner
            is_sent = planner is not None and planner.is_sending
            room = (self.spare_nbytes or 0) - (planner.reserved_nbytes if planner else 0)
            fits = self.kept_nbytes + storage.nbytes() <= room
            if not is_sent and (fits or self._charge_of(storage)):
                return None
            with self._store.guard:
                try:
                    saved = self.home.save(begin, nbytes)
                except CapacityError:
                    if self.spare_nbytes is None:
                        raise
                    if planner is not None:
                        planner.found_no_room = True
                    return None
                self.home.send(saved, storage, tensor)
            if nbytes == storage.nbytes():
                self._saved[storage._cdata] = (
                    StorageWeakRef(storage),
                    weakref.ref(saved),
                    tensor._version,
                )
        return View(
            saved,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _saved_bytes(self, tensor: torch.Tensor) -> Saved | None:
        """Returns the bytes at home of the whole storage, if they are still equal to it.

        Torch's version counter misses changes through ``.data`` or NumPy, so on a host device the
        bytes are compared. Elsewhere that would cost as much as sending them. There the counter
        decides, as in autograd's own check.
        """
        storage = tensor.untyped_storage()
        entry = self._saved.get(storage._cdata)
        saved = entry[1]() if entry is not None and not entry[0].expired() else None
        if saved is None:
            return None
        if not self._device.is_host:
            return saved if entry[2] == tensor._version else None
        source = raw_bytes(storage)
        if saved.array.tier is Tier.NVME:
            return saved if native.crc32c(source) == saved.checksum else None
        return saved if torch.equal(saved.array.flat[: saved.nbytes], source) else None
