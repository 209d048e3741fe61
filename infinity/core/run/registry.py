"""Registry: finds the record of a wrapped model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from ...errors import UsageError
from ..step.optimizer import InfinityOptimizer
from ..wrap.parts import Parts
from .engine import Engine

# Attribute of a wrapped model that holds its record, so both have one lifetime.
RECORD = "_infinity"
_records: weakref.WeakSet[Wrapped] = weakref.WeakSet()


class Wrapped:
    """Record of one wrapped model: its engine, and the objects that remove its hooks."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        removers: list,
        optimizers: Sequence[InfinityOptimizer],
        came_from: dict,
        plain: Sequence[torch.optim.Optimizer] = (),
    ):
        self.engine, self.removers = engine, removers
        self._model = weakref.ref(model)
        # An object that holds parts has to live as long as they do.
        self._parts = model if isinstance(model, Parts) else None
        self.came_from = came_from  # the device of each parameter before the wrap
        # Ends what was changed in it only while it is wrapped.
        self.release: Callable[[], None] = lambda: None
        # Takes its attributes that are views of weights anew.
        self.take_views: Callable[[], None] = lambda: None
        # The rest of an unwrap that has begun; may be called repeatedly.
        self.unwrapping: Callable[[], None] | None = None
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        # The indices of those that have given all their parameters to later ones.
        self._replaced: set[int] = set()
        # Given to wrap_model, too: they have no parameter that the engine moves.
        self._plain = [weakref.ref(optimizer) for optimizer in plain]
        _records.add(self)

    @property
    def model(self) -> nn.Module:
        """The wrapped model, or the object that holds its parts."""
        return self._model()

    @property
    def optimizers(self) -> list[InfinityOptimizer]:
        """The optimizers that wrap_model returned, as far as they are alive. Those that have given
        all parameters to later ones are left out."""
        remain = [ref for index, ref in enumerate(self._optimizers) if index not in self._replaced]
        return [alive for optimizer in remain if (alive := optimizer()) is not None]

    @property
    def optimizer(self) -> InfinityOptimizer | list[InfinityOptimizer] | None:
        """The optimizer that wrap_model returned, or all of them if they are several."""
        alive = self.optimizers
        several = len(self._optimizers) - len(self._replaced) > 1
        return alive if several else next(iter(alive), None)

    @property
    def count(self) -> int:
        """How many optimizers step at home, or have."""
        return len(self._optimizers)

    def join(self, optimizer: Any, config: Any) -> Any:
        """Gives the model more optimizers. Returns what stands for ``optimizer``, in its form.
        Raises ConfigError, UsageError or CapacityError."""
        for listener in self.engine.job.events.joining:
            return listener(self.model, optimizer, config)
        raise UsageError("a model is wrapped already, and gets no other optimizer: unwrap it first")

    def add(
        self,
        optimizers: Sequence[InfinityOptimizer],
        plain: Sequence[torch.optim.Optimizer],
        replaced: set[int],
    ) -> None:
        """Adds optimizers. ``replaced``: the indices of those that have no parameter any more."""
        self._optimizers += [weakref.ref(optimizer) for optimizer in optimizers]
        self._replaced |= replaced
        self._plain += [weakref.ref(optimizer) for optimizer in plain]

    def take_optimizers(
        self, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[InfinityOptimizer], list[torch.optim.Optimizer]]:
        """Returns ``optimizers`` in two parts: those that step at home, in their order, and the
        plain ones. Raises UsageError unless they are all that wrap_model returned, or none."""
        plain_ones = [ref() for ref in self._plain]
        plain = [opt for opt in plain_ones if any(opt is other for other in optimizers)]
        optimizers = [opt for opt in optimizers if all(opt is not other for other in plain)]
        if not optimizers and not plain:
            return [], []
        if any(
            not isinstance(opt, InfinityOptimizer) or opt.context.uses is not self.engine.uses
            for opt in optimizers
        ):
            raise UsageError(
                "this optimizer is not the one that wrap_model returned with this model"
            )
        ours = sorted(
            cast("list[InfinityOptimizer]", optimizers), key=lambda opt: opt.context.optimizer_index
        )
        wanted = len(self._optimizers) - len(self._replaced) + len(self._plain)
        count = len(ours) + len(plain)
        if count != wanted or len({opt.context.optimizer_index for opt in ours}) != len(ours):
            raise UsageError(
                f"{count} of the {wanted} optimizers that wrap_model returned with this model: give"
                " the whole list"
            )
        return ours, plain


def wrapped(model: nn.Module | Sequence[nn.Module]) -> Wrapped:
    """Returns the record of a wrapped model, or of the list of its parts. Raises UsageError for any
    other."""
    if isinstance(model, (list, tuple)) and model and isinstance(model[0], nn.Module):
        model = model[0]
    record = model.__dict__.get(RECORD) if isinstance(model, nn.Module) else None
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"this {type(model).__name__} is not wrapped: give the model that wrap_model returned."
            " unwrap_model, save_pretrained and stats take it first, save_checkpoint and"
            " load_checkpoint after the path"
        )
    if record is None:
        raise UsageError(
            f"this {type(model).__name__} is not wrapped: call infinity.wrap_model(model, ...)"
            " first"
        )
    return record


def wrapped_here() -> list[Wrapped]:
    """Lists the records of the models of this process that are wrapped."""
    return [record for record in _records if record.engine.is_open and record.unwrapping is None]


def is_wrapped(model: nn.Module) -> bool:
    """Tells whether ``model`` was given to :func:`infinity.wrap_model`, and not unwrapped since."""
    return RECORD in model.__dict__


def whole_of(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Returns the module that has all of a wrapped model's local parameters: itself, or the holder
    of its parts."""
    return wrapped(model).model


def engine_of(model: nn.Module) -> Engine:
    """Returns the engine of a wrapped model. Raises UsageError if its unwrap has begun."""
    record = wrapped(model)
    if record.unwrapping is not None:
        raise UsageError(
            "unwrap_model was cut short by an exception: call it again, with the same model"
        )
    return record.engine
