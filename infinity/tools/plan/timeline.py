"""Timeline: simulates the steps of one rank, as the queues of the engine would run them.

queue   what runs one job after the other: the compute, each direction of the link, the disks, the
        links to other ranks, and the optimizer on the host and on the device
gather  one copy of a unit's weights to the device, from its home and from other ranks

A queue without an order of its own takes, of the jobs that may begin, the one whose unit the next
forward needs first; the links to other ranks take the one that was asked for first. Three steps are
simulated; the last is the result, since all before it warm up.
The host is assumed to launch ahead of the device.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .queues import Job, run

COMPUTE, UP, DOWN = "compute", "host->device", "device->host"
DISK, OPTIMIZER, ON_DEVICE, RANKS_LINK = "disks", "optimizer", "optimizer on device", "ranks"
RANKS = 1 << 20  # more than a model has units
IN_ORDER = (COMPUTE, UP, DOWN)
FORWARD, BACKWARD = "forward", "backward"
STEPS = 3
FEW = 5  # passes of a step whose time may tell that of one with more
ROUNDING = 1e-9  # of a pass
SLOTS, PIECES = 3, 4  # of a unit's state on its way through the host
AHEAD = 2  # uses for which ranks gather beside the one that computes


@dataclass(frozen=True)
class UnitSeconds:
    """The seconds that each of a unit's jobs takes by itself. 0: there is no such job."""

    name: str
    nbytes: int  # of its weights in the device window
    forward: float
    backward: float  # with the recomputation, if any
    head_forward: float = 0.0  # of an embedding that is also the head: at the forward's end
    head_backward: float = 0.0
    copy: float = 0.0  # of the weights to the device
    read: float = 0.0  # of the weights from the disks, before each copy
    landing: float = 0.0  # of the gradients on the host
    load: float = 0.0  # of the optimizer's state from the disks
    step: float = 0.0  # of the state on the host
    save: float = 0.0  # of state and weights to the disks
    add: float = 0.0  # of gradients at home on the disks, for each pass that adds to them
    step_on_device: float = 0.0
    gather: float = 0.0  # of the other ranks' parts of the weights, after each copy
    reduce: float = 0.0  # of the gradients with other ranks, before they land
    activations: float = 0.0  # of what a forward saves, to its home and back


@dataclass(eq=False, kw_only=True)
class UnitJob(Job):
    """A job of a unit."""

    kind: str
    unit: int
    step: int


@dataclass(frozen=True)
class Gather:
    """One gather before use number ``place``. ``behind``: uses whose end frees its memory."""

    unit: int
    place: int
    behind: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """One step. Jobs begin at 0, the start of its first forward; those of the optimizer may end
    beside the next forward."""

    units: tuple[str, ...]  # names, in order of use
    jobs: tuple[UnitJob, ...]
    seconds: float

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of work of every queue."""
        seconds: dict[str, float] = {}
        for job in self.jobs:
            seconds[job.queue] = seconds.get(job.queue, 0.0) + job.seconds
        return seconds

    @property
    def bound(self) -> str:
        """The queue with the most work."""
        busy = self.busy
        return max(busy, key=busy.__getitem__)

    def spans(self) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
        """Yields each unit's name, with the start and end of every kind of its jobs. A gather for
        the backward is of the kind "copy again"."""
        for index, name in enumerate(self.units):
            span_of: dict[str, tuple[float, float]] = {}
            for job in self.jobs:
                if job.unit == index:
                    kind = "copy again" if job.kind == "copy" and "copy" in span_of else job.kind
                    start, end = span_of.get(kind, (job.start, job.end))
                    span_of[kind] = min(start, job.start), max(end, job.end)
            yield name, span_of


def uses_of(count: int, again: int | None = None) -> list[int]:
    """Returns the units that a forward and its backward use, in order. The backward finds the last
    unit still gathered. It needs no weights of the first, whose input has no gradient. ``again``: a
    unit that the forward uses once more at its end."""
    forward = list(range(count)) + ([] if again is None else [again])
    return forward + forward[-2:0:-1]


def plan_gathers(
    nbytes: Sequence[int], window_nbytes: int, *, passes: int = 1, again: int | None = None
) -> list[Gather]:
    """Plans the gathers of forwards through all units and their backwards. Places count through
    all passes.

    The unit in use stays, and in the backward the one used before it. The next unit is prefetched
    if it fits. The unit whose next use is furthest is evicted first. Every pass begins with none.
    ``nbytes``: of each unit's weights. ``again``: see :func:`uses_of`.
    """
    uses = uses_of(len(nbytes), again)
    window = _Window(nbytes, window_nbytes, uses)
    turn = len(nbytes) + (again is not None)  # the first use of the backward
    for _ in range(passes):
        for place, unit in enumerate(uses):
            held = {unit, uses[place - 1]} if place >= turn else {unit}
            if unit not in window.resident:
                window.gather(place, place, held)
            window.used[unit] = place
            if place + 1 < len(uses) and uses[place + 1] not in window.resident:
                window.gather(place + 1, place, held)
        window.end_pass()
    return window.gathers


class _Window:
    """The device window: which units are resident, and whose memory is about to be free."""

    def __init__(self, nbytes: Sequence[int], window_nbytes: int, uses: Sequence[int]):
        self._nbytes, self._uses, self._first = nbytes, uses, 0
        self._room = window_nbytes  # beside the resident units
        self._leaving: list[tuple[int, int]] = []  # a heap: place of the last use, bytes
        self._leaving_nbytes = 0
        self._places: dict[int, list[int]] = {}
        for place, unit in enumerate(uses):
            self._places.setdefault(unit, []).append(place)
        self.resident: set[int] = set()
        self.used: dict[int, int] = {}  # unit -> place of its last use in this pass
        self.gathers: list[Gather] = []

    def gather(self, place: int, now: int, held: set[int]) -> None:
        """Gathers the unit of ``place`` during the use at ``now``. One that is used later stays
        away if there is no room."""
        unit = self._uses[place]
        while self._room < self._nbytes[unit] and (idle := self.resident - held):
            self._evict(max(idle, key=lambda each: self._next_use(each, now)))
        if self._room < self._nbytes[unit] and place != now:
            return
        behind = []
        while self._leaving and self._room - self._nbytes[unit] < self._leaving_nbytes:
            used, nbytes = heapq.heappop(self._leaving)
            self._leaving_nbytes -= nbytes
            behind.append(used)
        self.resident.add(unit)
        self._room -= self._nbytes[unit]
        self.gathers.append(Gather(unit, self._first + place, tuple(behind)))

    def end_pass(self) -> None:
        """Evicts every unit."""
        for unit in list(self.resident):
            self._evict(unit)
        self._first += len(self._uses)
        self.used.clear()

    def _evict(self, unit: int) -> None:
        self.resident.remove(unit)
        self._room += self._nbytes[unit]
        self._leaving_nbytes += self._nbytes[unit]
        heapq.heappush(self._leaving, (self._first + self.used.get(unit, 0), self._nbytes[unit]))

    def _next_use(self, unit: int, now: int) -> float:
        places = self._places[unit]
        at = bisect.bisect_right(places, now)
        return places[at] if at < len(places) else math.inf


def simulate(
    units: Sequence[UnitSeconds],
    window_nbytes: int,
    *,
    passes: int = 1,
    slots: int = SLOTS,
    pieces: int = PIECES,
    after_backward: bool = False,
    again: int | None = None,
    averaged: int | None = None,
) -> Timeline:
    """Simulates steps of ``units``, in order of use, and returns the last one. A step has
    ``passes`` forwards and backwards.

    ``slots``: pieces of state on their way through the host at once, of ``pieces`` a unit.
    ``after_backward``: no unit is stepped before the last gradient has landed, as with clipping.
    ``again``: the unit of an embedding that is also the head. ``averaged``: gradients leave the
    device in the last so many passes; None: in all.
    """
    steps = _Steps(
        units,
        window_nbytes,
        passes=passes,
        slots=slots,
        pieces=pieces,
        again=again,
        averaged=averaged,
    )
    seconds = steps.run(after_backward=after_backward)
    last_step = [job for job in steps.jobs if job.step == STEPS - 1]
    begin = min(job.start for job in last_step if job.queue == COMPUTE)
    for job in last_step:
        job.start, job.end = job.start - begin, job.end - begin
    return Timeline(tuple(unit.name for unit in units), tuple(last_step), seconds)


def step_seconds(
    units: Sequence[UnitSeconds],
    window_nbytes: int,
    *,
    passes: int = 1,
    after_backward: bool = False,
    averaged: int | None = None,
    **how: Any,
) -> float:
    """Computes the seconds of a step as :func:`simulate` does, whose arguments it takes. Of many
    passes it runs the first and the last few, if all between would only repeat each other."""
    leaves_always = averaged in (None, passes)
    few = FEW
    while 3 * few <= passes and (leaves_always or averaged == 1):
        of_few = few if leaves_always else 1
        steps = _Steps(units, window_nbytes, passes=few, averaged=of_few, **how)
        seconds = steps.run(after_backward=after_backward)
        if (more := steps.seconds_of_one_more()) is not None:
            return seconds + (passes - few) * more
        few *= 3
    steps = _Steps(units, window_nbytes, passes=passes, averaged=averaged, **how)
    return steps.run(after_backward=after_backward)


class _Steps:
    """The jobs of several steps, each with those that it waits for."""

    def __init__(
        self,
        units: Sequence[UnitSeconds],
        window_nbytes: int,
        *,
        passes: int,
        slots: int = SLOTS,
        pieces: int = PIECES,
        again: int | None = None,
        averaged: int | None,
    ):
        self._units, self._pieces, self._passes = units, pieces, passes
        self._averaged = averaged or passes
        # Frees the oldest slot
        self._saved: deque[list[UnitJob]] = deque([[]] * slots, maxlen=slots)
        self._last: dict[str, list[UnitJob]] = {}  # job of a queue that keeps its order
        self._home: list[list[UnitJob]] = [[] for _ in units]  # after which the weights are at home
        self._used: dict[int, UnitJob] = {}  # place of a use -> the end of its compute
        self._uses, self._step, self._pass = len(uses_of(len(units), again)), -1, -1
        sizes = [unit.nbytes if unit.copy or unit.gather else 0 for unit in units]
        gathers = plan_gathers(sizes, window_nbytes, passes=STEPS * passes, again=again)
        self._gathers = {gather.place: gather for gather in gathers}
        # Uses of a forward: the unit, and its seconds of compute in forward and backward.
        self._forward = [(at, unit.forward, unit.backward) for at, unit in enumerate(units)]
        if again is not None:
            self._forward.append((again, units[again].head_forward, units[again].head_backward))
        self._of_pass: list[tuple[int, int]] = []  # from which job to which
        self.jobs: list[UnitJob] = []

    def run(self, *, after_backward: bool) -> float:
        """Runs all steps, and returns the seconds of the last one."""
        ends = [self.add_step(after_backward=after_backward) for _ in range(STEPS)]
        run(self.jobs)
        before, last = (end.end for end in ends[-2:])
        return last - before

    def seconds_of_one_more(self) -> float | None:
        """Returns the seconds that one more pass adds to the last step that ran; None if they are
        not known. They are if in each step the three passes before the last one have the same
        jobs, and all of them begin by the same time later than those of the pass before: then
        what is under way at their ends is the same, and a fourth would repeat them."""
        more = 0.0
        for step in range(STEPS):
            at = (step + 1) * self._passes - 1
            three = [self.jobs[slice(*self._of_pass[n])] for n in range(at - 3, at)]
            for before, after in zip(three, three[1:]):
                later = [b.start - a.start for a, b in zip(before, after)]
                more = later[0] if before is three[0] else more
                if len(before) != len(after) or any(
                    abs(each - more) > ROUNDING * more for each in later
                ):
                    return None
        return more

    def add_step(self, *, after_backward: bool) -> UnitJob:
        """Adds a step, and returns the end of its backward."""
        self._step += 1
        for number in range(1, self._passes + 1):
            begin = len(self.jobs)
            end, landed = self._add_pass(leaves=number > self._passes - self._averaged)
            for unit, jobs in landed.items() if number < self._passes else ():
                self._add(DISK, "save", unit, self._units[unit].add, jobs)
            self._of_pass.append((begin, len(self.jobs)))
        everything = [job for jobs in landed.values() for job in jobs] if after_backward else []
        for unit, jobs in landed.items():
            self._update(unit, [*jobs, *everything])
        return end

    def _add_pass(self, *, leaves: bool) -> tuple[UnitJob, dict[int, list[UnitJob]]]:
        """Adds a forward and its backward. Returns the end, and by unit what its landed gradients
        wait for. ``leaves``: they leave the device."""
        self._pass += 1
        first, last = self._pass * self._uses, len(self._forward) - 1
        saved: list[list[UnitJob]] = []
        for at, (unit, seconds, _) in enumerate(self._forward):
            copied = self._gather(first + at)
            end = self._used[first + at] = self._compute(FORWARD, unit, seconds, copied)
            sent = self._units[unit].activations if at < len(self._units) else 0.0
            saved.append(self._add(DOWN, "activations", unit, sent, [end]) if sent else [])
        landed: dict[int, list[UnitJob]] = {}
        for at, (unit, _, seconds) in reversed(list(enumerate(self._forward))):
            # What the forward used last is still there, and the first needs no weights.
            place = first + 2 * last - at
            again = self._gather(place) if 0 < at < last else []
            if saved[at]:
                back = self._units[unit].activations
                again = [*again, *self._add(UP, "activations", unit, back, saved[at])]
            end = self._compute(BACKWARD, unit, seconds, again)
            if at:
                self._used[place] = end
            if at < len(self._units):  # its first use
                landed[unit] = self._land(unit, end) if leaves else [end]
        return end, landed

    def _land(self, unit: int, end: UnitJob) -> list[UnitJob]:
        reduced = self._add(RANKS_LINK, "reduce", unit, self._units[unit].reduce, [end])
        return self._add(DOWN, "landing", unit, self._units[unit].landing, reduced)

    def _gather(self, place: int) -> list[UnitJob]:
        if (gather := self._gathers.get(place)) is None:
            return []
        unit = self._units[gather.unit]
        behind = [*self._home[gather.unit], *(self._used[use] for use in gather.behind)]
        read = self._add(DISK, "read", gather.unit, unit.read, behind)
        copied = self._add(UP, "copy", gather.unit, unit.copy, read)
        before = self._used.get(place - AHEAD - 1)
        asked = [*copied, before] if before is not None and unit.gather else copied
        return self._add(RANKS_LINK, "gather", gather.unit, unit.gather, asked)

    def _compute(self, kind: str, unit: int, seconds: float, behind: list[UnitJob]) -> UnitJob:
        return self._add(COMPUTE, kind, unit, seconds, behind, always=True)[0]

    def _update(self, index: int, landed: list[UnitJob]) -> None:
        unit, done = self._units[index], []
        done += self._add(ON_DEVICE, "step", index, unit.step_on_device, landed)
        for _ in range(self._pieces) if unit.load else ():
            load = self._add(DISK, "load", index, unit.load / self._pieces, landed + self._saved[0])
            step = self._add(OPTIMIZER, "step", index, unit.step / self._pieces, load)
            saved = self._add(DISK, "save", index, unit.save / self._pieces, step)
            self._saved.append(saved)
            done += saved
        if not unit.load:
            step = self._add(OPTIMIZER, "step", index, unit.step, landed)
            done += self._add(DISK, "save", index, unit.save, step)
        self._home[index] = done

    def _add(
        self,
        queue: str,
        kind: str,
        unit: int,
        seconds: float,
        behind: list[UnitJob],
        *,
        always: bool = False,
    ) -> list[UnitJob]:
        """Adds a job, and returns what follows it waits for: ``behind`` if it takes no time."""
        if not seconds and not always:
            return behind
        in_order = queue in IN_ORDER
        rank = self._step * RANKS + (0 if in_order or queue == RANKS_LINK else unit)
        job = UnitJob(queue, seconds, rank, kind=kind, unit=unit, step=self._step)
        for other in [*behind, *self._last.get(queue, ())] if in_order else behind:
            job.follow(other)
        if in_order:
            self._last[queue] = [job]
        self.jobs.append(job)
        return [job]
