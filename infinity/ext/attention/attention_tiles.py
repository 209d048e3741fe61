"""Attention tiles: the window of each query in neighborhood attention, and how many tiles of keys
a kernel reads (Hassani et al. 2025, Generalized Neighborhood Attention, arXiv 2504.16922).

axis      one dimension of the grid of tokens, with its window, stride, dilation and causality
group     the positions i, i + dilation, i + 2 dilation, ... of an axis; no window leaves its group
leader    the query whose window ``stride`` consecutive queries of a group share
hull      the keys from the first to the last that a tile of queries reads
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from ...errors import ConfigError

QUERY_TILE = {1: (256,), 2: (16, 16), 3: (8, 8, 8)}  # of our own, by the number of axes
SAMPLED, AT_ONCE = 8, 4096  # tiles of a stride, and strides, that are looked at together


@dataclass(frozen=True)
class Axis:
    """One axis of the grid. ``window``, ``stride``: in tokens of a group."""

    tokens: int
    window: int
    stride: int = 1
    dilation: int = 1
    causal: bool = False

    def check(self, number: int) -> None:
        """Raises ConfigError if no such windows exist. ``number``: of the axis, from 0."""
        setting = (
            f"axis {number}: tokens {self.tokens}, window {self.window}, stride {self.stride},"
            f" dilation {self.dilation}"
        )
        if self.tokens < 2:
            raise ConfigError(
                f"{setting}: an axis has 2 tokens or more. Leave out an axis of 1 token"
            )
        if not 1 <= self.dilation <= self.tokens // 2:
            raise ConfigError(
                f"{setting}: give a dilation from 1 to {self.tokens // 2} (tokens / 2)"
            )
        most = self.tokens // self.dilation
        if not 2 <= self.window <= most:
            raise ConfigError(f"{setting}: give a window from 2 to {most} (tokens / dilation)")
        if not 1 <= self.stride <= self.window:
            raise ConfigError(f"{setting}: give a stride from 1 to {self.window} (the window)")

    @property
    def group_sizes(self) -> list[int]:
        """The tokens of each group."""
        return [-(-(self.tokens - group) // self.dilation) for group in range(self.dilation)]

    def windows(self, queries: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first and the last key of each query, all as positions in a group of ``size``
        tokens. Neither decreases from a query to the next."""
        begin = queries // self.stride * self.stride
        if self.causal:
            leader = np.minimum(begin + self.stride - 1, size - 1)
            return np.maximum(leader - self.window + 1, 0), queries
        left, right = self.window // 2, (self.window - 1) // 2
        leader = np.minimum(begin + self.stride // 2, size - 1)
        centre = np.clip(leader, left, size - 1 - right)
        return centre - left, centre + right

    def windows_in_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first and the last key of each token of the axis, as its tokens."""
        first, last = np.empty((2, self.tokens), dtype=np.int64)
        for group, size in enumerate(self.group_sizes):
            windows = self.windows(np.arange(size), size)
            first[group :: self.dilation], last[group :: self.dilation] = (
                group + self.dilation * each for each in windows
            )
        return first, last

    def pairs(self) -> int:
        """Counts the pairs of a query and a key in its window."""
        total = 0
        for size, count in Counter(self.group_sizes).items():
            first, last = self.windows(np.arange(size), size)
            total += count * int((last - first + 1).sum())
        return total

    def pairs_of_tiles(self, query_tile: int) -> int:
        """Counts the pairs of a query and a key in the hull of its tile, which has ``query_tile``
        tokens of a group."""
        total = 0
        for size, count in Counter(self.group_sizes).items():
            begin = np.arange(0, size, query_tile)
            end = np.minimum(begin + query_tile, size)
            first, last = self.windows(begin, size)[0], self.windows(end - 1, size)[1]
            total += count * int(((end - begin) * (last - first + 1)).sum())
        return total


def axes_of(
    shape: Any, window: Any, stride: Any = 1, dilation: Any = 1, causal: Any = False
) -> tuple[Axis, ...]:
    """Returns the axes of a grid. One value stands for every axis. Raises ConfigError if the values
    are no numbers, or no such windows exist."""
    count = len(shape) if isinstance(shape, Sequence) else 1
    if not 1 <= count <= 3:
        raise ConfigError(f"shape={shape!r} has {count} axes: give 1 to 3, as (30, 48, 80)")
    settings = {"shape": shape, "window": window, "stride": stride, "dilation": dilation}
    columns = [per_axis(name, value, count) for name, value in settings.items()]
    is_causal = per_axis("causal", causal, count)
    if not {0, 1}.issuperset(is_causal):
        raise ConfigError(f"causal={causal!r}: give True or False, or one of them for each axis")
    axes = tuple(Axis(*row) for row in zip(*columns, map(bool, is_causal)))
    for number, axis in enumerate(axes):
        axis.check(number)
    return axes


def per_axis(name: str, value: Any, count: int) -> tuple[int, ...]:
    """Returns a whole number for each of ``count`` axes. Raises ConfigError if there are none."""
    values = value if isinstance(value, Sequence) else (value,) * count
    if len(values) != count:
        raise ConfigError(f"{name}={value!r} has {len(values)} values for {count} axes")
    try:
        return tuple(operator.index(each) for each in values)
    except TypeError:
        raise ConfigError(f"{name}={value!r}: give whole numbers") from None


@dataclass(frozen=True)
class Reading:
    """What a kernel reads. ``tiles``: of keys, for the tile of queries that reads the most;
    ``all_tiles``: what dense attention reads for it. ``block_sparse``: no tile needs a mask."""

    strides: tuple[int, ...]
    tiles: int
    all_tiles: int
    block_sparse: bool

    @property
    def bound(self) -> float:
        """The most that the kernel gains over dense attention, if it is as efficient."""
        return self.all_tiles / self.tiles


def read_tiles(axes: Sequence[Axis], query_tile: Sequence[int], key_tile: Sequence[int]) -> Reading:
    """Counts the tiles of keys that a kernel reads; tiles are in tokens per axis."""
    readings = [_of_axis(*each) for each in zip(axes, query_tile, key_tile)]
    return Reading(
        tuple(axis.stride for axis in axes),
        math.prod(tiles for tiles, _ in readings),
        math.prod(-(-axis.tokens // tile) for axis, tile in zip(axes, key_tile)),
        all(sparse for _, sparse in readings),
    )


def worth_reading(
    axes: Sequence[Axis], query_tile: Sequence[int], key_tile: Sequence[int]
) -> list[Reading]:
    """Returns the strides that are worth it, from 1 on: nothing reads as few tiles while at most as
    many queries share a window. The last are the least that are block-sparse, if any are."""
    choices = [_strides_of(*each) for each in zip(axes, query_tile, key_tile)]
    readings = [
        read_tiles(with_strides(axes, strides), query_tile, key_tile)
        for strides in product(*choices)
    ]
    readings.sort(key=lambda each: (math.prod(each.strides), each.tiles, each.strides))
    best: list[Reading] = []
    for each in readings:
        sparse_first = each.block_sparse and not any(before.block_sparse for before in best)
        if not best or each.tiles < best[-1].tiles or sparse_first:
            best.append(each)
    return best


def with_strides(axes: Sequence[Axis], strides: Sequence[int]) -> list[Axis]:
    """Returns the axes with other strides."""
    return [replace(axis, stride=stride) for axis, stride in zip(axes, strides)]


def end_to_end(bound: float, share: float) -> float:
    """Returns how much faster a job becomes if ``share`` of its time is attention that gains
    ``bound`` (Amdahl's law)."""
    return 1 / (1 - share + share / bound)


def own_bound(axes: Sequence[Axis]) -> float:
    """Returns how many times as many pairs dense attention computes as our own tiles, which read
    the keys of their hulls and no others."""
    tiles = zip(axes, QUERY_TILE[len(axes)])
    return math.prod(axis.tokens**2 / axis.pairs_of_tiles(tile) for axis, tile in tiles)


def _of_axis(axis: Axis, query_tile: int, key_tile: int) -> tuple[int, bool]:
    """Returns the tiles that a tile of queries reads at most, and whether every tile of queries has
    one window, which begins and ends at edges of tiles."""
    most, sparse = 0, True
    for size in {axis.group_sizes[0], axis.group_sizes[-1]}:
        begin = np.arange(0, size, query_tile)
        tiles, at_edges = _read(axis, begin, size, query_tile, key_tile)
        most, sparse = max(most, int(tiles.max())), sparse and bool(at_edges.all())
    return most, sparse and not axis.causal


def _read(
    axis: Axis, begin: np.ndarray, size: int, query_tile: int, key_tile: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tiles of keys that the tiles of queries from ``begin`` on read, and whether each
    has one window between edges of tiles. The axis's stride may be an array, with a row for
    each."""
    first, last = axis.windows(begin, size)
    last_first, last = axis.windows(np.minimum(begin + query_tile, size) - 1, size)
    at_edges = (first % key_tile == 0) & (((last + 1) % key_tile == 0) | (last + 1 == size))
    return last // key_tile - first // key_tile + 1, (first == last_first) & at_edges


def _strides_of(axis: Axis, query_tile: int, key_tile: int) -> list[int]:
    """Returns the strides with which an axis reads fewer tiles than with any smaller one, and the
    least with which it is block-sparse.

    Most strides are ruled out by a few of their tiles: those that begin a window, where the keys of
    two windows are read.
    """
    fitting, least = [], math.inf
    fewest = -(-axis.window // key_tile)  # of any window
    for start in range(1, axis.window + 1, AT_ONCE):
        if axis.causal and least == fewest:
            break  # no further one reads less, and none is block-sparse
        strides = np.arange(start, min(start + AT_ONCE, axis.window + 1))
        tiles, sparse = _least_of(axis, strides, query_tile, key_tile)
        for stride, reads, may_be in zip(strides.tolist(), tiles.tolist(), sparse.tolist()):
            if reads >= least and not may_be:
                continue
            exact, is_sparse = _of_axis(replace(axis, stride=stride), query_tile, key_tile)
            if exact < least or is_sparse:
                fitting.append(stride)
                least = exact
            if is_sparse:
                return fitting
    return fitting


def _least_of(
    axis: Axis, strides: np.ndarray, query_tile: int, key_tile: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tiles that each stride reads at least, and whether it may be block-sparse, by
    some of its tiles."""
    least = np.zeros(len(strides), dtype=np.int64)
    sparse = np.full(len(strides), not axis.causal)
    rows = replace(axis, stride=strides[:, None])  # type: ignore[arg-type]
    for size in {axis.group_sizes[0], axis.group_sizes[-1]}:
        windows = (size - 1) // strides[:, None]  # that begin after the first
        number = np.arange(SAMPLED)[None] * np.maximum(windows, 1) // SAMPLED + 1
        begin = np.minimum(number, windows) * strides[:, None] // query_tile * query_tile
        tiles, at_edges = _read(rows, begin, size, query_tile, key_tile)
        least = np.maximum(least, tiles.max(axis=1))
        sparse &= at_edges.all(axis=1)
    return least, sparse
