"""Loops of the engine under pytest-benchmark, one benchmark a quantity and parameter.

`pytest bench` calibrates and compares as pytest-benchmark's manual has it: --benchmark-autosave,
--benchmark-compare, --benchmark-compare-fail=median:5%, --benchmark-histogram. A benchmark's
`extra_info` has its rate and, measured in turns after it, its ceiling and the share of that.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from infinity import native
from infinity.tools.bench import adam, io
from infinity.tools.bench.rounds import alternate
from infinity.tools.bench.settings import Settings

from . import headline, loops, update

MIB = 1024 * 1024
UPDATED = (64 * MIB, 512 * MIB)  # bytes of state on disk


def record(
    benchmark: Any,
    group: str,
    job: Callable[[], object],
    *,
    amount: float,
    unit: str,
    ceiling: tuple[str, Callable[[], object]] | None = None,
) -> None:
    """Measures ``job``, which does ``amount`` of ``unit`` (in thousands of millions a second).
    ``ceiling``: its name, and a job that does as much at the hardware's limit."""
    benchmark.group = group
    job()
    benchmark(job)
    if benchmark.stats is not None:  # None: --benchmark-disable
        rate = amount / benchmark.stats.stats.median / 1e9
        benchmark.extra_info |= {"unit": unit, "rate": rate}
    if ceiling is None:
        return
    name, limit = ceiling
    wall = {who: times.wall for who, times in alternate({"job": job, "limit": limit}, 5).items()}
    shares = [theirs / ours for ours, theirs in zip(wall["job"], wall["limit"])]
    benchmark.extra_info |= {
        "ceiling": name,
        "ceiling_rate": amount / statistics.median(wall["limit"]) / 1e9,
        "share": statistics.median(shares),
    }


@pytest.fixture
def file(settings: Settings) -> Iterator[io.TestFile]:
    """Makes the file that disk benchmarks move."""
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        yield io.make_file(
            folder, settings.scaled(io.FILE_NBYTES // 4, io.RAW_THREADS * io.RAW_BLOCK)
        )


@pytest.mark.parametrize("direction", io.DIRECTIONS)
@pytest.mark.parametrize("kind", ["auto", "threads"])
def test_disk(benchmark, settings, file, kind, direction):
    """Measures the I/O engine beside threads that only read and write."""
    ours, raw = io.as_used(file, kind, settings.folder), io.Raw(file)
    with contextlib.closing(raw):
        record(
            benchmark,
            f"disk {direction}",
            partial(ours.run, direction),
            amount=file.nbytes,
            unit="GB/s",
            ceiling=("raw disk", partial(raw.run, direction)),
        )


@pytest.mark.parametrize("threads", [1, "all"])
@pytest.mark.parametrize("variant", adam.VARIANTS, ids=lambda each: each.name)
def test_adam(benchmark, settings, variant, threads):
    """Measures the optimizer's kernel beside a loop that moves its bytes."""
    count = settings.scaled(adam.PARAMETERS // 4, 64 * 1024)
    ours = adam.Ours(variant, count, settings.threads if threads == "all" else threads)
    ceiling = ("moving the same bytes", ours.move)
    unit = "G parameters/s"
    record(
        benchmark, f"adam, {threads} threads", ours.step, amount=count, unit=unit, ceiling=ceiling
    )


@pytest.mark.parametrize("state", UPDATED, ids=lambda nbytes: f"{nbytes // MIB}MiB")
def test_update(benchmark, settings, state):
    """Measures the optimizer's step over NVMe beside its disk in both directions."""
    multiple = sum(update.SIZES.values()) * native.CHECKSUM_NBYTES
    count = settings.scaled(state, multiple) // sum(update.SIZES.values())
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        job = update.Step(folder, count, settings.threads, in_memory=False)
        ceiling = ("both directions alone", job.both)
        step = partial(job.step, job.disk)
        record(benchmark, "update", step, amount=count, unit="G parameters/s", ceiling=ceiling)


def test_lease(benchmark, settings):
    """Measures a lease of pinned memory and its release."""
    leases = native.PinnedPool(native.Region(loops.POOL_NBYTES, True, settings.threads))
    held = [leases.try_lease(nbytes) for nbytes in loops.LEASE_NBYTES]
    record(
        benchmark,
        "pool",
        lambda: leases.try_lease(MIB).release(),
        amount=1,
        unit="G leases/s",
    )
    for lease in held:
        lease.release()


@pytest.mark.parametrize("name", ["tiny400", "wrap", "save", "load"])
def test_headline(benchmark, settings, name):
    """Measures a loop of `python -m bench against`."""
    with (
        tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder,
        headline.JOBS[name](folder, settings.scale) as turn,
    ):
        record(benchmark, "engine", turn, amount=1, unit="G turns/s")


@pytest.mark.parametrize("size", ["50M", "134M"])
@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_step(benchmark, settings, size, home):
    """Measures training steps at every home."""
    with (
        tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder,
        headline.JOBS[f"step{size}.{home}"](folder, settings.scale) as turn,
    ):
        record(benchmark, f"step {size}", turn, amount=headline.STEPS, unit="G steps/s")
