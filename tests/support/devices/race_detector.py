"""A device that finds races: memory that two queues use without being put in order.

Words used here:

**line**: what happens in one order: ``compute``, a queue, the ``host`` (the training thread itself)
or its ``updater``. **clock**: how far a line is, and how far every other line certainly was by then
(a vector clock). **access**: a read or write of a storage on a line, seen by a dispatch mode around
everything that runs. **race**: two accesses of one storage, one of them a write, on lines that
nothing puts in order; or memory that is freed while a line may still use it.

Everything runs at once on the processor, so the numbers are right whatever is forgotten: what a GPU
would do to them is told by the clocks alone. Host memory is what the engine registers (`pin`),
device memory is all else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity import native
from infinity.core.grads.tensor import GradProxy
from infinity.core.machine import accelerator, device
from infinity.core.params.parameter import StoredAlias
from infinity.core.step import stepper
from infinity.core.units.home_arrays import HomeArrays

LINES = ("compute", "host", "updater", *device.QUEUES)
Clock = dict[str, int]
PAGE = 4096

SILENT = {"set_", "resize_", "detach", "alias", "lift_fresh"}
ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class Race(AssertionError):
    pass


def merged(a: Clock, b: Clock) -> Clock:
    return {line: max(a[line], b[line]) for line in LINES}


@dataclass
class Record:
    """Who used a storage: the clock's own tick of each line's last read and write, and where."""

    home: str  # the line that may reuse the memory: the one that used it first
    alive: StorageWeakRef | None
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)
    writes: dict[str, tuple[int, str]] = field(default_factory=dict)


class DetectedMoment:
    """A clock to be put behind. It counts as over only once the host has waited for it."""

    def __init__(self, detector: RaceDetector, clock: Clock):
        self._detector, self.clock = detector, clock

    @property
    def done(self) -> bool:
        return all(self._detector.clocks["host"][line] >= tick for line, tick in self.clock.items())

    def precede(self) -> None:
        self._detector.join("compute", self.clock)

    def wait(self) -> None:
        self._detector.waits += not self.done
        self._detector.join("host", self.clock)


class RaceDetector(device.Device):
    """See the module. ``races`` are what it found, as text."""

    is_host = False
    overlaps = True

    def __init__(self, where, traffic):
        super().__init__(where, traffic)
        self.clocks = {line: dict.fromkeys(LINES, 0) for line in LINES}
        self.records: dict[object, Record] = {}  # by storage, in host memory by page
        self.races: list[str] = []
        self.host_memory: list[tuple[int, int]] = []
        self.line = "compute"
        self.waits = 0  # of the host
        self.tickets: dict[native.Ticket, Clock] = {}  # what each comes after

    # --- order ---

    def tick(self, line: str) -> None:
        self.clocks[line][line] += 1

    def join(self, line: str, clock: Clock) -> None:
        self.clocks[line] = merged(self.clocks[line], clock)

    def put(self, queue, work, *, after: Iterable = (), transfer=None):
        self.tick(queue)
        self.join(queue, self.clocks["host"])
        for moment in after:
            if isinstance(moment, DetectedMoment):
                self.join(queue, moment.clock)
        before, self.line = self.line, queue
        try:
            work()
        finally:
            self.line = before
        if transfer is not None:
            self.traffic.copied(transfer.edge, transfer.nbytes, transfer.label, 0.0, 1.0)
        return DetectedMoment(self, dict(self.clocks[queue]))

    def now(self):
        self.tick("compute")
        return DetectedMoment(self, dict(self.clocks["compute"]))

    def ticket(self, moments):
        waiting = [
            moment for moment in moments if isinstance(moment, DetectedMoment) and not moment.done
        ]
        if not waiting:
            return None
        ticket = native.Ticket(1)
        ticket.part_done()
        clock = waiting[0].clock
        for moment in waiting[1:]:
            clock = merged(clock, moment.clock)
        self.tickets[ticket] = clock
        return ticket

    def pin(self, region):
        self.host_memory.append((region.address, region.address + region.nbytes))

    def resize(self, storage, nbytes, *, after=()):
        if not nbytes and storage.nbytes():
            for moment in after:
                if isinstance(moment, DetectedMoment):
                    self.join("in", moment.clock)
            self.free(storage._cdata, "in")
        super().resize(storage, nbytes)
        if nbytes:
            self.records[storage._cdata] = Record("in", None)
            self.use(storage, "in", write=True, what="allocation")

    # --- accesses ---

    def is_host_memory(self, address: int) -> bool:
        return any(begin <= address < end for begin, end in self.host_memory)

    def use_host(self, address: int, nbytes: int, line: str, *, write: bool, what: str) -> None:
        """One access to host memory, page by page."""
        for page in range(address // PAGE, (address + nbytes - 1) // PAGE + 1):
            self.records.setdefault(("page", page), Record(line, None))
            self._use(("page", page), line, write=write, what=what)

    def use(self, storage: torch.UntypedStorage, line: str, *, write: bool, what: str) -> None:
        """One access to device memory."""
        if storage._cdata not in self.records:
            self.records[storage._cdata] = Record(line, StorageWeakRef(storage))
        self._use(storage._cdata, line, write=write, what=what)

    def _use(self, key: object, line: str, *, write: bool, what: str) -> None:
        record = self.records[key]
        clock = self.clocks[line]
        others = [*record.writes.items(), *(record.reads.items() if write else ())]
        for other, (tick, where) in others:
            if other != line and clock[other] < tick:
                self.found(
                    f"{what} on {line} {'writes' if write else 'reads'} what {where} on {other} may"
                    " still use"
                )
        (record.writes if write else record.reads)[line] = (clock[line], what)

    def free(self, key: object, line: str | None = None) -> None:
        record = self.records.pop(key, None)
        if record is None:
            return
        line = line or record.home
        for other, (tick, where) in [*record.writes.items(), *record.reads.items()]:
            if other != line and self.clocks[line][other] < tick:
                self.found(f"memory of {line} is freed while {where} on {other} may still use it")

    def found(self, text: str) -> None:
        frames, frame = [], sys._getframe(2)
        while frame is not None and len(frames) < 6:
            if "/infinity/" in frame.f_code.co_filename:
                frames.append(f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}")
            frame = frame.f_back
        self.races.append(f"{text} (at {', '.join(frames)})")

    def sweep(self) -> None:
        """Looks for memory that was freed since."""
        for key in [
            key
            for key, record in self.records.items()
            if record.alive is not None and record.alive.expired()
        ]:
            self.free(key)


class Watch(TorchDispatchMode):
    """Tells a detector of every operation's accesses."""

    def __init__(self, detector: RaceDetector):
        super().__init__()
        self.detector = detector

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        detector = self.detector
        if any(isinstance(leaf, (GradProxy, StoredAlias)) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented  # what it does inside is watched
        detector.sweep()
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name in ALLOCATIONS:
            detector.records[result.untyped_storage()._cdata] = Record(
                detector.line, StorageWeakRef(result.untyped_storage())
            )
        if func.is_view or name in SILENT or name in ALLOCATIONS:
            return result
        written = set()
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written |= {
                    id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)
                }
        tensors = [
            (leaf, id(leaf) in written)
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        tensors += [(leaf, True) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.account(name, tensors)
        return result

    def account(self, name: str, tensors: list[tuple[torch.Tensor, bool]]) -> None:
        detector = self.detector
        places = []
        for tensor, write in tensors:
            storage = tensor.untyped_storage()
            if tensor.layout is not torch.strided or not storage.nbytes():
                continue
            places.append((tensor, storage, write, detector.is_host_memory(storage.data_ptr())))
        line = detector.line
        detector.join(line, detector.clocks["host"])  # it was launched by the training thread
        for tensor, storage, write, on_host in places:
            detector.tick(line)
            if on_host:
                who = (
                    "host" if line == "compute" else line
                )  # outside the queues the training thread does it itself
                detector.tick(who)
                detector.use_host(tensor.data_ptr(), tensor.nbytes, who, write=write, what=name)
            else:
                detector.use(storage, line, write=write, what=name)
        if line == "compute" and any(
            on_host for *_, on_host in places
        ):  # such a copy is waited for
            detector.join("host", detector.clocks["compute"])
            detector.join("compute", detector.clocks["host"])


@contextmanager
def detecting(monkeypatch, kernels=None):
    """Wrapped models compute on a detector inside; yields a function that gives the last one."""
    made: list[RaceDetector] = []

    def make(where, traffic):
        made.append(RaceDetector(where, traffic))
        made[-1].kernels, made[-1].kernels_refusal = kernels, "" if kernels else "none were given"
        return made[-1]

    monkeypatch.setitem(accelerator.KINDS, "cpu", make)
    _watch_updates(monkeypatch, lambda: made[-1])
    yield lambda: made[-1]


def _watch_updates(monkeypatch, detector_of) -> None:
    """Has the processor's updates counted as accesses, behind what they were told to come after."""
    real_update, real_joined, real_wait = native.UnitUpdate, native.joined, HomeArrays.wait
    plan_update = stepper.Stepper._processor_update
    told: dict = {}
    bounds: dict = {}  # of each run
    real_run = native.Run
    planned: list = []  # updates, and when each is over

    def joined(tickets):
        found, detector = real_joined(tickets), detector_of()
        clock = dict.fromkeys(LINES, 0)
        for ticket in tickets:
            clock = merged(clock, detector.tickets.get(ticket, clock))
        detector.tickets[found] = clock
        return found

    def run(begin, end, *rest):
        made = real_run(begin, end, *rest)
        bounds[made] = begin, end
        return made

    def update(**given):
        told.update(given)
        return real_update(**given)

    def processor_update(self, step, runs, after):
        planned_update, detector = plan_update(self, step, runs, after), detector_of()
        detector.tick("updater")
        detector.join("updater", detector.clocks["host"])
        if told["after"] is not None:
            detector.join("updater", detector.tickets[told["after"]])
        first, last = bounds[runs[0]][0], bounds[runs[-1]][1]
        written = dict(step.flat_param.arrays)
        if step.draft.fresh is not None:
            written = {"weight": step.draft.fresh, "grad": written["grad"]}
        for name, array in written.items():
            if not array.extent.is_file:
                each = native.MOMENT_BLOCK if name.endswith("_scale") else 1
                begin, end = (at // each * array.dtype.itemsize for at in (first, last))
                detector.use_host(
                    array.extent.address + begin,
                    max(1, end - begin),
                    "updater",
                    write=name != "grad",
                    what="a step",
                )
        planned.append((planned_update, dict(detector.clocks["updater"])))
        return planned_update

    def wait(self, rows=None):
        ticket = getattr(self.update, "ticket", self.update)
        real_wait(self, rows)
        for each, over in planned:
            if ticket is not None and each.ticket is ticket:
                detector_of().join("host", over)

    monkeypatch.setattr(native, "Run", run)
    monkeypatch.setattr(native, "UnitUpdate", update)
    monkeypatch.setattr(native, "joined", joined)
    monkeypatch.setattr(stepper.Stepper, "_processor_update", processor_update)
    monkeypatch.setattr(HomeArrays, "wait", wait)
