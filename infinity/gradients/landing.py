"""LandingQueue: sends gradients home in a queue of the device, and says when they are there.

landing    gradients of a shard that are still on their way home
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..machine.device import Copy, Device, Event
from ..machine.in_flight import InFlight
from ..machine.traffic import Traffic
from ..state.shard import ParamShard


class LandingQueue:
    """Gradients on their way to the host. Used from the thread that runs backward or the step."""

    def __init__(self, device: Device, traffic: Traffic, in_flight_nbytes: int):
        self._device, self._traffic = device, traffic
        self._landing: dict[ParamShard, Event] = {}
        self._in_flight = InFlight(in_flight_nbytes)  # gradients that are still read there

    def send(self, shard: ParamShard, send: Callable[[], None], nbytes: int, what: str, *read: torch.Tensor) -> Event:
        """Runs ``send``, which reads the tensors ``read``, behind what is computed by now. Returns when it is done."""
        landing = self._device.put("out", send, behind=[self._device.now()], transfer=Copy("device->host", nbytes, what))
        self._landing[shard] = landing
        for tensor in read:
            self._in_flight.keep(tensor, landing)
        return landing

    def wait(self, shard: ParamShard) -> None:
        """Waits until what was sent home of ``shard`` is there: the host is about to use it."""
        if (landing := self._landing.get(shard)) is not None:
            with self._traffic.stalled("device->host", "gradients"):
                landing.wait()
            del self._landing[shard]

    def of(self, shard: ParamShard) -> list[Event]:
        """Lists what has to be over before the device can read a shard's gradients at home."""
        return [self._landing[shard]] if shard in self._landing else []

    def forget(self, shard: ParamShard) -> None:
        """Takes what was sent of ``shard`` for landed."""
        self._landing.pop(shard, None)

    def rebuild(self) -> None:
        """Forgets everything after an exception. Only while nothing is in flight."""
        self._landing.clear()
        self._in_flight = self._in_flight.emptied()
