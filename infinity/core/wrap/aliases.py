"""Aliases: tensors and arrays that share the memory of weights before a wrap.

In torch such a tensor shows every step of the weight, and a write to it changes the weight. One
that is an attribute of the model goes on to (:class:`OwnViews`); of any other a warning tells, for
it keeps the old values. Sharing that ordinary models have too gives no warning:

- a state dict from which the model was loaded (``load_state_dict(assign=True)``) or that it gave, -
an array from which it was made (``torch.from_numpy``): torch cannot tell it from a mapped file, -
an export, while a live graph may have saved a view of the weight.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import logging
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import ConfigError
from ...torch_private import is_of_transform
from ..machine.storage_guard import identity
from ..machine.storage_guard import references as references_to
from ..units.forms import local_of
from ..units.handle import handle_of, raw_grad
from .described_model import DescribedModel, is_managed

logger = logging.getLogger(__name__)

TOLD = 3  # names in the message
MARK = "infinity"  # in the metadata of a graph's node


def warn_of_aliases(
    model: DescribedModel, optimizers: Sequence[torch.optim.Optimizer], views: OwnViews
) -> None:
    """Warns, once, if an object outside the model and its optimizers shares the memory of managed
    parameters. ``views``: those of the model, which follow them."""
    local = {param: local_of(param) for param in model.users}
    names = {param: name for name, param in model.managed.items() if _has_bytes(local[param])}
    own = _own_tensors(model, optimizers) | _with_bases(views.tensors)
    counts = Counter(map(identity, own.values()))
    held: dict[int, list[nn.Parameter]] = {}
    for param in names:
        key = identity(local[param])
        references = references_to(local[param])
        if references is None or references > counts[key]:
            held.setdefault(key, []).append(param)
    if not held:
        return
    others = _others(held, own)
    of_dicts = _in_state_dicts(
        [tensor for tensors in others.values() for tensor in tensors], set(names.values())
    )
    affected = []
    for key, params in held.items():
        references = references_to(local[params[0]]) or 0
        hidden = references - counts[key] - len(_with_bases(others[key]))
        passed = _with_bases(
            [
                tensor
                for tensor in others[key]
                # As a forward makes a view of one of them: a graph may keep it.
                if id(tensor) in of_dicts
                or tensor.grad_fn is not None
                or any(tensor._base is local_of(p) and not p.requires_grad for p in params)
            ]
        )
        if others[key] and passed.keys() >= {id(tensor) for tensor in others[key]}:
            continue
        if others[key] or (hidden > 0 and not any(map(_may_be_saved, params))):
            affected += [names[param] for param in params]
    if affected:
        logger.warning(
            "%d of this model's parameters (%s%s) share memory with a tensor or array outside of"
            " the model, which keeps the values of before from here on: steps do not show there,"
            " and writes to it do not reach the weights. Read and write these through"
            " model.state_dict(), or in `with infinity.full_params(model, names, writeback=True)`.",
            len(affected),
            ", ".join(affected[:TOLD]),
            ", ..." if len(affected) > TOLD else "",
        )


class OwnViews:
    """What a model holds that are views of its weights: from the wrap to the unwrap they are views
    at rest, which show the values at home."""

    def __init__(self, model: DescribedModel):
        """Finds them. Raises ConfigError for a view that cannot follow its weight: a buffer, one of
        several weights, an array, or one inside a tuple."""
        by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, param in model.managed.items():
            if _has_bytes(param):
                by_storage.setdefault(identity(param), []).append((name, param))
        own = Counter(map(identity, _with_bases(model.users).values()))
        by_storage = {
            key: its
            for key, its in by_storage.items()
            if (references := references_to(its[0][1])) is None or references > own[key]
        }
        by_address = {
            param.untyped_storage().data_ptr(): its
            for its in by_storage.values()
            for _, param in its[:1]
        }
        self._found: list[_View] = []
        for path, place, key, value, follows in _held(model) if by_storage else ():
            if isinstance(value, np.ndarray):
                shared = by_address.get(_owner_address(value), [])
            elif handle_of(value) is not None or is_managed(value) or not _has_bytes(value):
                continue
            else:
                shared = by_storage.get(identity(value), [])
            is_tensor = isinstance(value, torch.Tensor)
            whose = [
                (name, param) for name, param in shared if is_tensor and _contains(param, value)
            ]
            if shared and not (whose and follows and value.dtype == whose[0][1].dtype):
                raise ConfigError(
                    f"{path} is a view of the weight {(whose or shared)[0][0]}, which goes home: it"
                    " would keep the values of now. Compute it in the forward, make it a plain"
                    " attribute that is a view of one weight, or clone() it before wrap_model."
                )
            for _, param in whose[:1]:
                offset = value.storage_offset() - param.storage_offset()
                form = (value.size(), value.stride(), offset)
                self._found.append(_View(place, key, param, form, value.requires_grad, value))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The views as they are now."""
        return [view for each in self._found if (view := each.there()) is not None]

    def take(self) -> None:
        """Takes the views anew, of the parameters as they are now: at rest, or plain. Leaves out
        those in whose place something else is by now."""
        for each in self._found:
            each.take()


class _View:
    """A view of a weight, and its place: a list, a dict, or the attributes of an object, which is
    not kept alive, since the model's record has the views and must not keep the model."""

    def __init__(
        self, place: Any, key: Any, param: nn.Parameter, form: tuple, has_grad: bool, view: Any
    ):
        self._place, self._key, self._param, self._form = place, key, param, form
        self._has_grad, self._view = has_grad, weakref.ref(view)

    def there(self) -> torch.Tensor | None:
        """Returns the view, if it still is at its place."""
        try:
            value = self._place[self._key]
        except (LookupError, AttributeError):
            return None
        return value if value is self._view() else None

    def take(self) -> None:
        if self.there() is None:
            return
        size, stride, offset = self._form
        with torch.set_grad_enabled(self._has_grad):
            data = self._param if self._has_grad else self._param.detach()
            view = data.as_strided(size, stride, data.storage_offset() + offset)
        self._place[self._key], self._view = view, weakref.ref(view)


class _Attributes:
    """The attributes of an object, or what a cell of a closure has, as a mapping."""

    def __init__(self, owner: Any):
        self._owner: Callable[[], Any]
        try:
            self._owner = weakref.ref(owner)
        except TypeError:
            self._owner = lambda: owner  # it has slots alone, or is a cell

    def __getitem__(self, name: str) -> Any:
        return object.__getattribute__(self._owner(), name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner(), name, value)  # past a module's, and a frozen dataclass's


Held = tuple[str, Any, Any, Any, bool]
MOST = 100_000  # objects that are looked through
_PASSED = (type, types.ModuleType, torch.optim.Optimizer, str, bytes, int, float, logging.Logger)


def _held(model: DescribedModel) -> Iterator[Held]:
    """Yields the path of each tensor and array that ``model`` holds outside of its parameters,
    where it is and its key there, and whether another tensor may take its place."""
    rest: list[tuple[str, Any]] = []
    kinds: set[type] = set()
    for module, prefix in model.modules.items():
        path = f"{prefix}." if prefix else ""
        for name, value in module._buffers.items():
            if value is not None:
                yield path + name, module._buffers, name, value, False
        of_class = {} if type(module) in kinds else vars(type(module))
        kinds.add(type(module))
        for name, value in of_class.items():
            yield from _found(path + name, None, name, value, False, rest)
        attributes = _Attributes(module)
        for name, value in list(vars(module).items()):
            if name == "_parameters":
                for of, param in value.items():
                    rest += [(path + of, param)] if param is not None else []
            elif name not in ("_buffers", "_modules"):
                yield from _found(path + name, attributes, name, value, True, rest)
    seen: set[int] = set()
    while rest and len(seen) < MOST:
        path, each = rest.pop()
        if id(each) not in seen:
            seen.add(id(each))
            for inner, place, key, value, follows in _inside(path, each):
                yield from _found(inner, place, key, value, follows, rest)


def _found(
    path: str, place: Any, key: Any, value: Any, follows: bool, rest: list[tuple[str, Any]]
) -> Iterator[Held]:
    """Yields a tensor or array, and puts anything else to what is looked through."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield path, place, key, value, follows
    elif not isinstance(value, (nn.Module, *_PASSED)):
        rest.append((path, value))


def _inside(path: str, value: Any) -> Iterator[Held]:
    """Yields what an object holds: items, attributes, what a function takes from around it."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        items = enumerate(value)
    elif isinstance(value, types.MethodType):
        yield path, None, "", value.__self__, False
        yield path, None, "", value.__func__, False
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield f"{path}.{name}", None, "", getattr(value, name), False
    elif isinstance(value, types.FunctionType):
        for name in ("__defaults__", "__kwdefaults__"):
            yield f"{path}.{name}", None, "", getattr(value, name), False
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            with contextlib.suppress(ValueError):  # an empty cell
                there = cell.cell_contents
                yield f"{path}().{name}", _Attributes(cell), "cell_contents", there, True
    follows = isinstance(value, (list, dict, collections.deque))
    for key, each in list(itertools.islice(items, MOST)):
        yield f"{path}[{key!r}]", value, key, each, follows
    names = set(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
    for name in sorted(names):
        with contextlib.suppress(AttributeError):
            there = object.__getattribute__(value, name)
            yield f"{path}.{name}", _Attributes(value), name, there, True


def _owner_address(array: np.ndarray) -> int:
    """Returns the address of the memory that an array is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if isinstance(array.base, torch.Tensor):
        return _address(array.base)
    return array.__array_interface__["data"][0]


def _contains(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether all of ``view`` lies in the span of ``param``, of the same storage."""
    spans = []
    for tensor in (param, view):
        last = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride()))
        begin = tensor.storage_offset()
        spans += [begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize]
    return spans[0] <= spans[2] and spans[3] <= spans[1]


def _has_bytes(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (
        torch.Tensor,
        nn.Parameter,
        nn.Buffer,
    ) or is_of_transform(tensor):
        return False
    return not tensor.is_meta and tensor.layout is torch.strided and tensor.numel() > 0


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of the first byte; 0 for a weight of another wrapped model, whose bytes
    are at home."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _own_tensors(
    model: DescribedModel, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[int, torch.Tensor]:
    """Returns the tensors of the model and its optimizers, and their view bases, by id."""
    tensors: list[torch.Tensor | None] = [
        *model.users,
        *model.buffers.values(),
        *map(raw_grad, model.users),
    ]
    for state in (state for optimizer in optimizers for state in optimizer.state.values()):
        values = state.values() if isinstance(state, Mapping) else [state]  # some keep a count
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return _with_bases([local_of(each) for each in tensors if each is not None])


def _with_bases(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    there = [tensor for tensor in tensors if _has_bytes(tensor)]
    bases = [tensor._base for tensor in there if tensor._base is not None]
    return {id(tensor): tensor for tensor in (*there, *bases)}


def _others(
    held: Mapping[int, list[nn.Parameter]], own: Mapping[int, torch.Tensor]
) -> dict[int, list[torch.Tensor]]:
    """Finds other Python tensors than ``own`` in the storages ``held``: in the same storage, or in
    another one over its memory."""
    by_address = {_address(local_of(params[0])): key for key, params in held.items()}
    others: dict[int, list[torch.Tensor]] = {key: [] for key in held}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and id(each) not in own and _has_bytes(each):
            here = identity(each)
            key = here if here in others else by_address.get(_address(each))
            if key is not None:
                others[key].append(each)
    return others


def _in_state_dicts(tensors: list[torch.Tensor], names: set[str]) -> set[int]:
    """Returns the ids of those of ``tensors`` that are values of a dict whose keys include most of
    a model's ``names``."""
    listed: set[int] = set()
    for each in gc.get_referrers(*tensors) if tensors else ():
        if isinstance(each, dict) and 2 * len(names & each.keys()) >= len(names):
            listed |= {id(each[name]) for name in names & each.keys()}
    return listed


def _may_be_saved(param: nn.Parameter) -> bool:
    """Returns whether a live graph contains ``param``: it may have saved a view, which Python
    does not see."""
    if not param.requires_grad:
        return True  # unknown
    with torch.enable_grad():
        # If no graph has the node, torch creates it and drops it again, with its metadata.
        _node_of(param).metadata[MARK] = True
        return MARK in _node_of(param).metadata


def _node_of(param: nn.Parameter) -> Any:
    return torch.autograd.graph.get_gradient_edge(param).node
