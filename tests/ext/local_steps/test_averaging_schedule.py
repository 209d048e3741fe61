"""AveragingSchedule: the averaging steps of units in a period, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from infinity import ConfigError
from infinity.ext.local_steps.averaging_schedule import AveragingSchedule
from infinity.ext.local_steps.climber import Climber

GIVEN: dict[str, Any] = {
    "every": 100,
    "stream": True,
    "delay": 0,
    "least": 4,
    "coefficient": None,
    "probe_every": 200,
}


def schedule(**given: Any) -> AveragingSchedule:
    return AveragingSchedule(**GIVEN | given)


@pytest.mark.parametrize(
    ("units", "period", "steps"),
    [(4, 100, [25, 50, 75, 100]), (3, 7, [3, 5, 7]), (5, 2, [1, 1, 2, 2, 2]), (1, 9, [9])],
)
def test_units_are_averaged_one_after_the_other(units, period, steps):
    assert schedule().averaging_steps(units, period) == steps
    assert schedule(stream=False).averaging_steps(units, period) == [period] * units


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
@pytest.mark.parametrize("stream", [True, False])
def test_so_many_exchanges_run_at_a_time(stream, delay):
    """Method: three periods are walked through. Twin: with one unit less there is room for less."""
    made, most, running = schedule(every=7, stream=stream, delay=delay), 0, []
    for step in range(21):
        running = [due for due in running if due > step]
        running += [step + delay for at in made.averaging_steps(10, 7) if at == step % 7 + 1]
        most = max(most, len(running))
    assert made.most_at_once(10) == (most if delay else 2)
    assert schedule(delay=0).most_at_once(1) == 1 and schedule().most_at_once(0) == 0


def test_the_period_is_given_or_follows():
    assert schedule().period(Climber(8), 0.1) == 100
    assert schedule(every="skew").period(Climber(8), 0.1) == 8
    quadratic = schedule(every="quadratic", coefficient=0.2)
    assert [quadratic.period(Climber(), lr) for lr in (0.1, 0.01)] == [4, 400]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"every": "often"}, "every='often'"),
        ({"every": 2.5}, "every=2.5"),
        ({"least": 0}, "least=0"),
        ({"probe_every": -1}, "probe_every=-1"),
        ({"every": "quadratic"}, "coefficient=None"),
        ({"delay": 100}, "0 to 99"),
        ({"delay": -1}, "delay=-1"),
        ({"every": "skew", "delay": 1}, "0 to 0"),
    ],
)
def test_what_does_not_fit_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        schedule(**given)
