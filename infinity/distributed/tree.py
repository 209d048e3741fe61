"""Tree: merges a few bytes of all ranks on their way up to the first one, and gives all of them the result on its way down.

A rank has at most ``CHILDREN`` below it, so that a result comes after two messages for each level, and of levels there are the
logarithm of the ranks. Whoever has said its word goes on: what comes back is waited for when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

CHILDREN = 32


def family_of(place: int, size: int) -> tuple[list[int], list[int]]:
    """Lists the places of the families that the rank at ``place`` of ``size`` is in: of its own children, and of its parent's. Each begins
    with the parent; one without children, or without a parent, is empty."""
    own = [place, *range(CHILDREN * place + 1, min(CHILDREN * place + CHILDREN + 1, size))]
    parent = (place - 1) // CHILDREN
    parents = [parent, *range(CHILDREN * parent + 1, min(CHILDREN * parent + CHILDREN + 1, size))]
    return own if len(own) > 1 else [], parents if place > 0 else []


class Merge:
    """One message of every rank on its way. Every rank of the tree begins the same ones, in one order."""

    def __init__(self, steps: Iterator[dist.Work | torch.Tensor]):
        self._steps = steps
        self._next: dist.Work | torch.Tensor = next(steps)

    def poll(self) -> bool:
        """Goes on as far as that goes without waiting. Returns whether the result is there."""
        while not isinstance(self._next, torch.Tensor):
            if not self._next.is_completed():
                return False
            self._go_on()
        return True

    def wait(self) -> torch.Tensor:
        """Returns the result. Raises RuntimeError, as the transport does, where a rank does not come."""
        while not isinstance(self._next, torch.Tensor):
            self._go_on()
        return self._next

    def _go_on(self) -> None:
        self._next.wait()
        self._next = next(self._steps)


class Tree:
    """The place of this rank among those that merge messages.

    below, above
        Groups of this rank with its children, and with its parent and the parent's other children. The parent is their first rank.
    """

    def __init__(self, below: dist.ProcessGroup | None, above: dist.ProcessGroup | None):
        self._below, self._above = below, above
        self.begun = 0  # merges

    def close(self) -> None:
        """Lets the groups go: nothing is merged afterwards."""
        self._below = self._above = None

    def begin(self, message: torch.Tensor, combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Merge:
        """Sends this rank's ``message``: as many bytes as every other's. ``combine`` makes one of several."""
        self.begun += 1
        return Merge(self._steps(message, combine))

    def _steps(self, message: torch.Tensor, combine: Callable) -> Iterator[dist.Work | torch.Tensor]:
        if self._below is not None:
            parts = [torch.empty_like(message) for _ in range(dist.get_world_size(self._below))]
            yield dist.gather(message, parts, group=self._below, group_dst=0, async_op=True)
            message = combine(parts)
        if self._above is not None:
            result = torch.empty_like(message)
            up = dist.gather(message, None, group=self._above, group_dst=0, async_op=True)
            down = dist.scatter(result, None, group=self._above, group_src=0, async_op=True)  # asked for before it is sent
            yield up
            yield down
            message = result
        if self._below is not None:
            copies = [message] * dist.get_world_size(self._below)
            yield dist.scatter(torch.empty_like(message), copies, group=self._below, group_src=0, async_op=True)
        yield message
