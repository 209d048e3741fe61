"""LandingQueue: sends gradients home in a copy queue of the device, and signals their arrival.

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
        self._in_flight = InFlight(in_flight_nbytes)  # gradients that the queue still reads

    def send(
        self,
        shard: ParamShard,
        send: Callable[[], None],
        nbytes: int,
        what: str,
        *read: torch.Tensor,
    ) -> Event:
        """Enqueues ``send``, which reads the tensors ``read``, after the compute enqueued so far.
        Returns the event of its end. Keeps ``read`` alive until then."""
        landing = self._device.put(
            "out", send, behind=[self._device.now()], transfer=Copy("device->host", nbytes, what)
        )
        self._landing[shard] = landing
        for tensor in read:
            self._in_flight.keep(tensor, landing)
        return landing

    def wait(self, shard: ParamShard) -> None:
        """Blocks until the landing gradients of ``shard`` have arrived: the host is about to use
        them."""
        if (landing := self._landing.get(shard)) is not None:
            with self._traffic.stalled("device->host", "gradients"):
                landing.wait()
            del self._landing[shard]

    def of(self, shard: ParamShard) -> list[Event]:
        """Lists the events that must complete before the device can read a shard's gradients at
        home."""
        return [self._landing[shard]] if shard in self._landing else []

    def forget(self, shard: ParamShard) -> None:
        """Treats the landing gradients of ``shard`` as landed."""
        self._landing.pop(shard, None)

    def rebuild(self) -> None:
        """Forgets everything after an exception. Only while no transfer is running."""
        self._landing.clear()
        self._in_flight = self._in_flight.emptied()
