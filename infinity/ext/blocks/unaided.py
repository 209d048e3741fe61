"""Unaided: tells whether a rank can run a block again while the other ranks do not.

Each rank chooses for its blocks by what it has measured, so ranks choose differently. Therefore the
second run of a block must not need another rank. It gathers no weights if the block computes with
one unit alone, which the backward holds anyway. And the block's code may not communicate: a rank
that did so alone would wait for the others, or meet another operation of theirs.

A measured forward is watched by operation. Later ones are compared with what was done before them,
which also shows what other threads send meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ...core.run.schedule import Schedule
from ...core.units.added import tensors_of
from ...core.units.handle import handle_of
from ...core.units.unit import ParamUnit
from ...core.units.weight_storages import WeightStorages
from ...ranks.parallel_dims import ParallelDims

COMMUNICATING = frozenset(("c10d", "_c10d_functional", "c10d_functional", "symm_mem"))


class Mark(NamedTuple):
    """What had been done when a forward began: uses of units, collectives of each group."""

    uses: int
    begun: tuple[int, ...]


class Watched:
    """One forward, by its operations. ``needs_others``: whether it has computed with weights of
    other units than ``own``, which a module around may hold, or has communicated."""

    def __init__(self, storages: WeightStorages | None, own: Collection[ParamUnit]):
        self._storages, self._own, self.needs_others = storages, own, False

    def see(self, operation: Any, args: tuple, kwargs: dict) -> None:
        """Looks at an operation that is about to run."""
        self.needs_others |= getattr(operation, "namespace", "") in COMMUNICATING or any(
            self._is_of_another(leaf)
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        )

    def _is_of_another(self, tensor: torch.Tensor) -> bool:
        entry = None if self._storages is None else self._storages.find(tensor)
        return entry is not None and entry[0] not in self._own


class Unaided:
    """What the blocks of one job need of other ranks. ``ranks``: all ranks of it; ``storages``: of
    its weights."""

    def __init__(self, schedule: Schedule, ranks: ParallelDims, storages: WeightStorages):
        self._schedule, self._is_alone = schedule, ranks.alone
        self._storages = weakref.ref(storages)  # a graph that a user keeps leads here
        groups = [
            group
            for channel in ranks.all_channels
            for group in (channel.group, channel.bulk, channel.reductions)
        ]
        self._own = {group.group_name for group in (*ranks.process_groups, *groups)}

    def allows(self, block: nn.Module, units: Sequence[ParamUnit]) -> bool:
        """Tells whether ``block`` has at most one unit, which it holds whole as it begins, and from
        its output's gradient on. ``units``: those with parameters of it that are gathered whole."""
        if self._is_alone:
            return True
        users = {handle.unit for each in tensors_of(block) if (handle := handle_of(each))}
        # The backward of a module without children holds what it saves alone
        holds_in_backward = next(block.children(), None) is not None
        return (
            len(users) <= 1
            and users == {*units}
            and not any(unit.lands_apart or unit.arrival.rows is not None for unit in units)
            and holds_in_backward
        )

    def watch(self, units: Collection[ParamUnit]) -> Watched | None:
        """Returns what watches a forward of a block with ``units``; None with one rank."""
        return None if self._is_alone else Watched(self._storages(), units)

    def mark(self) -> Mark | None:
        """Returns what was done before a forward begins; None with one rank."""
        return None if self._is_alone else Mark(len(self._schedule.uses), self._begun())

    def used_others(self, since: Mark | None, units: Collection[ParamUnit]) -> bool:
        """Tells whether a forward, which has ended, brought other units than ``units``."""
        used = self._schedule.uses[since.uses :] if since is not None else ()
        return not {*used} <= {unit.index for unit in units}

    def communicated(self, since: Mark | None) -> bool:
        """Tells whether this process has communicated meanwhile, in any thread."""
        return since is not None and since.begun != self._begun()

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
