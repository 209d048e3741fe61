"""Segments: what a class step steps at one time, and the memory that segments reuse.

segment   a piece of a parameter, or a round of whole ones
piece   consecutive elements of a parameter, if the class may step any part of it
round   whole parameters, one for each rank that shares them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.units.handle import ParamHandle
from .class_ranks import Result

PIECE, EVERY = 4 * 1024 * 1024, 2**62  # elements of a part of a parameter, of any parameter
MOST_KEPT = 6  # times the largest buffer: of the next segment, in a class with four moments


@dataclass(eq=False)
class Segment:
    """A piece of a parameter, or a round of whole ones, stepped at the same time."""

    handles: list[ParamHandle]
    spans: list[tuple[int, int]]  # the elements of each, among those that are at home here
    numbers: list[int]  # the new step counts
    is_last: bool = True  # of the pieces of its parameter
    ranks: list[int] = field(default_factory=list)  # that step each, if ranks share them
    buffers: list[torch.Tensor] = field(default_factory=list)
    step: Any = None  # that it belongs to
    results: list[Result] | None = None
    is_done: bool = False


class Buffers:
    """Memory that segments of one step reuse: fresh pages cost more than the copies."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._largest = 0

    def take(self, numel: int) -> torch.Tensor:
        """Returns a flat fp32 tensor of any values."""
        free = self._free.get(numel)
        return free.pop() if free else torch.empty(numel, dtype=torch.float32, device="cpu")

    def give(self, buffers: list[torch.Tensor]) -> None:
        """Takes tensors of :meth:`take` back."""
        while buffers:
            buffer = buffers.pop()
            self._largest = max(self._largest, buffer.numel())
            kept = sum(numel * len(each) for numel, each in self._free.items())
            if kept + buffer.numel() <= MOST_KEPT * self._largest:
                self._free.setdefault(buffer.numel(), []).append(buffer)

    def clear(self) -> None:
        """Frees all that was given back."""
        self._free.clear()


def segments_of(
    handles: Sequence[ParamHandle], numbers: Sequence[int], most: int
) -> Iterator[Segment]:
    """Yields the segments of ``handles`` of one flat param: pieces of ``most`` elements, or rounds
    of whole parameters if one piece holds any. ``numbers``: the step counts after it."""
    counts = [end - begin for begin, end in map(_span, handles)]
    if most > max(counts, default=0):
        size = handles[0].flat_param.ranks.size if handles and most >= EVERY else 1
        for at in range(0, len(handles), size):
            spans = [(0, count) for count in counts[at : at + size]]
            yield Segment(list(handles[at : at + size]), spans, list(numbers[at : at + size]))
        return
    for handle, number, count in zip(handles, numbers, counts):
        for begin in range(0, max(count, 1), most):
            end = min(count, begin + most)
            yield Segment([handle], [(begin, end)], [number], is_last=end == count)


def _span(handle: ParamHandle) -> tuple[int, int]:
    return handle.flat_param.layout.shard_part(handle.index)
