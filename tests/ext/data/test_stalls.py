"""Stalls: what a step waits for its data, and that a job which is measured is not changed."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from inside import parts_of
from torch import nn

import infinity
from infinity.core.machine.rates import memory_rate
from infinity.core.machine.traffic import DATA
from infinity.ext.data.stalls import Stalls, forget, measure_stalls


def test_shares_are_those_of_the_three_measurements():
    assert Stalls(10, 15, 40).shares == {"compute": 0.25, "prepare": 0.125, "fetch": 0.625}
    assert Stalls(2, 1.5, 1).shares == {"compute": 1.0, "prepare": 0.0, "fetch": 0.0}  # noise
    assert Stalls(0, 0, 0).shares == {"compute": 0.0, "prepare": 0.0, "fetch": 0.0}


class Net(nn.Module):
    """A model whose passes change its buffer and draw random numbers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.body(x)).square().sum()


def wrapped_net():
    torch.manual_seed(0)
    net = Net()
    return infinity.wrap_model(
        net, torch.optim.AdamW(net.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )


def run(steps: int, measured: bool):
    net, optimizer = wrapped_net()

    def passes(batch) -> None:
        net(batch + random.random() + float(np.random.rand())).backward()
        optimizer.zero_grad()

    if measured:
        measure_stalls(net, lambda index: torch.randn(8, 4), passes, 3)
    for _ in range(steps):
        net(torch.randn(8, 4) + random.random() + float(np.random.rand())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_a_job_that_is_measured_has_the_bits_of_one_that_is_not():
    """The twin: passes that are made without it change them."""
    for seed in (random.seed, np.random.seed):
        seed(1)
    plain = run(3, measured=False)
    for seed in (random.seed, np.random.seed):
        seed(1)
    found = run(3, measured=True)
    assert all(torch.equal(value, plain[name]) for name, value in found.items())
    for seed in (random.seed, np.random.seed):
        seed(2)
    assert not torch.equal(run(3, measured=False)["norm.running_mean"], plain["norm.running_mean"])


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("seed", range(5))
def test_ds_analyzer_finds_what_is_injected(seed, monkeypatch):
    """Claim: seconds of compute, of preparing and of a first read are told apart, exactly."""
    compute, prepare, fetch = (random.Random(seed).uniform(0.1, 3.0) for _ in range(3))
    net, optimizer = wrapped_net()
    clock, read = Clock(monkeypatch), set()

    def batch_of(index: int) -> torch.Tensor:
        clock.pass_by(prepare + (0.0 if index in read else fetch))
        read.add(index)
        return torch.ones(8, 4)

    found = measure_stalls(net, batch_of, lambda batch: clock.pass_by(compute), 20)
    total = compute + prepare + fetch
    expected = {"compute": compute / total, "prepare": prepare / total, "fetch": fetch / total}
    assert found.shares == pytest.approx(expected)
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_a_loop_tells_what_it_waited_for(monkeypatch):
    """Claim: the shares are of the time until the last step, and sum to one. The twin: a loader
    that is not watched is no wait."""
    memory_rate()  # measured once, by the real clock
    for watched in (True, False):
        net, optimizer = wrapped_net()
        with monkeypatch.context() as patch:
            clock = Clock(patch)
            job = parts_of(net._infinity).job
            job.updates.clock.ended = 0.0

            def loader(clock=clock):
                for _ in range(4):
                    clock.pass_by(3.0)
                    yield torch.ones(8, 4)

            with infinity.Watch(net) as watch:
                for batch in watch.data(loader()) if watched else loader():
                    net(batch).backward()
                    clock.pass_by(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            shares = infinity.stats(net).shares
        assert sum(shares.values()) == pytest.approx(1.0)
        assert shares[DATA] == pytest.approx(0.75 if watched else 0.0)


def test_files_are_dropped_from_memory(tmp_path):
    """Claim: of a mapped array, too, whose values stay."""
    path = tmp_path / "tokens"
    path.write_bytes(bytes(range(256)) * 4096)
    mapped = np.memmap(path, dtype=np.uint8, mode="r")[:1000]
    before = mapped.copy()
    forget([mapped, path])
    assert (mapped == before).all()
