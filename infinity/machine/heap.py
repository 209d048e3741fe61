"""Heap: what torch has freed and the C library keeps, given back to the kernel where memory runs short.

Torch asks for aligned memory, and glibc finds no room for it in a hole that the last buffer of the same size has left. So buffers that
come and go, the weights of one unit after the other, leave a heap as large as all of them together, of which little is used. A control
group counts it all the same, and kills. A ulimit counts the holes too, as address space, which is not given back: there every large
buffer is mapped by itself.
"""

from __future__ import annotations

from .. import native
from .limits import for_the_engine, is_by_ulimit, memory_left

MAPPED_NBYTES = 1024 * 1024  # of a buffer that is mapped by itself, under a ulimit
LEAST_FREED_NBYTES = 32 * 1024 * 1024  # between looks at how much memory is left


class Heap:
    """Looks after this process's heap. Used from one thread at a time."""

    def __init__(self) -> None:
        if is_by_ulimit():
            native.map_large_buffers(MAPPED_NBYTES)
        left = memory_left()
        self._low = (left - for_the_engine(left)) // 2  # of the part that is not the engine's
        self._until_look = self._after(left)

    def freed(self, nbytes: int) -> None:
        """Counts a buffer of ``nbytes`` that was given back to the C library. Where little memory is left the kernel gets what the
        library keeps."""
        self._until_look -= nbytes
        if self._until_look <= 0:
            left = memory_left()
            if left < self._low:
                native.trim_heap()
                left = memory_left()
            self._until_look = self._after(left)

    def _after(self, left: int) -> int:
        """Bytes that may be freed before the next look: a heap grows by no more than that."""
        return max(LEAST_FREED_NBYTES, (left - self._low) // 2)
