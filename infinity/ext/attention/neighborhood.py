"""Neighborhood attention in tiles: torch's scaled dot product attention of one tile of queries
over its hull of keys at a time, on any device (Hassani et al. 2025, arXiv 2504.16922).

span      a tile of queries along one axis, with its hull of keys
tile      one span for each axis; it needs a mask only if its queries have several windows
grid      a tensor of batch x heads x tokens x width with an axis for each axis of the tokens

The backward computes each tile again, so that the forward saves queries, keys and values only, and
at most one tile's scores exist at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .attention_tiles import QUERY_TILE, Axis


@dataclass(frozen=True)
class Span:
    """``queries``, ``keys``: slices of the axis. ``windows``: the first and the last key of each
    query, as positions in ``keys``; None if all queries read all keys."""

    queries: slice
    keys: slice
    nkeys: int
    windows: tuple[np.ndarray, np.ndarray] | None

    def allowed(self, device: torch.device) -> torch.Tensor:
        """Returns which key each query reads, as bools of queries x keys."""
        if self.windows is None:
            return torch.ones(1, self.nkeys, dtype=torch.bool, device=device)
        first, last = (torch.from_numpy(each).to(device)[:, None] for each in self.windows)
        keys = torch.arange(self.nkeys, device=device)
        return (first <= keys) & (keys <= last)


Tile = tuple[Span, ...]


def spans_of(axis: Axis, tile: int) -> Iterator[Span]:
    """Yields the spans of an axis, ``tile`` queries each at most."""
    for group, size in enumerate(axis.group_sizes):
        for begin in range(0, size, tile):
            first, last = axis.windows(np.arange(begin, min(begin + tile, size)), size)
            low, high = int(first[0]), int(last[-1])
            is_one = low == first[-1] and high == last[0]
            yield Span(
                _slice(axis, group, begin, begin + len(first)),
                _slice(axis, group, low, high + 1),
                high + 1 - low,
                None if is_one else (first - low, last - low),
            )


def _slice(axis: Axis, group: int, begin: int, end: int) -> slice:
    """Returns the slice of the axis of positions from ``begin`` to ``end`` in a group."""
    start = group + begin * axis.dilation
    return slice(start, start + (end - begin - 1) * axis.dilation + 1, axis.dilation)


def attend_in_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: Sequence[Axis]
) -> torch.Tensor:
    """Computes neighborhood attention. Tensors: batch x heads x tokens x width; q may have a
    multiple of the heads of k and v. Differentiable once."""
    return _Tiled.apply(q, k, v, axes)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, axes):
        ctx.save_for_backward(q, k, v)
        ctx.axes, ctx.tile = axes, _query_tile(k, v, len(axes))
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        into = _grid(out, axes)
        q, k, v = (_grid(each, axes) for each in (q, k, v))
        for tile in _tiles(axes, ctx.tile):
            queries, keys = _boxes(tile)
            into[queries] = _attend(q[queries], k[keys], v[keys], tile)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        grids = [_grid(each, ctx.axes) for each in ctx.saved_tensors]
        dy = _grid(dy, ctx.axes)
        needed = [index for index in range(3) if ctx.needs_input_grad[index]]
        # A key is in many tiles: their sum is kept in fp32, a query's gradient is one tile's.
        grads = {
            index: torch.zeros_like(
                grids[index], dtype=torch.promote_types(dy.dtype, torch.float32) if index else None
            )
            for index in needed
        }
        for tile in _tiles(ctx.axes, ctx.tile):
            queries, keys = _boxes(tile)
            boxes = (queries, keys, keys)
            parts = [grid[box].detach() for grid, box in zip(grids, boxes)]
            with torch.enable_grad():
                for index in needed:
                    parts[index].requires_grad_()
                out = _attend(*parts, tile)
            needed_grads = torch.autograd.grad(out, [parts[index] for index in needed], dy[queries])
            for index, grad in zip(needed, needed_grads):
                grads[index][boxes[index]] += grad
        return *(
            grads[index].flatten(2, -2).to(grids[index].dtype) if index in grads else None
            for index in range(3)
        ), None


def _query_tile(k: torch.Tensor, v: torch.Tensor, naxes: int) -> tuple[int, ...]:
    """Returns the queries of a tile along each axis: 1 if a key or value is not finite. A mask
    multiplies what it hides by 0, which leaves nan: then every query reads its own window only."""
    if k.is_meta:
        return QUERY_TILE[naxes]
    total = k.sum(dtype=torch.float32) + v.sum(dtype=torch.float32)
    return QUERY_TILE[naxes] if math.isfinite(total.item()) else (1,) * naxes


def _grid(tensor: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    return tensor.unflatten(2, [axis.tokens for axis in axes])


def _tiles(axes: Sequence[Axis], tile: Sequence[int]) -> Iterator[Tile]:
    return product(*(list(spans_of(*each)) for each in zip(axes, tile)))


def _boxes(tile: Tile) -> tuple[tuple, tuple]:
    """Returns the indices of the tile's queries and of its keys in a grid."""
    return (
        (..., *(span.queries for span in tile), slice(None)),
        (..., *(span.keys for span in tile), slice(None)),
    )


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Computes one tile. Returns a grid of its queries."""
    flat = [each.flatten(2, -2) for each in (q, k, v)]
    out = F.scaled_dot_product_attention(
        *flat, attn_mask=_mask(tile, q.shape[2:-1], q.device), enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.unflatten(2, q.shape[2:-1])


def _mask(tile: Tile, sizes: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Returns which key of its hull each query reads: bools of queries x keys; None if all do."""
    if all(span.windows is None for span in tile):
        return None
    mask = torch.ones(1, 1, dtype=torch.bool, device=device)
    for span, size in zip(tile, sizes):
        allowed = span.allowed(device).expand(size, -1)
        mask = (mask[:, None, :, None] & allowed[None, :, None, :]).flatten(0, 1).flatten(1, 2)
    return mask
