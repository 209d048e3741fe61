"""Books: ``optimizer.state`` and ``param_groups``, which show the state that the engine steps with.

OptimizerBooks   ``optimizer.state``: torch's mapping of parameters to their state. Values are at
                 home: one is read when its key is looked up, and written when it is set
StateEntry       the state of one parameter. The user's own keys are in the dict itself, and so
                 are torch's keys while some of them are missing
Members          the parameters that the groups step, read from the groups at each step
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from operator import is_
from typing import Any

import torch

from ..errors import UsageError
from ..gradients.record import GradState
from ..state.dtensors import is_distributed
from ..state.flat_layout import is_dense
from ..state.handle import ParamHandle, handle_of
from ..state.operations import Operation
from .context import StepContext
from .lent_state import STEP, checked_step

GONE = "optimizer.state: the optimizer that wrap_model returned is gone, and its state with it"
Owner = Callable[[], tuple[StepContext, list[dict[str, Any]]]]  # the context and the groups


class _Shown(MutableMapping, dict):
    """A dict with a part of its values elsewhere: methods that dict implements in C use the keys
    here."""

    def copy(self) -> dict:
        return dict(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(_short, self))})"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __or__(self, other: Mapping) -> dict:
        return dict(self) | dict(other)

    def __ror__(self, other: Mapping) -> dict:
        return dict(other) | dict(self)

    def __ior__(self, other: Any) -> _Shown:
        self.update(other)
        return self

    def __reversed__(self) -> Iterator:
        return reversed(list(self))

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return dict, (dict(self),)


def _short(key: object) -> str:
    handle = handle_of(key) if isinstance(key, torch.Tensor) else None
    return repr(key) if handle is None else handle.name


class StateEntry(_Shown):
    """The optimizer state of one parameter, in torch's form. Without ``books`` a plain dict."""

    def __init__(
        self, *args: Any, books: OptimizerBooks | None = None, handle: ParamHandle | None = None
    ):
        # No cycle: both go with the last reference
        self._of = None if books is None else weakref.ref(books)
        self._handle = handle
        self.update(*args)

    @property
    def _books(self) -> OptimizerBooks | None:
        if self._of is None:
            return None
        if (books := self._of()) is None:
            raise UsageError(GONE)
        return books

    @property
    def _at_home(self) -> tuple[str, ...]:
        return self._books.names if self._books is not None and self._handle.has_state else ()

    @property
    def missing(self) -> list[str]:
        """The keys that torch's step needs and that are missing."""
        names = () if self._books is None or self._at_home else self._books.names
        return [name for name in names if not dict.__contains__(self, name)]

    @property
    def is_partial(self) -> bool:
        return 0 < len(self.missing) < len(self._books.names)

    def __getitem__(self, key: Any) -> Any:
        return (
            self._books.read(self._handle, key)
            if key in self._at_home
            else dict.__getitem__(self, key)
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._books is None or key not in self._books.names:
            dict.__setitem__(self, key, value)
        elif self._at_home:
            self._books.write(self._handle, {key: value})
        elif value is not None:
            self._books.check(self._handle, {key: value})
            dict.__setitem__(self, key, value)
            self._books.note(self._handle, self)
            if not self.missing:
                self._books.write(
                    self._handle, {name: dict.__getitem__(self, name) for name in self._books.names}
                )
                for name in self._books.names:
                    dict.pop(self, name, None)

    def __delitem__(self, key: Any) -> None:
        if key not in self._at_home:
            dict.__delitem__(self, key)
            return
        rest = {name: self[name] for name in self._at_home if name != key}
        self._books.restart(self._handle)
        dict.update(self, rest)
        self._books.note(self._handle, self)

    def __iter__(self) -> Iterator:
        yield from self._at_home
        yield from list(dict.__iter__(self))

    def __len__(self) -> int:
        return len(self._at_home) + dict.__len__(self)

    def clear(self) -> None:
        if self._at_home:
            self._books.restart(self._handle)
        dict.clear(self)

    def part(self) -> None:
        """Makes this an independent dict with the present values: another entry replaces it."""
        dict.update(self, {name: self[name] for name in self._at_home})
        self._of = None

    @property
    def own(self) -> dict[Any, Any]:
        """The values that are not at home."""
        return {key: dict.__getitem__(self, key) for key in dict.__iter__(self)}


class OptimizerBooks(_Shown, defaultdict):
    """``optimizer.state`` of one wrapped model. ``moments``: torch's name of each -> array."""

    def __init__(self, owner: Owner, moments: dict[str, str], *, counts_steps: bool):
        defaultdict.__init__(self, dict)
        self._owner = owner
        self._partial: dict[ParamHandle, StateEntry] = {}  # may have only some of torch's keys
        self._arrays = ({STEP: STEP} if counts_steps and moments else {}) | moments
        self.names = tuple(self._arrays)  # torch's keys

    @property
    def _context(self) -> StepContext:
        return self._owner()[0]

    # --- the mapping ---

    def __getitem__(self, key: Any) -> Any:
        if not dict.__contains__(self, key):
            handle = self._handle(key)
            dict.__setitem__(
                self, key, StateEntry() if handle is None else StateEntry(books=self, handle=handle)
            )
        return dict.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if (handle := self._handle(key)) is None:
            dict.__setitem__(self, key, value)
            return
        if value is dict.get(self, key, self):
            return
        value = dict(value)
        self.check(handle, value)
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
        self.restart(handle)

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
            self._handle(key) is not None and self._is_kept(handle_of(key))
        )

    def __iter__(self) -> Iterator:
        context, groups = self._owner()
        params = dict.fromkeys(param for group in groups for param in group["params"])
        there = {
            param
            for param in params
            if self._handle(param) is not None and self._is_kept(handle_of(param))
        }
        yield from [key for key in params if key in there or dict.__contains__(self, key)]
        others = [
            handle.param
            for handle in context.trained
            if self._is_kept(handle) and handle.param not in params
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
        given = {
            key: dict(value) if isinstance(value, Mapping) else value
            for key, value in state.items()
        }
        for key, value in given.items():
            if (handle := self._handle(key)) is not None:
                self.check(handle, value)
        self.clear()
        self.update(given)

    def _handle(self, key: Any) -> ParamHandle | None:
        """Returns the handle of a parameter that is stepped; None for any other key."""
        handle = handle_of(key) if isinstance(key, torch.nn.Parameter) else None
        return (
            handle
            if handle is not None
            and handle.grad is not None
            and handle.engine.uses is self._context.uses
            else None
        )

    def _is_kept(self, handle: ParamHandle) -> bool:
        return bool(self.names) and handle.has_state

    # --- the homes ---

    def read(self, handle: ParamHandle, name: str) -> torch.Tensor:
        """Reads one value of a parameter that has state. With several ranks all call this."""
        with self._using():
            return self._context.lent.read(handle, self._arrays[name])

    def check(self, handle: ParamHandle, values: Mapping[str, Any]) -> None:
        """Raises UsageError if one of ``values`` is not valid for the parameter."""
        self._context.uses.check(Operation.USE_OPTIMIZER_STATE)
        for name in self.names:
            if (value := values.get(name)) is None:
                continue
            if name == STEP:
                checked_step(value, handle.name)
            elif (
                not isinstance(value, torch.Tensor)
                or value.is_meta
                or value.shape != handle.param.shape
            ):
                found = (
                    f"{tuple(value.shape)} on {value.device}"
                    if isinstance(value, torch.Tensor)
                    else type(value).__name__
                )
                raise UsageError(
                    f"optimizer.state: {name} of {handle.name} must be a tensor of shape"
                    f" {tuple(handle.param.shape)}, not {found}"
                )

    def write(self, handle: ParamHandle, values: Mapping[str, Any]) -> None:
        """Sets values of a parameter. A tensor in torch's own form is watched from then on."""
        self.check(handle, values)
        if any(value is None for value in values.values()):  # SGD's form of "none yet"
            self.restart(handle)
            return
        with self._using():
            lent = self._context.lent
            sent = {self._arrays[name]: value for name, value in values.items()}
            if STEP in sent:
                sent[STEP] = checked_step(sent[STEP], handle.name)
            elif not handle.has_state:
                # A rule without a count: its first step is past
                sent[STEP] = torch.tensor(1.0, device="cpu")
            lent.write(handle, sent)
            for name, value in values.items():
                array = self._arrays[name]
                if isinstance(value, torch.Tensor) and self._is_as_kept(handle, array, value):
                    lent.lend(handle, array, value)

    def restart(self, handle: ParamHandle) -> None:
        """Makes the next step of a parameter its first."""
        with self._using():
            self._context.lent.restart(
                handle, [array for array in self._arrays.values() if array != STEP]
            )

    def own_values(self) -> dict[Any, Any]:
        """Returns the values that are not at home, with the user's own keys."""
        found = ((key, dict.__getitem__(self, key)) for key in dict.__iter__(self))
        return {key: value.own if isinstance(value, StateEntry) else value for key, value in found}

    def take_own(self, state: Mapping) -> None:
        """Replaces the values that are not at home by those of ``state``."""
        dict.clear(self)
        self._partial.clear()
        for key, values in state.items():
            if self._handle(key) is None:
                dict.__setitem__(self, key, dict(values) if isinstance(values, Mapping) else values)
            else:
                at_home = {*self.names, *self._arrays.values(), STEP, "master"}
                if own := {name: value for name, value in values.items() if name not in at_home}:
                    dict.update(self[key], own)

    def note(self, handle: ParamHandle, entry: StateEntry) -> None:
        """Registers an entry that may have only some of torch's keys, for :meth:`settle`."""
        self._partial[handle] = entry

    def settle(self) -> None:
        """Sends changes home. Raises UsageError if a parameter has only some of torch's keys."""
        for handle, entry in list(self._partial.items()):
            if not entry.is_partial:
                del self._partial[handle]
            else:
                raise UsageError(
                    f"optimizer.state of {handle.name} lacks {', '.join(entry.missing)}: set all of"
                    f" {', '.join(self.names)}, or delete all of them to begin anew"
                )
        self._context.settle_state_dicts()
        self._context.lent.settle()

    def _is_as_kept(self, handle: ParamHandle, array: str, value: torch.Tensor) -> bool:
        if is_distributed(handle.param) or value.layout is not torch.strided:
            return False
        if not is_dense(value.shape, value.stride()):
            return False
        dtype = handle.shard.arrays[array].dtype if array != STEP else torch.float32
        kept = torch.float32 if dtype == torch.uint8 else dtype
        return value.dtype == kept and (array == STEP or value.device == handle.param.device)

    def _using(self) -> Any:
        return self._context.uses.operation(Operation.USE_OPTIMIZER_STATE)


class Members:
    """Which group steps each parameter, read at each step."""

    def __init__(self, context: StepContext):
        self._context = context
        self._params: list[list[torch.Tensor]] = []
        self.group_of: dict[ParamHandle, int] = {}

    def read(self, groups: list[dict[str, Any]]) -> None:
        """Reads the groups. Raises UsageError, with nothing changed, for unknown parameters."""
        lists = [group["params"] for group in groups]
        if len(lists) == len(self._params) and all(
            len(now) == len(before) and all(map(is_, now, before))
            for now, before in zip(lists, self._params)
        ):
            return
        found: dict[ParamHandle, int] = {}
        for index, params in enumerate(lists):
            for param in params:
                handle = self._stepped(param, index)
                if handle in found:
                    raise UsageError(
                        f"{handle.name} is in the optimizer's groups {found[handle]} and {index}"
                        if found[handle] != index
                        else f"{handle.name} is twice in the optimizer's group {index}"
                    )
                found[handle] = index
        self._params, self.group_of = [list(params) for params in lists], found

    @property
    def are_consumed(self) -> bool:
        """Whether a step has used any of their gradients."""
        return any(handle.grad.state is GradState.CONSUMED for handle in self.group_of)

    def check_unconsumed(self) -> None:
        """Raises UsageError if a step has used a gradient that was not changed since."""
        for handle in self.group_of:
            if handle.grad.state is GradState.CONSUMED:
                self._context.gradients.settle(handle)  # an assigned tensor may have changed
            if handle.grad.state is GradState.CONSUMED:
                raise UsageError(
                    f"step() without a new gradient: the one of {handle.name} was consumed by the"
                    " last step. Call zero_grad() and run backward before the next step()."
                )

    def _stepped(self, param: torch.Tensor, index: int) -> ParamHandle:
        handle = handle_of(param)
        if handle is None or handle.engine.uses is not self._context.uses:
            raise UsageError(
                f"the optimizer's group {index} has a parameter of shape {tuple(param.shape)} that"
                " wrap_model did not take home with this optimizer, so its state has no home."
                " unwrap_model first, add it, and wrap again."
            )
        if handle.grad is None:
            raise UsageError(
                f"the optimizer's group {index} has {handle.name}, which was in no group when the"
                " model was wrapped: give it to optimizer.add_param_group() before its first"
                " backward"
            )
        return handle
