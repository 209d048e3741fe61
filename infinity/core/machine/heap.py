"""Heap: returns memory that torch has freed and the C library keeps to the kernel when memory is
short.

[Note: why the heap grows] torch allocates aligned memory, and glibc cannot reuse the hole of the
last buffer of the same size for it. Buffers that come and go, such as the weights of unit after
unit, leave a heap as large as all of them, mostly unused. A control group counts it, and kills. A
ulimit counts the holes too, as address space, which is not returned: there every large buffer gets
its own mapping.
"""

from __future__ import annotations

from ... import native
from .limits import for_the_engine, is_by_ulimit, memory_left

MAPPED_NBYTES = 1024 * 1024  # of a buffer with its own mapping, under a ulimit
LEAST_FREED_NBYTES = 32 * 1024 * 1024  # between checks of the memory left


class Heap:
    """Watches this process's heap. Used from one thread at a time."""

    def __init__(self) -> None:
        if is_by_ulimit():
            native.map_large_buffers(MAPPED_NBYTES)
        left = memory_left()
        self._low = (left - for_the_engine(left)) // 2  # of the part that is not the engine's
        self._until_look = self._after(left)

    def freed(self, nbytes: int) -> None:
        """Counts a buffer of ``nbytes`` that was freed to the C library. If little memory is left,
        trims the heap."""
        self._until_look -= nbytes
        if self._until_look <= 0:
            left = memory_left()
            if left < self._low:
                native.trim_heap()
                left = memory_left()
            self._until_look = self._after(left)

    def _after(self, left: int) -> int:
        """Returns the bytes that may be freed before the next check: the heap grows by no more.

        Never more than half of the reserve, however much is left now: a plan that is being laid
        out takes what is left without freeing anything.
        """
        return max(LEAST_FREED_NBYTES, min(left - self._low, self._low) // 2)
