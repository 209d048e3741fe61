"""InFlight: keeps tensors alive while a queue of the device still reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from .device import PAST, Event


class InFlight:
    """Tensors that queues still read. Above ``limit_nbytes``, and above ``of_largest`` tensors of
    the largest size so far, the compute waits for the oldest."""

    def __init__(self, limit_nbytes: int, *, of_largest: int = 0):
        self._limit, self._of_largest = limit_nbytes, of_largest
        self._held: deque[tuple[Event, torch.Tensor, Callable[[], None]]] = deque()
        self._nbytes = 0

    def emptied(self) -> InFlight:
        """Returns an empty one with the same limit."""
        return InFlight(self._limit, of_largest=self._of_largest)

    def keep(
        self, tensor: torch.Tensor, event: Event, then: Callable[[], None] = lambda: None
    ) -> None:
        """Keeps ``tensor`` until ``event``, then calls ``then``. Drops what is over or exceeds the
        limit."""
        if event is PAST:
            return
        self._held.append((event, tensor, then))
        self._nbytes += tensor.nbytes
        self._limit = max(self._limit, self._of_largest * tensor.nbytes)
        while self._held and (self._nbytes > self._limit or self._held[0][0].done):
            event, tensor, then = self._held.popleft()
            event.precede()
            self._nbytes -= tensor.nbytes
            then()
