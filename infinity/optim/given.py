"""Given: the optimizer that wrap_model was given, which shares its books with the one in its place."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch

from ..errors import UsageError
from .books import GONE, OptimizerBooks

Groups = list[dict[str, Any]]


class Given:
    """The plain optimizer. Its groups, state, hooks and the attributes that users give it are those of the one in its
    place, whichever of the two is used; it does not step itself."""

    SHARED = (
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    )
    REPLACED = ("step", "load_state_dict", "add_param_group")  # which would write into the shared books

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._groups: Groups = []
        self._own = {name: vars(optimizer).get(name) for name in self.REPLACED}

    def share_groups(self, ours: Groups) -> Groups:
        """Returns the list of groups that counts, which is the given one's from now on: that which was assigned since the
        last time, to either optimizer."""
        self._groups = self.optimizer.param_groups if ours is self._groups else ours
        self.optimizer.param_groups = self._groups  # a scheduler made for it steers the one in its place
        return self._groups

    def share_state(self, books: OptimizerBooks, ours: torch.optim.Optimizer) -> None:
        """Moves what its state has beside what is at home into ``books``, which are its state from now on. ``ours``, the
        optimizer in its place, loads and takes groups for it."""
        books.take_own(self.optimizer.state)
        self.optimizer.state.clear()
        self.optimizer.state = books
        self.optimizer.step = MethodType(_refuse_step, weakref.proxy(self.optimizer))
        for name in self.REPLACED[1:]:
            setattr(self.optimizer, name, partial(_ask_instead, weakref.ref(ours), name))

    def attribute(self, name: str) -> Any:
        """Returns an attribute that users gave it. Raises AttributeError where there is none."""
        if not name.startswith("_") and name not in self.REPLACED and name in vars(self.optimizer):
            return vars(self.optimizer)[name]
        raise AttributeError(f"'{type(self.optimizer).__name__}' object, wrapped by Infinity, has no attribute '{name}'")

    def take_back(self, state_dict: dict[str, Any], outside: Mapping[torch.Tensor, Any], attributes: dict[str, Any]) -> None:
        """Has it step by itself again, with the state of ``state_dict`` and that of parameters ``outside`` of its
        groups. The groups stay the very ones that schedulers know. A second call does the same."""
        self._give_back_calls()
        hooks = {kind: vars(self.optimizer)[kind] for kind in self.SHARED}
        try:
            vars(self.optimizer).update({kind: OrderedDict() for kind in self.SHARED})  # of loads by users
            self.optimizer.load_state_dict(state_dict)
        finally:
            vars(self.optimizer).update(hooks)
        self.optimizer.param_groups = self._groups
        self.optimizer.state.update(outside)
        vars(self.optimizer).update(attributes)

    def _give_back_calls(self) -> None:
        for name, own in self._own.items():
            if own is not None:
                setattr(self.optimizer, name, own)
            else:
                vars(self.optimizer).pop(name, None)


def _ask_instead(ours: weakref.ref[torch.optim.Optimizer], name: str, *args: Any, **kwargs: Any) -> Any:
    if (alive := ours()) is None:
        raise UsageError(GONE)
    return getattr(alive, name)(*args, **kwargs)


def _refuse_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
    raise UsageError(
        f"step() of the {optimizer.__class__.__name__} that was wrapped: it is not the optimizer that wrap_model returned. "
        "Call step() of that one: model, optimizer = infinity.wrap_model(model, optimizer, ...)."
    )


_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler that was made for it does not warn
