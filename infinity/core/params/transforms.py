"""Transforms of torch.func (vmap, grad, jvp, ...) over tensors at rest.

A transform wraps the tensors that it gets, and torch unwraps them beneath ``__torch_function__``:
their operations arrive in ``__torch_dispatch__``, which a parameter has none of. So a transform
gets a view of all of the parameter instead, which has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...torch_private import WRAPPING, innermost_transform, without_transforms
from ..units.handle import DisableTorchFunction, managed
from .view_chain import SUBJECT, ViewStep, chain_of
from .view_nodes import View, is_recorded


def are_running() -> bool:
    """Tells whether a transform is running."""
    return innermost_transform() is not None


def whole_view(param: torch.Tensor, rest: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Returns a view of all of ``param``, at rest, which autograd records as any view. ``rest``
    makes it: see :mod:`.touch`."""
    step = ViewStep(torch.Tensor.view_as, (SUBJECT, SUBJECT), {}, 0, torch.is_grad_enabled())
    make = functools.partial(rest, param, managed(param), chain_of(param).then(step))
    with without_transforms():
        return View.apply(param, step, make) if is_recorded(param) else make()


def call(func: Callable, args: tuple, kwargs: dict, kind: type, stand_in: Callable) -> Any:
    """Calls ``func`` in a transform, with stand-ins for its arguments that are of ``kind``."""
    args, kwargs = tree_map_only(kind, stand_in, (args, kwargs))
    with DisableTorchFunction():
        return func(*args, **kwargs)


@cache
def let_be_wrapped(kind: type, stand_in: Callable) -> None:
    """Has transforms wrap ``stand_in(tensor)`` for each tensor of ``kind`` that they are given."""
    for module, name in WRAPPING:
        setattr(module, name, _replacing(getattr(module, name), kind, stand_in))


def _replacing(wrap: Callable, kind: type, stand_in: Callable) -> Callable:
    @functools.wraps(wrap)
    def wrap_stand_in(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        return wrap(stand_in(tensor) if isinstance(tensor, kind) else tensor, *args)

    return wrap_stand_in
