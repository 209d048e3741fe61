"""Fused loss: computes a cross-entropy from a head's input, in parts of its rows.

Logits of one part exist at a time. The forward computes the gradients with the loss, and the
backward only multiplies them by its own; if each row has a loss, the backward computes them. Sums
over parts are in fp32.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...core.run.context import ForwardContext
from ...core.run.replaced_forward import ReplacedForward, own_forward
from ...core.units.forms import is_plain
from ...core.units.handle import handle_of
from ...errors import UsageError
from .heads import HeadWay, head_forward, is_head, output_embeddings, replaced
from .tiles import HEAD_RATIO

logger = logging.getLogger(__name__)

LEAST_NBYTES = 32 * 1024 * 1024  # of a part's fp32 logits: smaller products are slow


class FusedCrossEntropy(torch.autograd.Function):
    """The cross-entropies of rows of ``x @ weight.T + bias``, 0 for ignored ones; or their sum or
    mean. Logits are computed in ``dtype``, then cast to fp32."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, ignore_index: int, reduction: str, dtype):
        counted, ctx.dtype = target != ignore_index, dtype
        # Each row has a gradient of its own, or fp16 needs the scale that comes with it.
        ctx.is_late = reduction == "none" or torch.float16 in (dtype, x.dtype, weight.dtype)
        target = target.where(counted, 0)
        number = counted.sum() if reduction == "mean" else torch.ones((), device=x.device)
        losses, grads = _in_parts(
            x,
            weight,
            bias,
            target,
            torch.where(counted, 1 / number, 0.0),
            dtype,
            [needed and not ctx.is_late for needed in ctx.needs_input_grad[:3]],
        )
        losses.masked_fill_(~counted, 0)
        if ctx.is_late:
            ctx.save_for_backward(x, bias, target, counted, number)
            ctx.weight = weight
        else:
            ctx.save_for_backward(*grads)
        return losses if reduction == "none" else losses.sum() / number

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True: a fused loss has no gradient of second order. Leave out"
                " fused_loss."
            )
        if ctx.is_late:
            x, bias, target, counted, number = ctx.saved_tensors
            scale, given = (dy / number).where(counted, 0), (x, ctx.weight, bias)
            _, grads = _in_parts(*given, target, scale, ctx.dtype, ctx.needs_input_grad[:3])
            return *grads, *[None] * 4
        return *(None if grad is None else grad * dy for grad in ctx.saved_tensors), *[None] * 4


def _in_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Computes the cross-entropy of each row, and the gradients of their sum, weighted by
    ``scale``, by those of ``x``, ``weight`` and ``bias`` that are ``wanted``."""
    wants_x, wants_weight, wants_bias = wanted
    losses = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if wants_x else None
    dw = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
    db = torch.zeros_like(weight[:, 0], dtype=torch.float32) if wants_bias else None
    cast, added = weight.to(dtype), None if bias is None else bias.to(dtype)
    size = max(1, LEAST_NBYTES // (4 * len(weight)), x.numel() // len(weight))
    for rows in (slice(begin, begin + size) for begin in range(0, len(x), size)):
        part, at = x[rows].to(dtype), target[rows, None]
        logits = F.log_softmax(F.linear(part, cast, added).float(), 1)
        losses[rows] = -logits.gather(1, at)[:, 0]
        if not any(wanted):
            continue
        logits.exp_().scatter_add_(1, at, -torch.ones_like(at, dtype=torch.float32))
        grads = logits.mul_(scale[rows, None]).to(dtype)
        if dx is not None:
            dx[rows] = grads @ cast
        if dw is not None:
            dw += grads.T @ part
        if db is not None:
            db += grads.sum(0)
    of_inputs = zip((dx, dw, db), (x, weight, bias))
    return losses, [None if grad is None else grad.to(of.dtype) for grad, of in of_inputs]


class _Deferred(torch.autograd.Function):
    """The output of a head in autograd's graph, before it is computed."""

    @staticmethod
    def forward(ctx, x, weight, bias, make: Callable[[torch.Tensor], torch.Tensor]):
        ctx.save_for_backward(x)
        ctx.of_head = weight, bias  # copies, which no budget of activations is for
        return make(x)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = *ctx.saved_tensors, *ctx.of_head
        with torch.enable_grad():
            given = [
                None if each is None else each.detach().requires_grad_(needed)
                for each, needed in zip((x, weight, bias), ctx.needs_input_grad)
            ]
            where, dtype = x.device.type, dy.dtype
            casts = any(each.dtype != dtype for each in given if each is not None)
            with torch.autocast(where, dtype, enabled=casts):
                out = F.linear(*given)
            wanted = [each for each in given if each is not None and each.requires_grad]
            found = iter(torch.autograd.grad(out, wanted, dy))
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None


@dataclass(frozen=True)
class FusedHead(HeadWay):
    """A head whose weight is whole. ``weight``: a copy, for as long as the logits live: when their
    loss is computed, the parameter may be back at home, where one rank alone cannot read it."""

    weight: torch.Tensor | None = None

    def is_worth(self, hidden: torch.Tensor) -> bool:
        """Tells whether the logits are for a backward, or larger than the copy, which the few
        tokens of a generation are not."""
        return torch.is_grad_enabled() or hidden.numel() >= hidden.shape[-1] ** 2

    def held(self) -> FusedHead:
        """Returns one with a copy of the weight."""
        return dataclasses.replace(self, weight=self.param.clone())

    def product(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes the logits, without a graph."""
        logits = F.linear(hidden, self.weight, bias)
        # A view that a Function returns may not be written to.
        return torch.ops.aten._unsafe_view(logits, logits.shape)

    def root(
        self,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        make: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Returns what ``make(hidden)`` returns, in the graph of the logits."""
        return _Deferred.apply(hidden, self.weight, bias, make)

    def loss(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignore_index: int,
        reduction: str,
    ) -> torch.Tensor:
        """Computes the cross-entropy of rows of hidden states."""
        where, dtype = rows.device.type, rows.dtype
        if torch.is_autocast_enabled(where):
            dtype = torch.get_autocast_dtype(where)
        with torch.autocast(where, enabled=False):
            return FusedCrossEntropy.apply(
                rows, self.weight, bias, target, ignore_index, reduction, dtype
            )


def install_fused_loss(
    find: Callable[[], ForwardContext], model: nn.Module, without: Container[nn.Parameter]
) -> list[ReplacedForward]:
    """Replaces the forward of every head but those with a weight of ``without``. Returns the
    replacements."""
    outputs = output_embeddings(model)
    heads = []
    for module in outputs or model.modules():
        weight = None if "forward" in module.__dict__ else module._parameters.get("weight")
        if weight is None or weight in without or not is_head(module, outputs):
            continue
        if handle_of(weight) is not None and is_plain(weight):
            heads.append(module)
    if not heads and not without:
        logger.warning(
            "fused_loss has no effect: %s has no output layer, an nn.Linear with at least %d times"
            " as many outputs as inputs, or its get_output_embeddings().",
            type(model).__name__,
            HEAD_RATIO,
        )
    return [
        replaced(
            module,
            module.weight,
            head_forward(module, FusedHead(find, module.weight), model, own_forward(module)),
        )
        for module in heads
    ]
