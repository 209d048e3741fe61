"""machine: what limits training here, in two minutes: each part at its best, beside its ceiling.

products    of square matrices, by dtype, large enough to last a moment
memory      a copy (read and written bytes), and a triad, a = b + c * s (two read, one written), on
            all threads, on one, and on each node of a machine that has several
checksums   of all bytes that go to a disk or come from it, on one thread
making      host memory: mapped and touched; then registered with the I/O engine
adam        the optimizer's step for each form of its state, on all threads and on one
disk        large transfers as the engine makes them, beside the raw disk; one small read; one small
            write that is synced; every block size and depth; each of several disks, and all at once
link        between pinned host memory and the GPU, if there is one, each way and both at once
gpu         its kernels, as `infinity bench gpu` has them
messages    an all-reduce between two processes of this machine, over gloo

loop        one figure's work, beside the work of its ceiling. All loops take turns, a round of
            each, for the whole two minutes: rounds differ as the figures of two runs would
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infinity import native

from ...core.machine import disk_profile, numa
from ...core.machine.limits import memory_left
from ...core.machine.rates import checksum_rate
from ...errors import ConfigError
from . import adam, gpu, intervals, io
from .results import READ_NBYTES, WRITTEN_NBYTES, Measured, Row, ends, is_wide, row, span
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
GRID_DEPTHS = (4, 16, 64)
SMALL, SMALL_READS, SMALL_WRITES = 4096, 200, 10
SENT = 32 * MIB
RANKS = 2
ANSWER_SECONDS = 120  # of a process
SECONDS = 90  # of all rounds
PASSES = 8  # operations of a parameter and token: forward 2, again 2, backward 4
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
        Of torch while it runs; 0: as many as there are.
    series, point
        A point of a series instead of a row.
    """

    name: str
    unit: str
    work: Callable[[], object]
    value: Callable[[float], float]
    limit: Callable[[], object] | None = None
    limit_name: str = ""
    threads: int = 0
    series: str = ""
    point: dict[str, Any] = field(default_factory=dict)
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
                told = job()
                seconds = time.perf_counter() - start
                into.append(self.value(told if isinstance(told, float) else seconds))
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
            for part in PARTS
            for loop in part(settings, where, stack, notes)
            if settings.wants(loop.name)
        ]
        _take_turns(loops, settings)
        found = _measured(loops, notes)
    found.notes += _better(found.series.get("machine.disk", []), settings.folder)
    if where != "cpu" and settings.wants_any_of("gpu"):
        try:
            found.add(gpu.measure(settings))
        except ConfigError as error:  # a GPU without kernels
            found.notes.append(str(error))
    return found


def _take_turns(loops: Sequence[Loop], settings: Settings) -> None:
    """Runs rounds of all loops, each in an order of its own, for two minutes at scale 1."""
    order, chance, turn = list(loops), random.Random(0), 0
    budget = settings.seconds or SECONDS * min(settings.scale, 1.0)
    begun = time.monotonic()
    for loop in loops:  # the first turn of each warms up
        tell(loop.name)
        loop.take_turn(turn)
        loop.found.clear()
        loop.limits.clear()
    while turn < settings.rounds or time.monotonic() - begun < budget:
        chance.shuffle(order)
        for loop in order:
            share = max((time.monotonic() - begun) / budget if budget else 0.0, 1e-3)
            PROGRESS.tell(f"round {turn + 1}", detail=loop.name, share=min(share, 1.0))
            loop.take_turn(turn)
        turn += 1
        settings.keep(_measured(loops, []))


def _measured(loops: Sequence[Loop], notes: list[str]) -> Measured:
    found = Measured([loop.row() for loop in loops if not loop.series], notes)
    for loop in loops:
        if loop.series:
            point = loop.point | {loop.unit: statistics.median(loop.found), "rounds": loop.found}
            if loop.limits:
                point["moving"] = statistics.median(loop.limits)
            found.series.setdefault(loop.series, []).append(point)
    return found


def _synced(work: Callable[[], object], where: str) -> Callable[[], None]:
    def run() -> None:
        work()
        if where != "cpu":
            torch.accelerator.synchronize()

    return run


Part = Callable[[Settings, str, ExitStack, list[str]], Iterator[Loop]]


def _products(settings: Settings, where: str, *_: Any) -> Iterator[Loop]:
    for name in DTYPES:
        for size in SIZES:
            a, b = (torch.ones(size, size, dtype=getattr(torch, name), device=where),) * 2
            job = _synced(partial(torch.matmul, a, b), where)
            job()  # the first is slower
            start = time.perf_counter()
            job()
            if time.perf_counter() - start >= PRODUCT_SECONDS * settings.scale:
                break
        yield Loop(f"machine.products.{name}", "GFLOP/s", job, _rate(2 * size**3))


def _memory(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    jobs, nbytes = _streams(settings)
    of_copy = _rate(nbytes["copy"])
    for threads in dict.fromkeys((settings.threads, 1)):
        suffix = "" if threads == settings.threads else f".{threads}thread"
        for name, job in jobs.items():
            rate = _rate(nbytes[name])
            yield Loop(f"machine.memory.{name}{suffix}", "GB/s", job, rate, threads=threads)
    for threads in adam.thread_counts(settings.threads):
        series, point = "machine.memory", {"threads": threads}
        yield Loop(series, "GB/s", jobs["copy"], of_copy, None, "", threads, series, point)
    allowed = os.sched_getaffinity(0)
    nodes = [node & allowed for node in numa.nodes() if node & allowed]
    for number, node in enumerate(nodes if len(nodes) > 1 else []):
        processors = ",".join(map(str, sorted(node)))
        helper = stack.enter_context(_Helpers([["node", processors, str(settings.scale)]]))
        if helper.is_there():
            yield Loop(f"machine.memory.copy.node{number}", "GB/s", helper.ask, of_copy)
        else:
            notes.append(f"machine: no process ran on the processors of node {number}")


def _streams(settings: Settings) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Returns a copy and a triad in memory near this thread, and the bytes that each moves."""
    count = settings.scaled(COPIED, MIB) // 4
    a, b, c = (torch.zeros(count) for _ in range(3))
    jobs = {"copy": partial(a.copy_, b), "triad": partial(torch.add, b, c, alpha=0.5, out=a)}
    return jobs, {"copy": 8 * count, "triad": 12 * count}


def _checksums(settings: Settings, where: str, *_: Any) -> Iterator[Loop]:
    source = torch.ones(settings.scaled(CHECKED, MIB), dtype=torch.uint8)
    yield Loop(
        *("machine.checksums", "GB/s", lambda: native.crc32c(source), _rate(source.nbytes)),
        limit=lambda: native.move_streams([(source.data_ptr(), 1, True, False)], source.numel(), 1),
        limit_name="reading the same bytes",
    )


def _making(settings: Settings, where: str, *_: Any) -> Iterator[Loop]:
    nbytes = settings.scaled(COPIED, MIB)
    touched = torch.empty(nbytes, dtype=torch.uint8)
    engine, region = native.make_io_engine(), native.Region(nbytes, True, settings.threads)

    def mapped() -> float:  # without giving it back
        start = time.perf_counter()
        made = native.Region(nbytes, True, settings.threads)
        seconds = time.perf_counter() - start
        del made
        return seconds

    yield Loop(
        *("machine.making.mapped", "GB/s", mapped, _rate(nbytes)),
        limit=lambda: native.move_streams(
            [(touched.data_ptr(), 1, False, True)], nbytes, settings.threads
        ),
        limit_name="writing memory that is there",
    )
    registered = partial(engine.register, [region])
    yield Loop("machine.making.registered", "GB/s", registered, _rate(nbytes))


def _adam(settings: Settings, where: str, *_: Any) -> Iterator[Loop]:
    count = settings.scaled(UPDATED, 64 * 1024)
    limit_name = "moving the same bytes"
    for variant in adam.VARIANTS:
        for threads in adam.thread_counts(settings.threads)[::-1]:
            name = adam.name_of(variant, threads, settings, "machine.adam")
            loop = Loop(name, "G parameters/s", lambda: None, _rate(count), limit_name=limit_name)
            if not settings.wants(name):
                continue
            ours = adam.Ours(variant, count, threads)
            loop.work, loop.limit = ours.step, ours.move
            if threads in (settings.threads, 1):
                yield loop
            if variant.name == "split":
                yield replace(
                    loop, series="machine.adam", point={"threads": threads}, found=[], limits=[]
                )


def _disk(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    """One disk, or each of several and all at once."""
    if not settings.wants_any_of("machine.disk"):
        return
    disks = [_Disk(folder, settings, stack) for folder in settings.folders]
    yield from _large(disks, "machine.disk", stack)
    if len(disks) > 1:
        for number, disk in enumerate(disks, start=1):
            yield from _large([disk], f"machine.disk.{number}", stack)
        names = ", ".join(
            f"disk.{number} is {each}" for number, each in enumerate(settings.folders, 1)
        )
        notes.append(f"machine: {names}; disk.read, .write and .both are of all at once")
    raw = disks[0].raw
    for way, work, count in (
        ("latency", _small_reads, SMALL_READS),
        ("sync", _small_writes, SMALL_WRITES),
    ):
        each = partial(_microseconds, count)
        yield Loop(f"machine.disk.{way}", "us", partial(work, raw), each)
    yield from _grid(disks[0].file, settings)


def _microseconds(count: int, seconds: float) -> float:
    return seconds / count * 1e6


class _Disk:
    """A file on the disk of folder ``of``, moved by the engine and by threads that only read and
    write."""

    def __init__(self, of: str, settings: Settings, stack: ExitStack):
        folder = tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=of)
        nbytes = settings.scaled(FILE_NBYTES, io.RAW_THREADS * io.RAW_BLOCK)
        self.file = io.make_file(stack.enter_context(folder), nbytes)
        self.ours = io.as_used(self.file, "auto", of)
        self.raw = stack.enter_context(contextlib.closing(io.Raw(self.file)))


def _large(disks: Sequence[_Disk], name: str, stack: ExitStack) -> Iterator[Loop]:
    """Large transfers of all ``disks`` at once."""
    threads = stack.enter_context(ThreadPoolExecutor(len(disks)))

    def at_once(runs: Sequence[Callable[[str], object]], way: str) -> None:
        list(threads.map(lambda run: run(way), runs))

    ours, limit = [disk.ours.run for disk in disks], [disk.raw.run for disk in disks]
    rate = _rate(sum(disk.file.nbytes for disk in disks))
    for way in io.DIRECTIONS:
        yield Loop(
            *(f"{name}.{'both' if way == 'mixed' else way}", "GB/s"),
            *(partial(at_once, ours, way), rate, partial(at_once, limit, way), "raw disk"),
        )


def _grid(file: io.TestFile, settings: Settings) -> Iterator[Loop]:
    """Reads and writes of a part of the file at every block size and depth, and by threads that
    wait for each block."""
    part = io.TestFile(file.path, min(settings.scaled(GRID_NBYTES, io.REQUEST_NBYTES), file.nbytes))
    for block in io.SWEPT_BLOCKS:
        for depth in GRID_DEPTHS:
            for kind in ("auto", "threads"):
                engine = io.Ours(part, kind, block_nbytes=block, depth=depth)
                for way in ("read", "write"):
                    point = {"kind": kind, "way": way, "block_nbytes": block, "depth": depth}
                    yield Loop(
                        *("machine.disk.grid", "GB/s", partial(engine.run, way)),
                        *(_rate(part.nbytes), None, "", 0, "machine.disk", point),
                    )


def _better(points: Sequence[dict], folder: str) -> list[str]:
    """Notes block size and depth whose reads are faster than with the engine's own, with
    confidence."""
    reads = {
        (each["block_nbytes"], each["depth"]): each["rounds"]
        for each in points
        if (each["kind"], each["way"]) == ("auto", "read")
    }
    if not reads:
        return []
    profile = disk_profile.disk_profile(folder)
    own = (profile.block_nbytes, profile.depth)
    best = max(reads, key=lambda each: statistics.median(reads[each]))
    found = intervals.of_ratio(reads.get(own, []), reads[best])
    if intervals.verdict(found) != "faster":  # of the time: reads[best] needs longer
        return []
    faster = statistics.median(reads[best]) / statistics.median(reads[own])
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

    yield Loop("machine.link.in", "GB/s", _synced(inward, where), _rate(nbytes))
    yield Loop("machine.link.out", "GB/s", _synced(outward, where), _rate(nbytes))
    yield Loop("machine.link.both", "GB/s", _synced(both, where), _rate(2 * nbytes))


def _messages(settings: Settings, where: str, stack: ExitStack, notes: list[str]) -> Iterator[Loop]:
    if not settings.wants("machine.messages"):
        return
    nbytes = settings.scaled(SENT, MIB)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-bench-"))
    given = [f"{folder}/meeting", str(nbytes)]
    helpers = _Helpers([["rank", str(rank), *given] for rank in range(RANKS)])
    ranks = stack.enter_context(helpers)
    if ranks.is_there():
        yield Loop("machine.messages", "GB/s", ranks.ask, _rate(nbytes))
    else:
        notes.append(f"machine: {RANKS} processes did not meet over gloo")


class _Helpers:
    """Processes of this module, one for each of ``commands``, which do their work once whenever
    they are asked. A context that ends them."""

    def __init__(self, commands: Sequence[Sequence[str]]):
        self._commands = commands
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> _Helpers:
        for command in self._commands:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            )
        return self

    def is_there(self) -> bool:
        """Tells whether they work: asks once."""
        try:
            self.ask()
        except (OSError, ValueError):
            return False
        return True

    def ask(self) -> float:
        """Returns the seconds of one turn. Raises ValueError when they do not answer in time."""
        for process in self._processes:
            process.stdin.write("\n")
            process.stdin.flush()
        told = self._processes[0].stdout
        if not select.select([told], [], [], ANSWER_SECONDS)[0]:
            raise ValueError(f"no answer within {ANSWER_SECONDS} s")
        return float(told.readline())

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


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


PARTS: tuple[Part, ...] = (
    *(_products, _memory, _checksums, _making, _adam, _disk, _link, _messages),
)


def limit_of(rows: Sequence[Row], parameters: float, tokens: float) -> str:
    """Returns what limits a step of full fine-tuning of so many ``parameters`` on so many
    ``tokens``, with AdamW and all state on the disk, and which dtype has the fastest products, by
    the ends of each row's interval. "" without this theme's rows, or if the rounds of one differ
    much."""
    found = {each.name: each for each in rows}
    products = {name: found.get(f"machine.products.{name}") for name in DTYPES}
    rates = {name: each.median for name, each in products.items() if each is not None}
    fastest = max(rates, key=lambda name: rates[name], default="")
    names = [f"machine.{each}" for each in ("disk.read", "disk.write", "disk.both", "adam.split")]
    used = [found.get(name) for name in (f"machine.products.{fastest}", *names)]
    if any(each is None or not each.median or is_wide(each) for each in used):
        return ""
    seconds: dict[str, list[float]] = {"products": [], "the update": [], "the disk": []}
    for end in (1, 0):
        product, read, write, mixed, updated = (ends(each)[end] for each in used)
        both = (READ_NBYTES + WRITTEN_NBYTES) / mixed
        seconds["products"].append(PASSES * tokens / product)
        seconds["the update"].append(1 / updated)
        seconds["the disk"].append(max(READ_NBYTES / read, WRITTEN_NBYTES / write, both))
    limit, second = sorted(seconds, key=lambda part: seconds[part][-1], reverse=True)[:2]
    billions = parameters / 1e9
    others = ", ".join(
        f"{part} {span(each, billions)}" for part, each in seconds.items() if part != limit
    )
    text = (
        f"{billions:g} B, {tokens:g} tokens, AdamW, all state on the disk ({fastest}): at least"
        f" about {span(seconds[limit], billions)} a step, the limit is {limit}; {others}."
    )
    if limit == "the disk":
        halves = [max(half / 2, seconds[second][at]) for at, half in enumerate(seconds[limit])]
        text += f" With another such disk: {span(halves, billions)}."
    if rates.get("float32", 0.0) > 2 * rates.get("bfloat16", math.inf):
        ratio = rates["float32"] / rates["bfloat16"]
        text += f" Products of float32 are {ratio:.0f} times as fast as of bfloat16 here."
    return text


def machine_file(rows: Sequence[Row], folders: Sequence[str], date: str) -> str:
    """Returns a machine file for `infinity plan --machine`, of what was measured: medians, with the
    spread of the rounds beside them. Without a GPU the processor is a device with half of the
    memory. Links between devices and the network are assumed."""
    found = {each.name: each for each in rows}
    products = max((f"machine.products.{name}" for name in DTYPES), key=lambda n: found[n].median)
    has_gpu = "machine.link.in" in found
    memory = memory_left()
    free = {os.stat(folder).st_dev: os.statvfs(folder) for folder in folders}
    room = sum(each.f_bavail * each.f_frsize for each in free.values())

    def rate(name: str, unit: float = 1e9) -> str:
        each = found[name]
        low, high = (end * unit for end in ends(each))
        return f"{each.median * unit:.4g}  # of {len(each.rounds)} rounds: {low:.3g} to {high:.3g}"

    host = f"{found['machine.memory.copy'].median * 1e9 / 2:.4g}"
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
efficiency = 1.0

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
