"""ValueEdits: writes values home that were set outside the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from ...errors import InfinityError, UsageError
from ...ranks.collectives import Collectives, in_turn
from ..homes.store import ArrayStore
from ..run.journal import Journal
from ..run.prefetch import Prefetcher
from ..run.step_counter import StepCounter
from ..units.forms import is_common, part_of
from ..units.handle import ParamHandle
from . import mistakes
from .lent import Source, Written


class ValueEdits(Source):
    """Writes values of parameters at home. Used from one thread, inside a use of the engine."""

    is_weight = True

    def __init__(
        self,
        store: ArrayStore,
        prefetcher: Prefetcher,
        journal: Journal,
        collectives: Collectives,
        steps: StepCounter,
    ):
        self._store, self._prefetcher, self._journal, self._collectives, self._steps = (
            store,
            prefetcher,
            journal,
            collectives,
            steps,
        )
        # The load that was refused, and the reason.
        self._refused: tuple[FrameType | None, str] = None, ""

    def stamp(self, handle: ParamHandle) -> Any:
        """Returns the numbers of the value's changes so far."""
        return handle.version, handle.forward_edits

    def write(self, written: Sequence[Written]) -> None:
        """Sends home what was written to tensors of state dicts: all or nothing."""

        def then() -> None:
            for _, _, end in written:
                end()

        edited = [(handle, value) for handle, value, _ in written]
        self.write_changes(edited, "taking over state_dict() values", then)

    def write_value(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Sets the parameter to ``value``, master included. Every rank calls this. Raises
        UsageError if other ranks set another value.

        [Note: why the whole load is refused] After an error torch's load_state_dict() continues
        with the next parameter. So the rest of that load is refused before ranks meet for it.
        Otherwise ranks at different parameters would never meet at the same one.
        """
        load = mistakes.caller("torch/nn/modules/module.py", "load_state_dict")
        refused, error = self._refused
        if refused is not None and refused is load:
            raise UsageError(
                f"{handle.name} is not loaded, since the load was refused before: {error}"
            )
        self._refused = None, ""
        try:
            self._write_value(handle, value)
        except InfinityError as error:
            self._refused = load, str(error)
            raise

    def _write_value(self, handle: ParamHandle, value: torch.Tensor) -> None:
        value = part_of(handle.param, value.detach(), f"setting {handle.name}").expand(
            tuple(handle.flat_param.layout.placements[handle.index].shape)
        )
        flat = handle.flat_param.flattened(value, handle.index)
        self._prefetcher.release_all([handle.unit])
        is_there = False
        # Optimizer state was loaded first: it may include this value's master.
        if handle.has_loaded_master:
            holds = handle.flat_param.holds(self._store, handle.index, value)
            (lacks,) = self._collectives.meet(f"setting {handle.name}", flags=[not holds])
            is_there = not lacks

        def change() -> None:
            if not is_there:
                handle.changed()
                handle.note_edit(value)
                handle.flat_param.write_flattened(
                    self._store, handle.index, flat, version=self._steps.index
                )

        def meet(then: Callable[[], None]) -> None:
            meets = handle.flat_param.collectives.meet
            meets(f"setting {handle.name}", value, over_tensors=is_common(handle.param), then=then)

        self._journal.carry_out(change, meet)

    def write_changes(
        self,
        edited: Sequence[tuple[ParamHandle, torch.Tensor]],
        what: str,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends home the elements that differ from the parameters' values; other elements keep the
        bits of their master. All or nothing. Every rank makes the same change, named ``what``.
        ``then`` ends it."""
        self._prefetcher.release_all([handle.unit for handle, _ in edited])
        changes = [
            (handle, value, handle.flat_param.changes(self._store, handle.index, value))
            for handle, value in edited
        ]

        def change() -> None:
            for handle, value, parts in changes:
                handle.changed()
                handle.note_edit(value)
                handle.flat_param.write_changes(
                    self._store, handle.index, parts, version=self._steps.index
                )
            then()

        self._journal.carry_out(change, partial(compare_values, self._collectives, what, edited))


def compare_values(
    collectives: Collectives,
    what: str,
    edits: Iterable[tuple[ParamHandle, torch.Tensor]],
    then: Callable[[], None],
) -> None:
    """Compares the values of ``edits`` over the ranks that share them: what all tensor parts have
    in common, then the experts' of this rank, then the others. Calls ``then`` as soon as all are
    known to be equal."""
    common: list[torch.Tensor] = []
    values: dict[Collectives, list] = {collectives.of_experts: [], collectives: []}
    for handle, value in edits:
        values[handle.flat_param.collectives].append(value)
        common += [value] * is_common(handle.param)
    meetings, ranks = [], collectives.ranks
    if ranks.tp_group is not None:
        said = f"{what} with {len(common)} tensors that all have"
        meetings.append(partial(collectives.meet, said, *common))
    for collectives_there, tensors in values.items() if ranks.data_size > 1 else ():
        said = f"{what} with {len(tensors)} tensors"
        meetings.append(partial(collectives_there.meet, said, *tensors, over_tensors=False))
    in_turn(meetings, then)
