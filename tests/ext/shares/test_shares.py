"""Shares of a batch for ranks of unlike speed: the best split, when it changes, and averages that
are weighed by it.

Words used here: see `infinity.ext.shares.paces`. **greedy**: the same split, one sample at a
time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pair
import pytest
import torch

from infinity.ext.shares.paces import EVERY_STEPS, LEAST_GAIN, Split, split, step_seconds
from infinity.ranks import kinds
from infinity.ranks.collectives import Collectives
from infinity.ranks.parallel_dims import ParallelDims


def greedy(batch: int, paces: list[float]) -> list[int]:
    shares = [1] * len(paces)
    for _ in range(batch - len(paces)):
        rank = min(range(len(paces)), key=lambda r: ((shares[r] + 1) * paces[r], r))
        shares[rank] += 1
    return shares


@pytest.mark.parametrize(
    ("batch", "paces", "shares", "gain"),
    [(12, (1, 2), [8, 4], 1.5), (60, (1, 2), [40, 20], 1.5), (12, (1, 1), [6, 6], 1.0)],
)
def test_gavel_heterogeneity_a_rank_of_half_the_speed_gets_half_the_samples(
    batch, paces, shares, gain
):
    """Two ranks, one of which needs twice as long for a sample: steps take two thirds of the
    seconds. Twin: equal ranks, for which nothing is gained."""
    assert split(batch, paces) == shares
    even = [batch // 2] * 2
    assert step_seconds(even, paces) / step_seconds(shares, paces) == gain


def test_no_other_split_is_faster():
    """Method: every split of up to 9 samples over 3 ranks. Twin: the even split is beaten."""
    draw, beaten = random.Random(5), 0
    for _ in range(60):
        batch, paces = draw.randint(3, 9), [draw.uniform(0.1, 3) for _ in range(3)]
        every = (
            shares
            for shares in itertools.product(range(1, batch), repeat=3)
            if sum(shares) == batch
        )
        least = min(step_seconds(shares, paces) for shares in every)
        found = split(batch, paces)
        assert sum(found) == batch and min(found) >= 1
        assert step_seconds(found, paces) == least
        beaten += step_seconds(split(batch, [1.0] * 3), paces) > least
    assert beaten


def test_a_large_batch_is_split_as_one_sample_at_a_time():
    """Method: the shortcut beside the greedy loop, with ties. Up to 300 samples, 1 to 6 ranks."""
    draw = random.Random(6)
    for _ in range(1000):
        ranks = draw.randint(1, 6)
        paces = [draw.choice([0.1, 0.5, 1.0, 2.0, 7.0, draw.random() + 1e-3]) for _ in range(ranks)]
        batch = draw.randint(ranks, 300)
        assert split(batch, paces) == greedy(batch, paces), (batch, paces)


def test_a_rank_that_is_ten_times_slower_gets_one_sample_and_not_none():
    assert split(8, [1.0, 10.0]) == [7, 1]
    assert split(3, [1.0, 1.0, 1e9]) == [1, 1, 1]
    assert split(97, [1.0] * 4) == [25, 24, 24, 24]


# --- when shares change ---


def steps_until_change(
    ranks: list[Split], paces: Callable[[int], list[float]], most: int
) -> int | None:
    """Runs steps of these ``paces`` until shares change. Returns how many there were."""
    for step in range(most):
        due = [each.note(pace) for each, pace in zip(ranks, paces(step), strict=True)]
        assert len(set(due)) == 1
        if due[0]:
            everyones = [each.pace for each in ranks]
            gains = [each.choose(everyones) for each in ranks]
            assert len(set(gains)) == 1 and len({tuple(each.shares) for each in ranks}) == 1
            if gains[0] is not None:
                return step + 1
    return None


def test_shares_change_after_twenty_steps_and_follow_the_slow_rank():
    """A rank slows down, then the other one instead, in the middle of a count of 20 steps: shares
    follow within 40. Twin: with equal paces they stay."""
    ranks = [Split(96, 2) for _ in range(2)]
    assert steps_until_change(ranks, lambda step: [1.0, 1.0], 100) is None
    assert steps_until_change(ranks, lambda step: [1.0, 2.0], 100) == EVERY_STEPS
    assert ranks[0].shares == [64, 32]
    turned = lambda step: [1.0, 2.0] if step < 15 else [2.0, 1.0]
    assert steps_until_change(ranks, turned, 100) == 2 * EVERY_STEPS
    assert ranks[0].shares == [32, 64]


def test_shares_stay_for_a_gain_of_less_than_three_percent():
    """Twin: a little more is worth it."""
    for factor, changes in ((1.05, False), (1.08, True)):
        ranks = [Split(1000, 2) for _ in range(2)]
        paces = [1.0, factor]
        gain = step_seconds([500, 500], paces) / step_seconds(split(1000, paces), paces)
        assert (gain > LEAST_GAIN) is changes
        assert (steps_until_change(ranks, lambda step: paces, 40) is not None) is changes


def test_one_slow_step_is_no_slow_rank():
    """The median of 20 steps, of which some wait for the machine. Twin: most of them do."""
    for slow, changes in ((9, False), (11, True)):
        ranks = [Split(96, 2) for _ in range(2)]
        paces = lambda step: [1.0, 8.0 if step < slow else 1.0]
        assert (steps_until_change(ranks, paces, 20) is not None) is changes


def test_weights_have_a_mean_of_one_and_none_are_needed_for_equal_shares():
    divided = Split(12, 2)
    assert divided.weights is None and divided.said == " with shares 6, 6"
    divided.take([1.0, 2.0])
    assert divided.weights == [8 * 2 / 12, 4 * 2 / 12] and sum(divided.weights) == 2
    assert divided.said == " with shares 8, 4"
    assert Split(7, 2).weights == [8 / 7, 6 / 7]  # the even split, of an odd batch


# --- averages ---


@pytest.fixture
def reduced(monkeypatch) -> Callable[..., list[torch.Tensor]]:
    """Both ranks' averages of a gradient, given by rank, with shares for ``paces``."""
    monkeypatch.setattr(kinds, "all_gather", pair.all_gather)
    monkeypatch.setattr(kinds, "dist", pair)

    def run(
        given: Callable[[int], float], paces: list[float] | None, axis: str
    ) -> list[torch.Tensor]:
        def make(meeting: pair.Pair, rank: int) -> Collectives:
            own = {"rank": rank, "size": 2} if axis == "shard_group" else {}
            own[axis] = pair.PairChannel(meeting, rank)
            return Collectives(ParallelDims(**own))

        def work(collectives: Collectives) -> torch.Tensor:
            if paces is not None:
                divided = Split(12, 2)
                divided.take(paces)
                collectives.weigh_by(divided)
            value = given(collectives.ranks.data_rank)
            flat, found = torch.full((512,), value, dtype=torch.bfloat16), []
            collectives.reduce(flat, "unit 0", lambda average, _: found.append(average)).wait()
            assert torch.equal(flat, torch.full_like(flat, value))  # a failed one can be repeated
            return found[0]

        return pair.run_pair(make, work)

    return run


@pytest.mark.parametrize("axis", ["shard_group", "replicate_group"])
def test_an_average_is_weighed_by_the_shares(axis, reduced):
    """Means of 3 over 8 samples and of 6 over 4: the mean over all 12 is 4. Twin: with equal shares
    it is that of both ranks, 4.5, to the bit."""
    given = lambda rank: 3.0 + 3.0 * rank
    for found in reduced(given, [1.0, 2.0], axis):
        assert found.dtype == torch.float32
        assert torch.allclose(found, torch.tensor(4.0), rtol=1e-6)
    for paces in (None, [1.0, 1.0]):
        for found in reduced(given, paces, axis):
            assert torch.equal(found, torch.full_like(found, 4.5))


def test_a_gradient_that_no_rank_has_is_none_with_weights(reduced):
    """Ranks bring negative zeros for it, by which it is known."""
    for found in reduced(lambda rank: -0.0, [1.0, 2.0], "shard_group"):
        assert (found == 0).all() and found.signbit().all()
