"""Climber: the period that groups end up with, by how much their data differ.

Words used here:

**share**: the part of the samples that is dealt out by label; the rest at random. **usual**: the
period of most probes, once it has climbed.
"""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass, field

import pytest
import torch

from infinity.ext.local_steps.climber import PERIODS, REMEMBERED, Climber, cost_of, quadratic_period

GROUPS, CLASSES, WIDTH, BATCH, STEPS, PROBE_EVERY = 5, 10, 20, 20, 4000, 200


@dataclass
class Run:
    """Softmax regression on ten Gaussian classes, by five groups, each with its own samples."""

    share: float
    every: int | None = None  # None: the climber's period
    other_shares: dict[int, float] = field(default_factory=dict)  # from a step on
    probes: list[tuple[int, int]] = field(default_factory=list)  # step, period after it
    exchanges: int = 0
    accuracy: float = 0.0

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        means = 0.6 * torch.randn(CLASSES, WIDTH, generator=self.random)
        (self.x, self.y), test = self.draw(means, 10_000), self.draw(means, 10_000)
        self.train()
        predicted = self.logits(self.weights.mean(0), test[0]).argmax(-1)
        self.accuracy = float((predicted == test[1]).float().mean())

    def draw(self, means: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(CLASSES, (count,), generator=self.random)
        x = means[y] + torch.randn(count, WIDTH, generator=self.random)
        return torch.cat([x, torch.ones(count, 1)], 1), y

    def deal(self, share: float) -> torch.Tensor:
        """Samples of each group: [groups, samples]."""
        order = torch.randperm(len(self.y), generator=self.random)
        cut = int(share * len(self.y))
        by_label = order[:cut][self.y[order[:cut]].argsort(stable=True)]
        parts = [by_label.view(GROUPS, -1), order[cut:].view(GROUPS, -1)]
        return torch.cat(parts, 1)

    def pick(self, count: int, groups: torch.Tensor) -> torch.Tensor:
        at = torch.randint(groups.size(1), (GROUPS, count), generator=self.random)
        return groups.gather(1, at)

    @staticmethod
    def logits(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ weights

    def accuracies(self, samples: torch.Tensor) -> torch.Tensor:
        predicted = self.logits(self.weights, self.x[samples]).argmax(-1)
        return (predicted == self.y[samples]).float().mean(1)

    def gap(self, groups: torch.Tensor) -> float:
        """How much better each group is on its own data than on the next one's."""
        own, others = self.pick(500, groups), self.pick(500, groups).roll(-1, 0)
        return float((self.accuracies(own) - self.accuracies(others)).mean())

    def train(self) -> None:
        self.weights = torch.zeros(GROUPS, WIDTH + 1, CLASSES)
        groups, climber = self.deal(self.share), Climber()
        period, at, probed = self.every or climber.period, 0, 0
        for step in range(1, STEPS + 1):
            if step in self.other_shares:
                groups = self.deal(self.other_shares[step])
            samples = self.pick(BATCH, groups)
            x = self.x[samples]
            wrong = self.logits(self.weights, x).softmax(-1)
            wrong.scatter_add_(-1, self.y[samples].unsqueeze(-1), -torch.ones(GROUPS, BATCH, 1))
            self.weights -= 0.05 * x.transpose(1, 2) @ wrong / BATCH
            at += 1
            if at == period:
                if self.every is None and step - probed >= PROBE_EVERY:
                    period, probed = climber.observe(self.gap(groups)), step
                    self.probes.append((step, period))
                self.weights[:] = self.weights.mean(0)
                self.exchanges, at = self.exchanges + 1, 0

    @property
    def usual(self) -> int:
        return statistics.mode(period for _, period in self.probes[4:])

    @property
    def saved(self) -> float:
        """How many times fewer exchanges than one a step, probes counted."""
        return STEPS / (self.exchanges + len(self.probes))


@functools.cache
def every_step() -> float:
    return Run(0.0, every=1).accuracy


@pytest.mark.parametrize(
    ("share", "least", "most", "saved"), [(0.0, 256, 512, 9), (0.6, 8, 32, 6), (1.0, 4, 16, 3)]
)
def test_skewscout_finds_longer_periods_the_more_alike_the_data_are(share, least, most, saved):
    """Within one per cent of the accuracy of an average after every step (Hsieh et al. 2020)."""
    run = Run(share)
    print(share, run.usual, round(run.saved, 1), run.accuracy, every_step())
    assert least <= run.usual <= most
    assert run.saved > saved
    assert abs(run.accuracy - every_step()) < 0.01


def test_a_long_period_with_skewed_data_loses_accuracy():
    """The twin: what the climber avoids."""
    probed = Run(1.0)
    assert Run(1.0, every=512).accuracy < probed.accuracy - 0.005


def test_skew_that_comes_and_goes_moves_the_period_both_ways():
    run = Run(0.0, other_shares={1200: 1.0, 2800: 0.0})
    periods = [(step, period) for step, period in run.probes]
    before = max(period for step, period in periods if step < 1200)
    meanwhile = min(period for step, period in periods if 1200 <= step < 2800)
    after = max(period for step, period in periods if step >= 2800)
    print(before, meanwhile, after)
    assert before >= 16 and meanwhile <= before // 2 and after > meanwhile


def test_it_climbs_to_the_longest_period_and_no_further():
    climber = Climber()
    assert [climber.observe(0.0) for _ in range(11)] == [*PERIODS[1:], 512, 512]


@pytest.mark.parametrize("gap", [0.2, math.nan, math.inf])
def test_it_goes_down_one_at_a_time_and_stays_at_one(gap):
    climber = Climber(4)
    assert [climber.observe(gap) for _ in range(3)] == [2, 1, 1]


def test_a_period_that_was_dearer_is_tried_again_when_it_is_forgotten():
    """Method: 32 has a gap, 16 has none. Twin: without the memory it would be tried at once."""
    climber, periods = Climber(16), []
    for _ in range(12):
        periods.append(climber.period)
        climber.observe(0.2 if climber.period == 32 else 0.0)
    tried = [at for at, period in enumerate(periods) if period == 32]
    assert [b - a for a, b in zip(tried, tried[1:])] == [REMEMBERED + 1] * (len(tried) - 1)
    assert len(tried) > 1
    assert Climber(16).observe(0.0) == 32


def test_what_it_remembers_goes_with_a_checkpoint():
    climber = Climber(32)
    climber.observe(0.2)
    again = Climber(climber.period, [[period, cost] for period, cost in climber.memory])
    assert [climber.observe(0.0) for _ in range(9)] == [again.observe(0.0) for _ in range(9)]


def test_the_cost_counts_the_gap_beyond_what_is_tolerated():
    assert cost_of(0.05, 4) == 0.25
    assert cost_of(0.15, 4) == pytest.approx(5.25)


def test_the_quadratic_rule():
    """floor((coefficient / lr) squared), at least ``least``: 400 at a twentieth."""
    assert quadratic_period(4, 0.2, 0.1) == 4
    assert quadratic_period(4, 0.2, 0.01) == 400
    assert quadratic_period(4, 0.2, 1.0) == quadratic_period(4, 0.2, 0.0) == 4
