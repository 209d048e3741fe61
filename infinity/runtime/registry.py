"""Registry: finds the record of a wrapped model: its engine, and how to take the hooks off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from ..errors import UsageError
from ..optim.optimizer import InfinityOptimizer
from ..state.parts import Parts
from .engine import Engine

RECORD = "_infinity"  # the attribute of a wrapped model that holds its record: it goes with the model


class Wrapped:
    """Holds what is known of one wrapped model: its engine, and how to take the hooks off again."""

    def __init__(self, engine: Engine, model: nn.Module, removers: list, optimizer: InfinityOptimizer | None, came_from: dict):
        self.engine, self.removers = engine, removers
        self._model = weakref.ref(model)
        # One that holds parts lives as long as they do.
        self._parts = model if isinstance(model, Parts) else None
        self.came_from = came_from  # the device of each parameter before it was wrapped
        self.unwrapping: Callable[[], None] | None = None  # what an unwrap that has begun still has to do, any number of times
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None

    @property
    def model(self) -> nn.Module:
        """What was wrapped: the model, or what holds its parts."""
        return self._model()

    @property
    def optimizer(self) -> InfinityOptimizer | None:
        return self._optimizer()


def wrapped(model: nn.Module | Sequence[nn.Module]) -> Wrapped:
    """Returns the record of a wrapped model, or of the list of its parts. Raises UsageError for any other."""
    if isinstance(model, (list, tuple)) and model and isinstance(model[0], nn.Module):
        model = model[0]
    record = model.__dict__.get(RECORD) if isinstance(model, nn.Module) else None
    if record is None:
        raise UsageError(f"this {type(model).__name__} is not wrapped: call infinity.wrap_model(model, ...) first")
    return record


def is_wrapped(model: nn.Module) -> bool:
    """Tells whether ``model`` is what :func:`infinity.wrap_model` was given, and has not been unwrapped."""
    return RECORD in model.__dict__


def whole_of(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Returns what has all of a wrapped model's parameters that are here: itself, or for its parts what holds them."""
    return wrapped(model).model


def engine_of(model: nn.Module) -> Engine:
    """Returns the engine of a wrapped model. Raises UsageError where its unwrap has begun."""
    record = wrapped(model)
    if record.unwrapping is not None:
        raise UsageError("unwrap_model was cut short by an exception: call it again, with the same model")
    return record.engine
