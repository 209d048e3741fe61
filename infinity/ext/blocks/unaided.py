"""Unaided: tells whether a rank can run a block again while the other ranks do not.

Each rank chooses for its blocks by what it has measured, so ranks choose differently. The second
run of a block may therefore need no other rank. It gathers no weights if the block has one unit,
which the backward holds anyway. And the block's code may not communicate: a rank that did so alone
would wait for the others, or meet another operation of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...core.run.schedule import Schedule
from ...core.units.added import tensors_of
from ...core.units.handle import handle_of
from ...core.units.unit import ParamUnit
from ...ranks.parallel_dims import ParallelDims


class Mark(NamedTuple):
    """What had been done when a forward began: uses of units, collectives of each group."""

    uses: int
    begun: tuple[int, ...]


class Unaided:
    """What the blocks of one job need of other ranks. ``ranks``: all ranks of it."""

    def __init__(self, schedule: Schedule, ranks: ParallelDims):
        self._schedule, self._is_alone = schedule, ranks.alone
        groups = [
            group
            for channel in ranks.all_channels
            for group in (channel.group, channel.bulk, channel.reductions)
        ]
        self._own = {group.group_name for group in groups}

    def allows(self, block: nn.Module, units: Sequence[ParamUnit]) -> bool:
        """Tells whether ``block`` computes with one unit, which it holds whole as it begins and in
        the backward. ``units``: those with parameters of it that are gathered whole."""
        if self._is_alone:
            return True
        users = {handle.unit for each in tensors_of(block) if (handle := handle_of(each))}
        return (
            [*users] == [*units]
            and all(not unit.lands_apart and unit.arrival.rows is None for unit in units)
            and next(block.children(), None) is not None
        )

    def mark(self) -> Mark | None:
        """Returns what was done before a forward begins; None with one rank."""
        return None if self._is_alone else Mark(len(self._schedule.uses), self._begun())

    def needed(self, since: Mark | None, units: Sequence[ParamUnit]) -> bool:
        """Tells whether a forward, which has ended, used weights of other units than ``units`` or
        communicated."""
        if since is None:
            return False
        others = {*self._schedule.uses[since.uses :]} - {unit.index for unit in units}
        return bool(others) or since.begun != self._begun()

    def _begun(self) -> tuple[int, ...]:
        """Counts the collectives of each process group that is not the engine's."""
        return tuple(
            _count(group, place)
            for group in dist.distributed_c10d._world.pg_map
            if group.group_name not in self._own
            for place in group._device_types
        )


def _count(group: dist.ProcessGroup, place: torch.device) -> int:
    try:
        return group._get_backend(place)._get_sequence_number_for_group()
    except RuntimeError:  # a backend that does not count
        return 0
