"""Loops of the engine alone: io and adam as in `infinity bench`, beside the rivals; pool.

pool    leasing a buffer and giving it back, and making the memory in the first place
error   of 8-bit moments, beside the kernel's speed
"""

from __future__ import annotations

import time

import torch

from infinity import native
from infinity.tools.bench import adam, io
from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.settings import Settings

from . import rivals

MIB = 1024 * 1024
LEASES = 20_000
POOL_NBYTES = 256 * MIB
LEASE_NBYTES = (MIB, 4 * MIB, 12 * MIB)


def measure_io(settings: Settings) -> Measured:
    """Measures the rows of :func:`infinity.tools.bench.io.measure`. Notes name absent rivals."""
    return io.measure(settings, rivals=rivals.of_disks(settings))


def measure_adam(settings: Settings) -> Measured:
    """Measures the rows of :func:`infinity.tools.bench.adam.measure`, and adam.int8.error.

    Notes name absent rivals.
    """
    others = rivals.of_optimizers(settings)
    found = adam.measure(settings, rivals=others, limit_threads=rivals.openmp_threads)
    found.rows.append(_int8_error())
    return found


def _int8_error() -> Row:
    """How far a step with 8-bit moments is from a step with fp32 moments over the same gradients.

    The figure is the root mean square of the difference over that of the step, for steps 101 to
    300. Gradients are normal, with scales over four decades.
    """
    count, steps, settled = 64 * 1024, 300, 100
    runs = {
        name: adam.Ours(next(each for each in adam.VARIANTS if each.name == name), count, 1)
        for name in ("int8", "split")
    }
    generator = torch.Generator().manual_seed(0)
    scales = 10 ** (4 * torch.rand(count, generator=generator) - 6)
    errors = []
    for step in range(steps):
        grad = (scales * torch.randn(count, generator=generator)).to(torch.bfloat16)
        moved = {}
        for name, run in runs.items():
            run.tensor("grad", torch.bfloat16).copy_(grad)
            before = run.master()
            run.step()
            moved[name] = run.master() - before
        if step >= settled:
            errors.append(((moved["int8"] - moved["split"]).norm() / moved["split"].norm()).item())
    return row("adam.int8.error", "of the step", errors)


def measure_pool(settings: Settings) -> Measured:
    """Measures rows pool.lease (microseconds of one lease and its release, Python's call included)
    and pool.make (GB/s)."""
    return Measured([_lease(settings), _make_region(settings)])


def _lease(settings: Settings) -> Row:
    pool = native.PinnedPool(native.Region(POOL_NBYTES, True, settings.threads))
    held = [
        pool.try_lease(nbytes) for nbytes in LEASE_NBYTES
    ]  # a pool in use is not one free block
    microseconds = []
    for _ in range(settings.rounds):
        start = time.perf_counter()
        for _ in range(LEASES):
            pool.try_lease(MIB).release()
        microseconds.append((time.perf_counter() - start) / LEASES * 1e6)
    for lease in held:
        lease.release()
    return row("pool.lease", "us", microseconds)


def _make_region(settings: Settings) -> Row:
    rates = []
    for _ in range(settings.rounds):
        start = time.perf_counter()
        native.Region(POOL_NBYTES, True, settings.threads)
        rates.append(POOL_NBYTES / (time.perf_counter() - start) / 1e9)
    return row("pool.make", "GB/s", rates)
