"""What moves bytes between disk and memory, under pytest-benchmark (bench_loops.py)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity import native
from infinity.core.homes.staging import Staging
from infinity.core.machine.device import Device
from infinity.core.machine.traffic import Traffic
from infinity.tools.bench import io

from . import loops, update
from .recorded import record

KIB, MIB = 1024, 1024 * 1024
BLOCKS, DEPTHS = (64 * KIB, MIB, 8 * MIB), (4, 16, 64)
# Small blocks need many in flight, large ones few
DIAGONAL = tuple(zip(BLOCKS, reversed(DEPTHS)))
SWEEP = [
    *(("read", block, depth) for block in BLOCKS for depth in DEPTHS),
    *((way, *each) for way in ("write", "mixed") for each in DIAGONAL),
]
SLOTS = 4  # of staging, in flight
UPDATED = (64 * MIB, 512 * MIB)  # bytes of state on disk


def size(nbytes: int) -> str:
    """Returns ``nbytes`` as a benchmark's name has it."""
    return f"{nbytes // MIB}MiB" if nbytes >= MIB else f"{nbytes // KIB}KiB"


@pytest.fixture(scope="module")
def file(settings) -> Iterator[io.TestFile]:
    """Makes the file that disk benchmarks move."""
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        yield io.make_file(folder, _file_nbytes(settings))


@pytest.fixture
def raw(file) -> Iterator[io.Raw]:
    """Opens the file for the ceiling."""
    with contextlib.closing(io.Raw(file)) as opened:
        yield opened


def _file_nbytes(settings: Any) -> int:
    return settings.scaled(io.FILE_NBYTES // 4, io.RAW_THREADS * io.RAW_BLOCK)


def _record_moved(benchmark: Any, ours: io.Ours, raw: io.Raw, direction: str, group: str) -> None:
    ceiling = ("raw disk", partial(raw.run, direction))
    job, amount = partial(ours.run, direction), raw.file.nbytes
    record(benchmark, group, job, amount=amount, unit="GB/s", ceiling=ceiling)


@pytest.mark.parametrize("direction", io.DIRECTIONS)
@pytest.mark.parametrize("kind", ["auto", "threads"])
def test_disk(benchmark, settings, file, raw, kind, direction):
    """Measures the I/O engine, as the disk's profile has it, beside threads that only read and
    write."""
    ours = io.as_used(file, kind, settings.folder)
    _record_moved(benchmark, ours, raw, direction, f"disk {direction}")


@pytest.mark.parametrize("direction, block, depth", SWEEP, ids=lambda each: _label(each))
def test_blocks(benchmark, file, raw, direction, block, depth):
    """Measures the I/O engine by block size and by how many are in flight."""
    ours = io.Ours(file, "auto", block_nbytes=block, depth=depth)
    _record_moved(benchmark, ours, raw, direction, f"blocks {direction}")


def _label(value: Any) -> str:
    return size(value) if isinstance(value, int) and value >= KIB else str(value)


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("kind", ["auto", "threads"])
def test_ticket(benchmark, file, raw, kind, direction):
    """Measures one small transfer from its submit to its wait, beside one system call."""
    engine = native.make_io_engine(kind=kind)
    extent = native.Extent.in_file(engine.open_file(file.path), 0, file.nbytes)
    memory = native.Region(native.CHECKSUM_NBYTES, False, 1)
    engine.register([memory])
    move = engine.read if direction == "read" else engine.write
    call = os.preadv if direction == "read" else os.pwritev
    block = memoryview(raw.memory)[: memory.nbytes]
    record(
        benchmark,
        f"ticket {direction}",
        lambda: move(extent, 0, memory.address, memory.nbytes, checksum=False).wait(),
        amount=1,
        unit="tickets/s",
        ceiling=("one system call", lambda: call(raw.descriptor, [block], 0)),
    )


def test_ticket_alone(benchmark):
    """Measures a ticket that no transfer belongs to: made, completed, waited for."""

    def job() -> None:
        ticket = native.Ticket(1)
        ticket.part_done()
        ticket.wait()

    record(benchmark, "ticket alone", job, amount=1, unit="tickets/s")


class Staged:
    """A file that comes through slots of a staging pool, as weights do."""

    def __init__(self, path: str, nbytes: int, slot_nbytes: int, *, checksums: bool):
        self.file, self.slot_nbytes = io.TestFile(path, nbytes), slot_nbytes
        engine = native.make_io_engine()
        extent = native.Extent.in_file(engine.create_file(path, nbytes), 0, nbytes)
        memory = native.Region((SLOTS + 1) * slot_nbytes, True, 1)
        native.tensor_at(memory, memory.address, memory.nbytes, torch.uint8).random_()
        engine.register([memory])
        for at in range(0, nbytes, slot_nbytes):
            engine.write(extent, at, memory.address, slot_nbytes).wait()
        self.array: Any = SimpleNamespace(extent=extent)
        device = Device(torch.device("cpu"), Traffic())
        self.staging = Staging(engine, device, checksums=checksums, sampled=False)
        self.pool = native.PinnedPool(memory)
        self.staging.open(self.pool)

    def run(self) -> None:
        """Fetches the file once."""
        ahead: deque[tuple[Any, native.Lease]] = deque()
        for at in range(0, self.file.nbytes, self.slot_nbytes):
            if len(ahead) == SLOTS:
                self._end(*ahead.popleft())
            slot = self.pool.try_lease(self.slot_nbytes)
            assert slot is not None
            ahead.append((self.staging.fetch(self.array, at, slot, self.slot_nbytes), slot))
        while ahead:
            self._end(*ahead.popleft())

    def _end(self, fetch: Any, slot: native.Lease) -> None:
        fetch.wait()
        slot.release()


@pytest.mark.parametrize("checksums", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("slot", [MIB, 8 * MIB], ids=size)
def test_staging(benchmark, settings, slot, checksums):
    """Measures reads into slots of the staging pool beside threads that only read."""
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        staged = Staged(f"{folder}/staged", _file_nbytes(settings), slot, checksums=checksums)
        with contextlib.closing(io.Raw(staged.file)) as raw:
            ceiling = ("raw disk", partial(raw.run, "read"))
            amount = staged.file.nbytes
            record(benchmark, "staging", staged.run, amount=amount, unit="GB/s", ceiling=ceiling)


def test_lease(benchmark, settings):
    """Measures a lease of pinned memory and its release."""
    leases = native.PinnedPool(native.Region(loops.POOL_NBYTES, True, settings.threads))
    held = [leases.try_lease(nbytes) for nbytes in loops.LEASE_NBYTES]
    job = lambda: leases.try_lease(MIB).release()
    record(benchmark, "pool", job, amount=1, unit="leases/s")
    for lease in held:
        lease.release()


@pytest.mark.parametrize("state", UPDATED, ids=size)
def test_update(benchmark, settings, state):
    """Measures the optimizer's step over NVMe beside its disk in both directions."""
    multiple = sum(update.SIZES.values()) * native.CHECKSUM_NBYTES
    count = settings.scaled(state, multiple) // sum(update.SIZES.values())
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        job = update.Step(folder, count, settings.threads, in_memory=False)
        ceiling = ("both directions alone", job.both)
        step = partial(job.step, job.disk)
        record(benchmark, "update", step, amount=count, unit="G parameters/s", ceiling=ceiling)
