"""DeviceShare: what part of the host's state the device steps, and how it is found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from infinity.core.step.device_share import HELPS, REST, STEPS, WORTH, DeviceShare, Rates
from infinity.core.units.flat_layout import SHARD_ALIGNMENT


class FlatParam:
    """As many elements."""

    def __init__(self, numel: int):
        self.layout = SimpleNamespace(shard_numel=numel)


RATES = Rates(processor=100.0, device=300.0, numel=1000)  # ten seconds without the device


def note(share: DeviceShare, waited: float, rates: Rates | None = RATES) -> float:
    """The share after the steps of a trial that waited so long, beside one long wait."""
    for _ in range(STEPS):
        share.note([1e6, waited], rates)
    return share.value


def test_waits_raise_the_share_and_a_trial_that_helps_is_kept():
    share = DeviceShare()
    assert note(share, 2.0) == pytest.approx(0.1)
    assert note(share, 0.9 * HELPS * 2.0) > 0.1
    assert note(share, 0.0) > 0.1


def test_a_trial_that_does_not_help_is_taken_back_for_a_while():
    share = DeviceShare()
    note(share, 2.0)
    for _ in range(REST // STEPS):
        assert note(share, 2.0) == 0.0
    assert note(share, 2.0) > 0.0


def test_the_share_is_at_most_where_both_are_done_together():
    share, waited = DeviceShare(), 1000.0
    for _ in range(4):
        waited *= 0.5 * HELPS
        note(share, waited)
    assert share.value == 0.75


@pytest.mark.parametrize("rates", [RATES, None])
def test_short_waits_and_unknown_rates_change_nothing(rates):
    """The longest wait alone is none: what is needed first lands last."""
    share = DeviceShare()
    assert note(share, WORTH * RATES.seconds / 2 if rates else 5.0, rates) == 0.0
    share.note([], rates)
    assert share.value == 0.0


@pytest.mark.parametrize("value, firsts", [(0.0, [3, 2, 1]), (0.5, [3, 0, 0]), (0.6, [2, 0, 0])])
def test_the_device_steps_what_is_needed_last(value, firsts):
    """In whole blocks."""
    share = DeviceShare()
    flats = [FlatParam(count * SHARD_ALIGNMENT) for count in (3, 2, 1)]
    share.value = value
    share.divide(flats)
    assert [share.first_own(flat) for flat in flats] == [
        first * SHARD_ALIGNMENT for first in firsts
    ]
