"""CardMemory: what an accelerator has and can give, and what torch's allocator keeps of it."""

from __future__ import annotations

import torch

FRACTION_FOR_THE_ENGINE = 0.5  # of what is free, without a budget; the rest is for activations
LIBRARIES_NBYTES = 96 << 20  # cuBLAS: 32 MiB for each stream that computes
NCCL_NBYTES = 1 << 30  # of two communicators: gathers and reductions


class CardMemory:
    """The memory of the accelerator ``where``. ``cached_nbytes``: that torch's allocator caches for
    the window. ``torch.cuda.empty_cache()`` between two steps gives it back to the driver."""

    def __init__(self, where: torch.device):
        self._where, self._reserved, self.cached_nbytes = where, 0, 0

    @property
    def is_unified(self) -> bool:
        """Whether it is the host's memory, too: an integrated GPU."""
        ask = getattr(torch.get_device_module(self._where), "get_device_properties", None)
        return ask is not None and bool(getattr(ask(self._where), "is_integrated", False))

    def free_nbytes(self) -> int | None:
        """Returns the bytes that are free; None if the accelerator does not tell."""
        ask = getattr(torch.get_device_module(self._where), "mem_get_info", None)
        return None if ask is None else int(ask(self._where)[0])

    def engine_nbytes(self) -> int | None:
        """Returns the bytes for the engine without a budget; None if the accelerator does not tell
        what is free."""
        free = self.free_nbytes()
        return None if free is None else int(free * FRACTION_FOR_THE_ENGINE)

    def left_nbytes(self, *, several_ranks: bool) -> int | None:
        """Returns the bytes that can still be allocated: without tensors that live, other
        processes, and what libraries will need. None if the accelerator does not tell."""
        free = self.free_nbytes()
        if free is None:
            return None
        # What torch keeps and no tensor has. The driver's context is taken already.
        if self._where.type == "cuda":
            free += self._reserved_nbytes() - torch.cuda.memory_allocated(self._where)
        return max(0, free - LIBRARIES_NBYTES - several_ranks * NCCL_NBYTES)

    def unused_nbytes(self) -> int:
        """Returns the bytes that no tensor ever had, not even at the peak. Only if the accelerator
        tells what is free."""
        free, module = self.free_nbytes() or 0, torch.get_device_module(self._where)
        if not hasattr(module, "memory_allocated"):
            return free
        # What the driver has given out, or what lives if all else counts as free
        reserved = self._reserved_nbytes() or module.memory_allocated(self._where)
        return max(0, free + reserved - module.max_memory_allocated(self._where))

    def note_cached(self, nbytes: int) -> None:
        """Notes that the allocator now caches ``nbytes``."""
        self.cached_nbytes, self._reserved = nbytes, self._reserved_nbytes()

    def was_given_back(self) -> bool:
        """Tells whether the allocator has less from the driver than when it was last asked."""
        before, self._reserved = self._reserved, self._reserved_nbytes()
        return self.cached_nbytes > 0 and self._reserved < before

    def _reserved_nbytes(self) -> int:
        """Returns what the allocator has from the driver; 0 if it does not tell."""
        return torch.cuda.memory_reserved(self._where) if self._where.type == "cuda" else 0
