"""ViewChain: the views that led from a parameter at rest to a tensor, to be repeated.

A view of a parameter at rest has no bytes. Each use of it brings the parameter, and views it again:
so it shows the newest values, as in torch, and a write to it is a write to the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ...errors import UsageError
from ..units.added import always_rests
from ..units.handle import handle_of, managed, own_bytes
from .view_nodes import with_node

SUBJECT = object()  # stands among the arguments for the tensor that is viewed


@dataclass(frozen=True)
class ViewStep:
    """A call of ``func``, of whose results the one numbered ``output`` is the view."""

    func: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    output: int
    with_grad: bool  # whether autograd recorded it

    @classmethod
    def of_call(
        cls, func, args: tuple, kwargs: dict, subject: torch.Tensor, output: int
    ) -> ViewStep:
        """Makes the step of a call with ``subject`` among its arguments."""
        args, kwargs = tree_map(
            lambda leaf: SUBJECT if leaf is subject else _frozen(leaf), (args, kwargs)
        )
        return cls(func, args, kwargs, output, torch.is_grad_enabled())

    @classmethod
    def of_strides(cls, view: torch.Tensor, subject: torch.Tensor) -> ViewStep:
        """Makes the step that gives ``view`` by its place in the memory of ``subject``."""
        offset = view.storage_offset() - subject.storage_offset()
        args = (SUBJECT, view.size(), view.stride(), offset)
        return cls(_as_strided, args, {}, 0, torch.is_grad_enabled())

    def repeat(self, subject: torch.Tensor) -> torch.Tensor:
        """Takes the view of ``subject``."""
        args, kwargs = tree_map(
            lambda leaf: subject if leaf is SUBJECT else leaf, (self.args, self.kwargs)
        )
        return tree_flatten(self.func(*args, **kwargs))[0][self.output]


def _as_strided(subject: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return subject.as_strided(size, stride, subject.storage_offset() + offset)


def _frozen(arg: Any) -> Any:
    """Returns an argument as it is now: users may change their tensors before the next use. A view
    takes numbers from them, or shapes."""
    if isinstance(arg, slice):
        return slice(*(_frozen(leaf) for leaf in (arg.start, arg.stop, arg.step)))
    if not isinstance(arg, torch.Tensor):
        return arg
    if arg.dim() == 0 and not arg.is_floating_point():
        return arg.item()
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")


@dataclass(frozen=True)
class ViewChain:
    """The views that led from a parameter to a tensor at rest, the first of them first."""

    steps: tuple[ViewStep, ...] = ()
    is_detached: bool = False  # from the graph of autograd, as by ``detach`` and ``data``
    replaced: int = 0  # times that ``param.data`` had been assigned when it was made

    def repeat(self, param: torch.Tensor, *, with_grad: bool = False) -> torch.Tensor:
        """Takes the views of ``param``, which has its bytes; ``with_grad``: as autograd recorded
        them first."""
        if with_grad and not self.is_detached:
            value = param
            for step in self.steps:
                with torch.set_grad_enabled(step.with_grad):
                    value = step.repeat(value)
            return value
        with torch.no_grad():
            value = param.detach()
            for step in self.steps:
                value = step.repeat(value)
        return value

    def then(self, step: ViewStep) -> ViewChain:
        """Returns the chain of a view of the tensor that has this one."""
        return replace(self, steps=(*self.steps, step))


def chain_of(tensor: torch.Tensor) -> ViewChain:
    """Returns the chain of a parameter, or of a tensor at rest that views one."""
    if (chain := tensor.__dict__.get("_chain")) is not None:
        return chain
    handle = handle_of(tensor)
    return ViewChain(replaced=0 if handle is None else handle.replaced)


def is_whole(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor at rest, or a plain one, is all of its parameter as it is now."""
    chain, handle = chain_of(tensor), handle_of(tensor)
    return not chain.steps and (handle is None or chain.replaced == handle.replaced)


def shows_all(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor at rest is all of its parameter in the parameter's own form, after any
    views."""
    chain, handle = chain_of(tensor), managed(tensor)
    param = handle.param
    form = param.shape, param.stride(), param.dtype
    view = chain.repeat(torch.empty_strided(*form[:2], dtype=param.dtype, device="meta"))
    shown = view.shape, view.stride(), view.dtype
    return chain.replaced == handle.replaced and shown == form and not view.storage_offset()


def present(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor at rest with its bytes, while its parameter is resident. Raises as
    :func:`bytes_of` does."""
    value = bytes_of(tensor)
    return with_node(tensor, value) if "_chain" in tensor.__dict__ else value


def bytes_of(tensor: torch.Tensor, *, written: bool = False) -> torch.Tensor:
    """Returns the bytes of a tensor at rest, with no place in the graph, while its parameter is
    resident. ``written``: they may be changed in place, which torch allows or refuses as for the
    view itself.

    Raises UsageError for a view of values that ``param.data = ...`` has replaced.
    """
    handle, chain = managed(tensor), tensor.__dict__.get("_chain")
    param = own_bytes(handle.param) if always_rests(handle.param) else handle.param
    if chain is None:
        return param
    if chain.replaced != handle.replaced:
        raise UsageError(
            f"a view of parameter {handle.name} shows the values before {handle.name}.data was"
            " assigned, which are gone. Take the view again, or keep a copy: view.clone()."
        )
    return chain.repeat(param if written else own_bytes(param), with_grad=written)
