"""Registry: finds the record of a wrapped model: its engine, and how to take the hooks off again."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from ..errors import UsageError
from ..optim.optimizer import InfinityOptimizer
from .engine import Engine

RECORD = "_infinity"  # the attribute of a wrapped model that holds its record: it goes with the model


class Wrapped:
    """Holds what is known of one wrapped model: its engine, and how to take the hooks off again."""

    def __init__(self, engine: Engine, removers: list, optimizer: InfinityOptimizer | None, came_from: dict):
        self.engine, self.removers = engine, removers
        self.came_from = came_from  # the device of each parameter before it was wrapped
        self.unwrapping: Callable[[], None] | None = None  # what an unwrap that has begun still has to do, any number of times
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None

    @property
    def optimizer(self) -> InfinityOptimizer | None:
        return self._optimizer()


def wrapped(model: nn.Module) -> Wrapped:
    """Returns the record of a wrapped model. Raises UsageError for any other."""
    record = model.__dict__.get(RECORD) if isinstance(model, nn.Module) else None
    if record is None:
        raise UsageError(f"this {type(model).__name__} is not wrapped: call infinity.wrap_model(model, ...) first")
    return record


def engine_of(model: nn.Module) -> Engine:
    """Returns the engine of a wrapped model. Raises UsageError where its unwrap has begun."""
    record = wrapped(model)
    if record.unwrapping is not None:
        raise UsageError("unwrap_model was cut short by an exception: call it again, with the same model")
    return record.engine
