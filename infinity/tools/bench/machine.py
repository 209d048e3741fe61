"""machine: what limits training here, in two minutes: each part at its best, beside its ceiling.

products    of square matrices of random values, by dtype, large enough to last a moment
memory      a copy (read and written bytes), and a triad, a = b + c * s (two read, one written), on
            all threads, on one, and on each node of a machine that has several
checksums   of all bytes that go to a disk or come from it, on one thread
making      host memory: mapped and touched; then registered with the I/O engine, if it does that
adam        the optimizer's step for each form of its state, on all threads and on one
disk        large transfers as the engine makes them, beside the raw disk; one small read; one small
            write that is synced; every block size and depth; each of several disks, and all at once
link        between pinned host memory and the GPU, if there is one, each way and both at once
messages    an all-reduce between two processes of this machine, over gloo
gpu         kernels and copies of a GPU, after all others (`gpu.py`)

loop        one figure's work, beside the work of its ceiling. Loops take turns, a round of each,
            for the whole time: rounds differ as the figures of two runs would
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from infinity import native

from ...core.machine import disk_profile, numa
from ...core.machine.limits import memory_left
from ...errors import ConfigError
from ...ext.rates.rates import checksum_rate
from . import adam, gpu, intervals, io
from .results import READ_NBYTES, WRITTEN_NBYTES, Measured, Row, ends, row, span, why_wide
from .rounds import PROGRESS, tell
from .settings import Settings

MIB = 1024 * 1024
DTYPES = ("float32", "bfloat16", "float16")
PRODUCT_SECONDS = 0.05  # the least time of a product
SIZES = (256, 512, 1024, 2048, 4096, 8192)
COPIED = 256 * MIB
CHECKED = 64 * MIB
FILE_NBYTES = 512 * MIB
UPDATED = 24 * MIB  # parameters: no cache holds their state
GRID_NBYTES = 64 * MIB
GRID_DEPTHS, GRID_THREADS = (4, 16, 64), (4, 16)
SMALL, SMALL_READS, SMALL_WRITES = 4096, 200, 10
SENT = 32 * MIB
RANKS = 2
ANSWER_SECONDS = 120  # of a process
SECONDS, KEEP_SECONDS = 80, 5  # of all rounds; between two writes of the file
PASSES = 8  # operations of a parameter and token: forward 2, again 2, backward 4
LINKED_IN, LINKED_OUT = 4, 2  # bytes of a parameter: bf16 weights for both passes, its gradient
BEGIN = "# Measured by `infinity bench machine`"


@dataclass
class Loop:
    """One figure.

    work
        What is timed; or it returns the seconds that count.
    value
        Makes the figure of the seconds.
    limit
        The work of its ceiling, whose name is ``limit_name``.
    threads
        Of torch while it runs; None: as many as there are.
    series, point
        The series that has this figure as a point, and what else the point has.
    is_row
        Whether it is a row, too.
    """

    name: str
    unit: str
    work: Callable[[], object]
    value: Callable[[float], float]
    limit: Callable[[], object] | None = None
    limit_name: str = ""
    threads: int | None = None
    series: str = ""
    point: dict[str, Any] = field(default_factory=dict)
    is_row: bool = True
    found: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def take_turn(self, turn: int) -> None:
        """Runs the work and that of its ceiling, the other one first in each second turn."""
        jobs = [(self.work, self.found)]
        if self.limit is not None:
            jobs.append((self.limit, self.limits))
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            for job, into in jobs[:: -1 if turn % 2 else 1]:
                start = time.perf_counter()
                answer = job()
                seconds = time.perf_counter() - start
                into.append(self.value(answer if isinstance(answer, float) else seconds))
        finally:
            torch.set_num_threads(before)

    def row(self) -> Row:
        """Returns the figure of the turns so far."""
        limit = (self.limit_name, self.limits) if self.limit is not None else None
        return row(self.name, self.unit, self.found, ceiling=limit)


def _rate(amount: float) -> Callable[[float], float]:
    """Returns what makes thousands of millions a second of seconds."""
    return lambda seconds: amount / seconds / 1e9


def measure(settings: Settings) -> Measured:
    """Measures the rows of this machine, whose names begin with ``machine.`` and the part.

    Rates are in GB/s, of products in GFLOP/s, of adam in G parameters/s; disk.latency and disk.sync
    in us. A GPU's rows are those of :func:`gpu.measure`. Series ``machine.disk`` has a point for
    each block size and depth, ``machine.adam`` and ``machine.memory`` for each number of threads.
    """
    where = str(torch.accelerator.current_accelerator()) if torch.cuda.is_available() else "cpu"
    notes: list[str] = []
    with ExitStack() as stack:
        loops = [
            loop
            for name, part in PARTS.items()
            if settings.wants_any_of(f"machine.{name}")
            for loop in part(settings, where, stack, notes)
            if settings.wants(loop.name)
        ]
        if loops:
            loops = _take_turns(loops, settings, notes)
        measured = _measured(loops, notes)
    measured.notes += _better(measured.series.get("machine.disk", []), settings.folder)
    if where != "cpu" and settings.wants_any_of("gpu"):
        try:
            measured.add(gpu.measure(settings))
        except (ConfigError, torch.OutOfMemoryError) as error:  # no kernels; a small GPU
            measured.notes.append(f"gpu: {str(error).splitlines()[0]}")
    return measured


def _take_turns(loops: Sequence[Loop], settings: Settings, notes: list[str]) -> list[Loop]:
    """Runs rounds of all loops, each in an order of its own, for about a minute and a half at scale
    1. Returns the loops that could be measured; the others have a note with the reason."""
    order, chance = list(loops), random.Random(0)
    budget = settings.seconds or SECONDS * min(settings.scale, 1.0)

    def turn_of(loop: Loop, turn: int) -> bool:
        try:
            loop.take_turn(turn)
        except _Lost as error:
            notes.append(f"{loop.name}: {error}")
            return False
        return True

    for loop in loops:  # the first turn of each warms up
        tell(loop.name)
        if not turn_of(loop, 0):
            order.remove(loop)
        loop.found.clear()
        loop.limits.clear()
    tell("all in turns")
    begun = kept = time.monotonic()

    def keep() -> None:
        settings.keep(_measured([loop for loop in loops if loop in order], list(notes)))

    turn = 0
    try:
        while order and (turn < settings.rounds or time.monotonic() - begun < budget):
            chance.shuffle(order)
            for loop in list(order):
                share = (time.monotonic() - begun) / budget if budget else 0.0
                share = min(max(share, 1e-3), 1.0)
                PROGRESS.tell(f"round {turn + 1}", detail=loop.name, share=share)
                if not turn_of(loop, turn):
                    order.remove(loop)
            turn += 1
            if time.monotonic() - kept > KEEP_SECONDS:
                kept = time.monotonic()
                keep()
    except BaseException:
        if turn:
            keep()
        raise
    return [loop for loop in loops if loop in order]


def _measured(loops: Sequence[Loop], notes: list[str]) -> Measured:
    measured = Measured([loop.row() for loop in loops if loop.is_row], notes)
    for loop in loops:
        if loop.series:
            point = loop.point | {loop.unit: statistics.median(loop.found), "rounds": loop.found}
            if loop.limits:
                point["moving"] = statistics.median(loop.limits)
            measured.series.setdefault(loop.series, []).append(point)
    return measured


def _synced(work: Callable[[], object], where: str) -> Callable[[], None]:
    def run() -> None:
        work()
        if where != "cpu":
            torch.accelerator.synchronize()

    return run


def _products(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    for name in DTYPES:
        for size in SIZES:
            a, b = (
                torch.randn(size, size, device=where).to(getattr(torch, name)) for _ in range(2)
            )
            job = _synced(partial(torch.matmul, a, b), where)
            job()  # the first is slower
            start = time.perf_counter()
            job()
            if time.perf_counter() - start >= PRODUCT_SECONDS * settings.scale:
                break
        yield Loop(f"machine.products.{name}", "GFLOP/s", job, _rate(2 * size**3))


def _memory(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    jobs, nbytes = _streams(settings)
    for threads in adam.thread_counts(settings.threads)[::-1]:
        suffix = "" if threads == settings.threads else f".{threads}thread"
        for name, job in jobs.items():
            is_row, has_point = threads in (settings.threads, 1), name == "copy"
            if is_row or has_point:
                yield Loop(
                    f"machine.memory.{name}{suffix}",
                    "GB/s",
                    job,
                    _rate(nbytes[name]),
                    threads=threads,
                    series="machine.memory" if has_point else "",
                    point={"threads": threads},
                    is_row=is_row,
                )
    allowed = os.sched_getaffinity(0)
    nodes = [node & allowed for node in numa.nodes() if node & allowed]
    for number, node in enumerate(nodes if len(nodes) > 1 else []):
        name, processors = f"machine.memory.copy.node{number}", ",".join(map(str, sorted(node)))
        if settings.wants(name):
            helper = stack.enter_context(_Helpers([["node", processors, str(settings.scale)]]))
            yield Loop(name, "GB/s", helper.ask, _rate(nbytes["copy"]))


def _streams(settings: Settings) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Returns a copy and a triad in memory near this thread, and the bytes that each moves."""
    count = settings.scaled(COPIED, MIB) // 4
    a, b, c = (torch.zeros(count) for _ in range(3))
    jobs = {"copy": partial(a.copy_, b), "triad": partial(torch.add, b, c, alpha=0.5, out=a)}
    return jobs, {"copy": 8 * count, "triad": 12 * count}


def _checksums(
    settings: Settings, where: str, stack: ExitStack, notes: list[str]
) -> Iterator[Loop]:
    source = torch.ones(settings.scaled(CHECKED, MIB), dtype=torch.uint8)
    yield Loop(
        "machine.checksums",
        "GB/s",
        lambda: native.crc32c(source),
        _rate(source.nbytes),
        limit=lambda: native.move_streams([(source.data_ptr(), 1, True, False)], source.nbytes, 1),
        limit_name="reading the same bytes",
    )


def _making(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    nbytes = settings.scaled(COPIED, MIB)
    touched = torch.empty(nbytes, dtype=torch.uint8)
    engine = native.make_io_engine()

    def mapped() -> float:  # without giving it back
        start = time.perf_counter()
        made = native.Region(nbytes, True, settings.threads)
        seconds = time.perf_counter() - start
        del made
        return seconds

    def registered() -> float:  # pages that were not registered before
        region = native.Region(nbytes, True, settings.threads)
        start = time.perf_counter()
        engine.register([region])
        seconds = time.perf_counter() - start
        engine.register([])
        return seconds

    yield Loop(
        "machine.making.mapped",
        "GB/s",
        mapped,
        _rate(nbytes),
        limit=lambda: native.move_streams(
            [(touched.data_ptr(), 1, False, True)], nbytes, settings.threads
        ),
        limit_name="writing memory that is there",
    )
    if engine.backend == "uring":
        yield Loop("machine.making.registered", "GB/s", registered, _rate(nbytes))


def _adam(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    count = settings.scaled(UPDATED, 64 * 1024)
    for variant in adam.VARIANTS:
        state: adam.Ours | None = None  # one for all numbers of threads
        for threads in adam.thread_counts(settings.threads)[::-1]:
            name = adam.name_of(variant, threads, settings, "machine.adam")
            is_row, has_point = threads in (settings.threads, 1), variant.name == "split"
            if settings.wants(name) and (is_row or has_point):
                state = state or adam.Ours(variant, count, threads)
                ours = state.with_threads(threads)
                yield Loop(
                    name,
                    "G parameters/s",
                    ours.step,
                    _rate(count),
                    limit=ours.move,
                    limit_name="moving the same bytes",
                    series="machine.adam" if has_point else "",
                    point={"threads": threads},
                    is_row=is_row,
                )


def _disk(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    """One disk, or each of several and all at once."""
    try:
        disks = [_Disk(folder, settings, stack) for folder in settings.folders]
    except ConfigError as error:
        notes.append(f"machine.disk: {error}")
        return
    yield from _large(disks, "machine.disk", stack)
    if len(disks) > 1:
        for number, disk in enumerate(disks, start=1):
            yield from _large([disk], f"machine.disk.{number}", stack)
        names = ", ".join(f"disk.{at} is {each}" for at, each in enumerate(settings.folders, 1))
        notes.append(
            f"machine: {names}; disk.read, .write and .both are of all at once, small transfers and"
            " block sizes of disk.1"
        )
    raw = disks[0].raw
    small = {"latency": (_small_reads, SMALL_READS), "sync": (_small_writes, SMALL_WRITES)}
    for way, (work, count) in small.items():
        value = partial(_microseconds, count)
        yield Loop(f"machine.disk.{way}", "us", partial(work, raw), value)
    yield from _grid(disks[0].file, settings)


def _microseconds(count: int, seconds: float) -> float:
    return seconds / count * 1e6


class _Disk:
    """A file on the disk of folder ``of``, moved by the engine and by threads that only read and
    write. Raises ConfigError for a file system that has only buffered transfers."""

    def __init__(self, of: str, settings: Settings, stack: ExitStack):
        folder = tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=of)
        nbytes = settings.scaled(FILE_NBYTES, io.RAW_THREADS * io.RAW_BLOCK)
        self.file = io.make_file(stack.enter_context(folder), nbytes)
        self.raw = stack.enter_context(contextlib.closing(io.Raw(self.file)))
        self.ours = io.as_used(self.file, "auto", of)


def _large(disks: Sequence[_Disk], name: str, stack: ExitStack) -> Iterator[Loop]:
    """Large transfers of all ``disks`` at once."""
    threads = stack.enter_context(ThreadPoolExecutor(len(disks)))

    def at_once(runs: Sequence[Callable[[str], object]], way: str) -> None:
        list(threads.map(lambda run: run(way), runs))

    nbytes = sum(disk.file.nbytes for disk in disks)
    for way in io.DIRECTIONS:
        yield Loop(
            f"{name}.{'both' if way == 'mixed' else way}",
            "GB/s",
            partial(at_once, [disk.ours.run for disk in disks], way),
            _rate(nbytes),
            limit=partial(at_once, [disk.raw.run for disk in disks], way),
            limit_name="raw disk",
        )


def _grid(file: io.TestFile, settings: Settings) -> Iterator[Loop]:
    """Reads and writes of a part of the file at every block size and depth, and by threads that
    wait for one block each."""
    part = io.TestFile(file.path, min(settings.scaled(GRID_NBYTES, io.REQUEST_NBYTES), file.nbytes))
    memory = native.Region(io.REQUESTS_AHEAD * io.REQUEST_NBYTES, True, 2)
    kinds = {"auto": GRID_DEPTHS} if native.make_io_engine().backend == "uring" else {}

    def run(kind: str, block: int, depth: int, way: str) -> float:
        engine = io.Ours(part, kind, block_nbytes=block, depth=depth, memory=memory)
        start = time.perf_counter()
        engine.run(way)
        return time.perf_counter() - start

    for kind, depths in (kinds | {"threads": GRID_THREADS}).items():
        for block in io.SWEPT_BLOCKS:
            for depth in depths:
                for way in ("read", "write"):
                    yield Loop(
                        "machine.disk.grid",
                        "GB/s",
                        partial(run, kind, block, depth, way),
                        _rate(part.nbytes),
                        series="machine.disk",
                        point={"kind": kind, "way": way, "block_nbytes": block, "depth": depth},
                        is_row=False,
                    )


def _better(points: Sequence[dict], folder: str) -> list[str]:
    """Notes block size and depth whose reads are faster than with the engine's own: the best of the
    even rounds, if the odd ones show it with confidence."""
    reads = {
        (each["block_nbytes"], each["depth"]): each["rounds"]
        for each in points
        if (each["kind"], each["way"]) == ("auto", "read")
    }
    profile = disk_profile.disk_profile(folder) if reads else None
    own = (profile.block_nbytes, profile.depth) if profile is not None else None
    if own not in reads:
        return []
    best = max(reads, key=lambda each: statistics.median(reads[each][::2]))
    interval = intervals.of_ratio(reads[own][1::2], reads[best][1::2])
    if intervals.verdict(interval) != "faster":  # the ratio of rates is that of the best one's time
        return []
    faster = statistics.median(reads[best][1::2]) / statistics.median(reads[own][1::2])
    sizes = [f"{block // 1024} KiB, {depth} in flight" for block, depth in (best, own)]
    return [f"machine: blocks of {sizes[0]}, are read {faster:.2f} times as fast as of {sizes[1]}"]


def _small_reads(raw: io.Raw) -> None:
    block = memoryview(raw.memory)[:SMALL]
    chance = random.Random(0)
    for _ in range(SMALL_READS):
        os.preadv(raw.descriptor, [block], chance.randrange(raw.file.nbytes // SMALL) * SMALL)


def _small_writes(raw: io.Raw) -> None:
    block = memoryview(raw.memory)[:SMALL]
    for place in range(SMALL_WRITES):
        os.pwritev(raw.descriptor, [block], place * SMALL)
        os.fdatasync(raw.descriptor)


def _link(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    if where == "cpu":
        notes.append("machine: no GPU, so no link to one")
        return
    nbytes = settings.scaled(COPIED, MIB)
    hosts = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.zeros(nbytes, dtype=torch.uint8, device=where) for _ in range(2)]
    other = torch.Stream(where)

    def inward() -> None:
        devices[0].copy_(hosts[0], non_blocking=True)

    def outward() -> None:
        hosts[1].copy_(devices[1], non_blocking=True)

    def both() -> None:
        with other:
            outward()
        inward()

    for way, work, count in (("in", inward, 1), ("out", outward, 1), ("both", both, 2)):
        yield Loop(f"machine.link.{way}", "GB/s", _synced(work, where), _rate(count * nbytes))


def _messages(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    nbytes = settings.scaled(SENT, MIB)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-bench-"))
    ranks = [["rank", str(rank), f"{folder}/meeting", str(nbytes)] for rank in range(RANKS)]
    helpers = stack.enter_context(_Helpers(ranks))
    yield Loop("machine.messages", "GB/s", helpers.ask, _rate(nbytes))


class _Lost(Exception):
    """A process of :class:`_Helpers` that does not answer, with the reason."""


class _Helpers:
    """Processes of this module, one for each of ``commands``, which do their work once whenever
    they are asked. A context that ends them."""

    def __init__(self, commands: Sequence[Sequence[str]]):
        self._commands = commands
        self._processes: list[subprocess.Popen] = []
        self._said: IO[bytes] = tempfile.TemporaryFile()  # on standard error, of all of them

    def __enter__(self) -> _Helpers:
        for place, command in enumerate(self._commands):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL if place else subprocess.PIPE,
                    stderr=self._said,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            )
        return self

    def ask(self) -> float:
        """Returns the seconds of one turn. Raises _Lost when they do not answer in time."""
        try:
            for process in self._processes:
                process.stdin.write("\n")
                process.stdin.flush()
            output = self._processes[0].stdout
            if not select.select([output], [], [], ANSWER_SECONDS)[0]:
                raise ValueError(f"no answer within {ANSWER_SECONDS} s")
            return float(output.readline())
        except (OSError, ValueError) as error:
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else str(error)
            raise _Lost(f"a process of its own has ended or does not answer: {why:.200}") from error

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(OSError):  # a line that a dead one did not take
                process.communicate()
        self._said.close()


def _answer(work: Callable[[], object]) -> None:
    """Does ``work`` for each line of standard input, and prints the seconds."""
    for _ in sys.stdin:
        start = time.perf_counter()
        work()
        print(time.perf_counter() - start, flush=True)


def _run_on_node(processors: str, scale: str) -> None:
    chosen = {int(each) for each in processors.split(",")}
    os.sched_setaffinity(0, chosen)  # before the first loop starts torch's threads
    torch.set_num_threads(len(chosen))
    _answer(_streams(Settings(scale=float(scale)))[0]["copy"])


def _run_rank(rank: str, meeting: str, nbytes: str) -> None:
    import torch.distributed as dist

    meet = f"file://{meeting}"
    dist.init_process_group("gloo", init_method=meet, rank=int(rank), world_size=RANKS)
    values = torch.zeros(int(nbytes) // 4)
    _answer(lambda: dist.all_reduce(values))


PARTS: dict[str, Callable[[Settings, str, ExitStack, list[str]], Iterator[Loop]]] = {
    "products": _products,
    "memory": _memory,
    "checksums": _checksums,
    "making": _making,
    "adam": _adam,
    "disk": _disk,
    "link": _link,
    "messages": _messages,
}


def limit_of(rows: Sequence[Row], parameters: float, tokens: float) -> str:
    """Returns what limits a step of full fine-tuning of so many ``parameters`` on so many
    ``tokens``, with AdamW and all state on the disk, and which dtype has the fastest products, by
    the ends of each row's interval; or why nothing follows from the rows. "" without this theme's
    rows."""
    by_name = {each.name: each for each in rows}
    products = {name: by_name.get(f"machine.products.{name}") for name in DTYPES}
    rates = {name: each.median for name, each in products.items() if each is not None}
    fastest = max(rates, key=lambda name: rates[name], default="")
    names = [f"machine.{each}" for each in ("disk.read", "disk.write", "disk.both", "adam.split")]
    if "machine.link.in" in by_name:
        names += ["machine.link.in", "machine.link.out"]
    used = [by_name.get(name) for name in (f"machine.products.{fastest}", *names)]
    if any(each is None or not each.median for each in used):
        return ""
    if reasons := [why for each in used if (why := why_wide(each))]:
        return f"What limits a step is not said: {'; '.join(reasons)}. Measure longer: --seconds"
    parts: dict[str, list[float]] = {}
    for end in (1, 0):
        product, read, write, mixed, updated, *link = (ends(each)[end] for each in used)
        both = (READ_NBYTES + WRITTEN_NBYTES) / mixed
        seconds = {"products": PASSES * tokens / product, "the update": 1 / updated}
        seconds["the disk"] = max(READ_NBYTES / read, WRITTEN_NBYTES / write, both)
        if link:
            seconds["the link"] = max(LINKED_IN / link[0], LINKED_OUT / link[1])
        for part, its in seconds.items():
            parts.setdefault(part, []).append(its)
    limit, second = sorted(parts, key=lambda part: parts[part][-1], reverse=True)[:2]
    billions = parameters / 1e9
    others = ", ".join(
        f"{part} {span(each, billions)}" for part, each in parts.items() if part != limit
    )
    text = (
        f"{billions:g} B, {tokens:g} tokens, AdamW, all state on the disk ({fastest}): at least"
        f" about {span(parts[limit], billions)} a step, the limit is {limit}; {others}."
    )
    if limit == "the disk":
        halves = [max(half / 2, parts[second][at]) for at, half in enumerate(parts[limit])]
        text += f" With another such disk: {span(halves, billions)}."
    if rates.get("float32", 0.0) > 2 * rates.get("bfloat16", math.inf):
        ratio = rates["float32"] / rates["bfloat16"]
        text += f" Products of float32 are {ratio:.0f} times as fast as of bfloat16 here."
    return text


def machine_file(rows: Sequence[Row], folders: Sequence[str], date: str) -> str:
    """Returns a machine file for `infinity plan --machine`, of what was measured: medians, with the
    spread of the rounds beside them. Without a GPU the processor is a device with half of the
    memory. Links between devices and the network are assumed."""
    by_name = {each.name: each for each in rows}
    products = max((f"machine.products.{name}" for name in DTYPES), key=lambda n: by_name[n].median)
    has_gpu = "machine.link.in" in by_name
    memory = memory_left()
    free = {os.stat(folder).st_dev: os.statvfs(folder) for folder in folders}
    room = sum(each.f_bavail * each.f_frsize for each in free.values())

    def rate(name: str, unit: float = 1e9) -> str:
        each = by_name[name]
        low, high = (end * unit for end in ends(each))
        return f"{each.median * unit:.4g}  # of {len(each.rounds)} rounds: {low:.3g} to {high:.3g}"

    bandwidth = ""
    if "gpu.adam.split" in by_name:  # whose ceiling is a copy inside the device
        bandwidth = f"\nbandwidth = {by_name['gpu.adam.split'].ceiling['value'] * 1e9:.4g}"
    host = f"{by_name['machine.memory.copy'].median * 1e9 / 2:.4g}"
    link = rate("machine.link.in") if has_gpu else f"{host}  # the processor is the device"
    count = torch.accelerator.device_count() if has_gpu else 1
    of_device = torch.accelerator.get_memory_info()[1] if has_gpu else memory // 2
    return f"""{BEGIN}, {date}
name = "this machine"
sources = ["measured {date}; assumed: 10 Gb/s and 30 us between nodes"]

[devices]
count = {count}
memory = {of_device}
flops = {rate(products)}
efficiency = 1.0{bandwidth}

[host]
memory = {memory if has_gpu else memory // 2}
bandwidth = {rate("machine.memory.copy")}
checksum = {checksum_rate():.4g}

[disks]
count = 1
capacity = {room}
read = {rate("machine.disk.read")}
write = {rate("machine.disk.write")}

[links]
device = {link}
host = {link}
network = 1.25e9
latency = 30e-6
"""


def write_machine_file(rows: Sequence[Row], folders: Sequence[str], date: str, path: Path) -> None:
    """Writes :func:`machine_file` to ``path``."""
    path.write_text(machine_file(rows, folders, date))


if __name__ == "__main__":
    {"node": _run_on_node, "rank": _run_rank}[sys.argv[1]](*sys.argv[2:])
