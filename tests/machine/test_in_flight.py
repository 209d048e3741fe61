"""InFlight: how much may be on its way before the compute waits."""

from __future__ import annotations

import pytest
import torch

from infinity.machine.in_flight import InFlight


class Event:
    """Never done; the compute may be put behind it."""

    done = False

    def __init__(self) -> None:
        self.precedes = False

    def precede(self) -> None:
        self.precedes = True


@pytest.mark.parametrize("of_largest, waits", [(0, [True, True, True]), (2, [True, False, False])])
def test_as_many_of_the_largest_may_be_on_their_way(of_largest, waits):
    """A limit below one of them would put the compute behind the copy that has just begun."""
    in_flight, events = InFlight(10, of_largest=of_largest), [Event() for _ in waits]
    for event in events:
        in_flight.keep(torch.empty(100, dtype=torch.uint8), event)
    assert [event.precedes for event in events] == waits
    events = [Event() for _ in waits]
    in_flight = in_flight.emptied()
    for event in events:
        in_flight.keep(torch.empty(100, dtype=torch.uint8), event)
    assert [event.precedes for event in events] == waits
