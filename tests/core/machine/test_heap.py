"""Heap: returns freed memory to the kernel before little is left, and not more often."""

from __future__ import annotations

import pytest
import torch

from infinity.core.machine import heap
from infinity.core.machine.device import Device
from infinity.core.machine.heap import LEAST_FREED_NBYTES, Heap
from infinity.core.machine.limits import GIB
from infinity.core.machine.traffic import Traffic

MIB = 1024**2
PIECE = 16 * MIB


class Machine:
    """Has ``left`` bytes; every freed buffer grows the heap, until it is trimmed."""

    def __init__(self, left: int) -> None:
        self.left, self.holes, self.least, self.trims, self.looks = left, 0, left, 0, 0

    def memory_left(self) -> int:
        self.looks += 1
        return self.left - self.holes

    def trim_heap(self) -> None:
        self.trims, self.holes = self.trims + 1, 0

    def free(self, kept: Heap, nbytes: int) -> None:
        self.holes += nbytes
        self.least = min(self.least, self.left - self.holes)
        kept.freed(nbytes)


@pytest.fixture
def machine(monkeypatch) -> Machine:
    machine = Machine(GIB)
    monkeypatch.setattr(heap, "native", machine)
    monkeypatch.setattr(heap, "memory_left", machine.memory_left)
    monkeypatch.setattr(heap, "is_by_ulimit", lambda: False)
    return machine


@pytest.mark.parametrize("planned", [0, 600 * MIB])
def test_holes_never_take_the_reserve(machine, planned):
    """Method: a plan takes its memory after the heap is watched, without freeing anything. Twin:
    an unwatched heap takes all that is left."""
    kept = Heap()
    machine.left -= planned
    for _ in range(200):
        machine.free(kept, PIECE)
    reserve = GIB // 3
    assert machine.trims and machine.least > reserve // 8
    assert 200 * PIECE > machine.left


def test_a_large_machine_is_left_alone(machine):
    """It is not trimmed, and is asked once for each gigabyte, not for each buffer."""
    machine.left = 1000 * GIB
    kept = Heap()
    machine.looks = 0
    for _ in range(200):
        kept.freed(64 * PIECE)
    assert machine.trims == 0 and machine.looks < 10


def test_the_memory_left_is_not_asked_for_at_every_small_buffer(machine):
    kept = Heap()
    machine.left, machine.looks = 100 * MIB, 0
    for _ in range(64):
        kept.freed(LEAST_FREED_NBYTES // 32)
    assert machine.looks <= 4


def test_a_device_counts_what_it_frees(monkeypatch):
    """Twin: what it allocates is not counted."""
    freed: list[int] = []
    monkeypatch.setattr(Heap, "freed", lambda kept, nbytes: freed.append(nbytes))
    device = Device(torch.device("cpu"), Traffic())
    storage = torch.empty(1000, dtype=torch.uint8).untyped_storage()
    device.resize(storage, 0)
    assert freed == [1000]
    device.resize(storage, 2000)
    device.note_freed(7)
    assert freed == [1000, 7]
