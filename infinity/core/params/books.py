"""Books: ``optimizer.state``, which shows the state that the engine steps with.

OptimizerBooks   torch's mapping of parameters to their state. Values are at home: one is read when
                 its key is looked up, and written when it is set
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..step.context import StepContext
from ..units.handle import ParamHandle, handle_of
from .state_entry import Shown, StateAtHome, StateEntry

Owner = Callable[[], tuple[StepContext, list[dict[str, Any]]]]  # the context and the groups


class OptimizerBooks(Shown, defaultdict):
    """``optimizer.state`` of one wrapped model. ``moments``: torch's name of each -> array.
    ``by_class``: its class steps."""

    def __init__(
        self,
        owner: Owner,
        moments: dict[str, str],
        *,
        counts_steps: bool,
        by_class: bool = False,
    ):
        defaultdict.__init__(self, dict)
        self._owner = owner
        self.at_home = StateAtHome(
            lambda: owner()[0], moments, counts_steps=counts_steps, by_class=by_class
        )

    # --- the mapping ---

    def __getitem__(self, key: Any) -> Any:
        if not dict.__contains__(self, key):
            handle = self._handle(key)
            state = None if handle is None else self.at_home
            dict.__setitem__(self, key, StateEntry(state=state, handle=handle))
        return dict.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if (handle := self._handle(key)) is None:
            dict.__setitem__(self, key, value)
            return
        if value is dict.get(self, key, self):
            return
        value = dict(value)
        self.at_home.check(handle, value)
        self._drop(key, handle)
        self[key].update(value)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if (handle := self._handle(key)) is not None:
            self._drop(key, handle)
        else:
            dict.pop(self, key)

    def _drop(self, key: torch.nn.Parameter, handle: ParamHandle) -> None:
        """Resets a parameter's state. An entry that a user may hold keeps its values."""
        if (entry := dict.pop(self, key, None)) is not None:
            entry.part()
        self.at_home.restart(handle)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        if key not in self:
            raise KeyError(key)
        value = self[key]
        del self[key]
        return value

    def __contains__(self, key: Any) -> bool:
        return dict.__contains__(self, key) or (
            self._handle(key) is not None and self._has_state(handle_of(key))
        )

    def __iter__(self) -> Iterator:
        context, param_groups = self._owner()
        params = dict.fromkeys(param for group in param_groups for param in group["params"])
        there = {
            param
            for param in params
            if self._handle(param) is not None and self._has_state(handle_of(param))
        }
        yield from [key for key in params if key in there or dict.__contains__(self, key)]
        others = [
            handle.param
            for handle in context.trained
            if self._has_state(handle) and handle.param not in params
        ]
        yield from dict.fromkeys(
            [*others, *(key for key in dict.__iter__(self) if key not in params)]
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def replace(self, state: Mapping) -> None:
        """Replaces all state, as ``optimizer.state = state`` does."""
        if state is self:
            return
        entries = {
            key: dict(value) if isinstance(value, Mapping) else value
            for key, value in state.items()
        }
        for key, value in entries.items():
            if (handle := self._handle(key)) is not None:
                self.at_home.check(handle, value)
        self.clear()
        self.update(entries)

    def _handle(self, key: Any) -> ParamHandle | None:
        """Returns the handle of a parameter that is stepped; None for any other key."""
        handle = handle_of(key) if isinstance(key, torch.nn.Parameter) else None
        return (
            handle
            if handle is not None
            and handle.grad is not None
            and handle.engine.uses is (context := self._owner()[0]).uses
            and context.steps_flat_param(handle.flat_param)
            else None
        )

    def _has_state(self, handle: ParamHandle) -> bool:
        return handle.has_state and bool(self.at_home.names_of(handle))

    # --- values that are not at home ---

    def give_up(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Forgets ``params``, which another optimizer steps from now on. Idempotent."""
        for param in params:
            dict.pop(self, param, None)
        self.at_home.forget_partial()

    def own_values(self) -> dict[Any, Any]:
        """Returns copies of the values that are not at home, with the user's own keys."""
        entries = ((key, dict.__getitem__(self, key)) for key in dict.__iter__(self))
        return {
            key: {name: _copied(item) for name, item in value.own.items()}
            if isinstance(value, StateEntry)
            else value
            for key, value in entries
        }

    def own_of(self, param: torch.nn.Parameter) -> dict[Any, Any]:
        """Returns the values of a parameter that are not at home."""
        entry = dict.get(self, param)
        return entry.own if isinstance(entry, StateEntry) else {}

    def put_own(self, param: torch.nn.Parameter, values: Mapping[Any, Any]) -> None:
        """Sets values of a parameter that are not at home. A tensor that a user may hold gets the
        new values, as in torch."""
        if values:
            entry = self[param]
            for name, value in values.items():
                before = dict.get(entry, name)
                if same_form(value, before) and not before.is_inference():
                    before.copy_(value)
                else:
                    dict.__setitem__(entry, name, value)

    def take_own(self, state: Mapping) -> None:
        """Replaces the values that are not at home by copies of those of ``state``: a step changes
        its tensors in place."""
        dict.clear(self)
        self.at_home.forget_partial()
        at_home = self.at_home.keys
        for key, values in state.items():
            if self._handle(key) is None:
                dict.__setitem__(self, key, dict(values) if isinstance(values, Mapping) else values)
            elif outside := {name: value for name, value in values.items() if name not in at_home}:
                dict.update(self[key], {name: _copied(value) for name, value in outside.items()})


def _copied(value: Any) -> Any:
    with torch.inference_mode(False):  # else a step could not change it in place
        return value.clone() if isinstance(value, torch.Tensor) else value


def same_form(value: Any, other: Any) -> bool:
    """Tells whether both are tensors, of the same shape, dtype and device."""
    return (
        isinstance(value, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (value.shape, value.dtype, value.device)
        == (
            other.shape,
            other.dtype,
            other.device,
        )
    )
