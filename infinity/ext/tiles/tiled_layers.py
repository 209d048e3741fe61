"""Tiled layers: compute with a weight larger than the device's budget, one tile at a time.

tile    consecutive rows of a weight; at most one of a layer is on the device

The weight is never whole on the device, in forward or backward. Its gradient is accumulated at home
tile by tile. Sums over tiles are added in another order than a single product adds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...core.run.context import ForwardContext
from ...core.run.replaced_forward import ReplacedForward
from ...core.units.forms import is_plain, local_of
from . import sharded_layers
from .heads import HeadWay, head_forward, is_head, output_embeddings, replaced
from .lazy_logits import whole
from .sharded_layers import in_style, style_of
from .tiles import Tiles

LOGITS_NBYTES = 32 * 1024 * 1024  # of a tile's fp32 logits at once: more tokens are split


class TiledLinear(torch.autograd.Function):
    """``x @ weight.T + bias``; the weight's rows are outputs."""

    @staticmethod
    def forward(
        ctx,
        x,
        bias,
        param,
        tiles: Tiles,
        make: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        """Computes the product. ``make(x)``, if given, returns a tensor of its shape instead."""
        ctx.save_for_backward(x)
        ctx.tiles, ctx.handle, ctx.version, ctx.has_bias = (
            tiles,
            tiles.handle,
            tiles.handle.version,
            bias is not None,
        )
        return TiledLinear.product(x, bias, tiles) if make is None else make(x)

    @staticmethod
    def product(x: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
        """Computes the output, without a graph."""
        out = None
        for begin, end, weight in tiles.each():
            part = F.linear(x, weight, None if bias is None else bias[begin:end])
            if out is None:
                out = part.new_empty(*x.shape[:-1], tiles.shape[0])
            out[..., begin:end] = part
        return out

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        tiles: Tiles = ctx.tiles
        tiles.check(ctx.handle, ctx.version)
        x_rows, dy_rows = x.reshape(-1, x.shape[-1]).to(dy.dtype), dy.reshape(-1, dy.shape[-1])
        # Sums over tiles are kept in fp32: each product is rounded already.
        dx = (
            torch.zeros_like(x_rows, dtype=torch.promote_types(x_rows.dtype, torch.float32))
            if ctx.needs_input_grad[0]
            else None
        )
        with tiles.taking_rows(ctx) as grads:
            for begin, end, weight in (
                tiles.each() if dx is not None else ((*span, None) for span in tiles.spans())
            ):
                if dx is not None:
                    dx.add_(dy_rows[:, begin:end] @ weight.to(dy.dtype))
                grads.land(
                    begin, end, lambda begin=begin, end=end: dy_rows[:, begin:end].T @ x_rows
                )
        db = dy_rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[1] else None
        return None if dx is None else dx.view(x.shape).to(x.dtype), db, grads.whole, None, None


class TiledCrossEntropy(torch.autograd.Function):
    """The cross-entropy of every row of ``x @ weight.T + bias`` against ``target``; 0 for ignored
    rows.

    Logits are computed in x's dtype or autocast's, then cast to fp32. A tile's logits exist only
    while it is computed; the backward recomputes them.
    """

    @staticmethod
    def forward(ctx, x, bias, target, param, ignore_index: int, tiles: Tiles):
        largest = torch.full(x.shape[:1], -torch.inf, dtype=torch.float32, device=x.device)
        total, chosen = torch.zeros_like(largest), torch.zeros_like(largest)
        for begin, end, weight in tiles.each():
            for rows in TiledCrossEntropy._parts(x, end - begin):
                logits = F.linear(x[rows], weight, None if bias is None else bias[begin:end])
                ctx.dtype = logits.dtype
                logits = logits.float()
                mine, column = TiledCrossEntropy._targets(target[rows], begin, end)
                chosen[rows][mine] = logits[mine, column]
                now = torch.maximum(largest[rows], logits.amax(1))
                finite = now.masked_fill(now == -torch.inf, 0)  # all classes so far may be masked
                total[rows] *= (largest[rows] - finite).exp_()
                total[rows] += logits.sub_(finite[:, None]).exp_().sum(1)
                largest[rows] = now
        normalizer = largest + total.log()
        ctx.save_for_backward(x, bias, target, normalizer)
        ctx.tiles, ctx.handle, ctx.version, ctx.ignore_index = (
            tiles,
            tiles.handle,
            tiles.handle.version,
            ignore_index,
        )
        return (normalizer - chosen).masked_fill_(target == ignore_index, 0)

    @staticmethod
    def backward(ctx, dy):
        x, bias, target, normalizer = ctx.saved_tensors
        tiles: Tiles = ctx.tiles
        tiles.check(ctx.handle, ctx.version)
        dy = dy.masked_fill(target == ctx.ignore_index, 0)
        dx = (
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            if ctx.needs_input_grad[0]
            else None
        )
        db = torch.empty_like(bias) if ctx.needs_input_grad[1] else None
        with tiles.taking_rows(ctx) as grads:
            for begin, end, weight in tiles.each():
                weight = weight.to(ctx.dtype)
                dw = torch.zeros_like(weight, dtype=torch.float32)
                db_tile = torch.zeros(end - begin, dtype=torch.float32, device=x.device)
                for rows in TiledCrossEntropy._parts(x, end - begin):
                    part = x[rows].to(ctx.dtype)
                    logits = F.linear(
                        part, weight, None if bias is None else bias[begin:end].to(ctx.dtype)
                    ).float()
                    dlogits = logits.sub_(normalizer[rows, None]).exp_()
                    mine, column = TiledCrossEntropy._targets(target[rows], begin, end)
                    dlogits[mine, column] -= 1
                    dlogits = dlogits.mul_(dy[rows, None]).to(ctx.dtype)
                    if dx is not None:
                        dx[rows] += dlogits @ weight
                    dw += dlogits.T @ part
                    db_tile += dlogits.sum(0)
                grads.land(begin, end, lambda dw=dw: dw.to(tiles.param.dtype))
                if db is not None:
                    db[begin:end] = db_tile
        return None if dx is None else dx.to(x.dtype), db, None, grads.whole, None, None

    @staticmethod
    def _parts(x: torch.Tensor, width: int) -> Iterator[slice]:
        """Returns the slices of rows whose logits are computed at once, for a tile of ``width``."""
        size = max(1, LOGITS_NBYTES // (4 * width))
        return (slice(begin, begin + size) for begin in range(0, x.shape[0], size))

    @staticmethod
    def _targets(target: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows whose target is in this tile, and their targets' columns in it."""
        mine = ((target >= begin) & (target < end)).nonzero().squeeze(1)
        return mine, target[mine] - begin


class TiledConv1D(torch.autograd.Function):
    """``x @ weight + bias``; the weight's rows are inputs."""

    @staticmethod
    def forward(ctx, x, bias, param, tiles: Tiles):
        out, dtype = None, None
        for begin, end, weight in tiles.each():
            part = x[..., begin:end] @ weight
            dtype = part.dtype
            part = part.to(torch.promote_types(dtype, torch.float32))
            out = part if out is None else out.add_(part)
        if bias is not None:
            out = out.add_(bias)
        out = out.to(dtype)
        ctx.save_for_backward(x)
        ctx.tiles, ctx.handle, ctx.version, ctx.has_bias = (
            tiles,
            tiles.handle,
            tiles.handle.version,
            bias is not None,
        )
        return out

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        tiles: Tiles = ctx.tiles
        tiles.check(ctx.handle, ctx.version)
        x_rows, dy_rows = x.reshape(-1, x.shape[-1]).to(dy.dtype), dy.reshape(-1, dy.shape[-1])
        dx = torch.empty_like(x_rows) if ctx.needs_input_grad[0] else None
        with tiles.taking_rows(ctx) as grads:
            for begin, end, weight in (
                tiles.each() if dx is not None else ((*span, None) for span in tiles.spans())
            ):
                if dx is not None:
                    torch.mm(dy_rows, weight.T.to(dy.dtype), out=dx[:, begin:end])
                grads.land(
                    begin, end, lambda begin=begin, end=end: x_rows[:, begin:end].T @ dy_rows
                )
        db = dy_rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[1] else None
        return None if dx is None else dx.view(x.shape).to(x.dtype), db, grads.whole, None


class TiledEmbedding(torch.autograd.Function):
    """Looks up rows of the weight by index."""

    @staticmethod
    def forward(ctx, ids, padding_idx, param, tiles: Tiles):
        flat_ids = ids.reshape(-1)
        dtype, width = tiles.handle.flat_param.spec.dtype, tiles.shape[1]
        out = torch.empty(flat_ids.numel(), width, dtype=dtype, device=ids.device)
        for begin, end, weight in tiles.each(flat_ids):
            inside = ((flat_ids >= begin) & (flat_ids < end)).nonzero().squeeze(1)
            out[inside] = weight[flat_ids[inside] - begin]
        ctx.save_for_backward(flat_ids)
        ctx.tiles, ctx.handle, ctx.padding_idx = tiles, tiles.handle, padding_idx
        return out.view(*ids.shape, width)

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        tiles: Tiles = ctx.tiles
        tiles.check(ctx.handle, None)
        dy_rows = dy.reshape(-1, dy.shape[-1])
        with tiles.taking_rows(ctx) as grads:
            for begin, end in tiles.spans(ids if grads.adds else None):
                grads.land(
                    begin,
                    end,
                    lambda begin=begin, end=end: TiledEmbedding._grad(
                        ids, dy_rows, begin, end, ctx.padding_idx
                    ),
                )
        return None, None, grads.whole, None

    @staticmethod
    def _grad(
        ids: torch.Tensor, dy: torch.Tensor, begin: int, end: int, padding_idx: int | None
    ) -> torch.Tensor:
        inside = (ids >= begin) & (ids < end)
        if padding_idx is not None:
            inside &= ids != padding_idx
        chosen = inside.nonzero().squeeze(1)
        grad = dy.new_zeros(end - begin, dy.shape[1])
        return grad.index_add_(0, ids[chosen] - begin, dy[chosen])


def install_tiles(
    find: Callable[[], ForwardContext], model: nn.Module, rows: dict[nn.Parameter, int]
) -> list[ReplacedForward]:
    """Replaces the forward of every module that uses a weight in ``rows``: it runs in tiles of that
    many rows. Returns the replacements."""
    removers, outputs = [], output_embeddings(model)
    for module in model.modules():
        param = module._parameters.get("weight")
        if param is not None and param in rows:
            tiles = Tiles(find, param, rows[param])
            forward = in_style(module, _forward(module, tiles, model, outputs))
            removers.append(replaced(module, param, forward))
    return removers


@dataclass(frozen=True)
class TiledHead(HeadWay):
    """A head that runs in tiles."""

    tiles: Tiles

    def product(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes the logits, without a graph."""
        return TiledLinear.product(hidden, bias, self.tiles)

    def root(
        self,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        make: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Returns what ``make(hidden)`` returns, in the graph of the logits."""
        return TiledLinear.apply(hidden, bias, self.param, self.tiles, make)

    def loss(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignore_index: int,
        reduction: str,
    ) -> torch.Tensor:
        """Computes the cross-entropy of rows of hidden states."""
        losses = TiledCrossEntropy.apply(rows, bias, target, self.param, ignore_index, self.tiles)
        if reduction == "mean":
            return losses.sum() / (target != ignore_index).sum()
        return losses if reduction == "none" else losses.sum()


def _forward(
    module: nn.Module, tiles: Tiles, model: nn.Module, outputs: Sequence[nn.Module]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the tiled forward of ``module``. torch.compile breaks the graph there: moving weights
    cannot be compiled."""
    reference, is_sharded = weakref.ref(module), not is_plain(tiles.param)
    if isinstance(module, nn.Embedding):
        last = module.num_embeddings

        def rows(ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
            return TiledEmbedding.apply(ids, padding_idx, tiles.param, tiles)

        @torch.compiler.disable
        def embed(input: torch.Tensor) -> torch.Tensor:
            if input.dtype not in (torch.int32, torch.int64):
                raise RuntimeError(f"ids of an embedding are int32 or int64, not {input.dtype}")
            ids = local_of(input)
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < last:
                raise IndexError(f"index out of range in self: an embedding of {last} rows")
            if is_sharded:
                return sharded_layers.lookup(reference(), input, rows)
            return rows(input, reference().padding_idx)

        return embed
    kind, outputs_at = (TiledLinear, 0) if isinstance(module, nn.Linear) else (TiledConv1D, 1)
    has_style = style_of(module) is not None

    def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        inputs = tiles.shape[1 - outputs_at]
        if x.size(-1) != inputs:
            raise RuntimeError(
                f"an input of {x.size(-1)} columns for a weight of {tuple(tiles.shape)}"
            )
        return kind.apply(x, bias, tiles.param, tiles)

    @torch.compiler.disable
    def linear(input: torch.Tensor) -> torch.Tensor:
        if is_sharded:
            return sharded_layers.linear(
                reference(), outputs_at, input, product, has_style=has_style
            )
        return product(whole(input), reference().bias)

    if is_head(module, outputs) and not is_sharded:
        way = TiledHead(tiles.find_context, tiles.param, tiles)
        return head_forward(module, way, model, linear)
    return linear
