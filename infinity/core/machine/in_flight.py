"""InFlight: keeps tensors alive while a queue of the device still reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from .device import PAST, Event, note_used


class InFlight:
    """Tensors that queues still read. Above ``limit_nbytes``, and above ``of_largest`` times the
    most that was kept at once so far, the compute waits for the oldest."""

    def __init__(self, limit_nbytes: int, *, of_largest: int = 0):
        self._limit, self._of_largest = limit_nbytes, of_largest
        self._held: deque[tuple[Event, Sequence[torch.Tensor], Callable[[], None]]] = deque()
        self._nbytes = 0

    def limit(self, nbytes: int) -> None:
        """Sets the limit."""
        self._limit = nbytes

    def emptied(self) -> InFlight:
        """Returns an empty one with the same limit."""
        return InFlight(self._limit, of_largest=self._of_largest)

    def keep(
        self,
        tensors: Sequence[torch.Tensor],
        event: Event,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Keeps ``tensors`` until ``event``, then calls ``then``. Drops what is over, and older
        ones beyond the limit."""
        if event is PAST:
            return
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._held.append((event, tensors, then))
        self._nbytes += nbytes
        self._limit = max(self._limit, self._of_largest * nbytes)
        while self._held and (
            self._held[0][0].done or (self._nbytes > self._limit and len(self._held) > 1)
        ):
            event, tensors, then = self._held.popleft()
            if not event.done:
                # Only this stream waits for it, and another one may have allocated them
                note_used(*tensors)
            event.precede()
            self._nbytes -= sum(tensor.nbytes for tensor in tensors)
            then()
