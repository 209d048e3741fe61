"""Live: the memory that a model's operations hold at one time."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Measures the most bytes that storages of operations' results have at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_nbytes, self._known = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._known = {key: row for key, row in self._known.items() if not row[0].expired()}
        self.peak_nbytes = max(self.peak_nbytes, sum(row[1] for row in self._known.values()))
        return out
