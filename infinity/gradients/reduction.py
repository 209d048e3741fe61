"""Reduction: one shard's gradients on their way to their average, and what is known of who has any of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from ..state.handle import ParamHandle
from ..state.shard import ParamShard


class Reduction:
    """Averages the gradients of ``wanted``, of which this rank has those with an index in ``got``.

    ``is_decided``: some rank has each of them. Else that is heard (:meth:`hear`), or the averages show it: nobody had what consists of negative
    zeros, as far as can be seen.
    """

    def __init__(self, shard: ParamShard, wanted: Sequence[ParamHandle], got: Collection[int], *, is_decided: bool):
        self._shard, self._wanted, self._got = shard, wanted, got
        self._is_decided, self._anywhere = is_decided, [True] * len(wanted)
        self.more_comes = False  # on some rank, which has told

    def bring_nothing(self, whole: torch.Tensor) -> None:
        """Fills flat ``whole`` with negative zeros where this rank has no gradient: to add them changes no bit."""
        for handle in self._wanted:
            if handle.index not in self._got:
                self._shard.layout.placements[handle.index].view(whole).fill_(-0.0)

    def hear(self, told: list[bool]) -> None:
        """Takes what is known now: which of the gradients any rank has, and whether more may come on some."""
        *self._anywhere, self.more_comes = told
        self._is_decided = True

    def land(self, average: torch.Tensor, land: Callable[[ParamHandle, torch.Tensor], None]) -> list[ParamHandle]:
        """Has each part of this rank's slice of the ``average`` land. Returns those of which perhaps nobody had a gradient."""
        undecided, first = [], self._shard.own_slice[0]
        for handle, has in zip(self._wanted, self._anywhere):
            begin, end = self._shard.slice_part(handle.index)
            part = average[begin - first : end - first]
            if has and (self._is_decided or handle.index in self._got or not _is_nothing(part)):
                land(handle, part)
            elif not self._is_decided:
                undecided.append(handle)
        return undecided


def _is_nothing(average: torch.Tensor) -> bool:
    """Whether an fp32 average consists of negative zeros, as it does where nobody had a gradient."""
    return bool((average.view(torch.int32) == torch.iinfo(torch.int32).min).all())
