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
from infinity.core.machine.traffic import DATA
from infinity.ext.data.stalls import Stalls, forget, measure_stalls
from infinity.ext.rates.rates import memory_rate


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


def late_step(workers: int, compute: float, prepare: float, fetch: float, kept: float) -> float:
    """Seconds of a step late in a loop beside so many workers, which share one disk: by moving each
    batch through it."""
    free, disk, step, ends, in_memory = [0.0] * workers, 0.0, 0.0, [], 0.0
    for _ in range(600):
        in_memory += kept
        reads = 0.0 if in_memory >= 1 else fetch
        in_memory -= in_memory >= 1
        worker = min(range(workers), key=free.__getitem__)
        begins = max(free[worker], disk) if reads else free[worker]
        disk = begins + reads if reads else disk
        free[worker] = begins + reads + prepare
        step = max(step, free[worker]) + compute
        ends.append(step)
    return (ends[-1] - ends[299]) / 300


@pytest.mark.parametrize(
    ("compute", "prepare", "fetch"), [(1.0, 3.4, 0.5), (1.0, 0.2, 0.1), (0.5, 1.7, 2.0), (2, 0, 3)]
)
def test_ds_analyzer_says_what_would_hide_the_data(compute, prepare, fetch):
    """Method: the loop moves batch after batch through workers and one disk. Twins: a worker less,
    or less of the data in memory, is slower."""
    remedy = Stalls(compute, compute + prepare, compute + prepare + fetch).remedy
    given = compute, prepare, fetch
    assert late_step(remedy.workers, *given, remedy.kept) == pytest.approx(compute, rel=0.02)
    assert remedy.times == pytest.approx((compute + prepare + fetch) / compute)
    if remedy.workers > 1:
        assert late_step(remedy.workers - 1, *given, remedy.kept) > 1.05 * compute
    if remedy.kept:
        assert late_step(remedy.workers, *given, remedy.kept - 0.1) > 1.05 * compute


def test_the_remedy_is_told_in_a_line():
    assert str(Stalls(1.0, 4.4, 4.9).remedy) == "4 workers would hide it: 4.90 times as fast"
    assert str(Stalls(1.0, 1.1, 1.2).remedy) == "1 worker would hide it: 1.20 times as fast"
    assert str(Stalls(1.0, 1.0, 3.0).remedy) == (
        "1 worker with 50% of the data kept in memory (or a disk 2.0 times as fast) would hide it:"
        " 3.00 times as fast"
    )
    assert Stalls(1.0, 1.01, 1.01).remedy is None and Stalls(0.0, 0.0, 0.0).remedy is None


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
