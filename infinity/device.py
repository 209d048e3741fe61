"""Device: what computes, and the queues that move bytes to and from it meanwhile.

queue     work that runs in order, beside the compute and the other queues: ``in`` (to the device), ``out`` (from it),
          ``step`` (the optimizer on the device)
moment    a place in a queue, or in the compute, that other work can be put behind
borrowed  tensors of the compute that a queue still reads: freed earlier, their memory would be written anew

On a GPU a queue is a stream and a moment an event: putting one behind the other costs the host nothing. A processor runs
its queues at once, or in threads of their own, which keep the same order: what is proved about one is true of the other.
Memory that one stream gives to another is put in order first, so nothing needs ``record_stream``; and once the first step
is over, what is allocated is there in the allocator's cache of the queue that asks.

The compute of one model is one stream at a time: its forward and backward may run on any, but not on two at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import guard, native
from .errors import CapacityError, ConfigError, StorageError
from .heap import Heap
from .tiers import format_nbytes
from .trace import Traffic

QUEUES = ("in", "out", "step")
ORIGIN_SECONDS = 60.0  # after which event times are taken from a nearer one
SHARE_FOR_THE_ENGINE = 0.5  # of a GPU's free memory, where no budget is given: activations get the rest


class Moment(Protocol):
    """A place in a queue."""

    @property
    def done(self) -> bool:
        """Whether everything before it is over."""

    def precede(self) -> None:
        """What this thread computes from now on comes after it. Raises what its work raised, where that is known."""

    def wait(self) -> None:
        """Blocks until it is done. Raises what its work raised."""


class _Past:
    """A moment that is over."""

    done = True

    def precede(self) -> None:
        pass

    def wait(self) -> None:
        pass


PAST = _Past()


@dataclass(frozen=True)
class Freight:
    """What a piece of work moves, for the books."""

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
        self.kernels: Any = None  # of the optimizer, where the processor's do not reach
        self.kernels_refusal = "the processor has its own"

    def put(
        self, queue: str, work: Callable[[], None], *, behind: Iterable[Moment] = (), freight: Freight | None = None
    ) -> Moment:
        """Runs ``work`` in ``queue``, behind what is in it and behind the given moments."""
        if freight is None:
            work()
        else:
            with self.traffic.copying(freight.edge, freight.nbytes, freight.what):
                work()
        return PAST

    def now(self) -> Moment:
        """After everything that was computed so far."""
        return PAST

    @property
    def stream_handle(self) -> int:
        """Of the stream that runs now, for the kernels."""
        return 0

    def ticket(self, moments: Iterable[Moment]) -> native.Ticket | None:
        """What work of the core can be put behind: finishes with ``moments``. None when they are over."""
        return None

    def resize(self, storage: torch.UntypedStorage, nbytes: int, *, behind: Moment = PAST) -> None:
        """Gives ``storage`` memory (called inside work of the queue ``in``), or takes it away, after all that was computed
        so far and ``behind``."""
        guard.open(storage)
        freed = storage.nbytes()
        storage.resize_(nbytes)
        if freed and not nbytes:
            self._heap.freed(freed)
        if not nbytes:
            guard.close(storage)

    def zeros(self, numel: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """A flat array on the device. Raises CapacityError when it has no room."""
        return torch.zeros(numel, dtype=dtype, device=self.where)

    def warm(self, nbytes: int) -> None:
        """Has the allocator keep ``nbytes`` in one piece for the queue ``in``: what comes and goes there is cut from it."""

    def free_nbytes(self) -> int | None:
        """Memory for the engine where no budget is given; None: as much as the host has."""
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


class _ThreadMoment:
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
        self._threads = [threading.Thread(target=_serve, args=(queue,), daemon=True, name=f"infinity-{name}")
                         for name, queue in self._queues.items()]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def put(
        self, queue: str, work: Callable[[], None], *, behind: Iterable[Moment] = (), freight: Freight | None = None
    ) -> Moment:
        moment, behind = _ThreadMoment(), list(behind)

        def run() -> None:
            try:
                for before in behind:
                    before.wait()
                start = time.perf_counter()
                work()
                if freight is not None:
                    self.traffic.copied(freight.edge, freight.nbytes, freight.what, start, time.perf_counter())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                moment.end(error)
            else:
                moment.end(None)

        self._queues[queue].put(run)
        return moment

    def ticket(self, moments: Iterable[Moment]) -> native.Ticket | None:
        return _ticket_of([moment for moment in moments if not moment.done])

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


def _ticket_of(moments: list[_ThreadMoment]) -> native.Ticket | None:
    if not moments:
        return None
    ticket = native.Ticket(len(moments))
    for moment in moments:
        moment.on_done(ticket.part_done)
    return ticket


class _Streams:
    """torch's streams and events of one device, whatever torch calls it. CUDA's have classes of their own, which older
    torches do not mix with the general ones."""

    def __init__(self, where: torch.device):
        self._where, self._is_cuda = where, where.type == "cuda"

    def new(self) -> torch.Stream:
        return torch.cuda.Stream(self._where) if self._is_cuda else torch.Stream(device=self._where)

    def current(self) -> torch.Stream:
        return torch.cuda.current_stream(self._where) if self._is_cuda else torch.accelerator.current_stream(self._where)

    def running(self, stream: torch.Stream) -> AbstractContextManager:
        """What is computed inside runs on ``stream``."""
        return torch.cuda.stream(stream) if self._is_cuda else stream

    def event(self, *, timing: bool = False) -> torch.Event:
        """One that a waiting thread sleeps for, where that is to be had."""
        if self._is_cuda:
            return torch.cuda.Event(enable_timing=timing, blocking=True)
        return torch.Event(device=self._where, enable_timing=timing)


class _EventMoment:
    """An event of an accelerator."""

    def __init__(self, event: torch.Event, streams: _Streams):
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
    """A GPU, or whatever torch calls an accelerator: a stream for each queue."""

    is_host = False
    overlaps = True

    def __init__(self, where: torch.device, traffic: Traffic):
        """Raises ConfigError where ``where`` cannot be used."""
        if where.index is None:
            where = torch.device(where.type, torch.accelerator.current_device_index())
        super().__init__(where, traffic)
        self._streams = _Streams(where)
        try:
            self._queues = {name: self._streams.new() for name in QUEUES}
            self._origin = self._streams.event(timing=True)
            self._origin.record(self._streams.current())
            self._origin.synchronize()
        except RuntimeError as error:
            told = str(error).splitlines()[0]
            raise ConfigError(f"device {where} cannot be used: {told}. `infinity env` tells more.") from error
        self.backend = _backend_of(where)
        self._began = time.perf_counter()
        self._uncounted: deque[tuple[torch.Event, torch.Event, Freight]] = deque()
        self._watch: SimpleQueue = SimpleQueue()
        self._watcher = threading.Thread(target=_watch, args=(self._watch, where), daemon=True, name="infinity-watch")
        self._watcher.start()
        self.kernels_refusal = f"there are none for {where.type}"
        if where.type == "cuda":
            with torch.cuda.device(where):
                self.kernels, self.kernels_refusal = native.gpu_kernels()

    def put(
        self, queue: str, work: Callable[[], None], *, behind: Iterable[Moment] = (), freight: Freight | None = None
    ) -> Moment:
        stream = self._queues[queue]
        for moment in behind:
            if isinstance(moment, _EventMoment):
                stream.wait_event(moment.event)
            else:
                moment.wait()
        start, end = (self._streams.event(timing=freight is not None) for _ in range(2))
        start.record(stream)
        try:
            with self._streams.running(stream):
                work()
        except BaseException as error:
            stream.synchronize()  # nobody is told of what was begun
            if isinstance(error, torch.OutOfMemoryError):
                raise self._no_room(freight.what if freight is not None else "the engine", error) from error
            raise
        end.record(stream)
        if freight is not None:
            self.traffic.edges[freight.edge].nbytes += freight.nbytes
            self._uncounted.append((start, end, freight))
            self._count()
        return _EventMoment(end, self._streams)

    def zeros(self, numel: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        try:
            return super().zeros(numel, dtype, what)
        except torch.OutOfMemoryError as error:
            raise self._no_room(what, error) from error

    def _no_room(self, what: str, error: BaseException) -> CapacityError:
        free = self.free_nbytes()
        told = f" ({format_nbytes(free / SHARE_FOR_THE_ENGINE)} is free)" if free is not None else ""
        return CapacityError(
            f"{self.where} has no memory for {what}, which was planned{told}: activations or another process took it. Lower "
            f"device_memory, or run fewer samples at once. The device says: {str(error).splitlines()[0]}"
        )

    def _count(self) -> None:
        """Enters into the books how long what is over has taken."""
        while self._uncounted and self._uncounted[0][1].query():
            start, end, freight = self._uncounted.popleft()
            began = self._began + self._origin.elapsed_time(start) / 1000
            self.traffic.copied(freight.edge, 0, freight.what, began, began + start.elapsed_time(end) / 1000)
            if time.perf_counter() - self._began > ORIGIN_SECONDS:  # times are floats: a far origin makes them coarse
                self._origin, self._began = end, began + start.elapsed_time(end) / 1000

    def now(self) -> Moment:
        event = self._streams.event()
        event.record(self._streams.current())
        return _EventMoment(event, self._streams)

    @property
    def stream_handle(self) -> int:
        return torch.cuda.current_stream(self.where).cuda_stream

    def ticket(self, moments: Iterable[Moment]) -> native.Ticket | None:
        waiting = [moment for moment in moments if not moment.done]
        if not waiting:
            return None
        ticket = native.Ticket(len(waiting))
        for moment in waiting:
            self._watch.put((moment, ticket))
        return ticket

    def resize(self, storage: torch.UntypedStorage, nbytes: int, *, behind: Moment = PAST) -> None:
        guard.open(storage)
        if nbytes:
            storage.resize_(nbytes)
            return
        # The memory goes back to the queue it came from, which must not write it before the compute has read it.
        for moment in (self.now(), behind):
            if isinstance(moment, _EventMoment):
                self._queues["in"].wait_event(moment.event)
        storage.resize_(0)
        guard.close(storage)

    def warm(self, nbytes: int) -> None:
        def take() -> None:
            torch.empty(nbytes, dtype=torch.uint8, device=self.where)  # and gives it back, to the queue's part of the cache

        self.put("in", take)

    def free_nbytes(self) -> int | None:
        memory = getattr(torch.get_device_module(self.where), "mem_get_info", None)
        return int(memory(self.where)[0] * SHARE_FOR_THE_ENGINE) if memory is not None else None

    def pin(self, region: native.Region) -> None:
        if self.where.type != "cuda" or region.pinned:
            return
        try:
            region.pin(self.where.index)
        except StorageError as error:
            raise CapacityError(f"host memory for {self.where}: {error.strerror}") from error

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._watcher

    def drain(self) -> None:
        for stream in self._queues.values():
            stream.synchronize()
        self._uncounted.clear()

    def close(self) -> None:
        try:
            for stream in self._queues.values():
                stream.synchronize()
        except RuntimeError:
            pass  # the device has failed, and whoever computed on it was told
        finally:
            self._watch.put(None)
            self._watcher.join()


def _backend_of(where: torch.device) -> str | None:
    try:
        return dist.get_default_backend_for_device(where) if dist.is_available() else None
    except ValueError:
        return None


def _watch(queue: SimpleQueue, where: torch.device) -> None:
    """Finishes tickets as their moments come: work of the core then starts without the training thread."""
    torch.accelerator.set_device_index(where.index)
    while (waiting := queue.get()) is not None:
        moment, ticket = waiting
        try:
            moment.wait()
        except RuntimeError as error:
            ticket.part_failed(str(error))
        else:
            ticket.part_done()


class Borrowed:
    """Tensors that queues still read. When they are more than ``limit_nbytes`` the compute waits for the oldest."""

    def __init__(self, limit_nbytes: int):
        self._limit = limit_nbytes
        self._held: deque[tuple[Moment, torch.Tensor, Callable[[], None]]] = deque()
        self._nbytes = 0

    def emptied(self) -> Borrowed:
        """The same without tensors: nothing is read any more."""
        return Borrowed(self._limit)

    def keep(self, tensor: torch.Tensor, moment: Moment, then: Callable[[], None] = lambda: None) -> None:
        """Keeps ``tensor`` until ``moment``, and calls ``then``."""
        if moment is PAST:
            return
        self._held.append((moment, tensor, then))
        self._nbytes += tensor.nbytes
        while self._held and (self._nbytes > self._limit or self._held[0][0].done):
            moment, tensor, then = self._held.popleft()
            moment.precede()
            self._nbytes -= tensor.nbytes
            then()


KINDS: dict[str, Callable[[torch.device, Traffic], Device]] = {"cpu": Device}  # by torch's name; else an Accelerator


def make_device(where: torch.device, traffic: Traffic) -> Device:
    """The device that computes where ``where`` says. Raises ConfigError when there is none."""
    if where.type in KINDS:
        return KINDS[where.type](where, traffic)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != where.type:
        reason = f"; {native.cuda_driver()[1]}" if where.type == "cuda" and native.cuda_driver()[1] else ""
        raise ConfigError(f"there is no device {where} here: torch {torch.__version__} finds {found or 'no accelerator'}{reason}")
    return Accelerator(where, traffic)
