"""whole_blocks: the checksum blocks of an array that have certain elements.

Twins: a block between two spans is not read, and one that has two is read once.
"""

from __future__ import annotations

import random

import pytest
import torch

from infinity import native
from infinity.core.homes.arrays import StateArray, whole_blocks
from infinity.core.machine.tiers import Tier

BLOCK = native.CHECKSUM_NBYTES


def array(numel: int, dtype: torch.dtype = torch.float32) -> StateArray:
    return StateArray(Tier.NVME, dtype, numel, None)


def test_without_spans_it_is_all_of_the_array():
    assert list(whole_blocks(array(100), None)) == [(0, 400)]
    assert list(whole_blocks(array(100), [])) == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_blocks_are_whole_and_apart(dtype):
    each = BLOCK // dtype.itemsize  # elements of a block
    made = array(10 * each, dtype)
    assert list(whole_blocks(made, [(3 * each, 4 * each)])) == [(3 * BLOCK, 4 * BLOCK)]
    assert list(whole_blocks(made, [(4 * each - 1, 4 * each + 1)])) == [(3 * BLOCK, 5 * BLOCK)]
    assert list(whole_blocks(made, [(6 * each, 6 * each + 1), (0, 1)])) == [
        (0, BLOCK),
        (6 * BLOCK, 7 * BLOCK),
    ]


def test_a_block_of_two_spans_is_read_once():
    each = BLOCK // 4
    made = array(10 * each)
    spans = [(each, each + 9), (each + 9, each + 99), (2 * each - 1, 2 * each + 1)]
    assert list(whole_blocks(made, spans)) == [(BLOCK, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK)]
    assert list(whole_blocks(made, [(0, 9), (1, 2)])) == [(0, BLOCK)]


def test_the_last_block_ends_with_the_array():
    each = BLOCK // 4
    made = array(each + 10)
    assert list(whole_blocks(made, [(each + 1, each + 2)])) == [(BLOCK, BLOCK + 40)]


@pytest.mark.parametrize("may_overlap", [False, True])
def test_any_spans_get_their_blocks_and_no_other(may_overlap):
    """Method: the same by counting blocks, for spans at random that may touch one another."""
    made, generator = array(20 * BLOCK // 4 - 17), random.Random(1)
    for _ in range(200):
        cuts = generator.sample(range(made.numel), 2 * generator.randrange(1, 6))
        cuts = cuts if may_overlap else sorted(cuts)
        spans = [(min(pair), max(pair)) for pair in zip(cuts[::2], cuts[1::2])]
        wanted = {n for b, e in spans for n in range(b * 4 // BLOCK, (e - 1) * 4 // BLOCK + 1)}
        generator.shuffle(spans)
        found = [n for b, e in whole_blocks(made, spans) for n in range(b // BLOCK, -(-e // BLOCK))]
        assert found == sorted(wanted)
