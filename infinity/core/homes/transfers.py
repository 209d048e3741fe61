"""Transfers: a bounded queue of running transfers, and memory that a hung disk may still use.

A transfer's memory is reused only after its end. A lease stays with its transfer in C++. What else
a transfer uses is released by ``finish``, or by ``abandon`` after an exception.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from ...errors import InfinityError

T = TypeVar("T")

# Memory that a hung disk or device may use for as long as the process lives.
never_freed: list[torch.Tensor] = []


class TransferQueue(Generic[T]):
    """Up to ``limit`` running transfers, which end in the order in which they started.

    finish
        Waits for a transfer and uses its result. An InfinityError means that the transfer is over;
        after any other exception it may still be running.
    abandon
        Ends a transfer whose result is not wanted, after an exception. May be called for one that
        is over. None: nothing has to be done for it.

    As a context it finishes all transfers, or abandons them if the block raises.
    """

    def __init__(
        self,
        limit: int,
        finish: Callable[[T], object],
        abandon: Callable[[T], object] = lambda transfer: None,
    ):
        self._limit, self._finish, self._abandon = limit, finish, abandon
        self._running: deque[T] = deque()

    def add(self, transfer: T) -> None:
        """Adds a transfer that was started."""
        self._running.append(transfer)

    def make_room(self) -> None:
        """Finishes the oldest transfers until another one fits."""
        while len(self._running) >= self._limit:
            self.finish_oldest()

    def finish_oldest(self) -> bool:
        """Finishes the oldest transfer. Returns False if there is none."""
        if not self._running:
            return False
        try:
            self._finish(self._running[0])
        except InfinityError:
            self._running.popleft()
            raise
        self._running.popleft()
        return True

    def drain(self) -> None:
        """Finishes all transfers. Raises the first error."""
        while self.finish_oldest():
            pass

    def abandon(self) -> None:
        """Ends all transfers, with their results unused. If interrupted, call it again."""
        while self._running:
            self._abandon(self._running[0])
            self._running.popleft()

    def __enter__(self) -> TransferQueue[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            try:
                self.drain()
            except BaseException:
                self.abandon()
                raise
        else:
            self.abandon()
