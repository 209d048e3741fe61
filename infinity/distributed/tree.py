"""Tree: merges a few bytes of all ranks on their way up to the first one, and gives all of them the result on its way down.

A rank has at most ``CHILDREN`` below it, so that a result comes after two messages for each level, and of levels there are the
logarithm of the ranks. Whoever has said its word goes on: what comes back is waited for when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .transfer import Stage, Transfer, gather, scatter

CHILDREN = 32


def family_of(place: int, size: int) -> tuple[list[int], list[int]]:
    """Lists the places of the families that the rank at ``place`` of ``size`` is in: of its own children, and of its parent's. Each begins
    with the parent; one without children, or without a parent, is empty."""
    own = [place, *range(CHILDREN * place + 1, min(CHILDREN * place + CHILDREN + 1, size))]
    parent = (place - 1) // CHILDREN
    parents = [parent, *range(CHILDREN * parent + 1, min(CHILDREN * parent + CHILDREN + 1, size))]
    return own if len(own) > 1 else [], parents if place > 0 else []


class Tree:
    """The place of this rank among those that merge messages. Every rank begins the same merges, in
    one order.

    below, above
        Groups of this rank with its children, and with its parent and the parent's other children. The parent is their first rank.
    """

    def __init__(self, below: dist.ProcessGroup | None, above: dist.ProcessGroup | None):
        self._below, self._above = below, above
        self._last: tuple[int, Transfer] | None = None  # the last merge, and how many there were before it

    def close(self) -> None:
        """Lets the groups go: nothing is merged afterwards."""
        self._below = self._above = self._last = None

    @property
    def begun(self) -> int:
        """How many merges this rank has begun: one that was made, and that no other rank has heard
        of, is none."""
        if self._last is None:
            return 0
        before, merge = self._last
        return before + merge.is_begun

    def merge(self, message: torch.Tensor, combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Transfer:
        """Makes the merge of this rank's ``message``, of as many bytes as every other's.
        ``combine`` makes one of several. Begin it before
        another one is made."""
        below, above, result = self._below, self._above, torch.empty_like(message)
        parts = [torch.empty_like(message) for _ in range(dist.get_world_size(below))] if below is not None else []

        def combined() -> torch.Tensor:
            return combine(parts) if parts else message

        def completed() -> torch.Tensor:
            return result if above is not None else result.copy_(combined())

        stages: list[Stage] = []
        if below is not None:
            stages.append(lambda: [gather(below, message, parts)])
        if above is not None:
            # What comes down is asked for before it is sent.
            stages.append(lambda: [gather(above, combined(), ()), scatter(above, result, ())])
        if below is not None:
            stages.append(lambda: [scatter(below, torch.empty_like(message), [completed()] * len(parts))])
        merge = Transfer(*stages, result=lambda: result)
        self._last = self.begun, merge
        return merge
