"""Tree: merges small messages of all ranks up to the first one, and sends the result down to all.

A rank has at most ``CHILDREN`` below it: a result takes two messages per level, with
logarithmically many levels. Sending does not block; reading the result does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .transfer import Phase, Transfer, gather, scatter

CHILDREN = 32


def family_of(index: int, size: int) -> tuple[list[int], list[int]]:
    """Lists the members of the two families of rank ``index`` of ``size``: its own children,
    and its parent's. Each starts with the parent. A family without children, or without a parent,
    is empty."""
    children = [index, *range(CHILDREN * index + 1, min(CHILDREN * index + CHILDREN + 1, size))]
    parent = (index - 1) // CHILDREN
    parents = [parent, *range(CHILDREN * parent + 1, min(CHILDREN * parent + CHILDREN + 1, size))]
    return children if len(children) > 1 else [], parents if index > 0 else []


class Tree:
    """The position of this rank in the tree that merges messages. Every rank starts the same
    merges, in one order.

    below, above
        Groups of this rank with its children, and with its parent and siblings. The parent is their
        first rank.
    """

    def __init__(self, below: dist.ProcessGroup | None, above: dist.ProcessGroup | None):
        self._below, self._above = below, above
        self._last: tuple[int, Transfer] | None = None  # the last merge, and the count before it
        self.sent_nbytes = 0  # by the merges so far

    def close(self) -> None:
        """Releases the groups: no merge is possible afterwards."""
        self._below = self._above = self._last = None

    @property
    def begun(self) -> int:
        """How many merges this rank has started. One that no other rank can have observed does not
        count."""
        if self._last is None:
            return 0
        before, merge = self._last
        return before + merge.is_begun

    def merge(
        self, message: torch.Tensor, combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    ) -> Transfer:
        """Makes the merge of this rank's ``message``, of equal size on all ranks. ``combine``
        reduces several to one. Start it before making another."""
        below, above, result = self._below, self._above, torch.empty_like(message)
        parts = (
            [torch.empty_like(message) for _ in range(dist.get_world_size(below))]
            if below is not None
            else []
        )

        def combined() -> torch.Tensor:
            return combine(parts) if parts else message

        def completed() -> torch.Tensor:
            return result if above is not None else result.copy_(combined())

        self.sent_nbytes += message.nbytes * (max(0, len(parts) - 1) + (above is not None))
        phases: list[Phase] = []
        if below is not None:
            phases.append(lambda: [gather(below, message, parts)])
        if above is not None:
            # The receive is posted before the send.
            phases.append(lambda: [gather(above, combined(), ()), scatter(above, result, ())])
        if below is not None:
            phases.append(
                lambda: [scatter(below, torch.empty_like(message), [completed()] * len(parts))]
            )
        merge = Transfer(*phases, result=lambda: result)
        self._last = self.begun, merge
        return merge
