"""Neighborhood attention by FlexAttention: tokens in the order of tiles, and a mask over blocks
that are such tiles, so that one block of keys is near in every axis.

block     128 tokens, one tile of the padded grid
padding   tokens that fill the last tiles of an axis; no query reads them
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F

from .attention_tiles import Axis

BLOCK_TILE = {1: (128,), 2: (8, 16), 3: (2, 8, 8)}  # 128 tokens, by the number of axes
BLOCK = 128


def attend_by_flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: Sequence[Axis]
) -> torch.Tensor:
    """Computes neighborhood attention; compiled on a GPU. On a processor it has no backward, and
    its scores are dense."""
    mask = block_mask(tuple(axes), q.device)
    attend = _compiled() if q.device.type == "cuda" else _flex()
    out = attend(
        *(in_blocks(each, axes) for each in (q, k, v)),
        block_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out_of_blocks(out, axes)


def _flex():
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled():
    return torch.compile(_flex(), dynamic=False)


def in_blocks(tensor: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Puts tokens into the order of tiles, each filled up with zeros. Takes and returns batch x
    heads x tokens x width."""
    tiles = BLOCK_TILE[len(axes)]
    ends = [(0, -axis.tokens % tile) for axis, tile in zip(axes, tiles)]
    tensor = tensor.unflatten(2, [axis.tokens for axis in axes])
    tensor = F.pad(tensor, [0, 0, *chain.from_iterable(reversed(ends))])
    for index in reversed(range(len(axes))):
        tensor = tensor.unflatten(2 + index, (-1, tiles[index]))
    outer = range(2, 2 + 2 * len(axes), 2)
    return tensor.permute(0, 1, *outer, *(each + 1 for each in outer), -1).flatten(2, -2)


def out_of_blocks(tensor: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Undoes :func:`in_blocks`."""
    tiles = BLOCK_TILE[len(axes)]
    counts = [-(-axis.tokens // tile) for axis, tile in zip(axes, tiles)]
    tensor = tensor.unflatten(2, (*counts, *tiles))
    pairs = ((2 + index, 2 + index + len(axes)) for index in range(len(axes)))
    tensor = tensor.permute(0, 1, *chain.from_iterable(pairs), -1)
    for index in range(len(axes)):
        tensor = tensor.flatten(2 + index, 3 + index)
    return tensor[(..., *(slice(axis.tokens) for axis in axes), slice(None))].flatten(2, -2)


@functools.lru_cache(maxsize=16)
def block_mask(axes: tuple[Axis, ...], device: torch.device):
    """Builds FlexAttention's BlockMask of the windows, without a mask of tokens x tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    of_axes = [_blocks_of(axis, tile) for axis, tile in zip(axes, BLOCK_TILE[len(axes)])]
    read, whole = (functools.reduce(np.kron, each) for each in zip(*of_axes))
    return BlockMask.from_kv_blocks(
        *_listed(read & ~whole, device),
        *_listed(whole, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=_reads(axes, device),
    )


def _blocks_of(axis: Axis, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which tile of keys each tile of queries reads, and reads whole."""
    begin = np.arange(0, axis.tokens, tile)
    end = begin + tile - 1
    first, last = axis.windows_in_tokens()
    low, high = np.minimum.reduceat(first, begin), np.maximum.reduceat(last, begin)
    read = (begin <= high[:, None]) & (low[:, None] <= end)
    low, high = np.maximum.reduceat(first, begin), np.minimum.reduceat(last, begin)
    return read, (low[:, None] <= begin) & (end <= high[:, None]) & (axis.dilation == 1)


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how many blocks are True in each row, and their columns first."""
    columns = np.argsort(~blocks, axis=1, kind="stable")
    return tuple(
        torch.from_numpy(each).to(device, torch.int32)[None, None]
        for each in (blocks.sum(1), columns)
    )


def _reads(axes: Sequence[Axis], device: torch.device) -> Callable[..., torch.Tensor]:
    """Makes the function that tells whether a query reads a key; both by their place in blocks."""
    tiles = BLOCK_TILE[len(axes)]
    counts = [-(-axis.tokens // tile) for axis, tile in zip(axes, tiles)]
    grid = torch.meshgrid(*map(torch.arange, (*counts, *tiles)), indexing="ij")
    places = [
        (tile * block + inner).flatten().to(device, torch.int32)
        for tile, block, inner in zip(tiles, grid, grid[len(axes) :])
    ]
    # A query of the padding has the window of its axis's last one: without a key its row is nan.
    of_queries = [place.clamp(max=axis.tokens - 1) for axis, place in zip(axes, places)]
    windows = [
        tuple(torch.from_numpy(each).to(place)[place.long()] for each in axis.windows_in_tokens())
        for axis, place in zip(axes, of_queries)
    ]

    def reads(batch, head, query, key):
        mask = key >= 0
        for axis, place, of_query, (first, last) in zip(axes, places, of_queries, windows):
            mask = mask & (first[query] <= place[key]) & (place[key] <= last[query])
            if axis.dilation > 1:
                mask = mask & ((place[key] - of_query[query]) % axis.dilation == 0)
        return mask

    return reads
