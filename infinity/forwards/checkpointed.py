"""Checkpointed: runs a block's forward again in the backward, keeping only its input."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..errors import UsageError
from ..state.journal import Journal
from ..state.unit import ParamUnit
from .weights import Weights, found_weakly


class Checkpointed:
    """A block's forward of which only the input is kept."""

    def __init__(self, engine: Weights, units: Sequence[ParamUnit], forward: Any):
        self._engine, self._units, self.forward = found_weakly(engine), units, forward

    @property
    def journal(self) -> Journal:
        """The changes of the engine that have begun."""
        return self._engine().journal

    def run(self, leaves: list, spec: Any) -> Any:
        """Runs the forward, which is run again in the backward; where there will be none, just the forward."""
        if not torch.is_grad_enabled():
            return self.compute(spec, *leaves)
        versions = [unit.version for unit in self._units]
        return checkpoint(partial(self.compute, versions=versions), spec, *leaves, use_reentrant=False)

    def compute(self, spec: Any, *leaves: Any, versions: list[int] | None = None) -> Any:
        """Computes the forward of arguments that were flattened. ``versions``: of its units' values, the first time."""
        engine = self._engine()
        args, kwargs = tree_unflatten(list(leaves), spec)
        if torch._C._current_graph_task_id() != -1:  # recomputation: nobody else may have asked for the weights yet
            if versions is not None and versions != [unit.version for unit in self._units]:
                raise UsageError(
                    "this backward runs a block's forward again, but its weights were changed since (by optimizer.step() or "
                    "load_state_dict()). Run backward before the step."
                )
            for unit in self._units:
                engine.hold_for_backward(unit)
        with engine.saving_tensors():
            return self.forward(*args, **kwargs)


def random_states(places: set[torch.device]) -> dict[torch.device, torch.Tensor]:
    """Reads the states of the processor's generator and of those of ``places``."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    elsewhere = [place for place in places if place.type != "cpu"]
    return states | {place: torch.get_device_module(place).get_rng_state(place) for place in elsewhere}


def set_random_states(states: dict[torch.device, torch.Tensor]) -> None:
    """Puts generators back to what :func:`random_states` found."""
    for place, state in states.items():
        torch.set_rng_state(state) if place.type == "cpu" else torch.get_device_module(place).set_rng_state(state, place)
