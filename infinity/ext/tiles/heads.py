"""Heads: layers whose logits are computed only when they are used.

head    a Linear much wider than its input, or a model's output embedding. Its logits are larger
        than its weight; if only a cross-entropy uses them, it is computed in parts
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...core.run.context import ForwardContext
from ...core.run.replaced_forward import ReplacedForward, living, own_forward
from ...core.units.handle import handle_of
from ...errors import UsageError
from .lazy_logits import Head, Logits, whole
from .tiles import HEAD_RATIO


@dataclass(frozen=True)
class HeadWay:
    """How a head computes with its weight ``param``: in tiles, or with all of it."""

    find_context: Callable[[], ForwardContext]
    param: nn.Parameter

    @property
    def context(self) -> ForwardContext:
        """The parts of its job. Raises UsageError if the engine is gone."""
        return self.find_context()

    def is_worth(self, hidden: torch.Tensor) -> bool:
        """Tells whether lazy logits of these hidden states save memory."""
        return True

    def held(self) -> HeadWay:
        """Returns what computes the same after the layer's forward, in which this is called."""
        return self

    def product(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes the logits, without a graph."""
        raise NotImplementedError

    def root(
        self,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        make: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Returns what ``make(hidden)`` returns, in the graph of the logits."""
        raise NotImplementedError

    def loss(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignore_index: int,
        reduction: str,
    ) -> torch.Tensor:
        """Computes the cross-entropy of rows of hidden states."""
        raise NotImplementedError


def is_head(module: nn.Module, outputs: Sequence[nn.Module]) -> bool:
    """Tells whether ``module`` is a head, of a model with these output embeddings."""
    if type(module) is not nn.Linear:
        return False
    return module.out_features >= HEAD_RATIO * module.in_features or any(
        module is each for each in outputs
    )


def output_embeddings(model: nn.Module) -> list[nn.Module]:
    """Lists the layers that a model, or a part of it, names as its output."""
    heads = []
    for module in model.modules():
        if callable(find := getattr(module, "get_output_embeddings", None)):
            try:
                heads.append(find())
            except (NotImplementedError, AttributeError):  # a model without output embeddings
                continue
    return list(dict.fromkeys(each for each in heads if isinstance(each, nn.Module)))


def replaced(
    module: nn.Module, param: nn.Parameter, made: Callable[..., torch.Tensor]
) -> ReplacedForward:
    """Replaces the forward of ``module`` by ``made``, which reads ``param`` at its home. With
    another weight, as of ``torch.func.functional_call``, the module's own forward runs."""
    own, reference = own_forward(module), weakref.ref(module)

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or living(reference)._parameters.get("weight") is param:
            return made(*args, **kwargs)
        return own(*args, **kwargs)

    return ReplacedForward(module, forward)


class HeadForward:
    """The forward of a head. Returns lazy logits if it can."""

    def __init__(
        self,
        module: nn.Module,
        way: HeadWay,
        model: nn.Module,
        plain: Callable[[torch.Tensor], torch.Tensor],
    ):
        self._module, self._way, self._plain = weakref.ref(module), way, plain
        self._around = [
            weakref.ref(each)
            for each in model.modules()
            if any(module is inner for inner in each.modules())
        ]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        x = whole(input)
        dtype = self._dtype(x)
        if dtype is None or not self._way.is_worth(x):
            return self._plain(x)
        way, bias = self._way.held(), self._module().bias
        # When the logits are computed, the bias may be back at home and autocast may have ended.
        bias = None if bias is None else bias.clone()
        where, casts = x.device.type, torch.is_autocast_enabled(x.device.type)
        handle = handle_of(way.param)
        version = handle.version

        def check() -> None:
            if handle_of(way.param) is not handle or handle.version != version:
                raise UsageError(
                    "logits were asked for after the weights of their layer had changed (by"
                    " optimizer.step(), or the model was unwrapped): they are computed when they"
                    " are used first. Use them before the step."
                )

        def compute(hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), torch.autocast(where, dtype, enabled=casts):
                return way.product(hidden, bias)

        def loss(
            rows: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str
        ) -> torch.Tensor:
            with torch.autocast(where, dtype, enabled=casts):
                return way.loss(rows, bias, target, ignore_index, reduction)

        head = Head(way.param.shape[0], compute, loss, check, way.context)
        root = way.root(x, bias, lambda _: Logits(head, x, dtype, compute))
        root._is_tracked = root.requires_grad
        return root

    def _dtype(self, x: torch.Tensor) -> torch.dtype | None:
        """Returns the dtype of lazy logits, or None if they must be computed now."""
        dtype = handle_of(self._way.param).flat_param.spec.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        elif x.dtype != dtype:
            return None  # torch raises its own error
        if (
            type(x) is not torch.Tensor
            or x.dim() < 2
            or x.shape[-1] != self._way.param.shape[1]
            or torch.is_inference_mode_enabled()
        ):
            return None
        # A checkpoint must return, and a module's backward hooks must get, an ordinary tensor.
        heard = any(
            each._backward_hooks or each._backward_pre_hooks
            for ref in self._around
            if (each := ref()) is not None
        )
        return None if heard or x.is_inference() or self._way.context.is_recomputed() else dtype


def head_forward(
    module: nn.Module,
    way: HeadWay,
    model: nn.Module,
    plain: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes the forward of ``module``, a head: lazy logits, or ``plain(input)`` where torch.compile
    reads it or they have to be computed at once."""
    lazily = torch.compiler.disable(HeadForward(module, way, model, plain).__call__)

    def logits(input: torch.Tensor) -> torch.Tensor:
        return plain(input) if torch.compiler.is_compiling() else lazily(input)

    return logits
