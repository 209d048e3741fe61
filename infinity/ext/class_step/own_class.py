"""OwnClass: whether an optimizer of a script's own class can be stepped by its own code.

own class   one that no entry of :mod:`.known` or :mod:`.known_elsewhere` names. Its step() runs
            unchanged, on one whole parameter at a time
trial       steps of small parameters like those of a group: by one optimizer that has all of them,
            and as they are stepped here. Both have the same bits, or the class is refused
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.step.rules import plain_step
from ...errors import ConfigError
from .class_code import like_it
from .class_trial import (
    LEAST,
    STEPS,
    Run,
    are_same,
    gradient_of,
    settings_to_move,
    switches,
    with_moments,
)
from .entries import OwnCode, class_entry

Group = Mapping[str, Any]
# Methods of the base class that would not run here, or would run on copies of the optimizer
KEPT = "state_dict", "zero_grad", "__del__", "__setattr__"
OF_RANKS = "c10d", "_c10d_functional"  # namespaces of collectives
LARGE = 256, 256  # of large matrices some classes keep other state
INSTEAD = (
    "\nIt can step the wrapped model as it is, with its state where it makes it:\n"
    "    model, _ = infinity.wrap_model(model, torch.optim.SGD(model.parameters()), config)\n"
    "    optimizer = {}(...)  # made after that, and stepped by the loop; the SGD is not\n"
)


def by_own_code(optimizer: torch.optim.Optimizer) -> OwnCode:
    """Returns how an ``optimizer`` of no known class is stepped by its own code. Raises ConfigError
    with the reason if that would be another step."""
    kind = type(optimizer)
    for name in KEPT:
        if any(name in vars(each) for each in _own_classes(kind)):
            raise ConfigError(f"It has a {name}() of its own, which would not run.")
    groups = [_with_unread_names(group) for group in optimizer.param_groups]
    if path := _by_parameter(optimizer):
        raise ConfigError(f"It looks parameters up in {path}, and here others stand in for them.")
    with _unchanged(optimizer):
        step = plain_step(kind.step).__code__.co_qualname
        known = class_entry(f"{kind.__module__}.{kind.__qualname__}", step, whole=True)
        known = with_moments(known, optimizer, groups)
        _refuse_sums(optimizer, groups)
        for group in groups:
            _try(optimizer, group, known.tried[switches(group)])
        return known


def instead(optimizer: torch.optim.Optimizer) -> str:
    """Says how a script uses an ``optimizer`` that cannot be stepped here."""
    return INSTEAD.format(type(optimizer).__name__)


def _try(optimizer: torch.optim.Optimizer, group: Group, moments: Sequence[str]) -> None:
    """Raises ConfigError for what stepping one parameter at a time would lose. ``moments``: every
    parameter of the group has an array for these, zeros if the class keeps none of it."""
    settings = settings_to_move(optimizer, group)
    shapes = {tuple(min(each, LEAST) for each in param.shape) for param in group["params"]}
    if any(param.ndim == 2 for param in group["params"]):
        shapes.add(LARGE)
    params = [_values(shape) for shape in sorted(shapes)] * 2
    alone = Run(optimizer, settings, params, together=False)
    theirs = [torch.nn.Parameter(param.clone()) for param in params]
    together = like_it(optimizer, settings, theirs)
    numbers, drawn = _numbers(together), torch.get_rng_state()
    try:
        Run(optimizer, settings, params[:1], together=False).step([None])
    except Exception as error:
        raise ConfigError(
            f"A step of it without a gradient raised {error!r}: it should leave out a parameter"
            " whose grad is None."
        ) from error
    try:
        with _WithoutRanks(), torch.no_grad():
            for number in range(2 * STEPS):
                grads = [gradient_of(param, number + place) for place, param in enumerate(params)]
                alone.step(grads)
                for param, state in zip(alone.params, alone.states):
                    for name in moments:
                        state.setdefault(name, torch.zeros_like(param))
                for param, grad in zip(theirs, grads):
                    param.grad = grad.clone()
                plain_step(type(optimizer).step)(together)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"A step of it on small tensors on the CPU raised {error!r}.") from error
    if not torch.equal(drawn, torch.get_rng_state()):
        raise ConfigError("It draws random numbers.")
    if all(map(torch.equal, params, theirs)):
        raise ConfigError("Its step changes nothing.")
    if changed := [
        name for name, value in _numbers(together).items() if numbers.get(name) != value
    ]:
        raise ConfigError(f"It counts in {changed[0]}, beside its state.")
    if others := [key for key in together.state if not isinstance(key, torch.Tensor)]:
        raise ConfigError(f"Its state has {others[0]!r}, which is not a parameter.")
    if not (
        all(map(torch.equal, theirs, alone.params))
        and all(are_same(together.state[p], state) for p, state in zip(theirs, alone.states))
    ):
        raise ConfigError(
            "It steps several parameters at once, as a clip by their common norm does, or keeps"
            " state outside of optimizer.state."
        )
    for value in (value for state in alone.states for value in state.values()):
        if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
            raise ConfigError(f"It keeps its state in {type(value).__name__}.")


@contextmanager
def _unchanged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Gives tensors that are attributes of ``optimizer``, as some keep for scalars, their values
    back."""
    tensors = [value for value in vars(optimizer).values() if isinstance(value, torch.Tensor)]
    before = [value.detach().clone() for value in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for value, kept in zip(tensors, before):
                value.copy_(kept)


def _own_classes(kind: type) -> tuple[type, ...]:
    """Returns ``kind`` and those of its bases that are above torch's."""
    return kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, int | float]:
    """Returns the numbers that ``optimizer`` keeps beside its settings and state."""
    return {path: value for path, value in _kept(optimizer) if type(value) in (int, float)}


def _kept(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields what ``optimizer`` keeps beside its settings and state: in its attributes, in those of
    its classes, and in all that these hold."""
    own = {
        name: value
        for each in reversed(_own_classes(type(optimizer)))
        for name, value in vars(each).items()
    } | vars(optimizer)
    waiting = [(name, own[name]) for name in own if name not in ("state", "param_groups")]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if id(value) not in seen and not isinstance(value, (torch.Tensor, type, ModuleType)):
            seen.add(id(value))
            if isinstance(value, Mapping):
                waiting += [(f"{path}[{key!r}]", each) for key, each in value.items()]
            elif isinstance(value, (list, tuple, set, deque)):
                waiting += [(f"{path}[{at}]", each) for at, each in enumerate(value)]
            else:
                held = getattr(value, "__dict__", {})
                waiting += [(f"{path}.{name}", each) for name, each in held.items()]


def _by_parameter(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns where ``optimizer`` has a dict or set by its parameters, or by their ids."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = {id(param) for param in params}
    for path, value in _kept(optimizer):
        if isinstance(value, (Mapping, set, frozenset)) and any(
            key in known if type(key) is int else id(key) in known for key in value
        ):
            return path
    return None


def _refuse_sums(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
    """Raises ConfigError if a tensor beside the state is added to in a step, as a count or a sum
    over parameters is: its new value follows the old one. One that is filled anew does not."""
    kept = {path: each for path, each in _kept(optimizer) if isinstance(each, torch.Tensor)}
    kept = {path: each for path, each in kept.items() if not isinstance(each, torch.nn.Parameter)}
    before = [each.detach().clone() for each in kept.values()]
    for group in groups if kept else ():
        after = []
        for more in (0, 1):
            for each, value in zip(kept.values(), before):
                each.copy_(value * (1 + more) + more)
            param = _values((LEAST, LEAST))
            Run(optimizer, settings_to_move(optimizer, group), [param], together=False).step(
                [gradient_of(param, 1)]
            )
            after.append([each.detach().clone() for each in kept.values()])
        for each, value in zip(kept.values(), before):
            each.copy_(value)
        for path, value, *values in zip(kept, before, *after):
            if not torch.equal(values[0], value) and not torch.equal(*values):
                raise ConfigError(f"It counts in {path}, beside its state.")


class _Unread:
    """Stands for a list of a group that has one text for each parameter: raises ConfigError if it
    is read."""

    def __init__(self, key: str):
        self._key = key

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(
            f"It reads {self._key} of a group, which has one for each parameter, and here it is"
            " given one parameter at a time."
        )

    def __getitem__(self, place: Any) -> str:
        return next(iter(self))


def _with_unread_names(group: Group) -> Group:
    """Returns ``group`` without the names of its parameters: an error stands for them."""
    return {
        key: _Unread(key)
        if isinstance(value, list)
        and len(value) == len(group["params"])
        and all(isinstance(each, str) for each in value)
        else value
        for key, value in group.items()
    }


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float32).view(shape)


class _WithoutRanks(TorchDispatchMode):
    """Raises ConfigError for a collective: here one rank alone may step a parameter."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in OF_RANKS:
            raise ConfigError("Its step meets the other ranks, which the engine does for it.")
        return func(*args, **(kwargs or {}))
