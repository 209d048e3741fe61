"""The hostile home of tests gives torch's bits to what asks the homes anew, and fails what keeps
their memory, or a place of theirs, over two uses.

Method words: a **keeper** is an extension that takes something of the homes at the first use, and
looks at it at every later one.
"""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import doubles
import hostile_home
import pytest
import torch
from doubles import DoubledDisks
from hostile_home import POISON, PoisonedDevice, PoisonedReads, Turns
from inside import parts_of
from models import at_home, differing, seeded
from torch import nn

import infinity
from infinity import native
from infinity.core.homes.arrays import StateArray
from infinity.core.homes.staging import ThroughHost
from infinity.core.machine.device import Device
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.seams import Extension

SEED = 41


def wrapped(home: str | None, folder: Any, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(SEED, lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if home is None:
        return model, optimizer
    return infinity.wrap_model(model, optimizer, at_home(home, home, folder, **more))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> nn.Module:
    for step in range(steps):
        model(torch.full((2, 32), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Keeper(Extension):
    """Notes at each use whether it sees the weights of the first unit as they are."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.saw: list[bool] = []

    def install(self, job: Any, model: Any) -> None:
        self.job, self.weight = job, job.units[0].flat_params[0].weight
        job.events.use_ready.append(self.look)

    def look(self) -> None:
        flat_param = self.job.units[0].flat_params[0]
        flat_param.homes.wait_idle()
        if self.kept is None:
            self.kept = self.take()
        else:
            true = self.job.store.read(self.weight, 0, self.weight.numel)
            self.saw.append(torch.equal(self.see(), true))

    def see(self) -> torch.Tensor:
        return self.job.store.read(self.kept, 0, self.kept.numel)


class OfTheArray(Keeper):
    """Right: the array knows where its bytes are."""

    def take(self) -> Any:
        return self.weight


class OfAPlace(Keeper):
    def take(self) -> Any:
        return dataclasses.replace(self.weight)


class OfMemory(Keeper):
    def take(self) -> Any:
        return self.weight.flat

    def see(self) -> torch.Tensor:
        return self.kept


class OfAnAddress(OfMemory):
    def take(self) -> Any:
        if self.weight.region is not None:
            return self.weight.region, self.weight.extent.address

    def see(self) -> torch.Tensor:
        return native.tensor_at(*self.kept, self.weight.numel, self.weight.dtype)


@pytest.mark.parametrize(
    ("kind", "plain"), [(OfAPlace, "nvme"), (OfAPlace, "host"), (OfMemory, "host"),
                        (OfAnAddress, "host")],
)  # fmt: skip
def test_a_keeper_that_a_plain_home_passes_fails(kind, plain, tmp_path):
    """Method: the same wrong keeper at a plain home sees the weights at every use, at the hostile
    one not. Twin: one that keeps the array itself sees them there."""
    saw = {}
    for home, each in ((plain, kind), ("hostile", kind), ("hostile", OfTheArray)):
        model, optimizer = wrapped(home, tmp_path)
        parts_of(model).add(keeper := each())
        train(model, optimizer)
        assert len(keeper.saw) >= 6
        saw[home, each] = all(keeper.saw)
    assert saw == {(plain, kind): True, ("hostile", kind): False, ("hostile", OfTheArray): True}


class Averaged(Extension):
    """The sum of the weights at each use, in an array that it keeps. ``writes``: to the memory that
    the array had at first, which is wrong."""

    def __init__(self, *, writes: bool) -> None:
        self.writes, self.memory, self.expected = writes, None, 0.0

    def install(self, job: Any, model: Any) -> None:
        self.job, self.kept = job, job.kept.keep("sum", torch.float32, keeper=self)
        job.events.use_ready.append(self.add)

    def add(self) -> None:
        if self.memory is None and self.array.flat is not None:
            self.memory = self.array.flat
        if self.memory is not None and self.writes:
            self.memory += 1
        else:
            before = self.job.store.read(self.array, 0, self.array.numel)
            self.job.store.write(self.array, 0, before + 1, version=0)
        self.expected += 1

    @property
    def array(self) -> StateArray:
        return next(iter(self.kept.flat_params)).homes.kept["sum"]

    def found(self) -> float:
        return self.job.store.read(self.array, 0, self.array.numel).mean().item()


@pytest.mark.parametrize(
    ("home", "writes", "is_right"),
    [("hostile", False, True), ("host", True, True), ("hostile", True, False)],
)
def test_writes_to_kept_memory_are_lost(home, writes, is_right, tmp_path):
    """Method: one is added at each use, to an array that an extension keeps. The last two cases are
    the twin: memory that was kept holds the sum at a plain home, and not at the hostile one."""
    model, optimizer = wrapped(home, tmp_path)
    parts_of(model).add(averaged := Averaged(writes=writes))
    train(model, optimizer)
    with parts_of(model).uses.begin():
        assert (averaged.found() == averaged.expected) is is_right


class Places:
    """The tiers and addresses of all arrays of a model, each time that it is asked."""

    def __init__(self, units: list[Any]) -> None:
        self.seen: list[list[tuple[Tier, int]]] = []
        self._arrays = [
            array for unit in units for flat in unit.flat_params for array in flat.arrays.values()
        ]

    def note(self, *_: Any) -> None:
        self.seen.append([(array.tier, array.extent.address) for array in self._arrays])


def test_every_array_moves_at_each_use_and_no_memory_comes_twice(tmp_path):
    """Method: tier and address of all arrays are noted in each of six forwards. Twin: at a plain
    home nothing moves. The bits are torch's."""
    places = {}
    for home in ("hostile", "host"):
        model, optimizer = wrapped(home, tmp_path)
        noted = places[home] = Places(parts_of(model).units)
        parts_of(model).events.pass_begun.append(noted.note)
        train(model, optimizer, 6)
        parts_of(model).events.pass_begun.remove(noted.note)
        assert differing(model.state_dict(), train(*wrapped(None, tmp_path), 6).state_dict()) == []
        if home == "hostile":
            assert parts_of(model).find(Turns).moved > 100
    hostile, plain = places["hostile"].seen, places["host"].seen
    for each in zip(*hostile):
        assert {tier for tier, _ in each} == {Tier.HOST, Tier.NVME}
        addresses = [address for tier, address in each if tier is Tier.HOST]
        assert len(addresses) == len(set(addresses)) > 1
    for each in hostile:
        assert {tier for tier, _ in each} == {Tier.HOST, Tier.NVME}
    assert all(each == plain[0] for each in plain)


def test_device_buffers_are_poisoned_and_come_elsewhere():
    """Method: a buffer is made, filled and freed 20 times. Twin: the plain device gives an address
    again."""
    for kind, again in ((PoisonedDevice, False), (Device, True)):
        device = kind(torch.device("cpu"), Traffic())
        device.freed, device.fillers = set(), []
        storage, addresses = torch.UntypedStorage(0), []
        for _ in range(20):
            device.resize(storage, 4096)
            addresses.append(storage.data_ptr())
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            assert again or bool((memory == POISON).all())
            memory.zero_()
            device.resize(storage, 0)
        assert (len(set(addresses)) < 20) is again


def test_staged_bytes_are_poisoned_once_they_were_asked_for():
    """Method: bytes of a pool are asked for, then others. Twin: the plain backend gives the memory
    itself."""
    pool = native.PinnedPool(native.Region(8192, huge_pages=False, touch_threads=0))
    for kind, keeps in ((PoisonedReads, False), (ThroughHost, True)):
        memory = native.tensor_at(pool.region, pool.region.address, 8192, torch.uint8).fill_(7)
        reads = kind(None, pool, checksums=True)
        first = reads.arrived(None, pool.region.address, 4096)
        assert bool((first == 7).all())
        assert bool((memory[:4096] == 7).all()) is keeps
        reads.arrived(None, pool.region.address + 4096, 4096)
        assert bool((first == 7).all()) is keeps


class LateDisk(DoubledDisks):
    """A disk whose transfers take a while, once ``layer`` is on."""

    def state_layer(self) -> doubles.Doubles:
        self.of_state = doubles.layer(doubles.fault_plan(delay=1.0, delay_seconds=0.3))
        self.of_state.on = False
        return self.of_state


def is_mapped(address: int) -> bool:
    """Tells whether this process has memory there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(each, 16) for each in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in spans)


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_of_an_interrupted_turn_stays_while_a_transfer_runs(keeps, tmp_path, monkeypatch):
    """Method: Ctrl-C comes behind a read of a late disk, and the turn's memory is let go. Freed,
    it may be Python's by the time that the bytes come. The last case is the twin: a transfer that
    does not keep its memory."""
    monkeypatch.setattr(native, "disks", disk := LateDisk())
    copy, begun = Turns._copy, []

    def interrupted(self: Turns, array: StateArray, other: StateArray) -> Any:
        ticket = copy(self, array, other)
        if ticket is not None and other.flat is not None:
            begun.append((ticket, other.extent.address))
            raise KeyboardInterrupt
        return ticket

    if not keeps:
        monkeypatch.setattr(hostile_home, "held", lambda region: None)
    # Without checksums, which would be computed over memory that is gone: a crash
    model, optimizer = wrapped("hostile", tmp_path, checksums=False)
    train(model, optimizer, 1)
    monkeypatch.setattr(Turns, "_copy", interrupted)
    disk.of_state.on = True
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 1)
    gc.collect()
    ticket, address = begun[0]
    assert not ticket.done
    assert is_mapped(address) is keeps
    ticket.wait()
