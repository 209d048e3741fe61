"""Given: the optimizer that wrap_model was given, which shares its books with the one in its place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from ..errors import UsageError
from .books import OptimizerBooks

Groups = list[dict[str, Any]]


class Given:
    """The plain optimizer. Its groups and state are those that are stepped; it does not step itself."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._groups: Groups = []
        self._own_step = vars(optimizer).get("step")

    def share_groups(self, ours: Groups) -> Groups:
        """Returns the list of groups that counts, which is the given one's from now on: that which was assigned since the
        last time, to either optimizer."""
        self._groups = self.optimizer.param_groups if ours is self._groups else ours
        self.optimizer.param_groups = self._groups  # a scheduler made for it steers the one in its place
        return self._groups

    def share_state(self, books: OptimizerBooks) -> None:
        """Moves what its state has beside what is at home into ``books``, which are its state from now on."""
        books.take_own(self.optimizer.state)
        self.optimizer.state.clear()
        self.optimizer.state = books
        self.optimizer.step = MethodType(_refuse_step, weakref.proxy(self.optimizer))  # it would write into these books

    def give_back_step(self) -> None:
        """Lets it step again. A second call does nothing."""
        if self._own_step is not None:
            self.optimizer.step = self._own_step
        else:
            vars(self.optimizer).pop("step", None)


def _refuse_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
    raise UsageError(
        f"step() of the {optimizer.__class__.__name__} that was wrapped: it is not the optimizer that wrap_model returned. "
        "Call step() of that one: model, optimizer = infinity.wrap_model(model, optimizer, ...)."
    )


_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler that was made for it does not warn
