"""Logits: the output of a head that runs in tiles, not computed until something asks for it.

A head's output is often larger than its weight, and mostly goes into one cross-entropy and nowhere else. That is then
computed from the head's input, tile by tile, and the logits are never whole. Everything else that is done with
them makes them an ordinary tensor first, so that no model has to know.

node    one such tensor: the head's output, or what casts to fp32, views and slices of whole rows made of it
whole   a node as an ordinary tensor
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_any, tree_map_only

from .errors import UsageError

VIEWS = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten)
METADATA = {
    getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_leaf", "is_cuda", "is_sparse",
                                                     "is_quantized", "is_meta", "is_nested", "grad", "itemsize")
} | {
    getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "ndimension", "nelement", "is_floating_point", "is_complex",
                                             "element_size", "__len__", "__hash__", "is_contiguous", "stride", "type")
}  # fmt: skip


@dataclass(eq=False)
class Head:
    """The layer behind logits: ``compute(hidden)`` is its output; ``losses(rows, target, ignore_index)`` the cross-entropy of
    each row of 2-d hidden states, 0 where it is ignored; ``check()`` raises when either would not be of its forward's weights."""

    width: int
    compute: Callable[[torch.Tensor], torch.Tensor]
    losses: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    check: Callable[[], None]
    nodes: list[weakref.ref[Logits]] = field(default_factory=list)


class Logits(torch.Tensor):
    """One node. ``hidden``: the head's input, with the views and slices of the node done to it."""

    @staticmethod
    def __new__(cls, head: Head, hidden: torch.Tensor, dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> Logits:
        shape = (*hidden.shape[:-1], head.width)
        node = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        node._head, node._hidden, node._seen, node._make, node._whole = head, hidden, hidden._version, make, None
        head.nodes.append(weakref.ref(node))
        return node

    @classmethod
    def of(cls, head: Head, hidden: torch.Tensor, dtype: torch.dtype) -> Logits:
        """What ``head`` makes of ``hidden``, in ``dtype``."""
        return cls(head, hidden, dtype, lambda: head.compute(hidden))

    def whole(self) -> torch.Tensor:
        """The logits. Raises UsageError when the weights or the hidden states have changed since the forward."""
        if self._whole is None:
            self._check()
            self._whole = self._make()
        return self._whole

    def _check(self) -> None:
        self._head.check()
        if self._hidden._version != self._seen:
            raise UsageError("logits were asked for after the hidden states that they are made of were changed in place")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        node = args[0] if args and isinstance(args[0], Logits) else None
        if node is not None and func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if node is not None and node._whole is None:
            if func == torch.Tensor.requires_grad.__get__:
                return True
            result = node._lazily(func, args[1:], kwargs)
            if result is not None:
                return result
        elif func is F.cross_entropy and isinstance(kwargs.get("input"), Logits):
            return F.cross_entropy(kwargs.pop("input"), *args, **kwargs)
        if _is_in_place(func):  # what was made of the head's output before is to keep its values
            for found in _nodes_in((args, kwargs)):
                for other in [ref() for ref in found._head.nodes]:
                    if other is not None:
                        other.whole()
        args, kwargs = tree_map_only(Logits, Logits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise UsageError(
            f"{func} reached logits of a head that runs in tiles past torch's own functions, where their gradient would be lost. "
            "Call .clone() on the logits first."
        )

    def _lazily(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """What ``func`` gives without the logits; None where it needs them."""
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if func is torch.Tensor.float or (func is torch.Tensor.to and args == (torch.float32,) and not kwargs):
            return self if self.dtype == torch.float32 else self._derived(self._hidden, torch.float32, lambda: self.whole().float())
        if func is torch.Tensor.contiguous and not args and not kwargs:
            return self._derived(self._hidden, self.dtype, lambda: self.whole().contiguous())
        if func in VIEWS:
            shape = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *args, **kwargs).shape
            if len(shape) and shape[-1] == self._head.width:
                hidden = self._hidden.reshape(*shape[:-1], self._hidden.shape[-1])
                return self._derived(hidden, self.dtype, lambda: func(self.whole(), *args, **kwargs))
        if func is torch.Tensor.__getitem__ and _keeps_rows(args[0], self.dim()):
            return self._derived(self._hidden[args[0]], self.dtype, lambda: func(self.whole(), *args))
        return None

    def _derived(self, hidden: torch.Tensor, dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> Logits:
        self._check()
        return Logits(self._head, hidden, dtype, make)

    def _cross_entropy(
        self, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
    ) -> torch.Tensor | None:
        plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
        indexed = isinstance(target, torch.Tensor) and not isinstance(target, Logits) and target.dtype == torch.int64
        fits = indexed and self.dim() == 2 and target.dim() == 1 and target.numel() == self.shape[0] > 0
        if not plain or not fits or self.dtype != torch.float32 or reduction not in ("none", "mean", "sum"):
            return None
        counted = target != ignore_index
        if not ((target >= 0) & (target < self._head.width) | ~counted).all():
            return None  # torch has an error for that
        self._check()
        losses = self._head.losses(self._hidden, target, ignore_index)
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def _keeps_rows(index: Any, dims: int) -> bool:
    """Whether indexing a tensor of so many dimensions with ``index`` leaves its last one alone."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(entry, (int, slice)) or entry is Ellipsis for entry in entries):
        return False
    if Ellipsis in entries:
        return entries[-1] is Ellipsis or entries[-1] == slice(None)
    return len(entries) < dims or entries[-1] == slice(None)


def _is_in_place(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__") or (name.startswith("__i") and name != "__invert__") or (
        name.endswith("_") and not name.endswith("__")
    )


def _nodes_in(tree: Any) -> list[Logits]:
    found: list[Logits] = []
    tree_any(lambda leaf: found.append(leaf) if isinstance(leaf, Logits) else None, tree)
    return found
