"""Aliases: tensors and arrays that share the memory of weights before a wrap.

In torch such a tensor shows every step of the weight, and a write to it changes the weight. One
that is an attribute of the model goes on to (:class:`OwnViews`); of any other a warning tells, for
it keeps the old values. Sharing that ordinary models have too gives no warning:

- a state dict from which the model was loaded (``load_state_dict(assign=True)``) or that it gave, -
an array from which it was made (``torch.from_numpy``): torch cannot tell it from a mapped file, -
an export, while a live graph may have saved a view of the weight.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..machine import storage_guard
from ..state.dtensors import local_of
from ..state.handle import handle_of, raw_grad
from ..state.partition import is_managed, parameter_names

logger = logging.getLogger(__name__)

TOLD = 3  # names in the message
MARK = "infinity"  # in the metadata of a graph's node


def warn_of_aliases(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], views: OwnViews
) -> None:
    """Warns, once, if an object outside the model and its optimizers shares the memory of managed
    parameters. ``views``: those of the model, which follow them."""
    names = {
        param: its[0]
        for param, its in parameter_names(model).items()
        if is_managed(param) and _has_bytes(local_of(param))
    }
    own = _own_tensors(model, optimizers) | _with_bases(views.tensors)
    counts = Counter(map(storage_guard.identity, own.values()))
    held: dict[int, list[nn.Parameter]] = {}
    for param in names:
        key = storage_guard.identity(local_of(param))
        if storage_guard.references(local_of(param)) > counts[key]:
            held.setdefault(key, []).append(param)
    if not held:
        return
    others = _others(held, own)
    of_dicts = _in_state_dicts(
        [tensor for tensors in others.values() for tensor in tensors], set(names.values())
    )
    found = []
    for key, params in held.items():
        hidden = (
            storage_guard.references(local_of(params[0]))
            - counts[key]
            - len(_with_bases(others[key]))
        )
        passed = _with_bases(
            [
                tensor
                for tensor in others[key]
                if id(tensor) in of_dicts or _is_of_graph(tensor, params)
            ]
        )
        if others[key] and passed.keys() >= {id(tensor) for tensor in others[key]}:
            continue
        if others[key] or (hidden > 0 and not any(map(_may_be_saved, params))):
            found += [names[param] for param in params]
    if found:
        logger.warning(
            "%d of this model's parameters (%s%s) share memory with a tensor or array outside of"
            " the model, which keeps the values of before from here on: steps do not show there,"
            " and writes to it do not reach the weights. Read and write these through"
            " model.state_dict(), or in `with infinity.full_params(model, names, writeback=True)`.",
            len(found),
            ", ".join(found[:TOLD]),
            ", ..." if len(found) > TOLD else "",
        )


class OwnViews:
    """The attributes of a model that are views of its weights: from the wrap to the unwrap they are
    views at rest, which show the values at home."""

    def __init__(self, model: nn.Module):
        """Finds them. Raises ConfigError for a view that cannot follow its weight: a buffer, one of
        several weights, or one inside a tuple."""
        by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for param, names in parameter_names(model).items():
            if is_managed(param) and _has_bytes(param):
                by_storage.setdefault(storage_guard.identity(param), []).append((names[0], param))
        self._found: list[tuple[Any, Any, nn.Parameter, tuple]] = []
        for path, place, key, tensor, follows in _attributes(model) if by_storage else ():
            if handle_of(tensor) is not None or is_managed(tensor) or tensor.grad_fn is not None:
                continue
            if not _has_bytes(tensor) or not tensor.numel():
                continue
            shared = by_storage.get(storage_guard.identity(tensor), [])
            whose = [(name, param) for name, param in shared if _contains(param, tensor)]
            if shared and not (whose and follows and tensor.dtype == whose[0][1].dtype):
                raise ConfigError(
                    f"{path} is a view of the weight {(whose or shared)[0][0]}, which goes home: it"
                    " would keep the values of now. Compute it in the forward, make it a plain"
                    " attribute that is a view of one weight, or clone() it before wrap_model."
                )
            for _, param in whose[:1]:
                offset = tensor.storage_offset() - param.storage_offset()
                self._found.append((place, key, param, (tensor.size(), tensor.stride(), offset)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The views as they are now."""
        return [_there(place)[key] for place, key, *_ in self._found]

    def take(self) -> None:
        """Takes the views anew, of the parameters as they are now: at rest, or plain."""
        with torch.no_grad():
            for place, key, param, (size, stride, offset) in self._found:
                data = param.detach()
                _there(place)[key] = data.as_strided(size, stride, data.storage_offset() + offset)


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any, Any, torch.Tensor, bool]]:
    """Yields the path of each buffer and tensor attribute of the modules of ``model``, where it is
    and its key there, and whether another tensor may take its place."""
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, value in module._buffers.items():
            if value is not None:
                yield path + name, module._buffers, name, value, False
        for name, value in list(vars(module).items()):
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(value, torch.Tensor):
                yield path + name, weakref.ref(module), name, value, True
            else:
                yield from _items(path + name, value, set())


def _items(
    path: str, value: Any, above: set[int]
) -> Iterator[tuple[str, Any, Any, torch.Tensor, bool]]:
    """Yields the same of each tensor in ``value``, if that is a list, tuple or dict, and in those
    inside. ``above``: the ids of those around it."""
    if type(value) not in (list, tuple, dict) or id(value) in above:
        return
    for key, each in value.items() if type(value) is dict else enumerate(value):
        if isinstance(each, torch.Tensor):
            yield f"{path}[{key!r}]", value, key, each, type(value) is not tuple
        else:
            yield from _items(f"{path}[{key!r}]", each, above | {id(value)})


def _there(place: Any) -> Any:
    """Returns the list or dict at ``place``, or the attributes of the module that it refers to: the
    model's record has the places, and must not keep the model."""
    return vars(place()) if isinstance(place, weakref.ref) else place


def _contains(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether all of ``view`` lies in the span of ``param``, of the same storage."""
    (begin, end), (first, last) = (
        (at := tensor.storage_offset() * tensor.itemsize, at + _span_nbytes(tensor))
        for tensor in (param, view)
    )
    return begin <= first and last <= end


def _span_nbytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    return (last + 1) * tensor.itemsize


def _has_bytes(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (
        torch.Tensor,
        nn.Parameter,
        nn.Buffer,
    ) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
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
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[int, torch.Tensor]:
    """Returns the tensors of the model and its optimizers, and their view bases, by id."""
    given: list[torch.Tensor | None] = [
        *model.parameters(),
        *model.buffers(),
        *map(raw_grad, model.parameters()),
    ]
    for state in (state for optimizer in optimizers for state in optimizer.state.values()):
        given += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return _with_bases([local_of(each) for each in given if each is not None])


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
    found: dict[int, list[torch.Tensor]] = {key: [] for key in held}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and id(each) not in own and _has_bytes(each):
            here = storage_guard.identity(each)
            key = here if here in found else by_address.get(_address(each))
            if key is not None:
                found[key].append(each)
    return found


def _in_state_dicts(tensors: list[torch.Tensor], names: set[str]) -> set[int]:
    """Returns the ids of those of ``tensors`` that are values of a dict whose keys include most of
    a model's ``names``."""
    found: set[int] = set()
    for each in gc.get_referrers(*tensors) if tensors else ():
        if isinstance(each, dict) and 2 * len(names & each.keys()) >= len(names):
            found |= {id(each[name]) for name in names & each.keys()}
    return found


def _is_of_graph(tensor: torch.Tensor, params: list[nn.Parameter]) -> bool:
    """Returns whether ``tensor`` is a view of one of ``params`` as a forward makes it: a graph may
    keep it."""
    if tensor.grad_fn is not None:
        return True
    return any(tensor._base is local_of(param) and not param.requires_grad for param in params)


def _may_be_saved(param: nn.Parameter) -> bool:
    """Returns whether a live graph contains ``param``: it may have saved a view, which is no Python
    object."""
    if not param.requires_grad:
        return True  # unknown
    with torch.enable_grad():
        # If no graph has the node, torch creates it and drops it again, with its metadata.
        _node_of(param).metadata[MARK] = True
        return MARK in _node_of(param).metadata


def _node_of(param: nn.Parameter) -> Any:
    return torch.autograd.graph.get_gradient_edge(param).node
