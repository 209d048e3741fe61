"""Logits: the output of a head, computed only when it is used.

A head's output is often larger than its weight, and mostly goes into one cross-entropy only. The
loss is then computed from the head's input, in parts, without whole logits. Any other use
converts the logits to an ordinary tensor first, so models need no change.

node    one lazy tensor: the head's output (the root), or a cast to fp32, view or slice of whole
        rows derived from it
whole   a node as an ordinary tensor. Once one node is whole all are, so that in-place changes
        show in views as in torch
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from ...core.run.saved_weights import LAZY, OPAQUE
from ...errors import UsageError

Make = Callable[[torch.Tensor], torch.Tensor]

VIEWS = (
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.reshape,
    torch.Tensor.flatten,
    torch.flatten,
)
METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "is_leaf",
        "is_cuda",
        "is_sparse",
        "is_quantized",
        "is_meta",
        "is_nested",
        "requires_grad",
        "grad",
        "itemsize",
    )
} | {
    getattr(torch.Tensor, name)
    for name in (
        "size",
        "dim",
        "numel",
        "ndimension",
        "nelement",
        "is_floating_point",
        "is_complex",
        "element_size",
        "__len__",
        "__hash__",
        "is_contiguous",
        "stride",
    )
}
WATCHING = (
    torch.Tensor.register_hook,
    torch.Tensor.retain_grad,
    torch.autograd.grad,
    torch.autograd.backward,
)


@dataclass(eq=False)
class Head:
    """The layer that produces logits.

    ``compute(hidden)`` returns its output, without a graph. ``loss(rows, target, ignore_index,
    reduction)`` returns the cross-entropy of 2-d hidden states. ``check()`` raises UsageError if
    the weights have changed since the forward.
    """

    width: int
    compute: Make
    loss: Callable[[torch.Tensor, torch.Tensor, int, str], torch.Tensor]
    check: Callable[[], None]
    context: object  # of the job that has the weights: kept alive until the logits are computed
    is_fused: bool = False  # a loss has been computed without the logits
    nodes: list[weakref.ref[Logits]] = field(default_factory=list)

    def living(self) -> Iterator[Logits]:
        """Yields the nodes that are still referenced."""
        self.nodes = [ref for ref in self.nodes if ref() is not None]
        return (node for ref in list(self.nodes) if (node := ref()) is not None)


class Logits(torch.Tensor):
    """One node. It is part of autograd's graph as the ordinary tensor would be.

    ``hidden``: the head's input, with the node's views and slices applied. ``make``: computes the
    node's values from its parent's, or a root's from its hidden states.
    """

    @staticmethod
    def __new__(
        cls,
        head: Head,
        hidden: torch.Tensor,
        dtype: torch.dtype,
        make: Make,
        parent: Logits | None = None,
    ) -> Logits:
        shape = (*hidden.shape[:-1], head.width)
        node = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        node._head, node._hidden, node._seen = head, hidden, hidden._version
        node._make, node._parent, node._whole = make, parent, None
        node._is_tracked = False  # of a root: whether its layer gave it a graph
        head.nodes.append(weakref.ref(node))
        return node

    @torch.compiler.disable
    def whole(self) -> torch.Tensor:
        """Computes the logits of every living node, and returns this one's.

        Raises UsageError if the weights or the hidden states have changed since the forward.
        """
        if self._whole is None:
            # The caller's grad mode applies to its own operation, not to the logits' graph.
            with torch.inference_mode(False), torch.enable_grad():
                for node in self._head.living():
                    node._become_whole()
        return self._whole

    def _become_whole(self) -> None:
        if self._whole is None and self._parent is None:
            self._check()
            self._whole = _Whole.apply(self, self._make)
        elif self._whole is None:
            self._parent._become_whole()
            self._whole = self._make(self._parent._whole)

    def _check(self) -> None:
        self._head.check()
        if self._hidden._version != self._seen:
            raise UsageError(
                "logits were asked for after the hidden states that they are made of were changed"
                " in place"
            )

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        node = args[0] if args and isinstance(args[0], Logits) else None
        if func is F.cross_entropy and isinstance(kwargs.get("input"), Logits):
            return F.cross_entropy(kwargs.pop("input"), *args, **kwargs)
        if node is not None and node._whole is None:
            if func in METADATA:
                return super().__torch_function__(func, types, args, kwargs)
            if (result := node._lazily(func, args[1:], kwargs)) is not None:
                return result
        if func in WATCHING:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Logits) and leaf._head.is_fused:
                    raise UsageError(
                        "the gradient of logits was asked for, but a loss was computed in parts,"
                        " without them. Ask before the loss (by retain_grad(), say), or leave out"
                        " fused_loss and give more device_memory."
                    )
        args, kwargs = tree_map_only(Logits, Logits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # Below autograd, whose graph has the node: only values are needed.
        with torch.no_grad():
            args, kwargs = tree_map_only(
                Logits, lambda node: node.whole().detach(), (args, kwargs or {})
            )
            return func(*args, **kwargs)

    def _lazily(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Computes ``func`` without the logits. Returns None if it needs them."""
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if func is torch.Tensor.float or (
            func is torch.Tensor.to and args == (torch.float32,) and not kwargs
        ):
            return (
                self
                if self.dtype == torch.float32
                else self._derived(self._hidden, torch.float32, torch.Tensor.float)
            )
        if func is torch.Tensor.contiguous and not args and not kwargs:
            return self
        if func in VIEWS and not any(
            isinstance(value, torch.dtype) for value in (*args, *kwargs.values())
        ):
            shape = func(
                torch.empty(self.shape, dtype=self.dtype, device="meta"), *args, **kwargs
            ).shape
            if len(shape) and shape[-1] == self._head.width:
                hidden = self._hidden.reshape(*shape[:-1], self._hidden.shape[-1])
                return self._derived(hidden, self.dtype, lambda whole: func(whole, *args, **kwargs))
        if func is torch.Tensor.__getitem__ and _keeps_rows(args[0], self.dim()):
            return self._derived(
                self._hidden[args[0]], self.dtype, lambda whole: func(whole, *args)
            )
        return None

    def _derived(self, hidden: torch.Tensor, dtype: torch.dtype, make: Make) -> Logits:
        self._check()
        if not torch.is_grad_enabled():  # the result has no graph, whenever it is computed
            return Logits(self._head, hidden, dtype, lambda whole: make(whole.detach()), self)
        return _Derived.apply(self, lambda: Logits(self._head, hidden, dtype, make, self), make)

    def _root(self) -> Logits:
        return self if self._parent is None else self._parent._root()

    def _cross_entropy(
        self,
        target,
        weight=None,
        size_average=None,
        ignore_index=-100,
        reduce=None,
        reduction="mean",
        label_smoothing=0.0,
    ) -> torch.Tensor | None:
        plain = (
            weight is None and size_average is None and reduce is None and label_smoothing == 0.0
        )
        indexed = (
            isinstance(target, torch.Tensor)
            and not isinstance(target, Logits)
            and target.dtype == torch.int64
        )
        # A reentrant checkpoint gives the root a graph that the hidden states do not have.
        indexed = indexed and self._root().requires_grad == self._root()._is_tracked
        fits = (
            indexed
            and self.dim() == 2
            and target.dim() == 1
            and target.numel() == self.shape[0] > 0
        )
        if (
            not plain
            or not fits
            or self.dtype != torch.float32
            or reduction not in ("none", "mean", "sum")
        ):
            return None
        counted = target != ignore_index
        if (
            target.device != self.device
            or not ((target >= 0) & (target < self._head.width) | ~counted).all()
        ):
            return None  # torch raises its own error
        self._check()
        self._head.is_fused = True
        # Of logits that were made without a graph there is no gradient, as of torch's.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad):
            return self._head.loss(self._hidden, target, ignore_index, reduction)


class _Whole(torch.autograd.Function):
    """Computes a root's values; their gradient is the root's."""

    @staticmethod
    def forward(ctx, node: Logits, make: Make):
        return make(node._hidden)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class _Derived(torch.autograd.Function):
    """Derives a node from its parent. Its backward runs only if an operation that bypasses
    ``__torch_function__`` uses the node itself."""

    @staticmethod
    def forward(ctx, parent: Logits, wrap: Callable[[], Logits], make: Make):
        ctx.make, ctx.shape, ctx.dtype = make, parent.shape, parent.dtype
        return wrap()

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            parent = torch.zeros(ctx.shape, dtype=ctx.dtype, device=dy.device, requires_grad=True)
            return torch.autograd.grad(ctx.make(parent), parent, dy)[0], None, None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` as an ordinary one."""
    return tensor.whole() if isinstance(tensor, Logits) else tensor


def _keeps_rows(index: Any, dims: int) -> bool:
    """Whether indexing a tensor of ``dims`` dimensions with ``index`` keeps the last one whole."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(
        entry is Ellipsis or (isinstance(entry, (int, slice)) and not isinstance(entry, bool))
        for entry in entries
    ):
        return False
    if Ellipsis in entries:
        return entries[-1] is Ellipsis or entries[-1] == slice(None)
    return len(entries) < dims or entries[-1] == slice(None)


LAZY.add(Logits)
OPAQUE.add(Logits)
