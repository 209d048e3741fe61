"""StepClock: how many steps there were, and how long the last one took.

**now**: what the wall clock says next, as the test has it.
"""

from __future__ import annotations

import time

import pytest

from infinity.core.step.step_clock import StepClock


@pytest.fixture
def now(monkeypatch) -> list[float]:
    said: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: said.pop(0))
    return said


def test_a_step_lasts_from_the_end_of_the_one_before(now):
    clock = StepClock()
    now += [1000.0, 1004.0, 1004.5]
    clock.tick({})
    for began, seconds in ((1000, 4), (1004, 0.5)):
        clock.tick({})
        assert (clock.began, clock.step_seconds) == (began, seconds)


def test_the_first_step_began_when_the_clock_was_made(monkeypatch):
    before = time.perf_counter()
    clock = StepClock()
    after = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: after + 2)
    clock.tick({})
    assert before <= clock.began <= after and clock.step_seconds == after + 2 - clock.began


def test_steps_are_counted_and_none_has_taken_time_before_the_first(now):
    clock, other = StepClock(), StepClock()
    assert clock.steps == 0 and clock.step_seconds == 0
    now += [1.0, 2.0, 3.0]
    for _ in range(3):
        clock.tick({})
    assert clock.steps == 3 and other.steps == 0


@pytest.mark.parametrize(
    "stepped, steps",
    [
        ("ab" * 4, 4),  # two optimizers
        ("ba" * 4, 4),
        ("abc" * 3, 3),
        ("aab" * 3, 6),  # a critic twice for each generator
        ("aaaaab" * 2, 10),
        ("ab" + "a" + "ab" + "a", 4),  # one every other step
        ("a" * 3 + "b" * 3, 5),  # b has not stepped in a's last step
    ],
)
def test_a_step_is_a_round_in_which_no_optimizer_steps_twice(now, stepped, steps):
    """Method: a second passes before each optimizer's step; all of them are of some step. Twin: an
    optimizer alone makes a step each time."""
    now += [float(second) for second in range(1, 2 * len(stepped) + 1)]
    clock, alone, seconds = StepClock(ended=0.0), StepClock(), {}
    for place in stepped:
        clock.tick({}, place)
        seconds[clock.steps] = clock.step_seconds
    assert clock.steps == steps == len(seconds)
    assert sum(seconds.values()) == clock.total_seconds == len(stepped)
    for _ in stepped:
        alone.tick({})
    assert alone.steps == len(stepped) > steps
