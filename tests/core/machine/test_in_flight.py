"""InFlight: how much may be on its way before the compute waits."""

from __future__ import annotations

import pytest
import torch

from infinity.core.machine import in_flight as module
from infinity.core.machine.in_flight import InFlight


class Event:
    """Not done, unless it is said; the compute may be put behind it."""

    def __init__(self) -> None:
        self.done = self.precedes = False

    def precede(self) -> None:
        self.precedes = True


@pytest.mark.parametrize("of_largest, waits", [(0, [True, True, False]), (2, [True, False, False])])
def test_as_many_of_the_largest_may_be_on_their_way(of_largest, waits):
    """The compute never waits for the copy that has just begun. Twin: two of the largest may be on
    their way."""
    in_flight, events = InFlight(10, of_largest=of_largest), [Event() for _ in waits]
    for event in events:
        in_flight.keep([torch.empty(100, dtype=torch.uint8)], event)
    assert [event.precedes for event in events] == waits
    events = [Event() for _ in waits]
    in_flight = in_flight.emptied()
    for event in events:
        in_flight.keep([torch.empty(100, dtype=torch.uint8)], event)
    assert [event.precedes for event in events] == waits


def test_tensors_of_one_copy_are_let_go_together():
    """The compute does not wait for a copy because another tensor of it is large. Twin: with the
    next copy it waits, once."""
    in_flight, events = InFlight(150), [Event(), Event()]
    tensors = [torch.empty(100, dtype=torch.uint8) for _ in range(3)]
    in_flight.keep(tensors, events[0])
    assert not events[0].precedes
    in_flight.keep(tensors[:1], events[1])
    assert events[0].precedes and not events[1].precedes


@pytest.mark.parametrize("limit, waits", [(0, True), (150, True), (250, False)])
def test_a_limit_that_is_set_counts_from_the_next_copy(limit, waits):
    """Method: two copies within a large limit, then a third. Twin: a limit with room for it."""
    in_flight, events = InFlight(10**6), [Event() for _ in range(2)]
    in_flight.keep([torch.empty(100, dtype=torch.uint8)], events[0])
    in_flight.limit(limit)
    in_flight.keep([torch.empty(100, dtype=torch.uint8)], events[1])
    assert [event.precedes for event in events] == [waits, False]


def test_tensors_are_let_go_for_the_stream_that_waits(monkeypatch):
    """Method: a copy that still runs leaves for lack of room, on a stream that may not own its
    tensors. Twin: of a copy that is over, the memory can be used at once."""
    told: list[torch.Tensor] = []
    monkeypatch.setattr(module, "note_used", lambda *tensors: told.extend(tensors))
    first, second = Event(), Event()
    in_flight, tensors = InFlight(150), [torch.empty(100, dtype=torch.uint8)] * 2
    in_flight.keep(tensors[:1], first)
    in_flight.keep(tensors[1:], second)
    assert first.precedes and len(told) == 1
    second.done = True
    in_flight.keep(tensors[:1], Event())
    assert second.precedes and len(told) == 1
