"""Device: runs queues that move bytes to and from what computes, meanwhile.

queue     work that runs in order, beside the compute and the other queues: ``in`` (to the device), ``out`` (from it),
          ``step`` (the optimizer on the device)
event     a place in a queue, or in the compute, that other work can be put behind

On a GPU a queue is a stream: putting one behind the other costs the host nothing. A processor runs
its queues at once.
Memory that one stream gives to another is put in order first, so nothing needs ``record_stream``; and once the first step
is over, what is allocated is there in the allocator's cache of the queue that asks.

The compute of one model is one stream at a time: its forward and backward may run on any, but not on two at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .. import native
from ..errors import InfinityError
from . import direct_storage, storage_guard
from .heap import Heap
from .traffic import Traffic

QUEUES = ("in", "out", "step")

SHARE_FOR_THE_ENGINE = 0.5  # of a GPU's free memory, where no budget is given: activations get the rest


class Event(Protocol):
    """A place in a queue."""

    @property
    def done(self) -> bool:
        """Whether everything before it is over."""

    def precede(self) -> None:
        """Puts what this thread computes from now on behind it. Raises what its work raised, where that is known."""

    def wait(self) -> None:
        """Blocks until it is done. Raises what its work raised."""


class _Past:
    """An event that is over."""

    done = True

    def precede(self) -> None:
        pass

    def wait(self) -> None:
        pass


PAST = _Past()


class Ticketed:
    """An event that a ticket of the core finishes with. What went wrong with it is told to whoever asked for that work."""

    def __init__(self, ticket: native.Ticket):
        self.ticket = ticket

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.ticket.done

    def precede(self) -> None:
        """Blocks until it is over: what the processor computes comes behind."""
        self.wait()

    def wait(self) -> None:
        """Blocks until it is over."""
        with contextlib.suppress(InfinityError, RuntimeError):
            self.ticket.wait()


@dataclass(frozen=True)
class Copy:
    """Names what a piece of work moves, for the books."""

    edge: str
    nbytes: int
    what: str


class Device:
    """The processor: its memory is the host's, and its queues run at once."""

    is_host = True  # whether what lies on the device can be used by the processor where it lies
    overlaps = False  # whether queues run beside the compute
    backend: str | None = None  # of process groups that reach its memory; None: that of the processor's

    def __init__(self, where: torch.device, traffic: Traffic):
        self.where, self.traffic = where, traffic
        self._heap = Heap()
        self._reads_disks: bool | None = None
        self.kernels: Any = None  # of the optimizer, where the processor's do not reach
        self.kernels_refusal = "the processor has its own"

    def put(self, queue: str, work: Callable[[], None], *, behind: Iterable[Event] = (), transfer: Copy | None = None) -> Event:
        """Runs ``work`` in ``queue``, behind what is in it and behind the given events."""
        if transfer is None:
            work()
        else:
            with self.traffic.copying(transfer.edge, transfer.nbytes, transfer.what):
                work()
        return PAST

    def now(self) -> Event:
        """Returns the event after everything that was computed so far."""
        return PAST

    @property
    def direct_calls(self) -> int:
        """Address of what threads of the core call to reach its memory: the kernels', which verify bytes there, or, without them, the
        driver's. 0 where the processor has it, or nothing reaches it."""
        if self.is_host:
            return 0
        return self.driver_calls if self.kernels is None else self.kernels.calls()

    @property
    def driver_calls(self) -> int:
        """Address of what its driver can do for threads of the core without kernels; 0 where there is none."""
        return 0

    def reads_disks(self, folders: Sequence[str], checksums: bool | str = True) -> bool:
        """Tells whether disks of ``folders`` can move bytes into its memory past the host's, and be verified as ``checksums`` says. Asked
        once."""
        if self._reads_disks is None:
            verified = self.kernels is not None or checksums is not True
            self._reads_disks = bool(folders) and verified and bool(self.direct_calls) and not direct_storage.refusal(folders)
        return self._reads_disks

    @property
    def stream_handle(self) -> int:
        """Handle of the stream that runs now, for the kernels."""
        return 0

    def ticket(self, events: Iterable[Event]) -> native.Ticket | None:
        """Makes a ticket that work of the core can be put behind: it finishes with ``events``. None when they are over."""
        tickets = [event.ticket for event in events if isinstance(event, Ticketed) and not event.done]
        return native.joined(tickets) if tickets else None

    def resize(self, storage: torch.UntypedStorage, nbytes: int, *, behind: Event = PAST) -> None:
        """Gives ``storage`` memory (called inside work of the queue ``in``), or takes it away, after all that was computed
        so far and ``behind``."""
        storage_guard.open(storage)
        freed = storage.nbytes()
        if freed != nbytes:  # of memory that stayed nothing is asked that torch could refuse
            storage.resize_(nbytes)
        if freed and not nbytes:
            self._heap.freed(freed)
        if not nbytes:
            storage_guard.close(storage)

    def close_storage(self, storage: torch.UntypedStorage, *, behind: Event = PAST) -> None:
        """Makes the bytes of ``storage`` inaccessible, and leaves its memory: what fills it next comes after all that was computed so
        far and ``behind``."""
        storage_guard.close(storage)

    def zeros(self, numel: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """Allocates a flat array of zeros on the device. Raises CapacityError when it has no room."""
        return torch.zeros(numel, dtype=dtype, device=self.where)

    def warm(self, nbytes: int) -> None:
        """Has the allocator keep ``nbytes`` in one piece for the queue ``in``: what comes and goes there is cut from it."""

    def free_nbytes(self) -> int | None:
        """Counts the bytes for the engine where no budget is given; None: as much as the host has."""
        return None

    def pin(self, region: native.Region) -> None:
        """Makes copies between ``region`` and the device run beside the host."""

    @property
    def is_own_thread(self) -> bool:
        """Whether a thread of the device itself runs this, which must not wait for the device."""
        return False

    def drain(self) -> None:
        """Waits until every queue is empty. What its work raised is told to whoever waits for that work."""

    def close(self) -> None:
        """Ends the queues, after what is in them. A second call does nothing."""
