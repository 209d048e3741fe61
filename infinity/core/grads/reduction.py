"""Reduction: averages one flat param's gradients, and tracks which of them any rank has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from ..units.flat_param import FlatParam
from ..units.handle import ParamHandle


class Reduction:
    """Averages the gradients of ``wanted``, of which this rank has those with an index in ``got``.

    ``is_decided``: each exists on some rank. If not, :meth:`note_flags` reports it, or the averages
    show it: one that consists of negative zeros had no gradient on any rank.
    """

    def __init__(
        self,
        flat_param: FlatParam,
        wanted: Sequence[ParamHandle],
        got: Collection[int],
        *,
        is_decided: bool,
    ):
        self._flat_param, self._wanted, self._got = flat_param, wanted, got
        self._is_decided, self._anywhere = is_decided, [True] * len(wanted)
        self.more_comes = False  # some rank reported that more of its gradients may come

    def bring_nothing(self, whole: torch.Tensor) -> None:
        """Fills flat ``whole`` with negative zeros where this rank has no gradient: adding them
        changes no bit."""
        for handle in self._wanted:
            if handle.index not in self._got:
                self._flat_param.layout.placements[handle.index].view(whole).fill_(-0.0)

    def note_flags(self, flags: list[bool]) -> None:
        """Takes the exchanged flags: which of the gradients any rank has, then whether more may
        come."""
        *self._anywhere, self.more_comes = flags
        self._is_decided = True

    def land(
        self, average: torch.Tensor, at: int, land: Callable[[ParamHandle, torch.Tensor, int], None]
    ) -> list[ParamHandle]:
        """Calls ``land`` for each gradient's part of the ``average`` of this rank's shard from
        element ``at``, with the first one's number in the gradient's part of the shard. Returns the
        gradients that perhaps no rank had."""
        undecided, first = [], self._flat_param.layout.own_shard[0] + at
        for handle, has in zip(self._wanted, self._anywhere):
            begin, end = self._flat_param.layout.shard_part(handle.index)
            low, high = max(begin, first), min(end, first + len(average))
            if low >= high and (at or begin < end):
                continue  # another bucket's, or none of this rank's: that lands with the first
            part = average[low - first : max(low, high) - first]
            if has and not (self._is_decided or handle.index in self._got):
                # Negative zeros alone, if no rank had a gradient
                has = not (part.view(torch.int32) == torch.iinfo(torch.int32).min).all()
            if has:
                land(handle, part, low - begin)
            elif not self._is_decided:
                undecided.append(handle)
        return undecided
