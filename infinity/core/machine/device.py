"""Device: runs queues that move bytes to and from the compute device, beside the compute.

queue     work that runs in order, beside the compute and the other queues: ``in`` (to the device),
          ``out`` (from it), ``step`` (the optimizer on the device), ``state-in`` and ``state-out``
          (optimizer state that passes the device: weights that are needed next overtake it)
event     a position in a queue, or in the compute, after which other work can be ordered

On a GPU a queue is a stream: ordering one after another costs the host nothing. A processor runs
queued work immediately. After the first step all allocations come from the allocator's cache of
their queue.

The compute of one model is one stream at a time: its forward and backward may run on any, but not
on two at once. A tensor that one of them allocated and another one uses is told to the allocator
(:func:`note_used`), or the first could overwrite it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ... import native
from ...errors import InfinityError
from . import storage_guard
from .card_memory import CardMemory
from .heap import Heap
from .traffic import Traffic

Count = Callable[[float, float], None]  # of a start and an end, of time.perf_counter()
QUEUES = ("in", "out", "step", "state-in", "state-out")


class Event(Protocol):
    """A position in a queue."""

    @property
    def done(self) -> bool:
        """Whether everything before it is complete."""

    def precede(self) -> None:
        """Orders this thread's later compute after it. Raises its work's error, if known."""

    def wait(self) -> None:
        """Blocks until it is done. Raises its work's error."""


class _Past:
    """An event that is over."""

    done = True

    def precede(self) -> None:
        pass

    def wait(self) -> None:
        pass


PAST = _Past()
Events = Iterable[Event]


class Ticketed:
    """The event of a ticket of the core. Errors are raised to the caller who submitted the work."""

    def __init__(self, ticket: native.Ticket):
        self.ticket = ticket

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.ticket.done

    def precede(self) -> None:
        """Blocks until it is over: the processor computes afterwards."""
        self.wait()

    def wait(self) -> None:
        """Blocks until it is over."""
        with contextlib.suppress(InfinityError, RuntimeError):
            self.ticket.wait()


@dataclass(frozen=True)
class Copy:
    """Describes a transfer, for the statistics."""

    edge: str
    nbytes: int
    label: str


def note_used(*tensors: torch.Tensor) -> None:
    """Tells the allocator that the current stream uses ``tensors``, which other streams may have
    allocated: their memory is not given out again before that."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class Device:
    """The processor: its memory is the host's, and its queues run immediately."""

    is_host = True  # whether the processor can access device memory in place
    overlaps = False  # whether queues run beside the compute
    on_paper: Any = None  # of a machine that is not here: the bytes of its tiers, for a plan
    memory: CardMemory | None = None  # None: the host's
    backend: str | None = None  # of process groups that reach its memory; None: the processor's

    def __init__(self, where: torch.device, traffic: Traffic):
        self.where, self.traffic = where, traffic
        # Notes that a buffer of so many bytes in device memory goes back to its allocator. The
        # host's allocator keeps it, unless the heap is trimmed.
        self.note_freed = Heap().freed
        self.kernels: Any = None  # of the optimizer, if the processor's do not reach
        self.kernels_refusal = "the processor has its own"

    def put(
        self,
        queue: str,
        work: Callable[[], None],
        *,
        after: Iterable[Event] = (),
        transfer: Copy | None = None,
    ) -> Event:
        """Runs ``work`` in ``queue``, after earlier work of the queue and after the events
        ``after``."""
        if transfer is None:
            work()
        else:
            start = time.perf_counter()
            work()
            self.traffic.copied_here(transfer.edge, transfer.nbytes, transfer.label, start)
        return PAST

    def now(self) -> Event:
        """Returns the event after all compute so far."""
        return PAST

    def stalled(self, edge: str, label: str) -> AbstractContextManager[None]:
        """Counts how long the compute stands still in the block, as a stall on ``edge``."""
        return self.traffic.stalled(edge, label)

    @contextmanager
    def timing(self, count: Count) -> Iterator[None]:
        """Calls ``count`` with the start and end of the block's compute, once that is over."""
        start = time.perf_counter()
        yield
        count(start, time.perf_counter())

    def follow(self, event: Event, edge: str, label: str) -> None:
        """Orders this thread's later compute after ``event``: a stall on ``edge``."""
        if event.done:
            event.precede()  # raises its work's error
            return
        with self.stalled(edge, label):
            event.precede()

    @property
    def direct_calls(self) -> int:
        """Address of the functions by which the core accesses device memory: the kernels', which
        verify bytes there, or else the driver's. 0 if the CPU can access it, or none exists."""
        if self.is_host:
            return 0
        return self.driver_calls if self.kernels is None else self.kernels.calls()

    @property
    def driver_calls(self) -> int:
        """Address of the driver's functions that the core needs without kernels; 0 if there are
        none."""
        return 0

    @property
    def stream_handle(self) -> int:
        """Handle of the current stream, for the kernels."""
        return 0

    def ticket(self, events: Iterable[Event]) -> native.Ticket | None:
        """Makes a ticket that completes with ``events``, for work of the core. None if they are
        over."""
        tickets = [
            event.ticket for event in events if isinstance(event, Ticketed) and not event.done
        ]
        return native.joined(tickets) if tickets else None

    def resize(self, storage: torch.UntypedStorage, nbytes: int, *, after: Events = ()) -> None:
        """Allocates the memory of ``storage`` (called inside work of the queue ``in``), or frees it
        after the events ``after``."""
        storage_guard.open(storage)
        freed = storage.nbytes()
        if freed != nbytes:  # no resize of unchanged memory: torch could refuse it
            storage.resize_(nbytes)
        if not nbytes:
            self.note_freed(freed)
            storage_guard.close(storage)

    def close_storage(self, storage: torch.UntypedStorage, *, after: Events = ()) -> None:
        """Makes the bytes of ``storage`` inaccessible, and keeps its memory. The next fill comes
        after the events ``after``."""
        storage_guard.close(storage)

    def zeros(self, numel: int, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """Allocates a flat array of zeros on the device. Raises CapacityError if it has no room."""
        return torch.zeros(numel, dtype=dtype, device=self.where)

    def begin_pass(self) -> None:
        """Prepares for a forward of the whole model. Raises UsageError if the device's compute
        cannot be moved to and fro now."""

    def warm(self, nbytes: int) -> None:
        """Makes the allocator keep ``nbytes`` in one piece for the queue ``in``, to cut later
        allocations from."""

    def pin(self, region: native.Region) -> None:
        """Registers ``region`` so that copies to and from the device do not block the host."""

    @property
    def is_own_thread(self) -> bool:
        """Whether the current thread is the device's own, which must not wait for the device."""
        return False

    def drain(self) -> None:
        """Waits until every queue is empty. Errors are raised to the callers who wait for the
        work."""

    def close(self) -> None:
        """Ends the queues after their work. Idempotent."""
