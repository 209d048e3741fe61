"""Checkpointed: runs a block's forward again in the backward, keeping only its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..errors import UsageError
from ..state.journal import Journal
from ..state.unit import ParamUnit
from .context import ForwardContext


class Checkpointed:
    """A block's forward that keeps only its input for the backward."""

    def __init__(
        self, find: Callable[[], ForwardContext], units: Sequence[ParamUnit], forward: Any
    ):
        self._context, self._units, self.forward = find, units, forward

    @property
    def journal(self) -> Journal:
        """The journal of the job. Raises UsageError if the engine is gone."""
        return self._context().journal

    def run(self, leaves: list, spec: Any) -> Any:
        """Runs the forward, and again in the backward. Without grad mode, runs it once."""
        if not torch.is_grad_enabled():
            return self.compute(spec, *leaves)
        versions = [unit.version for unit in self._units]
        return checkpoint(
            partial(self.compute, versions=versions), spec, *leaves, use_reentrant=False
        )

    def compute(self, spec: Any, *leaves: Any, versions: list[int] | None = None) -> Any:
        """Computes the forward of flattened arguments. ``versions``: the units' versions at the
        first run. Raises UsageError if a recomputation finds others."""
        context = self._context()
        args, kwargs = tree_unflatten(list(leaves), spec)
        running: AbstractContextManager[Any] = nullcontext()
        if torch._C._current_graph_task_id() != -1:
            if versions is not None and versions != [unit.version for unit in self._units]:
                raise UsageError(
                    "this backward runs a block's forward again, but its weights were changed since"
                    " (by optimizer.step() or load_state_dict()). Run backward before the step."
                )
            running = context.running_again(self._units)
        with running, context.saving_tensors():
            return self.forward(*args, **kwargs)


def random_states(places: set[torch.device]) -> dict[torch.device, torch.Tensor]:
    """Reads the random states of the CPU's generator and of those of the devices ``places``."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    elsewhere = [place for place in places if place.type != "cpu"]
    return states | {
        place: torch.get_device_module(place).get_rng_state(place) for place in elsewhere
    }


def set_random_states(states: dict[torch.device, torch.Tensor]) -> None:
    """Restores the generators' states that :func:`random_states` read."""
    for place, state in states.items():
        (
            torch.set_rng_state(state)
            if place.type == "cpu"
            else torch.get_device_module(place).set_rng_state(state, place)
        )
