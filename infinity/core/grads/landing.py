"""LandingQueue: sends gradients home in a copy queue of the device, and signals their arrival.

landing    gradients of a flat param that are still on their way home
job        of the queue: small gradients share one, since each costs the thread that launches it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..machine.device import PAST, Copy, Device, Event
from ..machine.in_flight import InFlight
from ..machine.traffic import Traffic
from ..units.flat_param import FlatParam

JOB_NBYTES = 32 * 1024**2  # of a job of several gradients: the link is at full rate


class LandingQueue:
    """Gradients on their way to the host. Used from the thread that runs backward or the step."""

    def __init__(self, device: Device, traffic: Traffic, in_flight_nbytes: int):
        self._device, self._traffic = device, traffic
        self.landing: dict[FlatParam, _Job] = {}
        self._in_flight = InFlight(in_flight_nbytes)  # gradients that the queue still reads
        self._job_nbytes = min(JOB_NBYTES, in_flight_nbytes)
        self._next = _Job()

    def send(
        self,
        flat_param: FlatParam,
        send: Callable[[], None],
        nbytes: int,
        label: str,
        *read: torch.Tensor,
    ) -> Event:
        """Adds ``send``, which reads the tensors ``read``, to the next job, which comes after the
        compute enqueued so far. Returns the event of its end. Keeps ``read`` alive until then.

        It is held back until :meth:`begin`. Precondition: the backward whose gradient it is has not
        ended, so that recovery finds the gradient torn; or the caller begins the job.
        """
        if self._next.nbytes + nbytes > self._job_nbytes:
            self.begin()
        job = self._next
        job.add(send, nbytes, label, read, after=self._device.now(), begin=self.begin)
        self.landing[flat_param] = job
        if job.nbytes >= self._job_nbytes:
            self.begin()
        return job

    def begin(self) -> None:
        """Enqueues the job that gradients were added to: a backward ends, or they are needed."""
        job, self._next = self._next, _Job()
        if not job.is_empty:
            self._in_flight.keep(job.enqueue(self._device), job.end)

    def wait(self, flat_param: FlatParam) -> None:
        """Blocks until the landing gradients of ``flat_param`` have arrived: the host is about to
        use them."""
        if (landing := self.landing.get(flat_param)) is not None:
            self.begin()
            with self._traffic.stalled("device->host", "gradients"):
                landing.wait()
            del self.landing[flat_param]

    def of(self, flat_param: FlatParam) -> list[Event]:
        """Lists the events that must complete before the device can read a flat param's gradients
        at home."""
        if flat_param not in self.landing:
            return []
        self.begin()
        return [self.landing[flat_param].end]

    def forget(self, flat_param: FlatParam) -> None:
        """Treats the landing gradients of ``flat_param`` as landed."""
        self.landing.pop(flat_param, None)

    def rebuild(self) -> None:
        """Forgets everything after an exception. Only while no transfer is running."""
        self.landing.clear()
        self._next.give_up()
        self._next = _Job()
        self._in_flight = self._in_flight.emptied()


class _Job:
    """Sends that one job of the queue makes, and the event of its end."""

    def __init__(self) -> None:
        self._begin: Callable[[], None] | None = None  # enqueues this one, if it was not
        self._sends: list[Callable[[], None]] = []
        self._read: list[torch.Tensor] = []
        self._after: list[Event] = []  # of the compute, which may run on several streams
        self._first = ""
        self._end: Event = PAST
        self.nbytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._sends

    def add(
        self,
        send: Callable[[], None],
        nbytes: int,
        label: str,
        read: Sequence[torch.Tensor],
        *,
        after: Event,
        begin: Callable[[], None],
    ) -> None:
        self._begin, self._first = begin, self._first or label
        self._sends.append(send)
        self._after.append(after)
        self._read += read
        self.nbytes += nbytes

    def enqueue(self, device: Device) -> list[torch.Tensor]:
        """Enqueues the sends. Returns the tensors that they read."""
        sends, read, after = self._sends, self._read, self._after
        more = f" and {len(sends) - 1} more" if len(sends) > 1 else ""
        self.give_up()

        def work() -> None:
            for send in sends:
                send()

        transfer = Copy("device->host", self.nbytes, f"{self._first}{more}")
        self._end = device.put("out", work, after=after, transfer=transfer)
        return read

    def give_up(self) -> None:
        """Forgets the sends: they are enqueued, or will never be."""
        self._sends, self._read, self._after, self._begin = [], [], [], None

    @property
    def end(self) -> Event:
        """The event of the end."""
        if self._begin is not None:
            self._begin()
        return self._end

    @property
    def done(self) -> bool:
        return self.end.done

    def precede(self) -> None:
        self.end.precede()

    def wait(self) -> None:
        self.end.wait()
