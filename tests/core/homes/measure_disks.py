"""disks: eight modelled disks and up to eight ranks, beside the rate of all disks together.

modelled disk   a folder whose files the I/O engine moves at a given rate and no faster
                (csrc/tests/doubles); the ranks share it
unit            what one block of a model moves at once, cut into equal shards for the ranks
lockstep        all ranks read the same unit, and meet before the next

The model is checked by row ``disks.one``: one disk alone gives its rate. A disk of 1 GB/s moves
nothing (the instant backend): a drive brings its bytes without the processor, and eight of them
bring more than two processors can copy. All else is done as it is for real ones: the queues, the
completions, and a checksum of every byte, which is verified against that of the zeros which are
there. The rows with ``.moved`` are of slower disks whose bytes do move, by the disk that is there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench.launch import doubles
from infinity import native
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.disk_profile import DiskProfile
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.sizes import round_up
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.settings import Settings

DISKS, UNITS = 8, 8
RATE, UNIT_NBYTES = (
    1e9,
    800_000_000,
)  # bytes per second of a disk that moves nothing; of half a layer of a 70 B model in bf16
MOVED_RATE, MOVED_NBYTES = (
    64e6,
    200_000_000,
)  # of a disk whose bytes move: eight of them are slower than the one that is there
TIMES_SLOWER = 10
MIB = 1024 * 1024
PATIENCE_SECONDS = 300


class Ranks:
    """Processes that read units in lockstep from the disks of one model, each through a store of
    its own. ``moves``: whether bytes move."""

    def __init__(
        self, folder: Path, rates: Sequence[float], count: int, unit_nbytes: int, *, moves: bool
    ):
        self.count, self.unit_nbytes = count, unit_nbytes
        self._disks = [folder / f"disk{index}" for index in range(len(rates))]
        for disk in self._disks:
            disk.mkdir(parents=True)
        (folder / "model.json").write_text(
            json.dumps({str(disk): rate for disk, rate in zip(self._disks, rates)})
        )
        kept = {
            f"model {disk} {kind}": asdict(DiskProfile(rate, rate, rate, MIB, 64))
            for disk, rate in zip(self._disks, rates)
            for kind in native.IO_KINDS
        }
        (folder / "disks.json").write_text(json.dumps(kept))
        context = multiprocessing.get_context("spawn")
        self._barrier = context.Barrier(count)
        self._processes, self._ends = [], []
        for rank in range(count):
            end, other = context.Pipe()
            shard_nbytes = round_up(unit_nbytes // count, native.BLOCK_NBYTES)
            process = context.Process(
                target=serve,
                args=(other, str(folder), rank, count, shard_nbytes, self._barrier, moves),
                daemon=True,
            )
            process.start()
            self._processes.append(process)
            self._ends.append(end)
        self._answers()  # all are ready

    def _answers(self) -> list[float]:
        for end in self._ends:
            if not end.poll(PATIENCE_SECONDS):
                raise TimeoutError(f"a rank did not answer for {PATIENCE_SECONDS} s")
        return [end.recv() for end in self._ends]

    def rate(self, units: int, *, at_once: bool) -> float:
        """Returns the bytes per second of all ranks together for reading ``units`` units, one after
        the other or all at once."""
        for end in self._ends:
            end.send((units, at_once))
        return units * self.unit_nbytes / max(self._answers())

    def close(self) -> None:
        """Ends the processes."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(PATIENCE_SECONDS)


def serve(
    end: Connection, folder: str, rank: int, ranks: int, shard_nbytes: int, barrier, moves: bool
) -> None:
    """Runs one rank: makes the units, then reads what it is told to and answers with the seconds,
    until it is told None."""
    os.environ |= {
        "INFINITY_MODEL_DISKS": os.path.join(folder, "model.json"),
        "INFINITY_CACHE": folder,
    }
    doubles().install()
    disks, layer = list(doubles().modelled_disks()), doubles().layer(instant=not moves)
    store = ArrayStore(
        disks, Ledger(), Traffic(), service_nbytes=MIB, layer=layer, rank=rank, ranks=ranks
    )
    arrays = [
        store.allocator.allocate(Tier.NVME, torch.uint8, shard_nbytes, "a unit")
        for _ in range(UNITS)
    ]
    memory = store.allocator.make_region(shard_nbytes)  # of all units: the bytes are not read
    store.open([memory])
    store.allocator.await_pages()
    end.send(0.0)
    while (wanted := end.recv()) is not None:
        units, at_once = wanted
        barrier.wait(PATIENCE_SECONDS)
        start = time.perf_counter()
        tickets = []
        for array in (arrays * (units // UNITS + 1))[:units]:
            tickets.append(store.io.read(array.extent, 0, memory.address, array.nbytes))
            if not at_once:
                tickets.pop().wait()
                barrier.wait(PATIENCE_SECONDS)
        for ticket in tickets:
            ticket.wait()
        barrier.wait(PATIENCE_SECONDS)
        end.send(time.perf_counter() - start)
    store.close()


def measure(settings: Settings) -> Measured:
    """Measures rows disks.one, disks.unit, disks.units8, disks.ranks2, disks.ranks4, disks.ranks8
    and disks.slow_one (GB/s), of disks of 1 GB/s that move nothing; and disks.moved.one,
    disks.moved.unit and so on, of slower ones whose bytes move.
    """
    doubles()  # before any process starts
    rows: list[Row] = []
    for prefix, rate, unit_nbytes, moves in (
        ("disks", RATE, UNIT_NBYTES, False),
        ("disks.moved", MOVED_RATE, MOVED_NBYTES, True),
    ):
        nbytes = settings.scaled(unit_nbytes, MIB)
        equal, slow = [rate] * DISKS, [rate] * (DISKS - 1) + [rate / TIMES_SLOWER]
        jobs = {  # disks, ranks, units, and whether those are asked for at once
            "one": ([rate], 1, 1, False),
            "unit": (equal, 1, 1, False),
            "units8": (equal, 1, UNITS, True),
            "ranks2": (equal, 2, UNITS, False),
            "ranks4": (equal, 4, UNITS, False),
            "ranks8": (equal, 8, UNITS, False),
            "slow_one": (slow, 1, UNITS, True),
        }
        for name, (rates, count, units, at_once) in jobs.items():
            with (
                tempfile.TemporaryDirectory(
                    prefix="infinity-bench-", dir=settings.folder
                ) as folder,
                ExitStack() as stack,
            ):
                ranks = Ranks(Path(folder).resolve(), rates, count, nbytes, moves=moves)
                stack.callback(ranks.close)
                found = [ranks.rate(units, at_once=at_once) / 1e9 for _ in range(settings.rounds)]
            what = f"{len(rates)} modelled disks" if len(rates) > 1 else "the modelled disk"
            rows.append(
                row(
                    f"{prefix}.{name}",
                    "GB/s",
                    found,
                    ceiling=(what, [sum(rates) / 1e9] * len(found)),
                )
            )
    return Measured(rows)
