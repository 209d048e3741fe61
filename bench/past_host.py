"""past_host: bytes from a disk into a GPU's memory, past the host's and through it, verified both
ways. Needs a GPU.

ceiling of both        the disk alone: the same reads into the host's memory, which nobody looks at
ceiling of checksums   what a copy inside the device moves in the same time
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from contextlib import closing

import torch

from infinity import native
from infinity.core.homes.arrays import StateArray
from infinity.core.homes.staging import Fetch, ThroughHost
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.device import PAST, Device, Event
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.ext.gpu_direct import direct_storage
from infinity.ext.gpu_direct.gpu_direct import GpuDirect
from infinity.tools.bench.gpu import this_machines
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.settings import Settings

MIB = 1024 * 1024
NBYTES = 2048 * MIB
PIECE_NBYTES = 8 * MIB
AHEAD = 8  # pieces


def measure(settings: Settings) -> Measured:
    """Measures rows ``past_host.through|past`` and ``past_host.checksums`` (GB/s)."""
    with closing(this_machines("past_host")) as device:
        return measure_on(device, settings)


def measure_on(device: Device, settings: Settings) -> Measured:
    """Measures with what computes given. Without a way past the host it says why, and measures the
    other."""
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        refusal = direct_storage.refusal([folder])
        jobs = {"through": _Job(folder, device, settings, ThroughHost)}
        if not refusal:
            jobs["past"] = _Job(folder, device, settings, GpuDirect)
        try:
            runs = {name: job.run for name, job in jobs.items()} | {"disk": jobs["through"].read}
            times = settings.alternate(runs)
            nbytes = jobs["through"].array.nbytes
            rates = {name: [nbytes / each / 1e9 for each in times[name].wall] for name in runs}
            rows = [
                row(
                    f"past_host.{name}",
                    "GB/s",
                    rates[name],
                    ceiling=("the disk alone", rates["disk"]),
                )
                for name in jobs
            ]
        finally:
            for job in jobs.values():
                job.store.close()
    rows.append(_checksums(device, settings))
    notes = [f"device: {device.where}"]
    return Measured(rows, [*notes, f"not past the host: {refusal}"] if refusal else notes)


class _Job:
    """An array on disk, and memory on the device as large as a piece of it."""

    def __init__(self, folder: str, device: Device, settings: Settings, backend: type[ThroughHost]):
        self._device = device
        self.store = ArrayStore(
            [folder], Ledger(), device.traffic, service_nbytes=PIECE_NBYTES, device=device
        )
        self.array: StateArray = self.store.allocator.allocate(
            Tier.NVME, torch.uint8, settings.scaled(NBYTES, PIECE_NBYTES), "the benchmark"
        )
        region = self.store.allocator.make_region(AHEAD * PIECE_NBYTES)
        self.store.open([region], staging=native.PinnedPool(region), backend=backend)
        self._target = device.zeros(PIECE_NBYTES, torch.uint8, "the benchmark")
        data = torch.randint(0, 256, (PIECE_NBYTES,), dtype=torch.uint8, device="cpu")
        for begin in range(0, self.array.nbytes, PIECE_NBYTES):
            self.store.write(self.array, begin, data, version=1)

    def run(self) -> None:
        """Brings the array to the device once, piece by piece, as a unit's weights come."""
        self._run(copies=True)

    def read(self) -> None:
        """Reads it into the host's memory, and does nothing else."""
        self._run(copies=False)

    def _run(self, *, copies: bool) -> None:
        ahead: deque[tuple[native.Lease, Fetch]] = deque()
        last: Event = PAST
        for begin in range(0, self.array.nbytes + AHEAD * PIECE_NBYTES, PIECE_NBYTES):
            if len(ahead) == AHEAD or (ahead and begin >= self.array.nbytes):
                lease, fetch = ahead.popleft()
                fetch.wait()
                if copies:
                    source = fetch.values(torch.uint8)
                    last = self._device.put(
                        "in", lambda source=source: self._target.copy_(source, non_blocking=True)
                    )
                    self.store.staging.take_back([lease], last)
                else:
                    lease.release()
            if begin < self.array.nbytes:
                lease = self.store.take_lease(
                    self.store.staging.pool,
                    PIECE_NBYTES,
                    lambda: self.store.staging.collect(wait=True),
                )
                fetch = self.store.staging.fetch(self.array, begin, lease, PIECE_NBYTES)
                ahead.append((lease, fetch))
        while ahead:
            ahead.popleft()[1].wait()
        last.wait()
        self.store.staging.collect(wait=True)


def _checksums(device: Device, settings: Settings):
    data = device.zeros(
        settings.scaled(1024 * MIB, native.CHECKSUM_NBYTES), torch.uint8, "the benchmark"
    )
    other = torch.empty_like(data)
    ours, limits = [], []
    for _ in range(settings.rounds + 1):
        start = time.perf_counter()
        device.kernels.checksums(data.data_ptr(), data.numel())
        middle = time.perf_counter()
        other.copy_(data)
        device.now().wait()
        ours.append(data.numel() / (middle - start) / 1e9)
        limits.append(2 * data.numel() / (time.perf_counter() - middle) / 1e9)
    return row(
        "past_host.checksums", "GB/s", ours[1:], ceiling=("a copy inside the device", limits[1:])
    )
