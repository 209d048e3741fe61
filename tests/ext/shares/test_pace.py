"""Pace: seconds of forwards, without what comes before them.

**clock**: one that moves only where a layer computes, or where the engine waits.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from inside import parts_of
from torch import nn

import infinity
from infinity.core.machine import device
from infinity.ext.shares.pace import Pace

HOST = {"params": "host", "optimizer": "host"}


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    """A layer that computes for a second."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.linear, self._clock = nn.Linear(4, 4), clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.now += 1
        if x.isnan().any():
            raise ValueError("stop")
        return self.linear(x)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(device, "time", made)
    return made


def timed(clock: Clock) -> tuple[nn.Module, Pace]:
    """A model of two slow blocks, which waits 10 seconds before each of them."""
    model = nn.Sequential(*[nn.Sequential(Slow(clock), nn.Tanh()) for _ in range(2)])
    for block in model:
        block.register_forward_pre_hook(lambda *_: setattr(clock, "now", clock.now + 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = infinity.wrap_model(model, optimizer, HOST)
    model.optimizer = optimizer
    return model, Pace(model, parts_of(model).job)


def test_the_seconds_of_blocks_are_counted_and_not_the_waits_before_them(clock):
    """Two forwards of two blocks, of a second each, which waited 10 before each. Twin: what was
    taken is not counted again."""
    model, pace = timed(clock)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert clock.now == 44 and pace.take() == 4.0 and pace.take() == 0.0


def test_what_is_called_inside_of_blocks_that_are_not_is_counted(clock):
    """Method: blocks that are lists, of two layers of a second each. Twin: a list that is called
    itself is counted once, with what it waits for inside."""

    class Lists(nn.Module):
        kind = nn.ModuleList

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(self.kind([Slow(clock), Slow(clock)]) for _ in range(2))

        def forward(self, x):
            for layers in self.layers:
                clock.now += 10
                for layer in [layers] if callable(getattr(layers, "run", None)) else layers:
                    x = layer(x)
            return x

    class Called(Lists):
        class kind(nn.ModuleList):
            def run(self, x):
                clock.now += 10
                return self[1](self[0](x))

            forward = run

    for kind, seconds in ((Lists, 4.0), (Called, 24.0)):
        model = kind()
        model, optimizer = infinity.wrap_model(
            model, torch.optim.SGD(model.parameters(), lr=0.1), HOST
        )
        pace = Pace(model, parts_of(model).job)
        model(torch.ones(2, 4)).sum().backward()
        assert pace.take() == seconds


def test_a_forward_that_fails_is_over(clock):
    """The next one is counted as ever."""
    model, pace = timed(clock)
    with pytest.raises(ValueError, match="stop"):
        model(torch.full((2, 4), torch.nan))
    assert pace.take() == 1.0
    model(torch.ones(2, 4))
    assert pace.take() == 2.0


def test_a_model_without_units_of_its_own_is_counted_whole(clock):
    model = Slow(clock)
    job = SimpleNamespace(device=device.Device(torch.device("cpu"), None), units=[])
    pace = Pace(model, job)
    model(torch.ones(2, 4))
    assert pace.take() == 1.0


def test_nothing_is_counted_once_it_is_closed(clock):
    model, pace = timed(clock)
    pace.close(), pace.close()
    model(torch.ones(2, 4))
    assert pace.take() == 0.0


def test_hooks_do_not_keep_it(clock):
    model, pace = timed(clock)
    alive = weakref.ref(pace)
    del pace
    gc.collect()
    model(torch.ones(2, 4))
    assert alive() is None
