"""Interval: saving takes the share of the time that it was given, also when its cost changes."""

from __future__ import annotations

import random

import pytest

from infinity.ext.checkpoint.interval import Interval, steps_between

CHOSEN = {  # stall, total, step, share -> steps
    "5 %": ((1, 1, 1, 0.05), 20),
    "3.5 %": ((1, 1, 1, 0.035), 29),
    "1 %": ((1, 1, 1, 0.01), 100),
    "nothing stalls, and it takes a while": ((0, 7.2, 1, 0.05), 8),
    "most is in the background": ((0.1, 3.1, 1, 0.05), 3),
    "cheaper than a step": ((0.001, 0.001, 10, 0.05), 1),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_the_rule_chooses(case):
    given, steps = CHOSEN[case]
    assert steps_between(*given) == steps


def test_failures_that_are_known_shorten_it():
    """Claim: Young's interval if it is the shorter one, and never two saves at a time."""
    assert steps_between(1, 1, 1, 0.01, between_failures=800) == 40
    assert steps_between(1, 1, 1, 0.05, between_failures=10**9) == 20
    assert steps_between(0.1, 50, 1, 0.01, between_failures=1) == 50


def shares(adapts: bool, seed: int = 1) -> list[float]:
    """The share of each third of 6,000 steps. The disk is shared in the second third, where a save
    costs seven seconds in place of one."""
    noise = random.Random(seed)
    interval, found = Interval(0.05), []
    interval.note_save(1.0)
    for third in range(3):
        stalled = 0.0
        for _ in range(2000):
            interval.note_step(noise.gauss(1.0, 0.1))
            fixed = interval._since >= 20
            if interval.is_due if adapts else fixed:
                cost = (7.0 if third == 1 else 1.0) * noise.gauss(1.0, 0.1)
                interval.note_save(cost)
                stalled += cost
        found.append(stalled / 2000)
    return found


def test_checkfreq_keeps_its_share_on_a_shared_disk():
    """The twin: a fixed interval takes seven times the share there."""
    adapted, fixed = shares(True), shares(False)
    assert all(share < 0.058 for share in adapted) and min(adapted) > 0.03
    assert fixed[1] > 0.3


def test_a_dear_save_counts_at_once_and_cheap_ones_after_three():
    interval = Interval(0.05)
    for _ in range(10):
        interval.note_step(1.0)
    found = []
    for cost in (1, 7, 1, 1, 1):
        interval.note_save(cost)
        found.append(interval.steps)
    assert found == [20, 140, 140, 140, 20]


def test_the_first_save_comes_after_ten_steps_and_a_minute():
    def first(seconds: float) -> int:
        interval, steps = Interval(0.02), 0
        while not interval.is_due:
            interval.note_step(seconds)
            steps += 1
        return steps

    assert first(1.0) == 60 and first(30.0) == 10


def test_steps_of_no_time_and_clocks_that_go_backwards_make_no_storm():
    interval = Interval(0.05)
    for seconds in (0.0, -3.0, 0.0):
        interval.note_step(seconds)
    interval.note_save(0.5)
    interval.note_step(0.0)
    assert not interval.is_due and interval.step_seconds == 0.0
    interval.note_save(-1.0)
    assert interval.stall_seconds == 0.5


def test_what_steps_take_longer_beside_a_save_is_its_stall():
    """Claim: those steps do not count as usual ones, and no other save is due meanwhile. The twin:
    one that failed says nothing."""
    interval = Interval(0.5)
    for _ in range(5):
        interval.note_step(1.0)
    for failed in (False, True):
        interval.begin_save()
        for seconds in (1.5, 1.0, 0.9):
            interval.note_step(seconds)
            assert not interval.is_due
        interval.end_save(*(None, None) if failed else (0.1, 3.4))
        assert interval.stall_seconds == pytest.approx(0.5) and interval.step_seconds == 1.0
        assert interval.steps == 3


def test_a_step_that_takes_long_for_another_reason_is_no_dearer_than_its_save():
    interval = Interval(0.02)
    for _ in range(5):
        interval.note_step(1.0)
    interval.begin_save()
    interval.note_step(600.0)  # an evaluation
    interval.end_save(0.1, 20.0)
    assert interval.stall_seconds == 20.0 and interval.steps == 1000
