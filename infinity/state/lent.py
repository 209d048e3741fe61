"""Lent: lets a parameter stand for its whole value inside a block of full_params."""

from __future__ import annotations

import weakref

import torch

from ..errors import UsageError
from .dtensors import like
from .handle import handle_of


class Lent:
    """A parameter's value as a block of :func:`infinity.full_params` has it: a copy of its own, and a gradient of it is the
    parameter's. While the block runs, the parameter itself stands for it; whoever holds this object keeps that so."""

    def __init__(self, param: torch.Tensor, value: torch.Tensor):
        self._handle, self._before = handle_of(param), handle_of(param).lent
        self.version = self._handle.version
        # Not a view, of which autograd would take the base for what was computed.
        self.tensor = value = torch.empty(0, dtype=value.dtype, device=value.device).set_(
            value.untyped_storage(), value.storage_offset(), value.size(), value.stride()
        )
        self.tensor = value = like(param, value)
        if param.requires_grad and torch.is_grad_enabled():
            self.tensor = _Lend.apply(param, value, self._handle.version)
        self._handle.lent = weakref.ref(self)

    def end(self) -> None:
        """Ends the block: the parameter is at rest again. A second call does nothing."""
        lent = self._handle.lent
        if lent is not None and lent() is self:
            self._handle.lent = self._before


class _Lend(torch.autograd.Function):
    """The value, with the parameter as what it was computed from."""

    @staticmethod
    def forward(ctx, param, value, version):
        ctx.handle, ctx.version = handle_of(param), version
        ctx.mark_dirty(value)  # it is that very tensor, which may be edited in place
        return value

    @staticmethod
    def backward(ctx, grad):
        if ctx.handle.version != ctx.version:
            raise UsageError(
                f"this backward needs {ctx.handle.name} as full_params gave it, but it was changed since (by optimizer.step(), a load or "
                "an edit). Run backward before that."
            )
        return grad, None, None


def lent_to(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns what a parameter at rest stands for just now; None outside a block of full_params and while its model computes."""
    handle = handle_of(tensor)
    lent = handle.lent() if handle is not None and handle.lent is not None else None
    if lent is None or handle.engine.computing or handle.version != lent.version:  # a step has changed it since
        return None
    return lent.tensor
