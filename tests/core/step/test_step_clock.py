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
    assert clock.tick({}) == 1000 and clock.step_seconds == 4
    assert clock.tick({}) == 1004 and clock.step_seconds == 0.5


def test_the_first_step_began_when_the_clock_was_made(monkeypatch):
    before = time.perf_counter()
    clock = StepClock()
    after = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: after + 2)
    began = clock.tick({})
    assert before <= began <= after and clock.step_seconds == after + 2 - began


def test_steps_are_counted_and_none_has_taken_time_before_the_first(now):
    clock, other = StepClock(), StepClock()
    assert clock.steps == 0 and clock.step_seconds == 0
    now += [1.0, 2.0, 3.0]
    for _ in range(3):
        clock.tick({})
    assert clock.steps == 3 and other.steps == 0
