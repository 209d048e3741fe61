"""ClassRanks: has whole parameters stepped, each on one of the ranks that have its elements.

stepping rank   the rank that steps a parameter: it gets every rank's elements, steps as one rank
                would, and sends each its new elements back. No other rank has the whole parameter
round           as many parameters as there are ranks, so that all ranks step at the same time
load            the cost of what a rank steps. In a round the costliest parameter goes to the rank
                with the least load so far
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.units.handle import ParamHandle
from ...errors import UsageError
from ...ranks.collectives import Collectives
from ...ranks.transfer import swap


@dataclass(eq=False)
class Result:
    """The values of one parameter after its step: elements, flat, in fp32."""

    elements: torch.Tensor
    moments: dict[str, torch.Tensor]  # by array
    own: dict[str, Any]  # without an array at home
    changed: dict[str, Any]  # settings of the group


Inputs = list[torch.Tensor]  # of one parameter: elements, gradient and moments, flat, in fp32
Step = Callable[[ParamHandle, Inputs], Result]


def stepping_ranks(
    rounds: Sequence[Sequence[ParamHandle]], size: int, cost_of: Callable[[ParamHandle], int]
) -> list[list[int]]:
    """Chooses the stepping rank of each parameter of ``rounds``, which ``size`` ranks share, by the
    cost of each. Every rank chooses the same ones, however often it is interrupted."""
    load, chosen = [0] * size, []
    for handles in rounds:
        cost = [cost_of(handle) for handle in handles]
        ranks = [0] * len(handles)
        free = sorted(range(size), key=lambda rank: (load[rank], rank))
        for place in sorted(range(len(handles)), key=lambda place: (-cost[place], place)):
            ranks[place] = free.pop(0)
            load[ranks[place]] += cost[place]
        chosen.append(ranks)
    return chosen


class ClassRanks:
    """The steps of whole parameters that ranks share."""

    def __init__(self, collectives: Collectives):
        self._collectives = collectives

    def _swap(
        self, given: Sequence[torch.Tensor], counts: Sequence[int], what: str
    ) -> list[torch.Tensor]:
        """Sends each rank its tensor of ``given``, and returns what each sends here."""
        ranks = self._collectives.ranks
        transfer = swap(ranks.shard_group.group, given, counts)
        return ranks.sync_channel_of(ranks.shard_group).pass_on(what, transfer)

    def step(
        self,
        handles: Sequence[ParamHandle],
        chosen: Sequence[int],
        inputs: Sequence[Inputs],
        step: Step,
    ) -> list[Result]:
        """Steps ``handles`` of one round on the ranks ``chosen``. ``inputs``: this rank's elements
        of each. Returns them after the step. Every rank of the shard group calls this."""
        collectives, ranks = self._collectives, self._collectives.ranks
        what = f"stepping {handles[0].name} and its neighbours"
        mine = next((place for place, rank in enumerate(chosen) if rank == ranks.rank), None)
        # To the stepping ranks
        sent = [nothing := torch.empty(0, dtype=torch.float32, device="cpu")] * ranks.size
        for rank, parts in zip(chosen, inputs):
            sent[rank] = torch.cat(parts)
        parts_of = [] if mine is None else _parts(handles[mine], ranks.size)
        kinds = 0 if mine is None else len(inputs[mine])
        counts = [kinds * (end - begin) for begin, end in parts_of] or [0] * ranks.size
        received = self._swap(sent, counts, f"{what}: to the stepping ranks")
        result, failed = None, None
        if mine is not None:
            rows = [part.view(kinds, -1) for part in received]
            whole = [torch.cat([row[kind] for row in rows]) for kind in range(kinds)]
            try:
                result = step(handles[mine], whole)
            except Exception as error:  # noqa: BLE001 - told to all ranks, which wait for this one
                failed = f"{handles[mine].name} on rank {ranks.world_rank} raised {error!r}"
        # Small values to all
        small = None if result is None else (mine, list(result.moments), result.own, result.changed)
        results = collectives.collect((small, failed), f"{what}: results", [ranks.shard_group])
        if failures := [error for _, error in results if error is not None]:
            raise UsageError(
                f"step(): the step of {failures[0]}. Nothing of it was written; the step goes on"
                " when its cause is gone, or load a checkpoint."
            )
        known = {each[0]: each[1:] for each, _ in results if each is not None}
        values = [] if result is None else [result.elements, *result.moments.values()]
        sent = [torch.cat([value[begin:end] for value in values]) for begin, end in parts_of]
        counts = [0] * ranks.size
        for place, rank in enumerate(chosen):
            counts[rank] = (1 + len(known[place][0])) * inputs[place][0].numel()
        back = self._swap(sent or [nothing] * ranks.size, counts, f"{what}: back")
        return [_of_parts(back[rank], *known[place]) for place, rank in enumerate(chosen)]


def _of_parts(
    part: torch.Tensor, arrays: list[str], own: dict[str, Any], changed: dict[str, Any]
) -> Result:
    """Splits the ``part`` that the stepping rank has sent back into this rank's result."""
    rows = part.view(1 + len(arrays), -1)
    moments = {array: rows[1 + kind] for kind, array in enumerate(arrays)}
    return Result(rows[0], moments, own, changed)


def _parts(handle: ParamHandle, size: int) -> list[tuple[int, int]]:
    """Returns the elements of a parameter that each rank has, from the parameter's first on."""
    layout = handle.flat_param.layout
    first = layout.placements[handle.index].offset
    spans = [layout.shard_part(handle.index, rank) for rank in range(size)]
    return [(begin - first, end - first) if begin < end else (0, 0) for begin, end in spans]
