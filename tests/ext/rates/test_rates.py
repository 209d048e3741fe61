"""Rates of this machine's memory: measured once, with memory that a job has."""

from __future__ import annotations

import pytest

from infinity.ext.rates import rates

MIB = 1 << 20


@pytest.mark.parametrize(
    ("room", "left", "nbytes"),
    [
        (None, 1 << 40, 64 * MIB),
        (64 * MIB, 1 << 40, 4 * MIB),
        (1 << 40, 160 * MIB, 10 * MIB),
        (0, 1 << 40, MIB),
        ("33554432", 1 << 40, 2 * MIB),
    ],
)
def test_a_probe_takes_a_part_of_the_budget(monkeypatch, room, left, nbytes):
    """Counts the bytes that are copied, by budget and by the memory left; a second call copies
    nothing."""
    copied = []
    monkeypatch.setattr(rates, "_known", {})
    monkeypatch.setattr(rates, "memory_left", lambda: left)
    monkeypatch.setattr(rates, "_best", lambda work: copied.append(work.__closure__) or 1.0)
    assert rates.memory_rate(room=room) == 2 * nbytes
    assert rates.checksum_rate(room=room) == nbytes
    assert rates.memory_rate() == 2 * nbytes and len(copied) == 2
