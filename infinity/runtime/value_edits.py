"""ValueEdits: sends values home that were set outside the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..distributed.collectives import Collectives
from ..state.dtensors import is_common, part_of
from ..state.handle import ParamHandle
from ..state.journal import Journal
from ..state.step_counter import StepCounter
from ..storage.store import ShardStore
from .prefetch import Prefetcher


class ValueEdits:
    """Writes values of parameters at home. Used from one thread, inside a use of the engine."""

    def __init__(self, store: ShardStore, prefetcher: Prefetcher, journal: Journal, collectives: Collectives, steps: StepCounter):
        self._store, self._prefetcher, self._journal, self._collectives, self._steps = (
            store,
            prefetcher,
            journal,
            collectives,
            steps,
        )

    def write_value(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Makes ``value`` the parameter's, master and all. Raises UsageError where other ranks set another one."""
        value = part_of(handle.param, value.detach(), f"setting {handle.name}").expand(
            tuple(handle.shard.layout.placements[handle.index].shape)
        )
        handle.shard.collectives.same(f"setting {handle.name}", value, over_tensors=is_common(handle.param))
        flat = handle.shard.flattened(value, handle.index)
        self._prefetcher.release_all([handle.unit])
        if handle.has_loaded_master:
            holds = handle.shard.holds(self._store, handle.index, value)
            if self._collectives.least([holds], f"setting {handle.name}")[0]:
                return  # the optimizer's state was loaded first, and has the master of this very value

        def change() -> None:
            handle.changed()
            handle.shard.write_flattened(self._store, handle.index, flat, version=self._steps.index)

        self._journal.carry_out(change)

    def write_changes(self, edited: Sequence[tuple[ParamHandle, torch.Tensor]]) -> None:
        """Sends home the elements of the values that differ from their parameters'; the others keep their master's bits. All of it
        or, where that is refused, nothing."""
        self._prefetcher.release_all([handle.unit for handle, _ in edited])
        found = [(handle, handle.shard.changes(self._store, handle.index, value)) for handle, value in edited]

        def change() -> None:
            for handle, parts in found:
                handle.changed()
                handle.shard.write_changes(self._store, handle.index, parts, version=self._steps.index)

        self._journal.carry_out(change)
