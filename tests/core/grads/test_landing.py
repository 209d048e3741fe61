"""LandingQueue: gradients on their way home, beside the compute.

**gate**: what a transfer waits for, so that it is on its way for as long as a test wants.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from threaded_device import ThreadedDevice

from infinity.core.grads.landing import LandingQueue
from infinity.core.machine.device import Copy, Device
from infinity.core.machine.traffic import Traffic

SECONDS = 5  # that a closed gate lasts at most: a fault fails, and hangs nothing
NBYTES = 16  # of four elements of four bytes
SHARD, OTHER = object(), object()


class Way:
    """A queue home, on a device with threads, and a gate."""

    def __init__(self, in_flight_nbytes: int = 10 * NBYTES):
        self.traffic, self.gate, self.home = Traffic(), threading.Event(), torch.zeros(4)
        self.device = ThreadedDevice(torch.device("cpu"), self.traffic)
        self.queue = LandingQueue(self.device, self.traffic, in_flight_nbytes)

    def send(self, flat_param: object, value: torch.Tensor, *, is_gated: bool = True):
        def send() -> None:
            if is_gated:
                self.gate.wait(SECONDS)
            self.home.copy_(value)

        return self.queue.send(flat_param, send, NBYTES, "a.weight", value)


@pytest.fixture
def way() -> Iterator[Way]:
    way = Way()
    yield way
    way.gate.set()
    way.device.close()


def test_a_gradient_is_home_once_it_was_waited_for(way):
    """Twin: before, it is on its way, and the caller was not held up."""
    event = way.send(SHARD, torch.ones(4))
    assert not event.done and way.queue.of(SHARD) == [event.end]
    assert way.home.tolist() == [0] * 4
    way.gate.set()
    way.queue.wait(SHARD)
    assert way.home.tolist() == [1] * 4 and event.done
    assert way.queue.of(SHARD) == []


def test_a_shard_without_gradients_on_their_way_is_not_waited_for(way):
    """Although another's are: the gate is closed."""
    way.send(OTHER, torch.ones(4))
    way.queue.wait(SHARD)
    assert way.queue.of(SHARD) == [] and way.home.tolist() == [0] * 4


def test_the_last_of_several_gradients_of_a_shard_is_waited_for(way):
    way.send(SHARD, torch.ones(4), is_gated=False)
    last = way.send(SHARD, torch.full((4,), 2.0))
    assert way.queue.of(SHARD) == [last.end]
    way.gate.set()
    way.queue.wait(SHARD)
    assert way.home.tolist() == [2] * 4


def test_the_waits_and_the_bytes_are_counted_on_their_edge(way):
    edge = way.traffic.edges["device->host"]
    way.send(SHARD, torch.ones(4), is_gated=False)
    way.queue.wait(OTHER)
    assert edge.stall_seconds == 0
    way.queue.wait(SHARD)
    assert edge.nbytes == NBYTES and edge.stall_seconds > 0
    assert all(
        way.traffic.edges[name].nbytes == 0 for name in way.traffic.edges.keys() - {"device->host"}
    )


def test_a_gradient_that_is_read_on_its_way_lives_until_it_is_home(way):
    """Whoever made it has let it go. Twin: once home, the next send lets it go."""
    value = torch.ones(4)
    held = weakref.ref(value)
    way.queue.send(SHARD, partial(way.gate.wait, SECONDS), NBYTES, "a.weight", value)
    del value
    gc.collect()
    assert held() is not None
    way.gate.set()
    way.queue.wait(SHARD)
    way.send(SHARD, torch.ones(4), is_gated=False)
    way.queue.wait(SHARD)
    gc.collect()
    assert held() is None


def test_more_bytes_than_the_limit_are_waited_for():
    """With room for one gradient the second waits for the first. Twin: with room for two the gate
    stays closed."""
    for room, is_home in ((2 * NBYTES, False), (NBYTES, True)):
        way = Way(room)
        first = way.send(SHARD, torch.ones(4))
        if is_home:
            way.gate.set()
        way.send(OTHER, torch.ones(4), is_gated=False)
        assert first.done == is_home
        way.gate.set()
        way.device.close()


def test_an_error_on_the_way_is_raised_by_whoever_waits(way):
    def fail() -> None:
        raise ValueError("no way")

    way.queue.send(SHARD, fail, NBYTES, "a.weight")
    with pytest.raises(ValueError, match="no way"):
        way.queue.wait(SHARD)


def test_what_is_sent_comes_after_the_compute_so_far():
    """Method: a device whose compute is behind the gate; the transfer waits for it."""
    gate, events = threading.Event(), []

    class Computing(ThreadedDevice):
        def now(self):
            events.append(self.put("in", partial(gate.wait, SECONDS)))
            return events[-1]

    device = Computing(torch.device("cpu"), Traffic())
    queue, sent = LandingQueue(device, device.traffic, NBYTES), threading.Event()
    event = queue.send(SHARD, sent.set, NBYTES, "a.weight")
    assert len(events) == 1 and not event.done
    device.put("step", lambda: None).wait()  # another queue is not held up
    assert not sent.is_set()
    gate.set()
    queue.wait(SHARD)
    assert sent.is_set() and events[0].done
    device.close()


def test_what_is_forgotten_is_not_waited_for(way):
    """Of one flat param, or of all after an exception. Twin: another flat param's is still on its
    way."""
    way.send(SHARD, torch.ones(4))
    event = way.send(OTHER, torch.ones(4))
    way.queue.forget(SHARD)
    way.queue.wait(SHARD)
    assert way.queue.of(SHARD) == [] and way.queue.of(OTHER) == [event.end]
    way.queue.rebuild()
    way.queue.wait(OTHER)
    assert way.queue.of(OTHER) == [] and way.home.tolist() == [0] * 4


def test_on_a_processor_gradients_are_home_at_once():
    device = Device(torch.device("cpu"), Traffic())
    queue, home = LandingQueue(device, device.traffic, 0), torch.zeros(4)
    assert queue.send(SHARD, lambda: home.fill_(3), NBYTES, "a.weight", home).done
    assert home.tolist() == [3] * 4 and device.traffic.edges["device->host"].nbytes == NBYTES


# --- small gradients share a job ---


class Counting(Device):
    """Runs jobs at once, and lists their transfers."""

    def __init__(self):
        super().__init__(torch.device("cpu"), Traffic())
        self.sent: list[Copy] = []

    def put(self, queue, work, *, after=(), transfer=None):
        self.sent.append(transfer)
        return super().put(queue, work, after=after, transfer=transfer)


@pytest.fixture
def counting() -> Counting:
    return Counting()


def sent_by(queue: LandingQueue, count: int, nbytes: int = NBYTES) -> list[float]:
    """The values that have come home, of as many gradients."""
    home: list[float] = []
    for number in range(count):
        queue.send(SHARD, partial(home.append, number), nbytes, f"weight {number}")
    return home


BEGINS = {
    "a backward ends": lambda queue, event: queue.begin(),
    "they are waited for": lambda queue, event: queue.wait(SHARD),
    "the step comes after them": lambda queue, event: queue.of(SHARD),
    "compute comes after them": lambda queue, event: event.precede(),
    "somebody asks": lambda queue, event: event.done,
}


@pytest.mark.parametrize("how", BEGINS)
def test_small_gradients_share_a_job_until_it_is_needed(how, counting):
    """In order. Twin: before, nothing was sent; what comes after begins another job."""
    queue = LandingQueue(counting, counting.traffic, 100 * NBYTES)
    home = sent_by(queue, 3)
    event = queue.send(SHARD, partial(home.append, 3), NBYTES, "weight 3")
    assert home == [] and counting.sent == []
    BEGINS[how](queue, event)
    assert home == [0, 1, 2, 3]
    BEGINS[how](queue, event)
    (transfer,) = counting.sent
    assert transfer.nbytes == 4 * NBYTES and transfer.label == "weight 0 and 3 more"
    sent_by(queue, 1)
    queue.begin()
    assert len(counting.sent) == 2


def test_a_job_that_is_large_enough_begins_at_once(counting):
    """As large as what may be in flight. Twin: one gradient less."""
    queue = LandingQueue(counting, counting.traffic, 3 * NBYTES)
    assert sent_by(queue, 2) == []
    assert sent_by(queue, 1) == [0] and len(counting.sent) == 1
    assert sent_by(queue, 2, nbytes=3 * NBYTES) == [0, 1] and len(counting.sent) == 3


def test_a_job_comes_after_the_compute_of_each_of_its_gradients(counting, monkeypatch):
    """Which may have run on several streams."""
    moments = iter(range(9))
    after = []
    monkeypatch.setattr(counting, "now", lambda: next(moments))
    put = counting.put

    def noted(queue, work, *, after=(), transfer=None, told=after):
        told.append(list(after))
        return put(queue, work, transfer=transfer)

    monkeypatch.setattr(counting, "put", noted)
    queue = LandingQueue(counting, counting.traffic, 100 * NBYTES)
    sent_by(queue, 3)
    queue.begin()
    assert after == [[0, 1, 2]]


def test_a_job_is_no_larger_than_what_may_be_in_flight(counting):
    """Unless one gradient is."""
    queue = LandingQueue(counting, counting.traffic, 3 * NBYTES)
    sent_by(queue, 1, nbytes=2 * NBYTES)
    sent_by(queue, 1, nbytes=2 * NBYTES)
    queue.begin()
    assert [transfer.nbytes for transfer in counting.sent] == [2 * NBYTES] * 2


def test_what_was_given_up_holds_nothing_and_is_over(counting):
    value = torch.ones(4)
    queue = LandingQueue(counting, counting.traffic, 100 * NBYTES)
    event = queue.send(SHARD, lambda: None, NBYTES, "a.weight", value)
    held = weakref.ref(value)
    del value
    queue.rebuild()
    gc.collect()
    assert held() is None and event.done
    event.precede()


def test_what_an_exception_kept_back_is_never_sent(counting):
    queue = LandingQueue(counting, counting.traffic, 100 * NBYTES)
    home = sent_by(queue, 2)
    queue.rebuild()
    queue.begin()
    assert home == [] and counting.sent == [] and queue.of(SHARD) == []
