"""ThreadedDevice: a processor that runs each queue in a thread, to test the order that a GPU's
streams keep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue

import torch

from infinity import native
from infinity.core.machine.device import QUEUES, Copy, Device, Event
from infinity.core.machine.traffic import Traffic


class _ThreadEvent:
    """A piece of work of a thread: its end."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def end(self, error: BaseException | None) -> None:
        """The work is over. Its error is raised by whoever waits."""
        with self._lock:
            self._error = error
            self._over.set()
            then, self._then = self._then, []
        for call in then:
            call()

    def on_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._over.is_set():
                self._then.append(call)
                return
        call()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    precede = wait


class ThreadedDevice(Device):
    """The processor, with a thread for each queue."""

    overlaps = True

    def __init__(self, where: torch.device, traffic: Traffic):
        super().__init__(where, traffic)
        self._queues = {name: SimpleQueue() for name in QUEUES}
        self._threads = [
            threading.Thread(target=_serve, args=(queue,), daemon=True, name=f"infinity-{name}")
            for name, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def put(
        self,
        queue: str,
        work: Callable[[], None],
        *,
        after: Iterable[Event] = (),
        transfer: Copy | None = None,
    ) -> Event:
        event, after = _ThreadEvent(), list(after)

        def run() -> None:
            nonlocal work
            try:
                for before in after:
                    before.wait()
                start = time.perf_counter()
                work()
                work = None  # it refers to tensors
                if transfer is not None:
                    self.traffic.copied(
                        transfer.edge, transfer.nbytes, transfer.label, start, time.perf_counter()
                    )
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                event.end(error)
            else:
                event.end(None)

        self._queues[queue].put(run)
        return event

    def ticket(self, events: Iterable[Event]) -> native.Ticket | None:
        return _ticket_of([event for event in events if not event.done])

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() in self._threads

    def drain(self) -> None:
        for queue in QUEUES:
            self.put(queue, lambda: None).wait()

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put(None)  # a second one is never looked at
        for thread in self._threads:
            thread.join()


@torch.inference_mode(False)
@torch.no_grad()
def _serve(queue: SimpleQueue) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # the next one may be long in coming


def _ticket_of(events: list[_ThreadEvent]) -> native.Ticket | None:
    if not events:
        return None
    ticket = native.Ticket(len(events))
    for event in events:
        event.on_done(ticket.part_done)
    return ticket
