"""Accelerator: runs a device's queues as streams, and orders them by events."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist

from ... import native
from ...errors import CapacityError, ConfigError, StorageError, UsageError
from . import storage_guard
from .card_memory import CardMemory
from .device import QUEUES, Copy, Count, Device, Event, Events
from .sizes import format_nbytes
from .traffic import Traffic

logger = logging.getLogger(__name__)
ORIGIN_SECONDS = 60.0  # after which event times are measured from a later origin


class Streams:
    """torch's streams and events of one device of any type. CUDA has its own classes, which older
    torches do not mix with the general ones."""

    def __init__(self, where: torch.device):
        self._where, self._is_cuda = where, where.type == "cuda"

    def new(self) -> torch.Stream:
        return torch.cuda.Stream(self._where) if self._is_cuda else torch.Stream(device=self._where)

    def current(self) -> torch.Stream:
        return (
            torch.cuda.current_stream(self._where)
            if self._is_cuda
            else torch.accelerator.current_stream(self._where)
        )

    def running(self, stream: torch.Stream) -> AbstractContextManager:
        """Runs the compute inside on ``stream``."""
        return torch.cuda.stream(stream) if self._is_cuda else stream

    def event(self, *, timing: bool = False) -> torch.Event:
        """Makes an event whose wait sleeps instead of spinning, if available."""
        if self._is_cuda:
            return torch.cuda.Event(enable_timing=timing, blocking=True)
        return torch.Event(device=self._where, enable_timing=timing)


class StreamClock:
    """Times what runs between two events of a stream, without waiting for it."""

    def __init__(self, streams: Streams):
        """Waits for the current stream, once."""
        self._streams = streams
        self._origin, self._began = streams.event(timing=True), time.perf_counter()
        self._origin.record(streams.current())
        self._origin.synchronize()
        self._uncounted: deque[tuple[torch.Event, torch.Event, Count]] = deque()

    def add(self, start: torch.Event, end: torch.Event, count: Count) -> None:
        """Calls ``count`` once ``end`` is over. Counts what is over by now."""
        self._uncounted.append((start, end, count))
        while self._uncounted and self._uncounted[0][1].query():
            start, end, count = self._uncounted.popleft()
            began = self._began + self._origin.elapsed_time(start) / 1000
            count(began, began + start.elapsed_time(end) / 1000)
            # Times are floats: a far origin makes them coarse
            if time.perf_counter() - self._began > ORIGIN_SECONDS:
                self._origin, self._began = end, began + start.elapsed_time(end) / 1000

    @contextmanager
    def running(self, count: Count) -> Iterator[None]:
        """Times what the block does to the current stream."""
        stream = self._streams.current()
        start, end = (self._streams.event(timing=True) for _ in range(2))
        start.record(stream)
        try:
            yield
        finally:
            end.record(stream)
            self.add(start, end, count)

    def clear(self) -> None:
        """Forgets what is not counted yet."""
        self._uncounted.clear()


class _DeviceEvent:
    """An event of an accelerator."""

    def __init__(self, event: torch.Event, streams: Streams):
        self.event, self._streams = event, streams

    @property
    def done(self) -> bool:
        return self.event.query()

    def precede(self) -> None:
        if not self.event.query():
            self._streams.current().wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class Accelerator(Device):
    """A GPU, or another accelerator of torch: a stream for each queue."""

    is_host = False
    overlaps = True

    def __init__(self, where: torch.device, traffic: Traffic):
        """Raises ConfigError if ``where`` cannot be used."""
        if where.index is None:
            where = torch.device(where.type, torch.accelerator.current_device_index())
        super().__init__(where, traffic)
        self.streams = Streams(where)
        try:
            self._queues = {name: self.streams.new() for name in QUEUES}
            self._clock = StreamClock(self.streams)
        except RuntimeError as error:
            note = str(error).splitlines()[0]
            raise ConfigError(
                f"device {where} cannot be used: {note}. `infinity env` tells more."
            ) from error
        self.backend, self.registers = _backend_of(where), where.type == "cuda"
        self.memory = CardMemory(where)
        self._watch: SimpleQueue = SimpleQueue()
        self._watcher = threading.Thread(
            target=_watch, args=(self._watch, where), daemon=True, name="infinity-watch"
        )
        self._watcher.start()
        self.kernels_refusal = f"there are none for {where.type}"
        if where.type == "cuda":
            with torch.cuda.device(where):
                self.kernels, self.kernels_refusal = native.gpu_kernels()

    def put(
        self,
        queue: str,
        work: Callable[[], None],
        *,
        after: Iterable[Event] = (),
        transfer: Copy | None = None,
    ) -> Event:
        stream = self._queues[queue]
        for event in after:
            if isinstance(event, _DeviceEvent):
                stream.wait_event(event.event)
            else:
                event.wait()
        start, end = (self.streams.event(timing=transfer is not None) for _ in range(2))
        start.record(stream)
        try:
            with self.streams.running(stream):
                work()
        except BaseException as error:
            stream.synchronize()  # the caller gets no event for what has started
            if isinstance(error, torch.OutOfMemoryError):
                purpose = transfer.label if transfer is not None else "the engine"
                raise no_room(self, purpose, error) from error
            raise
        end.record(stream)
        if transfer is not None:
            self.traffic.edges[transfer.edge].nbytes += transfer.nbytes
            copied = transfer.edge, transfer.nbytes, transfer.label
            count = partial(self.traffic.copied, *copied, is_counted=True)
            self._clock.add(start, end, count)
        return _DeviceEvent(end, self.streams)

    def zeros(self, numel: int, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        try:
            return super().zeros(numel, dtype, purpose)
        except torch.OutOfMemoryError as error:
            raise no_room(self, purpose, error) from error

    def now(self) -> Event:
        event = self.streams.event()
        event.record(self.streams.current())
        return _DeviceEvent(event, self.streams)

    def stalled(self, edge: str, label: str) -> AbstractContextManager[None]:
        # Not the training thread's own time: it is ahead of the compute.
        return self._clock.running(partial(self.traffic.stood_still, edge, label))

    def timing(self, count: Count) -> AbstractContextManager[None]:
        return self._clock.running(count)

    @property
    def driver_calls(self) -> int:
        return native.driver_calls() if self.where.type == "cuda" else 0

    @property
    def stream_handle(self) -> int:
        return torch.cuda.current_stream(self.where).cuda_stream

    def ticket(self, events: Iterable[Event]) -> native.Ticket | None:
        waiting = [event for event in events if not event.done]
        if not waiting:
            return None
        ticket = native.Ticket(len(waiting))
        for event in waiting:
            self._watch.put((event, ticket))
        return ticket

    def resize(self, storage: torch.UntypedStorage, nbytes: int, *, after: Events = ()) -> None:
        storage_guard.open(storage)
        if nbytes:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
            return
        self._free_after(after)
        storage.resize_(0)
        storage_guard.close(storage)

    def close_storage(self, storage: torch.UntypedStorage, *, after: Events = ()) -> None:
        self._free_after(after)
        super().close_storage(storage)

    def _free_after(self, after: Events) -> None:
        """Makes the queue ``in`` allocate and free memory after the events ``after``."""
        for event in after:
            if isinstance(event, _DeviceEvent):
                self._queues["in"].wait_event(event.event)

    def warm(self, nbytes: int) -> None:
        # Freed to this queue's part of the cache
        self.put("in", partial(torch.empty, nbytes, dtype=torch.uint8, device=self.where))
        self.memory.note_cached(nbytes)

    def begin_pass(self) -> None:
        if self.where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "this forward is recorded as a CUDA graph, but weights come to other places each"
                " time, which a graph cannot follow. Run it outside of torch.cuda.graph(), and"
                ' compile without mode="reduce-overhead".'
            )
        if self.memory.was_given_back():
            with contextlib.suppress(CapacityError):  # the units then take it one by one
                self.warm(self.memory.cached_nbytes)

    def pin(self, region: native.Region) -> None:
        if not self.registers or region.pinned:
            return
        try:
            region.pin(self.where.index)
        except StorageError as error:
            self.registers = False  # what a quota has left may be asked for by others
            logger.warning(
                "host memory for %s: %s. What is not registered passes through the driver's own"
                " pinned buffers: the same bits, but the training thread waits for each copy",
                self.where,
                error.strerror,
            )

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._watcher

    def drain(self) -> None:
        for stream in self._queues.values():
            stream.synchronize()
        self._clock.clear()

    def close(self) -> None:
        try:
            self.drain()
        except RuntimeError:
            pass  # the device failed, and its callers got the error
        finally:
            self._watch.put(None)
            self._watcher.join()


def no_room(device: Device, purpose: str, error: BaseException) -> CapacityError:
    """Makes the error of a device that has no memory for ``purpose``."""
    free = device.memory.free_nbytes() if device.memory is not None else None
    note = f" ({format_nbytes(free)} is free)" if free is not None else ""
    return CapacityError(
        f"{device.where} has no memory for {purpose}, which was planned{note}: activations or"
        " another process took it. Lower device_memory, or run fewer samples at once. The device"
        f" says: {str(error).splitlines()[0]}"
    )


def _backend_of(where: torch.device) -> str | None:
    try:
        return dist.get_default_backend_for_device(where) if dist.is_available() else None
    except ValueError:
        return None


def _watch(queue: SimpleQueue, where: torch.device) -> None:
    """Completes tickets as their events come, so that the core starts work without the training
    thread."""
    torch.accelerator.set_device_index(where.index)
    while (waiting := queue.get()) is not None:
        event, ticket = waiting
        try:
            event.wait()
        except RuntimeError as error:
            ticket.part_failed(str(error))
        else:
            ticket.part_done()


# By torch's name; any other is an Accelerator
KINDS: dict[str, Callable[[torch.device, Traffic], Device]] = {"cpu": Device}


def make_device(where: torch.device, traffic: Traffic) -> Device:
    """Makes the compute device of ``where``. Raises ConfigError if there is none."""
    if where.type in KINDS:
        return KINDS[where.type](where, traffic)
    if torch.version.hip is not None:
        raise ConfigError(
            f"device {where} is AMD's, by ROCm, for which there are no kernels and no registered"
            " host memory here. Compute on the processor: Config(device='cpu')"
        )
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None or current.type != where.type:
        reason = native.cuda_driver()[1] if where.type == "cuda" else ""
        raise ConfigError(
            f"there is no device {where} here: torch {torch.__version__} finds"
            f" {current or 'no accelerator'}{reason and f'; {reason}'}"
        )
    return Accelerator(where, traffic)
