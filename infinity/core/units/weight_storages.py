"""WeightStorages: finds the unit of a weight by its storage."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...torch_private import is_of_transform
from ..machine import storage_guard

untyped_storage = torch.Tensor.untyped_storage  # as `identity`, a call less for each saved tensor


class WeightStorages:
    """The storages of all device buffers. A storage may be replaced by another."""

    def __init__(self) -> None:
        # Weak: a unit's buffers refer to this object.
        self.entries: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}

    def enter(self, unit: Any, flat: torch.Tensor) -> None:
        """Registers the storage of ``flat``, a device buffer of ``unit``."""
        self.entries[storage_guard.identity(flat)] = (weakref.ref(unit), flat)

    def replace(self, flat: torch.Tensor, other: torch.UntypedStorage) -> None:
        """Registers ``other``, which is about to become the storage of ``flat``."""
        self.entries = {
            key: entry
            for key, entry in self.entries.items()
            if storage_guard.identity(entry[1]) == key
        } | {other._cdata: self.entries[storage_guard.identity(flat)]}

    def find(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor] | None:
        """Returns the unit and the device buffer of strided ``tensor``, a weight or a view of one;
        None for any other tensor."""
        if is_of_transform(tensor):
            return None  # it has no storage
        key = untyped_storage(tensor)._cdata
        entry = self.entries.get(key)
        # The address may belong to another storage by now.
        if entry is None or untyped_storage(entry[1])._cdata != key:
            return None
        unit = entry[0]()
        return None if unit is None else (unit, entry[1])
