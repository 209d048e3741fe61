"""Pace: seconds of forwards, without what comes before them.

**clock**: one that moves only where a layer computes, or where the engine waits.
"""

from __future__ import annotations

import gc

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
    """A model of two slow blocks, which waits 10 seconds for the weights of each of them."""
    return paced(clock, nn.Sequential(*[nn.Sequential(Slow(clock), nn.Tanh()) for _ in range(2)]))


def paced(clock: Clock, model: nn.Module) -> tuple[nn.Module, Pace]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = infinity.wrap_model(model, optimizer, HOST)
    model.optimizer, job = [optimizer], parts_of(model).job  # which keeps it alive
    hold = job.prefetcher.hold

    def waiting(*args, **how):
        clock.now += 0 if how.get("backward") else 10
        return hold(*args, **how)

    job.prefetcher.hold = waiting
    return model, job.add(Pace(job.device))


def test_the_seconds_of_blocks_are_counted_and_not_the_waits_before_them(clock):
    """Two forwards of two blocks, of a second each, which waited 10 before each. Twin: what was
    taken is not counted again."""
    model, pace = timed(clock)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert clock.now == 44 and pace.take() == 4.0 and pace.take() == 0.0


def test_what_is_called_inside_of_blocks_that_are_not_is_counted(clock):
    """Method: blocks that are lists, of two layers of a second each. Twin: a list that is called
    itself is counted once, with the 5 seconds that it computes itself."""

    class Lists(nn.Module):
        kind = nn.ModuleList

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(self.kind([Slow(clock), Slow(clock)]) for _ in range(2))

        def forward(self, x):
            for layers in self.layers:
                for layer in [layers] if callable(getattr(layers, "run", None)) else layers:
                    x = layer(x)
            return x

    class Called(Lists):
        class kind(nn.ModuleList):
            def run(self, x):
                clock.now += 5
                return self[1](self[0](x))

            forward = run

    for kind, seconds in ((Lists, 4.0), (Called, 14.0)):
        model, pace = paced(clock, kind())
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


def test_a_forward_that_is_cut_short_is_forgotten(clock):
    """Method: Ctrl-C in the second block, for which torch calls no hook. Twin: without it both
    count."""
    model, pace = timed(clock)

    def stop(*_):
        raise KeyboardInterrupt("stop")

    handle = model[1][1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt, match="stop"):
        model(torch.ones(2, 4))
    handle.remove()
    model.optimizer[0].zero_grad()
    assert pace.take() == 1.0 and not pace._running
    model(torch.ones(2, 4))
    assert pace.take() == 2.0


def test_a_model_that_calls_no_owner_is_counted_whole(clock):
    """Twin: one that does is counted but for what it computes beside it."""
    pace, root, owner = Pace(device.Device(torch.device("cpu"), None)), nn.Tanh(), nn.Linear(1, 1)
    for inside, seconds in (((), 1.0), ((owner,), 2.0), ((owner, owner), 4.0)):
        pace.begin(root, [])
        clock.now += 1
        for module in inside:
            pace.begin(module, ["its unit"])
            clock.now += 2
            pace.end(module)
        pace.end(root)
        assert pace.take() == seconds


def test_nothing_is_counted_once_its_shares_are_gone(clock):
    """Twin: while they are there."""
    model, _ = timed(clock)
    job = parts_of(model).job
    shares = infinity.Shares(batch=4, model=model)
    pace = shares._pace
    model(torch.ones(2, 4))
    assert pace.take() == 2.0 and pace in job.extensions
    del shares
    gc.collect()
    model(torch.ones(2, 4))
    assert pace.take() == 0.0 and pace not in job.extensions
