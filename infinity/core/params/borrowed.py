"""Borrowed: replaces a parameter by its whole value inside a block of full_params."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...errors import UsageError
from ..units.forms import like
from ..units.handle import handle_of, managed
from .lent import Lent, Source
from .view_chain import chain_of


class Borrowed(Lent):
    """A parameter's value inside a block of :func:`infinity.full_params`: a copy, whose gradient is
    the parameter's. While this object lives and the block runs, uses of the parameter use the copy.
    """

    def __init__(self, source: Source, param: torch.Tensor, value: torch.Tensor):
        handle = managed(param)
        # Not a view: autograd would take its base for the computed tensor.
        value = torch.empty(0, dtype=value.dtype, device=value.device).set_(
            value.untyped_storage(), value.storage_offset(), value.size(), value.stride()
        )
        value = like(param, value)
        if param.requires_grad and torch.is_grad_enabled():
            value = _Lend.apply(param, value, handle.version)
        super().__init__(source, handle, value)
        self.give(value)
        self.note(source.stamp(handle))
        self._before, handle.borrowed = handle.borrowed, weakref.ref(self)

    @property
    def is_superseded(self) -> bool:
        """Whether the value at home is newer."""
        return self.stamp != self.source.stamp(self.handle)

    def end(self) -> None:
        """Ends the block: the parameter is at rest again. Idempotent."""
        borrowed = self.handle.borrowed
        if borrowed is not None and borrowed() is self:
            self.handle.borrowed = self._before


class _Lend(torch.autograd.Function):
    """The value, as computed from the parameter."""

    @staticmethod
    def forward(ctx, param, value, version):
        ctx.handle, ctx.version = handle_of(param), version
        ctx.mark_dirty(value)  # the same tensor is returned, and may be edited in place
        return value

    @staticmethod
    def backward(ctx, grad):
        if ctx.handle.version != ctx.version:
            raise UsageError(
                f"this backward needs {ctx.handle.name} as full_params gave it, but it was changed"
                " since (by optimizer.step(), a load or an edit). Run backward before that."
            )
        return grad, None, None


def lent_to(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor that replaces a parameter at rest now. None outside a block of
    full_params, and while its model computes."""
    handle = handle_of(tensor)
    borrowed = handle.borrowed() if handle is not None and handle.borrowed is not None else None
    if borrowed is None or handle.engine.computing or borrowed.is_superseded:
        return None
    return borrowed.user_tensor()


def call_on_borrowed(func: Callable, args: tuple, kwargs: dict, kind: type) -> Any:
    """Calls ``func`` with the borrowed tensors of the parameters among its arguments, which are of
    ``kind``, as are views of them."""

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        borrowed = lent_to(tensor)
        return tensor if borrowed is None else chain_of(tensor).repeat(borrowed, with_grad=True)

    if func == torch.Tensor.data.__set__ and lent_to(args[0]) is not None:
        with torch.no_grad():
            replaced(args[0]).copy_(args[1])
        return None
    result = func(*(new := tree_map_only(kind, replaced, (args, kwargs)))[0], **new[1])
    # In place.
    return args[0] if args and isinstance(args[0], kind) and result is new[0][0] else result
