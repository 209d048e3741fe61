"""DeviceFraction: what part of the host's state the device steps, and how it is found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from infinity.core.step.device_fraction import HELPS, PAUSE, STEPS, WORTH, DeviceFraction, Rates
from infinity.core.units.flat_layout import SHARD_ALIGNMENT


class FlatParam:
    """As many elements."""

    def __init__(self, numel: int):
        self.layout = SimpleNamespace(shard_numel=numel)


RATES = Rates(processor=100.0, device=300.0, numel=1000)  # ten seconds without the device


def note(fraction: DeviceFraction, waited: float, rates: Rates | None = RATES) -> float:
    """The fraction after the steps of a trial that waited so long, beside one long wait."""
    for _ in range(STEPS):
        fraction.note([1e6, waited], rates)
    return fraction.value


def test_waits_raise_the_share_and_a_trial_that_helps_is_kept():
    fraction = DeviceFraction()
    assert note(fraction, 2.0) == pytest.approx(0.1)
    assert note(fraction, 0.9 * HELPS * 2.0) > 0.1
    assert note(fraction, 0.0) > 0.1


def test_a_trial_that_does_not_help_is_taken_back_for_a_while():
    fraction = DeviceFraction()
    note(fraction, 2.0)
    for _ in range(PAUSE // STEPS):
        assert note(fraction, 2.0) == 0.0
    assert note(fraction, 2.0) > 0.0


def test_the_share_is_at_most_where_both_are_done_together():
    fraction, waited = DeviceFraction(), 1000.0
    for _ in range(4):
        waited *= 0.5 * HELPS
        note(fraction, waited)
    assert fraction.value == 0.75


@pytest.mark.parametrize("rates", [RATES, None])
def test_short_waits_and_unknown_rates_change_nothing(rates):
    """The longest wait alone is none: what is needed first lands last."""
    fraction = DeviceFraction()
    assert note(fraction, WORTH * RATES.seconds / 2 if rates else 5.0, rates) == 0.0
    fraction.note([], rates)
    assert fraction.value == 0.0


@pytest.mark.parametrize("value, firsts", [(0.0, [3, 2, 1]), (0.5, [3, 0, 0]), (0.6, [2, 0, 0])])
def test_the_device_steps_what_is_needed_last(value, firsts):
    """In whole blocks."""
    fraction = DeviceFraction()
    flats = [FlatParam(count * SHARD_ALIGNMENT) for count in (3, 2, 1)]
    fraction.value = value
    fraction.divide(flats)
    assert [fraction.first_own(flat) for flat in flats] == [
        first * SHARD_ALIGNMENT for first in firsts
    ]
