"""LandingQueue: sends gradients home in a copy queue of the device, and signals their arrival.

landing    gradients of a flat param that are still on their way home
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..machine.device import Copy, Device, Event
from ..machine.in_flight import InFlight
from ..machine.traffic import Traffic
from ..state.flat_param import FlatParam


class LandingQueue:
    """Gradients on their way to the host. Used from the thread that runs backward or the step."""

    def __init__(self, device: Device, traffic: Traffic, in_flight_nbytes: int):
        self._device, self._traffic = device, traffic
        self._landing: dict[FlatParam, Event] = {}
        self._in_flight = InFlight(in_flight_nbytes)  # gradients that the queue still reads

    def send(
        self,
        flat_param: FlatParam,
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
        self._landing[flat_param] = landing
        for tensor in read:
            self._in_flight.keep(tensor, landing)
        return landing

    def wait(self, flat_param: FlatParam) -> None:
        """Blocks until the landing gradients of ``flat_param`` have arrived: the host is about to
        use them."""
        if (landing := self._landing.get(flat_param)) is not None:
            with self._traffic.stalled("device->host", "gradients"):
                landing.wait()
            del self._landing[flat_param]

    def of(self, flat_param: FlatParam) -> list[Event]:
        """Lists the events that must complete before the device can read a flat param's gradients
        at home."""
        return [self._landing[flat_param]] if flat_param in self._landing else []

    def forget(self, flat_param: FlatParam) -> None:
        """Treats the landing gradients of ``flat_param`` as landed."""
        self._landing.pop(flat_param, None)

    def rebuild(self) -> None:
        """Forgets everything after an exception. Only while no transfer is running."""
        self._landing.clear()
        self._in_flight = self._in_flight.emptied()
