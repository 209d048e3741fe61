"""ActivationCopies: in which order buffers are read and written, and what is brought ahead."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.core.homes.arrays import StateArray
from infinity.core.machine.device import PAST, Device
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.run import activation_copies
from infinity.core.run.activation_copies import ActivationCopies
from infinity.core.run.saved_tensor import Saved, SavingOrder, raw_bytes

NBYTES = 256


class Work:
    """A piece of queued work, done once it is waited for, after all that it comes behind."""

    def __init__(self, work: Callable[[], None], after: list, before: list[Work]):
        self._work, self.after, self._before, self.done = work, after, before, False

    def wait(self) -> None:
        for each in (*self._before, *self.after):
            each.wait()
        if not self.done:
            self.done, work, self._work = True, self._work, None
            work()

    precede = wait


class Lazy(Device):
    """A device beside the compute, which does nothing before somebody waits for it."""

    overlaps = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), Traffic())
        self.queues: dict[str, list[Work]] = {"in": [], "out": []}

    def put(
        self, queue: str, work: Callable[[], None], *, after: Iterable = (), transfer=None
    ) -> Work:
        event = Work(work, [each for each in after if each is not PAST], self.queues[queue][-1:])
        self.queues[queue].append(event)
        return event


class Places:
    """Buffers of their own for all; ``again`` is given to the next one instead."""

    def __init__(self) -> None:
        self.again: StateArray | None = None

    def take(self, nbytes: int) -> StateArray:
        found, self.again = self.again, None
        flat = torch.zeros(nbytes, dtype=torch.uint8)
        extent = SimpleNamespace(address=flat.data_ptr())
        return found or StateArray(Tier.HOST, torch.uint8, nbytes, extent, flat)


class Sent:
    """Tensors of equal numbers, sent home in their order."""

    def __init__(self, device: Device, count: int):
        self.device, self.places, self.order = device, Places(), SavingOrder()
        self.copies = ActivationCopies(device, self.order)
        self.tensors: list[torch.Tensor] = []
        self.saved: list[Saved] = []
        for number in range(count):
            self.send(number + 1)

    def send(self, value: int) -> Saved:
        tensor = torch.full((NBYTES // 4,), float(value))
        saved = Saved(self.places.take(NBYTES), 0, NBYTES)
        self.copies.send(saved, raw_bytes(tensor.untyped_storage()), tensor)
        self.order.append(saved)
        self.tensors.append(tensor)
        self.saved.append(saved)
        return saved

    def bring(self, index: int) -> list[float]:
        storage = self.copies.bring(self.saved[index])
        found = torch.empty(0).set_(storage).unique().tolist()
        self.saved[index].came_back(storage)
        self.kept = storage
        return found


@pytest.mark.parametrize("device", [Lazy, lambda: Device(torch.device("cpu"), Traffic())])
def test_the_bytes_come_back_whatever_became_of_the_tensor(device):
    """Claim: the copy back waits for the copy home. Twin: another one's bytes are others."""
    sent = Sent(device(), 3)
    del sent.tensors[:]
    gc.collect()
    assert [sent.bring(index) for index in (2, 1, 0)] == [[3.0], [2.0], [1.0]]


def test_what_is_sent_lives_until_it_is_at_home():
    """Twin: after that nothing of it is held, and it may be changed."""
    sent = Sent(Lazy(), 1)
    saved, source = sent.saved[0], StorageWeakRef(sent.tensors[0].untyped_storage())
    assert saved.source is not None and not saved.sent.done
    sent.copies.wait()
    sent.send(2)  # looks at what is done
    assert saved.sent.done and saved.source is None
    sent.tensors[0].add_(1)
    assert sent.bring(0) == [1.0]
    assert not source.expired()
    del sent.tensors[0]
    assert source.expired()


def test_a_change_while_the_bytes_are_sent_is_told():
    """Twin: the processor copies at once, so that a change comes too late to matter."""
    sent, at_once = Sent(Lazy(), 1), Sent(Device(torch.device("cpu"), Traffic()), 1)
    for each in (sent, at_once):
        each.tensors[0].add_(1)
    with pytest.raises(RuntimeError, match="while it was sent home"):
        sent.bring(0)
    assert at_once.bring(0) == [1.0] and at_once.saved[0].source is None


def test_the_two_saved_before_are_brought_ahead(monkeypatch):
    """Claim: each storage is copied once, and those that are back are not copied again. The room
    for more is none here."""
    monkeypatch.setattr(activation_copies, "IN_FLIGHT_NBYTES", 0)
    sent = Sent(Lazy(), 4)
    assert sent.bring(3) == [4.0]
    assert [each.coming is not None for each in sent.saved] == [False, True, True, False]
    assert len(sent.device.queues["in"]) == 3
    assert sent.bring(2) == [3.0] and len(sent.device.queues["in"]) == 4
    held = sent.kept
    assert sent.saved[2].bytes_on_device() is not None and held is not None
    assert sent.bring(3) == [4.0] and len(sent.device.queues["in"]) == 5


def test_what_was_changed_is_not_brought_ahead():
    sent = Sent(Lazy(), 3)
    sent.tensors[0].add_(1)
    assert sent.bring(2) == [3.0]
    assert [each.coming is not None for each in sent.saved] == [False, True, False]


def test_a_device_that_does_not_overlap_brings_nothing_ahead():
    sent = Sent(Device(torch.device("cpu"), Traffic()), 3)
    assert sent.bring(2) == [3.0]
    assert [each.coming for each in sent.saved] == [None] * 3


def test_a_buffer_is_filled_again_only_after_it_was_read():
    """Method: the copy back of the first is under way as its buffer is given to another. Twin:
    the one after that, in a buffer of its own, comes behind no copy back."""
    sent = Sent(Lazy(), 1)
    storage = sent.copies.bring(sent.saved[0])
    (back,) = sent.device.queues["in"]
    sent.places.again = sent.saved[0].array
    other, own = sent.send(7), sent.send(8)
    assert other.sent.after == [back] and own.sent.after == []
    other.sent.wait()
    assert torch.empty(0).set_(storage).unique().tolist() == [1.0]
    assert sent.bring(1) == [7.0]
    sent.places.again = sent.saved[0].array
    assert back not in sent.send(9).sent.after  # waited for once


def test_to_wait_is_to_wait_for_both_directions():
    """Twin: after all copies were forgotten there is nothing to wait for."""
    for forgets in (False, True):
        sent = Sent(Lazy(), 2)
        sent.copies.bring(sent.saved[1])
        last = [sent.device.queues["in"][-1], sent.send(3).sent]
        if forgets:
            sent.copies.forget()
        sent.copies.wait()
        assert [each.done for each in last] == [not forgets] * 2


def test_the_bytes_are_counted_in_both_directions():
    sent = Sent(Device(torch.device("cpu"), Traffic()), 3)
    sent.bring(1)
    edges = sent.device.traffic.edges
    assert [edges[edge].nbytes for edge in ("device->host", "host->device")] == [768, 256]
