"""StateEntry: shows the optimizer state of one parameter as the dict that torch's optimizers have.

StateAtHome   reads, checks and writes the values of all parameters at home
Shown         the base of mappings that show state at home
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ...errors import UsageError
from ..run.operations import Operation
from ..step.context import StepContext
from ..units.flat_layout import is_dense
from ..units.forms import is_plain
from ..units.handle import ParamHandle, handle_of
from .borrowed_state import STEP, checked_step

GONE = "optimizer.state: the optimizer that wrap_model returned is gone, and its state with it"
Context = Callable[[], StepContext]  # raises if the optimizer is gone


class Shown(MutableMapping, dict):
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

    def __ior__(self, other: Any) -> Shown:
        self.update(other)
        return self

    def __reversed__(self) -> Iterator:
        return reversed(list(self))

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return dict, (dict(self),)


def _short(key: object) -> str:
    handle = handle_of(key) if isinstance(key, torch.Tensor) else None
    return repr(key) if handle is None else handle.name


class StateEntry(Shown):
    """The optimizer state of one parameter, in torch's form. Without ``state`` a plain dict.

    The user's own keys are in the dict itself, and so are torch's keys while some of them are
    missing.
    """

    def __init__(
        self, *args: Any, state: StateAtHome | None = None, handle: ParamHandle | None = None
    ):
        # No cycle: both go with the last reference
        self._of = None if state is None else weakref.ref(state)
        self._handle = handle
        self.update(*args)

    @property
    def _state(self) -> StateAtHome | None:
        if self._of is None:
            return None
        if (state := self._of()) is None:
            raise UsageError(GONE)
        return state

    @property
    def _at_home(self) -> tuple[str, ...]:
        return self._names if self._state is not None and self._handle.has_state else ()

    @property
    def _names(self) -> tuple[str, ...]:
        """torch's keys of the values that have a home."""
        return self._state.names_of(self._handle)

    @property
    def missing(self) -> list[str]:
        """The keys that torch's step needs and that are missing."""
        names = () if self._state is None or self._at_home else self._names
        return [name for name in names if not dict.__contains__(self, name)]

    @property
    def is_partial(self) -> bool:
        return 0 < len(self.missing) < len(self._names)

    def __getitem__(self, key: Any) -> Any:
        return (
            self._state.read(self._handle, key)
            if key in self._at_home
            else dict.__getitem__(self, key)
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._state is None or key not in self._names:
            dict.__setitem__(self, key, value)
        elif self._at_home:
            self._state.write(self._handle, {key: value})
        elif value is not None:
            self._state.check(self._handle, {key: value})
            dict.__setitem__(self, key, value)
            self._state.note(self._handle, self)
            if not self.missing:
                names = self._names
                self._state.write(
                    self._handle, {name: dict.__getitem__(self, name) for name in names}
                )
                for name in names:
                    dict.pop(self, name, None)

    def __delitem__(self, key: Any) -> None:
        if key not in self._at_home:
            dict.__delitem__(self, key)
            return
        others = {name: self[name] for name in self._at_home if name != key}
        self._state.restart(self._handle)
        dict.update(self, others)
        self._state.note(self._handle, self)

    def __iter__(self) -> Iterator:
        yield from self._at_home
        yield from list(dict.__iter__(self))

    def __len__(self) -> int:
        return len(self._at_home) + dict.__len__(self)

    def clear(self) -> None:
        if self._at_home:
            self._state.restart(self._handle)
        dict.clear(self)

    def part(self) -> None:
        """Makes this an independent dict with the present values: another entry replaces it."""
        dict.update(self, {name: self[name] for name in self._at_home})
        self._of = None

    @property
    def own(self) -> dict[Any, Any]:
        """The values that are not at home."""
        return {key: dict.__getitem__(self, key) for key in dict.__iter__(self)}


class StateAtHome:
    """The values of the optimizer's state. ``moments``: torch's name of each -> array.
    ``by_class``: the class counts the steps, in a value of its own."""

    def __init__(
        self,
        context: Context,
        moments: dict[str, str],
        *,
        counts_steps: bool,
        by_class: bool = False,
    ):
        self._find_context, self._by_class = context, by_class
        self._partial: dict[ParamHandle, StateEntry] = {}  # may have only some of torch's keys
        self.moments = moments
        self._array_names = ({STEP: STEP} if counts_steps and moments else {}) | moments
        self.names = tuple(self._array_names)  # torch's keys, of any parameter

    @property
    def _context(self) -> StepContext:
        return self._find_context()

    def names_of(self, handle: ParamHandle) -> tuple[str, ...]:
        """Returns torch's keys of the values that a parameter has a home for."""
        moments = (STEP, *handle.flat_param.spec.moments)  # also when it is unwrapped
        return tuple(name for name, array in self._array_names.items() if array in moments)

    @property
    def keys(self) -> set[str]:
        """Every key under which a state dict has a value that is at home."""
        step = () if self._by_class else (STEP,)
        return {*self.names, *self._array_names.values(), *step, "master"}

    def read(self, handle: ParamHandle, name: str) -> torch.Tensor:
        """Reads one value of a parameter that has state. With several ranks all call this."""
        with self._using():
            return self._context.borrowed.read(handle, self._array_names[name])

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
                actual = (
                    f"{tuple(value.shape)} on {value.device}"
                    if isinstance(value, torch.Tensor)
                    else type(value).__name__
                )
                raise UsageError(
                    f"optimizer.state: {name} of {handle.name} must be a tensor of shape"
                    f" {tuple(handle.param.shape)}, not {actual}"
                )

    def write(self, handle: ParamHandle, values: Mapping[str, Any]) -> None:
        """Sets values of a parameter. A tensor in torch's own form is watched from then on; a value
        in another form is only copied, and the tensor before it is the user's own."""
        self.check(handle, values)
        if any(value is None for value in values.values()):  # SGD's form of "none yet"
            self.restart(handle)
            return
        with self._using():
            borrowed = self._context.borrowed
            sent = {self._array_names[name]: value for name, value in values.items()}
            if STEP in sent:
                sent[STEP] = checked_step(sent[STEP], handle.name)
            elif not handle.has_state:
                # A rule without a count: its first step is past
                sent[STEP] = torch.tensor(1.0, device="cpu")
            borrowed.write(handle, sent)
            for name, value in values.items():
                array = self._array_names[name]
                if isinstance(value, torch.Tensor) and self._is_as_at_home(handle, array, value):
                    borrowed.lend(handle, array, value)
                else:
                    borrowed.part(handle, array)

    def restart(self, handle: ParamHandle) -> None:
        """Makes the next step of a parameter its first."""
        with self._using():
            self._context.borrowed.restart(
                handle, [self._array_names[name] for name in self.names_of(handle) if name != STEP]
            )

    def note(self, handle: ParamHandle, entry: StateEntry) -> None:
        """Registers an entry that may have only some of torch's keys, for :meth:`settle`."""
        self._partial[handle] = entry

    def forget_partial(self) -> None:
        """Forgets the entries that :meth:`note` registered: all state is loaded."""
        self._partial.clear()

    def settle(self) -> None:
        """Sends changes home. Raises UsageError if a parameter has only some of torch's keys."""
        for handle, entry in list(self._partial.items()):
            if not entry.is_partial:
                del self._partial[handle]
            else:
                raise UsageError(
                    f"optimizer.state of {handle.name} lacks {', '.join(entry.missing)}: set all of"
                    f" {', '.join(self.names_of(handle))}, or delete all of them to begin anew"
                )
        self._context.lents.settle_all()

    def _is_as_at_home(self, handle: ParamHandle, array: str, value: torch.Tensor) -> bool:
        if not is_plain(handle.param) or value.layout is not torch.strided:
            return False
        if not is_dense(value.shape, value.stride()):
            return False
        dtype = handle.flat_param.arrays[array].dtype if array != STEP else torch.float32
        home_dtype = torch.float32 if dtype == torch.uint8 else dtype
        return value.dtype == home_dtype and (array == STEP or value.device == handle.param.device)

    def _using(self) -> Any:
        return self._context.uses.operation(Operation.USE_OPTIMIZER_STATE)
