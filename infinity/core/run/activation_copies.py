"""ActivationCopies: copies saved storages to host memory, and back for the backward."""

from __future__ import annotations

import weakref
from functools import partial

import torch

from ..machine.device import PAST, Copy, Device, Event
from ..machine.in_flight import InFlight
from .saved_tensor import Saved, SavingOrder, release_saved

IN_FLIGHT_NBYTES = 256 * 1024 * 1024  # activations on their way; more of them wait
# As many of the largest may be on their way, or each would wait for its own copy.
IN_FLIGHT_OF_LARGEST = 4


class ActivationCopies:
    """Copies in the device's queues, in both directions. Used from the threads that run forward and
    backward."""

    def __init__(self, device: Device, order: SavingOrder, most_nbytes: int | None = None):
        """``most_nbytes``: that may be on their way, if the device has little room."""
        self._device, self._order = device, order
        self._most_nbytes = IN_FLIGHT_NBYTES if most_nbytes is None else most_nbytes
        of_largest = IN_FLIGHT_OF_LARGEST if most_nbytes is None else 0
        self._in_flight = InFlight(self._most_nbytes, of_largest=of_largest)
        self._in_use: dict[int, Event] = {}  # by home address: the last copy that reads the buffer
        # By queue: its last copy; after it no copy uses any buffer.
        self._last: dict[str, Event] = {}

    def limit(self, nbytes: int) -> None:
        """Sets how many bytes may be on their way."""
        self._most_nbytes = min(IN_FLIGHT_NBYTES, nbytes)
        self._in_flight.limit(self._most_nbytes)

    def forget(self) -> None:
        """Forgets all copies, after an exception. Only while nothing is in flight."""
        self._in_flight, self._in_use, self._last = self._in_flight.emptied(), {}, {}

    def wait(self) -> None:
        """Blocks until no copy uses any buffer."""
        for event in self._last.values():
            event.wait()

    def send(self, saved: Saved, source: torch.Tensor, tensor: torch.Tensor) -> None:
        """Starts copying ``source``, the bytes of ``saved``, home. ``tensor`` was saved of them."""
        array = saved.array
        after = [self._device.now(), self._in_use.pop(array.extent.address, PAST)]
        transfer = Copy("device->host", saved.nbytes, "activations")
        target = array.flat[: saved.nbytes]
        event = self._device.put(
            "out",
            lambda: target.copy_(source, non_blocking=True),
            after=after,
            transfer=transfer,
        )
        saved.sent = self._last["out"] = event
        if event is not PAST:
            saved.source = tensor.detach(), tensor._version
            self._in_flight.keep([source], event, partial(release_saved, weakref.ref(saved)))

    def bring(self, saved: Saved) -> torch.UntypedStorage:
        """Copies a storage back from the host. If copies overlap compute, also starts copying the
        storages that the backward needs next."""
        saved.check_source()
        if saved.coming is None:
            self._set_out(saved)
        storage, saved.arrived = saved.coming
        saved.coming = None
        if self._device.overlaps:
            for other in self._order.before(saved, nbytes=self._most_nbytes):
                if (
                    other.coming is None
                    and other.bytes_on_device() is None
                    and not other.was_changed()
                ):
                    self._set_out(other)
        self._device.follow(saved.arrived, "host->device", "activations")
        return storage

    def _set_out(self, saved: Saved) -> None:
        """Starts copying to the device. The target was allocated on the compute stream, so the copy
        waits for earlier compute on it."""
        target, source = (
            torch.empty(saved.nbytes, dtype=torch.uint8, device=self._device.where),
            saved.array.flat[: saved.nbytes],
        )
        transfer = Copy("host->device", saved.nbytes, "activations")
        after = [self._device.now(), saved.sent]
        event = self._device.put(
            "in", lambda: target.copy_(source, non_blocking=True), after=after, transfer=transfer
        )
        # The copy writes to it even if no backward uses the result.
        self._in_flight.keep([target], event)
        self._in_use[saved.array.extent.address] = self._last["in"] = event
        saved.coming = target.untyped_storage(), event
