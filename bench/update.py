"""update: the optimizer step over NVMe, load -> step -> save, beside what it is made of.

read, write   the step's bytes from and to the disk alone, as the pipeline transfers them
both          both directions at once, without any computing: a disk whose directions share a rate
              cannot do better
compute       the same step with every array in memory
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile

import torch

from infinity import native
from infinity.core.machine.sizes import format_nbytes
from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.settings import Settings

MIB = 1024 * 1024
PARAMETERS = 32 * MIB
SLOT_NBYTES = 7 * MIB  # the engine's own, where the budget allows
SLOT_COUNT = 8
STATES = (64 * MIB, 512 * MIB, 4096 * MIB, 8192 * MIB)  # bytes of state on disk
FILES = 2  # one that is stepped, one that is only moved
SIZES = {"weight": 2, "master": 2, "exp_avg": 4, "exp_avg_sq": 4}
LAYOUT = native.Layout(
    rule=native.Rule.ADAMW,
    weight=native.DType.BFLOAT16,
    master=native.Master.SPLIT,
    grad=native.DType.BFLOAT16,
    moments=native.DType.FLOAT32,
)


class Step:
    """One bf16 unit with split master and fp32 moments, on disk and in memory."""

    def __init__(self, folder: str, count: int, threads: int, *, in_memory: bool = True):
        self.count = count
        self.engine = native.make_io_engine()
        state_nbytes = count * sum(SIZES.values())
        file = self.engine.create_file(os.path.join(folder, "swap"), state_nbytes)
        other = self.engine.create_file(os.path.join(folder, "other"), state_nbytes)
        self.slots = native.Region(SLOT_COUNT * SLOT_NBYTES, True, threads)
        self.engine.register([self.slots])
        sizes = SIZES if in_memory else {}
        self.regions = {
            name: native.Region(count * size, True, threads) for name, size in sizes.items()
        }
        self.grad = native.Region(count * 2, True, threads)
        native.tensor_at(self.grad, self.grad.address, count, torch.bfloat16).normal_()
        self.memory = {
            name: native.Extent.in_memory(region.address, region.nbytes)
            for name, region in self.regions.items()
        }
        self.disk, offset = {}, 0
        # as much of another file, for what is only moved: there nobody looks at the bytes
        self.moved = []
        for name, size in SIZES.items():
            self.disk[name] = native.Extent.in_file(file, offset, count * size)
            self.moved.append(native.Extent.in_file(other, offset, count * size))
            offset += count * size
        self.updater = native.Updater(
            self.engine, self.slots.address, self.slots.nbytes, SLOT_COUNT, threads
        )
        self.steps = 0
        self.step(self.disk)  # the first writes allocate blocks
        self.transfer(self.write)

    def step(self, extents: dict) -> None:
        self.steps += 1
        hyper = native.Hyperparameters()
        hyper.step = self.steps
        update = native.UnitUpdate(
            layout=LAYOUT,
            count=self.count,
            **extents,
            grad=native.Extent.in_memory(self.grad.address, self.grad.nbytes),
            runs=[native.Run(0, self.count, hyper)],
            version=self.steps,
        )
        self.updater.submit(update).wait()

    def timeline(self) -> list[dict]:
        """Takes one more step, and returns it chunk by chunk: what happened in which slot, from
        when to when, in seconds."""
        self.updater.record_events()
        self.step(self.disk)
        events = self.updater.take_events()
        begin = min(start for *_, start, _, _ in events)
        return [
            {"kind": kind, "slot": slot, "start": start - begin, "end": end - begin}
            for kind, _, slot, start, end, _ in events
        ]

    def read(self, extent, offset: int, address: int, nbytes: int) -> native.Ticket:
        return self.engine.read(extent, offset, address, nbytes, checksum=False)

    def write(self, extent, offset: int, address: int, nbytes: int) -> native.Ticket:
        return self.engine.write(extent, offset, address, nbytes, checksum=False)

    def transfer(self, operation) -> None:
        """Moves all bytes once, through the slots, as many in flight as the pipeline has."""
        self._move([(operation, place) for place in self._places()], SLOT_COUNT)

    def both(self) -> None:
        """Reads and writes of all bytes at once, half of the slots each."""
        places = list(self._places())
        half = len(places) // 2
        pairs = zip(places, places[half:] + places[:half])
        self._move(
            [one for first, second in pairs for one in ((self.read, first), (self.write, second))],
            SLOT_COUNT,
        )

    def _places(self):
        chunk = SLOT_NBYTES // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES
        for extent in self.moved:
            for at in range(0, extent.nbytes, chunk):
                yield extent, at, min(chunk, extent.nbytes - at)

    def _move(self, transfers: list, slot_count: int) -> None:
        pending = [None] * slot_count
        for turn, (operation, (extent, at, nbytes)) in enumerate(transfers):
            slot = turn % slot_count
            if pending[slot] is not None:
                pending[slot].wait()
            pending[slot] = operation(extent, at, self.slots.address + slot * SLOT_NBYTES, nbytes)
        for ticket in pending:
            if ticket is not None:
                ticket.wait()


def measure(settings: Settings) -> Measured:
    """Measures rows update.nvme (ceiling: both directions at once), its parts in seconds, and the
    step over the slowest part."""
    count = settings.scaled(PARAMETERS, native.CHECKSUM_NBYTES)
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        times, timeline = _time_parts(Step(folder, count, settings.threads), settings)
    alone = [max(parts) for parts in zip(times["read"], times["compute"], times["write"])]
    rates = {name: [count / seconds / 1e9 for seconds in times[name]] for name in ("step", "both")}
    ceiling = ("both directions alone", rates["both"])
    rows = [row("update.nvme", "G parameters/s", rates["step"], ceiling=ceiling)]
    rows += [row(f"update.{name}", "s", values) for name, values in times.items()]
    slowest = [step / part for step, part in zip(times["step"], alone)]
    rows.append(row("update.step_over_slowest", "ratio", slowest))
    notes = [
        f"update: the step takes {statistics.median(slowest):.2f} times the slowest of read,"
        " compute and write alone"
    ]
    for nbytes in STATES:
        needed = FILES * nbytes * settings.scale
        if shutil.disk_usage(settings.folder).free > needed:
            rows.append(_of_size(nbytes, settings))
        else:
            notes.append(
                f"update: no row of {nbytes // MIB} MiB, {format_nbytes(needed)} of disk are not"
                " free"
            )
    return Measured(rows, notes, {"update.timeline": timeline})


def _time_parts(job: Step, settings: Settings) -> tuple[dict[str, list[float]], list]:
    """Seconds of the step and of its parts alone, in turns; and when what happened in the last
    step."""
    jobs = {
        "step": lambda: job.step(job.disk),
        "read": lambda: job.transfer(job.read),
        "compute": lambda: job.step(job.memory),
        "write": lambda: job.transfer(job.write),
        "both": job.both,
    }
    times = settings.alternate(jobs)
    return {name: of_one.wall for name, of_one in times.items()}, job.timeline()


def _time_whole(job: Step, settings: Settings) -> dict[str, list[float]]:
    """Seconds of the step, and of both directions of the disk alone, in turns."""
    jobs = {"step": lambda: job.step(job.disk), "both": job.both}
    times = settings.alternate(jobs)
    return {name: of_one.wall for name, of_one in times.items()}


def _of_size(nbytes: int, settings: Settings) -> Row:
    """The step over a state of ``nbytes``, in units of both directions alone."""
    count = (
        max(1, round(nbytes * settings.scale / sum(SIZES.values()) / native.CHECKSUM_NBYTES))
        * native.CHECKSUM_NBYTES
    )
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        times = _time_whole(Step(folder, count, settings.threads, in_memory=False), settings)
    ratios = [step / both for step, both in zip(times["step"], times["both"])]
    moved = max(1, count * sum(SIZES.values()) // MIB)
    return row(f"update.step_over_both.{moved}MiB", "ratio", ratios)
