"""Tiles of generalized neighborhood attention (Hassani et al. 2025): windows, tiles read, and the
strides that are worth it, against published rows and against counting.

**published**: bounds and speed-ups of the paper, for the strides of its tables.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import pytest
from attention_cases import row_of, visible, windows
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import ConfigError
from infinity.ext.attention import attention_tiles, neighborhood
from infinity.ext.attention.attention_tiles import axes_of, end_to_end, read_tiles, worth_reading

HUNYUAN = ((30, 48, 80), (18, 24, 24), (4, 8, 8), (2, 8, 8), 0.607)
COSMOS = ((16, 44, 80), (16, 24, 16), (8, 4, 8), (8, 4, 4), 0.587)
WIDE_COSMOS = ((16, 44, 80), (16, 32, 48), (8, 4, 8), (8, 4, 4), 0.587)
FLUX = ((256, 256), (80, 80), (16, 16), (16, 8), 0.518)
PUBLISHED = [  # a model, a stride, the bound, the whole model's speed-up
    (HUNYUAN, (1, 1, 1), 3.273, 1.729),
    (HUNYUAN, (2, 1, 1), 3.600, 1.781),
    (HUNYUAN, (1, 1, 8), 5.455, 1.983),
    (HUNYUAN, (2, 1, 8), 6.000, 2.024),
    (HUNYUAN, (1, 8, 8), 9.091, 2.175),
    (HUNYUAN, (2, 8, 8), 10.00, 2.204),
    (HUNYUAN, (16, 8, 8), 11.111, 2.234),
    (COSMOS, (1, 1, 1), 5.238, 1.905),
    (COSMOS, (1, 8, 1), 6.111, 1.964),
    (COSMOS, (1, 1, 8), 7.857, 2.050),
    (COSMOS, (1, 8, 8), 9.167, 2.096),
    (WIDE_COSMOS, (1, 1, 1), 1.746, 1.335),
    (WIDE_COSMOS, (1, 8, 1), 1.964, 1.405),
    (WIDE_COSMOS, (1, 1, 8), 2.037, 1.426),
    (WIDE_COSMOS, (1, 8, 8), 2.292, 1.494),
    (FLUX, (1, 1), 6.095, 1.764),
    (FLUX, (16, 1), 8.533, 1.843),
    (FLUX, (16, 16), 10.24, 1.878),
]


@pytest.mark.parametrize(("model", "stride", "bound", "speed_up"), PUBLISHED)
def test_the_published_rows_are_counted(model, stride, bound, speed_up):
    """Twin: another tile of keys has another bound."""
    shape, window, query_tile, key_tile, share = model
    found = read_tiles(axes_of(shape, window, stride), query_tile, key_tile)
    assert found.bound == pytest.approx(bound, abs=6e-4)
    assert end_to_end(found.bound, share) == pytest.approx(speed_up, abs=1e-3)
    larger = [2 * tile for tile in key_tile]
    assert read_tiles(axes_of(shape, window, stride), query_tile, larger).bound < bound


@pytest.mark.parametrize(
    ("model", "most"), [(HUNYUAN, 100 / 9), (COSMOS, 55 / 6), (FLUX, 10.24)], ids=str
)
def test_operations_bound_what_windows_gain(model, most):
    """Method: pairs of tokens over pairs that are read. Twin: no stride worth it gains more."""
    shape, window, *tiles, _ = model
    axes = axes_of(shape, window)
    assert math.prod(axis.tokens**2 / axis.pairs() for axis in axes) == pytest.approx(most)
    assert all(each.bound < most + 1e-9 for each in worth_reading(axes, *tiles))


def test_the_strides_worth_it_are_those_that_the_paper_shows():
    """Method: HunyuanVideo's seven rows, without being told its strides; the last is block-sparse,
    and gains what operations allow. Twin: the row before it is not block-sparse."""
    shape, window, *tiles, _ = HUNYUAN
    axes = axes_of(shape, window)
    found = worth_reading(axes, *tiles)
    assert [each.strides for each in found] == [row[1] for row in PUBLISHED if row[0] is HUNYUAN]
    assert [each.block_sparse for each in found] == [False] * 6 + [True]
    by_operations = math.prod(axis.tokens**2 / axis.pairs() for axis in axes)
    assert found[-1].bound == pytest.approx(by_operations) == pytest.approx(100 / 9)


@pytest.mark.parametrize("query_tile", [128, 256])
def test_the_least_block_sparse_stride_is_nattens(query_tile):
    """Method: NATTEN's documentation says 256 for 32 K tokens with a window of 2 K, on the tiles of
    Hopper and of Blackwell. Twin: 128 is not."""
    axes = axes_of(32768, 2048)
    assert worth_reading(axes, [query_tile], [128])[-1].strides == (256,)
    assert not read_tiles(axes_of(32768, 2048, 128), [query_tile], [128]).block_sparse


@settings(max_examples=150, deadline=None)
@given(windows())
def test_windows_are_those_of_the_definition(given_windows):
    """Method: every query's first and last key, and their number. Twin: in a window that is not
    causal every query has as many keys as the window."""
    for axis, *rule in zip(axes_of(**given_windows), *given_windows.values()):
        rows = [row_of(query, *rule) for query in range(axis.tokens)]
        first, last = axis.windows_in_tokens()
        assert [(row[0], row[-1]) for row in rows] == list(zip(first, last))
        assert sum(map(len, rows)) == axis.pairs()
        assert axis.causal or {len(row) for row in rows} == {axis.window}


@settings(max_examples=150, deadline=None)
@given(windows(), st.data())
def test_tiles_read_are_those_that_the_mask_touches(given_windows, data):
    """Method: counts, without dilation, the tiles of keys with any key that any query of a tile
    reads, in the oracle's mask; the most of any tile. Twin: windows of all tokens read them
    all."""
    given_windows["dilation"] = (1,) * len(given_windows["shape"])
    shape = given_windows["shape"]
    tiles = [[data.draw(st.integers(1, n)) for n in shape] for _ in range(2)]
    mask = visible(**given_windows).view(*shape, *shape)
    queries, keys = (
        [[slice(at, at + tile) for at in range(0, n, tile)] for n, tile in zip(shape, tiles_of)]
        for tiles_of in tiles
    )
    counts = [
        sum(bool(mask[(*rows, *columns)].any()) for columns in product(*keys))
        for rows in product(*queries)
    ]
    found = read_tiles(axes_of(**given_windows), *tiles)
    assert (max(counts), len(list(product(*keys)))) == (found.tiles, found.all_tiles)
    whole = read_tiles(axes_of(shape, shape), *tiles)
    assert whole.tiles == whole.all_tiles == found.all_tiles


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 60), st.data())
def test_with_dilation_the_tiles_of_every_group_count(n, data):
    """Method: the same for one axis, group by group. Twin: the next test."""
    draw = lambda least, most: data.draw(st.integers(least, most))
    dilation = draw(1, min(4, n // 2))
    window = draw(2, n // dilation)
    rule = (window, draw(1, window), dilation, data.draw(st.booleans()))
    query_tile, key_tile = draw(1, n), draw(1, n)
    most = 0
    for group in range(dilation):
        mask = visible((n,), *((each,) for each in rule))[group::dilation, group::dilation]
        for rows in mask.split(query_tile):
            most = max(most, sum(bool(each.any()) for each in rows.split(key_tile, dim=1)))
    found = read_tiles(axes_of(n, *rule), [query_tile], [key_tile])
    assert (found.tiles, found.all_tiles) == (most, -(-n // key_tile))


def test_a_smaller_group_may_read_more():
    """Method: groups of 4 and of 3 tokens; only in the smaller one a block is shifted at the border
    and has parts of two tiles. Twin: the larger one alone."""
    assert read_tiles(axes_of(7, 2, 2, 2), [1], [2]).tiles == 2
    assert read_tiles(axes_of(4, 2, 2), [1], [2]).tiles == 1


WRONG = [
    ({"window": 1}, r"axis 0: tokens 64, window 1, .* from 2 to 64"),
    ({"window": 65}, "window from 2 to 64"),
    ({"window": 33, "dilation": 2}, r"window from 2 to 32 \(tokens / dilation\)"),
    ({"stride": -1}, r"stride -1, .* from 1 to 8 \(the window\)"),
    ({"stride": 9}, "stride from 1 to 8"),
    ({"dilation": 0}, "dilation from 1 to 32"),
    ({"dilation": 33}, "dilation from 1 to 32"),
    ({"window": (8, 8)}, r"window=\(8, 8\) has 2 values for 1 axes"),
    ({"window": 8.0}, r"window=8.0: give whole numbers"),
    ({"window": "8"}, "window='8': give whole numbers"),
    ({"causal": 2}, "causal=2: give True or False"),
    ({"shape": (64, 1)}, "axis 1: tokens 1, .* Leave out an axis of 1 token"),
    ({"shape": (8, 8, 8, 8)}, "has 4 axes: give 1 to 3"),
    ({"shape": ()}, "has 0 axes"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_windows_that_do_not_exist_are_refused_with_their_numbers(wrong, said):
    """Twin: the same call without the wrong value."""
    right = {"shape": 64, "window": 8}
    assert axes_of(**right)
    with pytest.raises(ConfigError, match=said):
        axes_of(**right | wrong)


def test_strides_are_those_of_trying_all_one_by_one():
    """Method: random axes, tiles, dilations, causal or not. The twin: half of the strides."""
    draw, differing = random.Random(20261129), 0
    for _ in range(300):
        tokens = draw.randint(2, 400)
        dilation = draw.randint(1, max(1, min(4, tokens // 2)))
        window = draw.randint(2, max(2, tokens // dilation))
        if window > tokens // dilation:
            continue
        (axis,) = axes_of(tokens, window, 1, dilation, draw.random() < 0.3)
        tiles = draw.choice([1, 3, 8, 16, 61]), draw.choice([1, 4, 8, 31, 128])
        expected, least = [], math.inf
        for stride in range(1, window + 1):
            reads, sparse = attention_tiles._of_axis(replace(axis, stride=stride), *tiles)
            if reads < least or sparse:
                expected.append(stride)
                least = reads
            if sparse:
                break
        assert attention_tiles._strides_of(axis, *tiles) == expected, (axis, tiles)
        differing += expected[-1] > window // 2
    assert differing > 10


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_of_half_a_million_looks_at_few_strides(causal, monkeypatch):
    """Method: counts the strides that are looked at with all their tiles. Twin: there are half a
    million."""
    looked, of_axis = [], attention_tiles._of_axis
    monkeypatch.setattr(
        attention_tiles, "_of_axis", lambda *given: looked.append(1) or of_axis(*given)
    )
    (axis,) = axes_of(1_000_000, 500_000, 1, 1, causal)
    assert attention_tiles._strides_of(axis, 64, 64)[:2] == [1, 32]
    assert len(looked) < 20_000


@pytest.mark.parametrize(
    ("shape", "window", "stride", "causal"),
    [(1000, 300, 1, False), ((40, 50), (9, 20), (3, 1), True), ((12, 20, 17), 6, 2, False)],
)
def test_the_bound_of_own_tiles_counts_the_keys_that_they_read(shape, window, stride, causal):
    """Method: the spans of the kernel itself. With tiles of one key a simulated kernel may read
    less for its largest tile only."""
    axes = axes_of(shape, window, stride, 1, causal)
    pairs = [
        sum(
            len(range(axis.tokens)[span.queries]) * span.nkeys
            for span in neighborhood.spans_of(axis, tile)
        )
        for axis, tile in zip(axes, attention_tiles.QUERY_TILE[len(axes)])
    ]
    dense = math.prod(axis.tokens**2 for axis in axes)
    assert attention_tiles.own_bound(axes) == pytest.approx(dense / math.prod(pairs))
    operations = dense / math.prod(axis.pairs() for axis in axes)
    assert 1 <= attention_tiles.own_bound(axes) <= operations
