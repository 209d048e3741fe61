"""ClassRanks: has whole parameters stepped, each on one of the ranks that have its elements.

stepping rank   the rank that steps a parameter: it gets every rank's elements, steps as one rank
                would, and sends each its new elements back. No other rank has the whole parameter
round           as many parameters as there are ranks, so that all ranks step at the same time
load            the cost of what a rank has stepped. In a round the costliest parameter goes to the
                rank with the least load
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..distributed.collectives import Collectives
from ..distributed.transfer import swap
from ..state.handle import ParamHandle


@dataclass(eq=False)
class Result:
    """The values of one parameter after its step: elements, flat, in fp32."""

    elements: torch.Tensor
    moments: dict[str, torch.Tensor]  # by array
    own: dict[str, Any]  # without an array at home
    changed: dict[str, Any]  # settings of the group


Inputs = list[torch.Tensor]  # of one parameter: elements, gradient and moments, flat, in fp32
Step = Callable[[ParamHandle, Inputs], Result]


class ClassRanks:
    """The stepping ranks of the parameters of one step."""

    def __init__(self, collectives: Collectives):
        self._collectives = collectives
        self._load = [0] * collectives.ranks.size

    def _choose(self, handles: Sequence[ParamHandle]) -> list[int]:
        """Chooses the stepping rank of each of ``handles``, which are of one round."""
        cost = [_cost(handle) for handle in handles]
        chosen = [0] * len(handles)
        free = sorted(range(len(self._load)), key=lambda rank: (self._load[rank], rank))
        for place in sorted(range(len(handles)), key=lambda place: (-cost[place], place)):
            chosen[place] = free.pop(0)
        for place, rank in enumerate(chosen):
            self._load[rank] += cost[place]
        return chosen

    def _swap(
        self, given: Sequence[torch.Tensor], counts: Sequence[int], what: str
    ) -> list[torch.Tensor]:
        """Sends each rank its tensor of ``given``, and returns what each sends here."""
        ranks = self._collectives.ranks
        transfer = swap(ranks.shard_group.group, given, counts)
        return ranks.place_of(ranks.shard_group).pass_on(what, transfer)

    def step(
        self, handles: Sequence[ParamHandle], inputs: Sequence[Inputs], step: Step
    ) -> list[Result]:
        """Steps ``handles`` of one round. ``inputs``: this rank's elements of each. Returns them
        after the step. Every rank of the shard group calls this."""
        collectives, ranks = self._collectives, self._collectives.ranks
        chosen = self._choose(handles)
        what = f"stepping {handles[0].name} and its neighbours"
        mine = next((place for place, rank in enumerate(chosen) if rank == ranks.rank), None)
        # To the stepping ranks
        given = [nothing := torch.empty(0, dtype=torch.float32, device="cpu")] * ranks.size
        for rank, parts in zip(chosen, inputs):
            given[rank] = torch.cat(parts)
        parts_of = [] if mine is None else _parts(handles[mine], ranks.size)
        kinds = 0 if mine is None else len(inputs[mine])
        counts = [kinds * (end - begin) for begin, end in parts_of] or [0] * ranks.size
        found = self._swap(given, counts, what)
        result = None
        if mine is not None:
            rows = [part.view(kinds, -1) for part in found]
            whole = [torch.cat([row[kind] for row in rows]) for kind in range(kinds)]
            result = step(handles[mine], whole)
        # Small values to all
        small = None if result is None else (mine, list(result.moments), result.own, result.changed)
        everyones = collectives.collect(small, what, [ranks.shard_group])
        known = {each[0]: each[1:] for each in everyones if each is not None}
        # And each rank's elements back
        values = [] if result is None else [result.elements, *result.moments.values()]
        given = [torch.cat([value[begin:end] for value in values]) for begin, end in parts_of]
        given = given or [nothing] * ranks.size
        counts = [0] * ranks.size
        for place, rank in enumerate(chosen):
            counts[rank] = (1 + len(known[place][0])) * inputs[place][0].numel()
        back = self._swap(given, counts, what)
        results = []
        for place, rank in enumerate(chosen):
            arrays, own, changed = known[place]
            rows = back[rank].view(1 + len(arrays), -1)
            moments = {array: rows[1 + kind] for kind, array in enumerate(arrays)}
            results.append(Result(rows[0], moments, own, changed))
        return results


def _parts(handle: ParamHandle, size: int) -> list[tuple[int, int]]:
    """Returns the elements of a parameter that each rank has, from the parameter's first on."""
    layout = handle.flat_param.layout
    first = layout.placements[handle.index].offset
    spans = [layout.shard_part(handle.index, rank) for rank in range(size)]
    return [(begin - first, end - first) if begin < end else (0, 0) for begin, end in spans]


def _cost(handle: ParamHandle) -> int:
    """Estimates the cost of a parameter's step: multiplications of a matrix by its own square."""
    shape = handle.flat_param.layout.placements[handle.index].shape
    return shape.numel() * (min(shape[-2:]) if len(shape) > 1 else 1)
