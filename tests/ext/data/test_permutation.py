"""Permutation: every place has one sample, any place by itself, and keys give different orders."""

from __future__ import annotations

import numpy as np
import pytest

from infinity.ext.data.permutation import mixed, shuffled


@pytest.mark.parametrize("samples", [*range(1, 18), 63, 64, 65, 255, 1000, 4096, 4097])
def test_every_sample_is_at_one_place(samples):
    found = shuffled(np.arange(samples), samples, key=5)
    assert sorted(found.tolist()) == list(range(samples))


def test_a_place_is_computed_by_itself():
    whole = shuffled(np.arange(1000), 1000, key=9)
    assert all(shuffled(np.array([n]), 1000, key=9)[0] == whole[n] for n in (0, 1, 500, 999))


def test_keys_and_seeds_give_other_orders():
    one, other = (shuffled(np.arange(1000), 1000, key) for key in (1, 2))
    assert (one != other).mean() > 0.9
    assert len({mixed(a, b) for a in range(30) for b in range(30)}) == 900
    assert mixed(1, 2) != mixed(2, 1) and 0 <= mixed(-1, 2**70) < 2**64


def test_samples_spread_evenly():
    """Claim: the first places of 1,000 orders hit ten equal parts of the samples alike: chi-square
    of 9 degrees, below its 99.9 % point. The twin: an order that is not shuffled is far above."""

    def chi_square(firsts):
        counts = np.bincount(np.asarray(firsts) // 410, minlength=10)
        return (((counts - len(firsts) / 10) ** 2) / (len(firsts) / 10)).sum()

    assert chi_square([shuffled(np.array([0]), 4097, key)[0] for key in range(1000)]) < 27.9
    assert chi_square([0] * 1000) > 1000


def test_a_billion_samples_take_no_memory():
    found = shuffled(np.arange(512), 10**9, key=3)
    assert len(set(found.tolist())) == 512 and found.max() < 10**9 and found.std() > 10**8
