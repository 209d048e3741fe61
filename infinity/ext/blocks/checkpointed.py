"""Checkpointed: runs a block's forward again in the backward, keeping only its input."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_unflatten
from torch.utils.checkpoint import checkpoint

from ...core.params.outside_modes import makes_hooks
from ...core.run.context import ForwardContext
from ...core.run.journal import Journal
from ...core.units.unit import ParamUnit
from ...errors import UsageError
from ...torch_private import current_task, top_hooks
from .products import Counted, Products


class Checkpointed:
    """A block's forward that keeps only its input for the backward."""

    def __init__(self, find: Callable[[], ForwardContext], units: Sequence[ParamUnit]):
        self._context, self._units = find, units

    @property
    def journal(self) -> Journal:
        """The journal of the job. Raises UsageError if the engine is gone."""
        return self._context().journal

    def run(
        self,
        leaves: list,
        spec: Any,
        *,
        forward: Callable,
        held: Held | None = None,
        products: Counted | Products | None = None,
    ) -> Any:
        """Runs the forward, and again in the backward. Without grad mode, runs it once.

        ``forward``: the block's. ``held``: keeps what it saves, until it is dropped. ``products``:
        counts, or keeps, those of this call.
        """
        if not torch.is_grad_enabled():
            return self.compute(spec, *leaves, forward=forward)
        versions = [unit.version for unit in self._units]
        compute = partial(
            self.compute, versions=versions, forward=forward, held=held, products=products
        )
        return checkpoint(compute, spec, *leaves, use_reentrant=False)

    def compute(
        self,
        spec: Any,
        *leaves: Any,
        versions: list[int] | None = None,
        forward: Callable,
        held: Held | None = None,
        products: Counted | Products | None = None,
    ) -> Any:
        """Computes the forward of flattened arguments, as :meth:`run`. ``versions``: the units'
        versions at the first run. Raises UsageError if a recomputation finds others."""
        context = self._context()
        if versions is not None:  # a checkpoint that the user's model does not have
            top_hooks(True)[0].gives_params = True
        args, kwargs = tree_unflatten(list(leaves), spec)
        running: AbstractContextManager[Any] = nullcontext()
        if current_task() != -1:
            if versions is not None and versions != [unit.version for unit in self._units]:
                raise UsageError(
                    "this backward runs a block's forward again, but its weights were changed since"
                    " (by optimizer.step() or load_state_dict()). Run backward before the step."
                )
            running = context.running_again(self._units)
        elif held is not None:
            running = held.hooks()
        mode = nullcontext() if products is None else products.mode()
        with running, context.saving_tensors(), mode:
            return forward(*args, **kwargs)


class Held:
    """What one forward saves inside a checkpoint. It is held, so that nothing is computed again,
    until :meth:`drop`: whether a block may run again, and finds room, is known once it has run."""

    def __init__(self, note_saved: Callable[[], None] | None) -> None:
        """``note_saved``: is called before each tensor is saved. None: they are not saved before
        :meth:`keep`, as long as the forward runs."""
        self._note_saved = note_saved
        # How a tensor is saved outside of the checkpoint
        self._save, self._bring = top_hooks(True)
        self._saved: list[weakref.ref[_Both]] = []

    @makes_hooks
    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Makes the hooks for saved tensors, inside the checkpoint's."""
        count, compute = top_hooks(True)

        def pack(tensor: torch.Tensor) -> _Both:
            if self._note_saved is None:
                both = _Both(_Waiting(tensor, tensor._version), count(tensor))
            else:
                self._note_saved()
                both = _Both(self._save(tensor), count(tensor))
            self._saved.append(weakref.ref(both))
            return both

        def unpack(both: _Both) -> torch.Tensor:
            if isinstance(waiting := both.saved, _Waiting):  # a backward inside of the forward
                tensor, version = waiting
                if tensor._version == version:
                    return tensor.detach()
                both.saved = CHANGED
            if both.saved is CHANGED:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an"
                    " inplace operation"
                )
            return compute(both.counted) if both.saved is None else self._bring(both.saved)

        pack.count, pack.is_counted = count, True
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def keep(self) -> None:
        """Saves what waits, at the end of the forward: the backward does not run it again."""
        for ref in self._saved:
            if (both := ref()) is not None:
                if both.saved is CHANGED:
                    continue
                tensor, version = both.saved
                both.saved = self._save(tensor) if tensor._version == version else CHANGED

    def drop(self) -> None:
        """Drops what is held: the backward runs the forward again."""
        for ref in self._saved:
            if (both := ref()) is not None:
                both.saved = None


class _Waiting(NamedTuple):
    """A tensor that is not saved yet, and its version then."""

    tensor: torch.Tensor
    version: int


CHANGED = object()  # in place of a tensor that was written to before it was saved


class _Both:
    """A saved tensor as it is held, and what the checkpoint has in its place."""

    __slots__ = ("saved", "counted", "__weakref__")

    def __init__(self, saved: Any, counted: Any):
        self.saved, self.counted = saved, counted


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
