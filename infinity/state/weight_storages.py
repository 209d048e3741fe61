"""WeightStorages: finds the unit that a tensor is a weight of, by the storage that it lies in."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..machine import storage_guard


class WeightStorages:
    """The storages of all device buffers. Another storage may take the place of one."""

    def __init__(self) -> None:
        # Weakly: a unit's buffers refer to this object.
        self._entries: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}

    def enter(self, unit: Any, flat: torch.Tensor) -> None:
        """Enters the storage of ``flat``, a device buffer of ``unit``."""
        self._entries[storage_guard.identity(flat)] = (weakref.ref(unit), flat)

    def replace(self, flat: torch.Tensor, other: torch.UntypedStorage) -> None:
        """Enters ``other``, which is about to become the storage of ``flat``."""
        self._entries = {key: entry for key, entry in self._entries.items() if self._is_current(key, entry[1])} | {
            other._cdata: self._entries[storage_guard.identity(flat)]
        }

    def find(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor] | None:
        """Returns the unit of which strided ``tensor`` is a weight, or a part of one, and the
        buffer that it lies in; None of any other."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None  # which has no storage
        key = storage_guard.identity(tensor)
        entry = self._entries.get(key)
        if entry is None or not self._is_current(key, entry[1]):  # an address may be another storage's by now
            return None
        unit = entry[0]()
        return None if unit is None else (unit, entry[1])

    @staticmethod
    def _is_current(key: int, flat: torch.Tensor) -> bool:
        return storage_guard.identity(flat) == key
