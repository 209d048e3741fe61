"""ViewNodes: the places of tensors at rest in the graph of autograd.

node   a view that autograd recorded has a node of its own in the graph, as in torch. Each use adds
       a node behind it that gives the bytes, so that hooks, gradients and sums of gradients are
       those of one tensor
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ...torch_private import keeps_next_functions

ASKING_FOR_PLACES = {torch.autograd.grad, torch.autograd.backward}


@keeps_next_functions
class View(torch.autograd.Function):
    """The node of a view at rest. ``make`` makes the tensor; ``step`` leads to it from
    ``source``."""

    @staticmethod
    def forward(ctx, source, step, make):
        ctx.step = step
        ctx.form = source.shape, source.stride(), source.dtype, source.device
        return make()

    @staticmethod
    def backward(ctx, grad):
        shape, stride, dtype, device = ctx.form
        with torch.enable_grad():
            stand_in = torch.empty_strided(
                shape, stride, dtype=dtype, device=device, requires_grad=True
            )
            view = ctx.step.repeat(stand_in)
        (inner,) = torch.autograd.grad(view, stand_in, grad, create_graph=torch.is_grad_enabled())
        return inner, None, None


class Bytes(torch.autograd.Function):
    """The bytes of a tensor at rest, as computed from it."""

    @staticmethod
    def forward(ctx, rest, value):
        return value

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def is_recorded(tensor: torch.Tensor) -> bool:
    """Tells whether autograd records a use of ``tensor`` now."""
    return tensor.requires_grad and torch.is_grad_enabled()


def with_node(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns ``value``, the bytes of ``tensor`` at rest, as computed from it if autograd
    records."""
    return Bytes.apply(tensor, value) if is_recorded(tensor) else value


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Returns the place in the graph of a tensor at rest, which torch finds by viewing it. Raises
    RuntimeError if it requires no gradient."""
    if not tensor.requires_grad:
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    with torch.enable_grad():
        used = Bytes.apply(tensor, torch.empty(()))
    # Held by what lies behind it: a node alone does not keep its graph in every version of torch
    return GradientEdge(*used.grad_fn.next_functions[0], used)


def ask_for_edges(func: Callable, args: tuple, kwargs: dict, kind: type) -> Any:
    """Calls ``func`` for gradients of tensors at rest, which are of that ``kind``: it needs their
    nodes in the graph, not their bytes."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    outputs = next(iter(bound.arguments))  # "outputs", or "tensors" of a backward

    def replaced(arg: Any, of_leaf: Callable) -> Any:
        if isinstance(arg, dict):
            return {key: replaced(item, of_leaf) for key, item in arg.items()}
        if isinstance(arg, (list, tuple)) and not isinstance(arg, GradientEdge):
            return [replaced(item, of_leaf) for item in arg]
        return of_leaf(arg) if isinstance(arg, kind) else arg

    bound.arguments[outputs] = replaced(bound.arguments[outputs], torch.clone)
    asked = bound.arguments.get("inputs")
    if asked is not None:
        bound.arguments["inputs"] = replaced(asked, edge_of)
    fills = bound.arguments.get("materialize_grads") and bound.arguments.get("allow_unused", True)
    if asked is None or not fills:
        return func(*bound.args, **bound.kwargs)
    # torch makes no zeros for a place in the graph
    bound.arguments |= {"materialize_grads": False, "allow_unused": True}
    results = func(*bound.args, **bound.kwargs)
    if isinstance(asked, dict):
        return {name: _or_zeros(results[name], item) for name, item in asked.items()}
    return tuple(map(_or_zeros, results, [asked] if isinstance(asked, torch.Tensor) else asked))


def _or_zeros(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, requires_grad=False) if grad is None else grad
