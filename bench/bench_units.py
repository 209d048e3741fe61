"""What the engine does for blocks and units, under pytest-benchmark (bench_loops.py)."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import infinity
from infinity import native
from infinity.tools.bench import adam

from . import headline, two_ranks, update
from .one_unit import OneUnit
from .recorded import record

MIB = 1024 * 1024
WIDTH = 16  # of a block, whose arithmetic takes a few microseconds
COUNTS = (MIB, 16 * MIB)  # parameters of a unit
SENT = (MIB // 2, 8 * MIB)  # parameters of a unit that ranks exchange


def millions(count: int) -> str:
    """Returns ``count`` as a benchmark's name has it."""
    return f"{count / MIB:g}Mi"


@pytest.fixture
def folder(settings) -> Iterator[str]:
    """Makes a folder on the disk that is measured."""
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as made:
        yield made


def _passes(model: Any, x: torch.Tensor, way: str) -> Callable[[], None]:
    """Returns a forward without a graph, or a forward and a backward."""

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def both() -> None:
        model(x).sum().backward()

    return forward if way == "forward" else both


@pytest.mark.parametrize("blocks", [1, 16])
@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("way", ["forward", "both"])
def test_hooks(benchmark, folder, way, home, blocks):
    """Measures passes through blocks of trivial arithmetic beside the same blocks in plain
    torch."""
    plain = headline.make(blocks, WIDTH)
    model, optimizer = headline.wrapped(copy.deepcopy(plain), home, folder)
    x = torch.randn(1, WIDTH)
    ceiling = ("plain torch", _passes(plain, x, way))
    job = _passes(model, x, way)
    record(benchmark, f"hooks {way}", job, amount=blocks, unit="blocks/s", ceiling=ceiling)
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("count", COUNTS, ids=millions)
@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("way", ["set", "add"])
def test_landing(benchmark, settings, folder, way, home, count):
    """Measures how a unit's gradient lands, where none is or added to one, beside the same model
    in plain torch."""
    count = settings.scaled(count, native.CHECKSUM_NBYTES)
    unit, plain = OneUnit(count, home, folder), OneUnit(count, None)
    with contextlib.closing(unit):
        record(
            benchmark,
            f"landing {way}",
            getattr(unit, way),
            amount=count * torch.bfloat16.itemsize,
            unit="GB/s",
            ceiling=("plain torch", getattr(plain, way)),
        )


@pytest.mark.parametrize("count", COUNTS, ids=millions)
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_unit_step(benchmark, settings, folder, home, count):
    """Measures the optimizer's step of one unit beside what only moves its bytes."""
    count = settings.scaled(count, native.CHECKSUM_NBYTES)
    # In memory one: a ceiling that starts threads is none for small units
    threads = 1 if home == "host" else settings.threads
    unit = OneUnit(count, home, folder, update_threads=threads)
    unit.add()
    if home == "host":
        ceiling = ("moving the same bytes", adam.Ours(adam.VARIANTS[0], count, threads).move)
    else:
        alone = update.Step(folder, count, threads, in_memory=False)
        ceiling = ("both directions alone", alone.both)

    def step() -> None:
        unit.optimizer.step()  # by the same gradient each time
        headline.settle(unit.model)

    with contextlib.closing(unit):
        group = f"unit's step, {home}"
        record(benchmark, group, step, amount=count, unit="G parameters/s", ceiling=ceiling)


@pytest.fixture(scope="module")
def ranks(settings) -> Iterator[two_ranks.TwoRanks]:
    """Starts the two ranks: they need seconds to import torch."""
    with (
        tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as made,
        two_ranks.TwoRanks(made) as started,
    ):
        yield started


@pytest.mark.parametrize("count", SENT, ids=millions)
@pytest.mark.parametrize("way", two_ranks.CEILINGS)
def test_collective(benchmark, settings, ranks, way, count):
    """Measures a unit's collective of two ranks beside that of torch.distributed."""
    count, limit = settings.scaled(count, native.CHECKSUM_NBYTES), two_ranks.CEILINGS[way]
    record(
        benchmark,
        f"collective {way}",
        partial(ranks.turn, way, count),
        amount=two_ranks.TIMES * count * torch.bfloat16.itemsize,
        unit="GB/s",
        ceiling=(f"torch's {limit}", partial(ranks.turn, limit, count)),
    )
