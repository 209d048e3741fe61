"""io: reading, writing and both at once, on one file, O_DIRECT.

The ceiling is the raw disk: a few threads that only call preadv and pwritev, or fio if it is a
rival and is faster. Every job moves the same file, so that all use the same part of the disk.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from infinity import native

from ...core.machine import disk_profile
from ...errors import ConfigError
from .results import Measured, Row, row, write_whole
from .rounds import Times, paired, tell
from .settings import Settings

MIB = 1024 * 1024
FILE_NBYTES = 2048 * MIB
REQUEST_NBYTES = 8 * MIB
REQUESTS_AHEAD = 16
SWEPT_BLOCKS = (64 * 1024, 256 * 1024, MIB, 4 * MIB)
SWEPT_DEPTHS = (4, 16, 64)
RAW_BLOCK, RAW_THREADS = 4 * MIB, 8
MOST_THREADS = 16  # of the kind that waits for each block
PROFILES = "disks.json"  # in the cache, of core/machine/disk_profile.py
OFF = 1.5  # times, between a stored profile and what is measured
DIRECTIONS = ("read", "write", "mixed")


@dataclass
class TestFile:
    """The file that every job reads or writes."""

    path: str
    nbytes: int


class Ours:
    """Our I/O engine: large requests, several in flight, with registered memory. ``depth``: blocks
    in flight; of kind "threads" as many threads, which wait for one each."""

    def __init__(
        self,
        file: TestFile,
        kind: str,
        *,
        block_nbytes: int,
        depth: int,
        memory: native.Region | None = None,
    ):
        self.file = file
        self.engine = native.make_io_engine(
            kind=kind, block_nbytes=block_nbytes, depth=depth, threads=min(depth, MOST_THREADS)
        )
        index = self.engine.open_file(file.path)
        self.extent = native.Extent.in_file(index, 0, file.nbytes)
        self.memory = memory or native.Region(REQUESTS_AHEAD * REQUEST_NBYTES, True, 2)
        self.engine.register([self.memory])

    def run(self, direction: str) -> None:
        """Reads or writes the file once; "mixed" reads one half and writes the other."""
        self._run(list(self._requests(direction)))

    def _requests(self, direction: str) -> Iterator[tuple[Callable, int]]:
        offsets = range(0, self.file.nbytes, REQUEST_NBYTES)
        if direction == "mixed":
            half = len(offsets) // 2
            for first, second in zip(offsets[:half], offsets[half:]):
                yield self._read, first
                yield self._write, second
        else:
            for offset in offsets:
                yield (self._read if direction == "read" else self._write), offset

    def _read(self, extent, offset: int, address: int, nbytes: int) -> native.Ticket:
        return self.engine.read(extent, offset, address, nbytes, checksum=False)  # as rivals do

    def _write(self, extent, offset: int, address: int, nbytes: int) -> native.Ticket:
        return self.engine.write(extent, offset, address, nbytes, checksum=False)

    def _run(self, requests: list) -> None:
        pending: list[native.Ticket | None] = [None] * REQUESTS_AHEAD
        for turn, (operation, offset) in enumerate(requests):
            slot = turn % REQUESTS_AHEAD
            if pending[slot] is not None:
                pending[slot].wait()
            nbytes = min(REQUEST_NBYTES, self.file.nbytes - offset)
            pending[slot] = operation(
                self.extent, offset, self.memory.address + slot * REQUEST_NBYTES, nbytes
            )
        for ticket in pending:
            if ticket is not None:
                ticket.wait()


class Raw:
    """The raw disk: a few threads, one system call per block. Raises ConfigError for a file system
    that has only buffered transfers."""

    def __init__(self, file: TestFile):
        self.file = file
        try:
            self.descriptor = os.open(file.path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            raise ConfigError(
                f"the file system of {file.path} has no direct transfers ({error.strerror}): give a"
                " --folder on a disk"
            ) from error
        self.memory = native.Region(RAW_THREADS * RAW_BLOCK, True, 2)
        self.threads = ThreadPoolExecutor(RAW_THREADS)

    def close(self) -> None:
        self.threads.shutdown()
        os.close(self.descriptor)

    def run(self, direction: str) -> None:
        list(self.threads.map(lambda thread: self._share(thread, direction), range(RAW_THREADS)))

    def _share(self, thread: int, direction: str) -> None:
        """Moves a thread's blocks; "mixed": of one half, which is read, or of the other, which is
        written, as every job does."""
        block = memoryview(self.memory)[thread * RAW_BLOCK : (thread + 1) * RAW_BLOCK]
        begin, end, lane, lanes = 0, self.file.nbytes, thread, RAW_THREADS
        writes = direction == "write"
        if direction == "mixed":
            writes, lane, lanes = bool(thread % 2), thread // 2, RAW_THREADS // 2
            begin, end = (end // 2, end) if writes else (0, end // 2)
        move = os.pwritev if writes else os.preadv
        for offset in range(begin + lane * RAW_BLOCK, end - RAW_BLOCK + 1, lanes * RAW_BLOCK):
            move(self.descriptor, [block], offset)


def measure(settings: Settings, *, rivals: Sequence[Any] = ()) -> Measured:
    """Measures rows io.read, io.write, io.mixed, io.read.cpu, io.threads.read.

    rivals
        Other I/O systems. Each has a NAME and `find`. A note names each absent one.

    Creates its file in ``settings.folder`` and removes it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder,
        ExitStack() as stack,
    ):
        tell("the file is written")
        file = make_file(folder, settings.scaled(FILE_NBYTES, RAW_THREADS * RAW_BLOCK))
        tell("")
        ours, threads = (as_used(file, kind, folder) for kind in ("auto", "threads"))
        raw = Raw(file)
        stack.callback(raw.close)
        times = settings.alternate(
            _jobs({"ours": ours.run, "raw disk": raw.run})
            | {("threads", "read"): lambda: threads.run("read")}
        )
        rows = _rows(times, file.nbytes)
        settings.show(rows)
        others: dict[str, Any] = {}
        notes = []
        for rival in rivals:
            other = rival.find(file.path, file.nbytes)
            if isinstance(other, str):
                notes.append(f"{rival.NAME}: {other}")
            else:
                stack.callback(other.close)
                others[rival.NAME] = other
        if others:
            runs = {"ours": ours.run} | {name: rival.run for name, rival in others.items()}
            times = settings.alternate(_jobs(runs))
            _compare(rows, times, file.nbytes, list(others))
        notes += _compare_profile(rows, settings)
        versions = {name: rival.told() for name, rival in others.items()}
        tell("reads of every block size and depth, once each")
        return Measured(rows, notes, {"io.sweep": _sweep(file)}, versions)


def _compare_profile(rows: Sequence[Row], settings: Settings) -> list[str]:
    """Notes a stored profile of the disk that is far from what was measured now: the engine takes
    its block size, and plans their seconds, from it. ``settings.keep_profile`` replaces its
    rates."""
    stored = disk_profile.disk_profile(settings.folder)
    by_name = {each.name: each.median * 1e9 for each in rows}
    now = [by_name[f"io.{way}"] for way in DIRECTIONS]
    file = disk_profile.cache_folder() / PROFILES
    if settings.keep_profile:
        rates = dict(zip(("read_rate", "write_rate", "mixed_rate"), now))
        key = f"{disk_profile.Disk(settings.folder).device} {native.io_kind()}"
        kept = json.loads(file.read_text()) | {key: dataclasses.asdict(stored) | rates}
        write_whole(file, json.dumps(kept, indent=1) + "\n")
        disk_profile.disk_profile.cache_clear()
        return ["io: these rates replace the stored profile of this disk"]
    before = (stored.read_rate, stored.write_rate, stored.mixed_rate)
    off = max(max(new / old, old / new) for new, old in zip(now, before))
    if off <= OFF or not file.exists():
        return []
    figures = ", ".join(f"{way} {rate / 1e9:.2f}" for way, rate in zip(DIRECTIONS, before))
    day = datetime.date.fromtimestamp(file.stat().st_mtime).isoformat()
    return [
        f"io: the stored profile of this disk ({figures} GB/s, {day} or before) is off by {off:.1f}"
        " times. The engine and `infinity plan` use it; --keep-profile replaces it by these rates"
    ]


def _jobs(systems: dict[str, Callable[[str], object]]) -> dict[Any, Callable[[], object]]:
    return {
        (who, way): lambda run=run, way=way: run(way)
        for way in DIRECTIONS
        for who, run in systems.items()
    }


def as_used(file: TestFile, kind: str, folder: str) -> Ours:
    """Makes our engine with the block size and depth of this disk's profile."""
    profile = disk_profile.disk_profile(folder, kind)
    return Ours(file, kind, block_nbytes=profile.block_nbytes, depth=profile.depth)


def _sweep(file: TestFile) -> list[dict]:
    """Measures reads at every block size and depth, once each."""
    points = []
    for block_nbytes in SWEPT_BLOCKS:
        for depth in SWEPT_DEPTHS:
            ours = Ours(file, "auto", block_nbytes=block_nbytes, depth=depth)
            start = time.perf_counter()
            ours.run("read")
            rate = file.nbytes / (time.perf_counter() - start) / 1e9
            points.append({"block_nbytes": block_nbytes, "depth": depth, "GB/s": rate})
    return points


def make_file(folder: str, nbytes: int) -> TestFile:
    """Creates the file in ``folder`` and fills it with random bytes, so that its blocks are
    allocated."""
    engine = native.make_io_engine()
    path = os.path.join(folder, "file")
    extent = native.Extent.in_file(engine.create_file(path, nbytes), 0, nbytes)
    memory = native.Region(64 * MIB, True, 2)
    native.tensor_at(memory, memory.address, memory.nbytes, torch.uint8).random_()
    for offset in range(0, nbytes, memory.nbytes):
        engine.write(extent, offset, memory.address, min(memory.nbytes, nbytes - offset)).wait()
    return TestFile(path, nbytes)


def _rates(times: dict[Any, Times], who: str, way: str, nbytes: int) -> list[float]:
    return [nbytes / seconds / 1e9 for seconds in times[who, way].wall]


def _rows(times: dict[Any, Times], nbytes: int) -> list[Row]:
    rows = [
        row(
            f"io.{way}",
            "GB/s",
            _rates(times, "ours", way, nbytes),
            ceiling=("raw disk", _rates(times, "raw disk", way, nbytes)),
        )
        for way in DIRECTIONS
    ]
    gib = nbytes / 2**30
    rows.append(row("io.read.cpu", "CPU s/GiB", [each / gib for each in times["ours", "read"].cpu]))
    both = paired(times["threads", "read"].wall, times["ours", "read"].wall)
    rates = _rates(times, "threads", "read", nbytes)
    rows.append(row("io.threads.read", "GB/s", rates, ratios={"uring": both}))
    return rows


def _compare(rows: list[Row], times: dict[Any, Times], nbytes: int, rivals: list[str]) -> None:
    """Adds the rivals' ratios to the rows; fio is the ceiling where it is faster than the raw
    disk."""
    of_way = dict(zip(DIRECTIONS, rows))
    for way, entry in of_way.items():
        wall = times["ours", way].wall
        entry.ratios = {who: paired(wall, times[who, way].wall) for who in rivals}
        if "fio" not in rivals:
            continue
        limits = _rates(times, "fio", way, nbytes)
        if statistics.median(limits) > entry.ceiling["value"]:
            entry.limited_by("fio", limits, _rates(times, "ours", way, nbytes))
    cpu = times["ours", "read"].cpu
    (entry,) = (each for each in rows if each.name == "io.read.cpu")
    entry.ratios = {who: paired(cpu, times[who, "read"].cpu) for who in rivals}
