"""PlainOptimizer: the optimizer that was given to wrap_model, which shares its books with its
replacement."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch

from ...errors import UsageError
from ..params.books import OptimizerBooks
from ..params.state_entry import GONE

logger = logging.getLogger(__name__)

ParamGroups = list[dict[str, Any]]


class PlainOptimizer:
    """The plain optimizer. It shares groups, state, hooks and users' attributes with its
    replacement, whichever of the two is used. It does not step itself."""

    HOOKS = (
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    )
    REPLACED = ("step", "load_state_dict", "add_param_group")  # would write into the shared books

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._groups: ParamGroups = []
        self._replaced = {name: vars(optimizer).get(name) for name in self.REPLACED}
        self._hooks = {kind: getattr(optimizer, kind) for kind in self.HOOKS}

    def share_groups(self, ours: ParamGroups) -> ParamGroups:
        """Returns the current list of groups, and sets it on the given optimizer: the list that was
        assigned last, to either optimizer."""
        self._groups = self.optimizer.param_groups if ours is self._groups else ours
        self.optimizer.param_groups = self._groups  # a scheduler made for it steers the replacement
        return self._groups

    def share_state(self, books: OptimizerBooks, ours: torch.optim.Optimizer) -> None:
        """Moves its state that is not at home into ``books``, which become its state. ``ours``, the
        replacement, loads and takes groups for it."""
        books.take_own(self.optimizer.state)
        self.optimizer.state.clear()
        self.optimizer.state = books
        self.optimizer.step = MethodType(_refuse_step, weakref.proxy(self.optimizer))
        for name in self.REPLACED[1:]:
            setattr(self.optimizer, name, partial(_ask_instead, weakref.ref(ours), name))

    def attribute(self, name: str) -> Any:
        """Returns an attribute that users set on it. Raises AttributeError if there is none."""
        if not name.startswith("_") and name not in self.REPLACED and name in vars(self.optimizer):
            return vars(self.optimizer)[name]
        raise AttributeError(
            f"'{type(self.optimizer).__name__}' object, wrapped by Infinity, has no attribute"
            f" '{name}'"
        )

    def take_back(
        self,
        state_dict: dict[str, Any],
        outside: Mapping[torch.Tensor, Any],
        attributes: dict[str, Any],
    ) -> None:
        """Lets it step by itself again, with the state of ``state_dict`` and of parameters
        ``outside`` of its groups. The group objects, which schedulers refer to, stay the same.
        Idempotent."""
        for name, method in self._replaced.items():
            if method is not None:
                setattr(self.optimizer, name, method)
            else:
                vars(self.optimizer).pop(name, None)
        try:
            # Hooks of users' loads must not run
            vars(self.optimizer).update({kind: OrderedDict() for kind in self.HOOKS})
            self._load(state_dict)
        finally:
            vars(self.optimizer).update(self._hooks)
        self.optimizer.param_groups = self._groups
        self.optimizer.state.update(outside)
        vars(self.optimizer).update(attributes)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Loads by the class's own method; if that raises, by torch's, which it extends."""
        self.optimizer.state = defaultdict(dict)
        if not state_dict["state"]:
            return  # some classes expect what their first step adds
        try:
            self.optimizer.load_state_dict(state_dict)
        except Exception as error:  # noqa: BLE001 - of the class's own code
            logger.warning(
                "load_state_dict() of %s raised %r: its state is loaded as torch.optim.Optimizer"
                " does",
                type(self.optimizer).__name__,
                error,
            )
            torch.optim.Optimizer.load_state_dict(self.optimizer, state_dict)


def _ask_instead(
    ours: weakref.ref[torch.optim.Optimizer], name: str, *args: Any, **kwargs: Any
) -> Any:
    if (alive := ours()) is None:
        raise UsageError(GONE)
    return getattr(alive, name)(*args, **kwargs)


def _refuse_step(
    optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
) -> None:
    raise UsageError(
        f"step() of the {optimizer.__class__.__name__} that was wrapped: it is not the optimizer"
        " that wrap_model returned. Call step() of that one: model, optimizer ="
        " infinity.wrap_model(model, optimizer, ...)."
    )


# Avoids a warning of a scheduler made for it
_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
