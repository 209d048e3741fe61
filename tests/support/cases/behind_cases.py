"""What the tests of values on their way home share.

Words used here: **block**: `native.CHECKSUM_NBYTES` bytes of an array on disk, with one checksum.
**plain model**: name -> the bytes that the writes so far give, kept in memory. **slow disk**: an
engine that moves bytes only when somebody waits for them, and of several transfers in any order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import doubles
import pytest
import torch
from models import leftovers
from native_arrays import ENGINES

from infinity import native
from infinity.core.homes.store import ArrayStore
from infinity.core.homes.write_behind import WriteBehind, writing_behind
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic

SEED = 77
LR = 1e-2
BLOCK, PAGE = native.CHECKSUM_NBYTES, native.BLOCK_NBYTES
# Smaller than a block, whole blocks, blocks and a rest; the lengths in elements differ by dtype.
ARRAYS = [
    (PAGE, torch.uint8),
    (3 * BLOCK + 5 * PAGE, torch.float32),
    (BLOCK, torch.bfloat16),
    (2 * BLOCK - PAGE, torch.int16),
    (7 * BLOCK, torch.float16),
    (BLOCK + PAGE, torch.float64),
]


@pytest.fixture(params=ENGINES)
def kind(request, monkeypatch) -> str:
    monkeypatch.setenv("INFINITY_IO", request.param)
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("swap")


class Noted:
    """An engine, and the ticket of every transfer."""

    def __init__(self, engine: native.IoEngine):
        self._engine, self.tickets = engine, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def write(self, *place: Any, **more: Any) -> native.Ticket:
        self.tickets.append(self._engine.write(*place, **more))
        return self.tickets[-1]

    def read(self, *place: Any, **more: Any) -> native.Ticket:
        self.tickets.append(self._engine.read(*place, **more))
        return self.tickets[-1]

    def under_way(self) -> int:
        return sum(not ticket.done for ticket in self.tickets)


class SlowDisk(Noted):
    """See above. Ctrl-C comes in the first wait for transfer number ``interrupted``."""

    class Held:
        def __init__(self, disk: SlowDisk, transfer: Callable, place: tuple):
            self.disk, self.transfer, self.place, self.done = disk, transfer, place, False

        def wait(self) -> None:
            if self.disk.tickets.index(self) == self.disk.interrupted:
                self.disk.interrupted = None
                raise KeyboardInterrupt
            while not self.done:
                held = self.disk.rng.choice(
                    [ticket for ticket in self.disk.tickets if not ticket.done]
                )
                held.transfer(*held.place).wait()
                held.done, held.transfer = True, None  # and with it the memory

    def __init__(self, engine: native.IoEngine, seed: int, interrupted: int | None = None):
        super().__init__(engine)
        self.rng, self.interrupted = random.Random(seed), interrupted

    def write(self, *place: Any, **more: Any) -> Held:
        self.tickets.append(self.Held(self, partial(self._engine.write, **more), place))
        return self.tickets[-1]

    def read(self, *place: Any, **more: Any) -> Held:
        self.tickets.append(self.Held(self, partial(self._engine.read, **more), place))
        return self.tickets[-1]


class Home:
    """A store with arrays on disk and one in memory, their plain model, and moves of both."""

    def __init__(
        self,
        folder: Path,
        *,
        service_nbytes: int = 5 * BLOCK,
        faults: doubles.FaultPlan | None = None,
        **options: Any,
    ):
        layer = doubles.layer(faults)
        self.store = ArrayStore(
            [str(folder)],
            Ledger(),
            Traffic(),
            service_nbytes=service_nbytes,
            layer=layer,
            **options,
        )
        places = [*((Tier.NVME, *array) for array in ARRAYS), (Tier.HOST, 3 * PAGE, torch.float32)]
        self.arrays = [
            self.store.allocator.allocate(tier, dtype, n // dtype.itemsize, "array")
            for tier, n, dtype in places
        ]
        self.store.open([])
        self.store.io = self.engine = Noted(self.store.io)
        self.plain = [torch.zeros(array.numel, dtype=array.dtype) for array in self.arrays]

    def write(
        self,
        writer: WriteBehind,
        index: int,
        begin: int,
        count: int,
        seed: int,
        *,
        borrowed: bool = False,
    ) -> None:
        size = self.arrays[index].dtype.itemsize
        raw = torch.randint(
            256, (count * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        values = raw.view(self.arrays[index].dtype)
        self.plain[index][begin : begin + count] = values
        if borrowed and count:  # where its blocks lie as the disk's do
            region = native.Region(count * size + PAGE, False, 0)
            memory = native.tensor_at(
                region, region.address + begin * size % PAGE, count * size, torch.uint8
            )
            memory.copy_(raw)
            writer.write(
                self.arrays[index], begin, memory.view(values.dtype), version=1, stable=True
            )
            return
        writer.write(self.arrays[index], begin, values, version=1)
        raw.fill_(0xEE)  # it is the caller's again

    def check_read(
        self, reader: ArrayStore | WriteBehind, index: int, begin: int, count: int
    ) -> None:
        found = reader.read(self.arrays[index], begin, begin + count)
        assert torch.equal(as_bytes(found), as_bytes(self.plain[index][begin : begin + count])), (
            f"array {index} at {begin}"
        )

    def check_all(self) -> None:
        """All bytes are those of the plain model, by the store, which verifies every checksum."""
        for index, array in enumerate(self.arrays):
            self.check_read(self.store, index, 0, array.numel)

    def write_all_anew(self) -> None:
        with writing_behind(self.store) as writer:
            for index, array in enumerate(self.arrays):
                self.write(writer, index, 0, array.numel, index)

    def do(self, writer: WriteBehind, moves: list[tuple]) -> None:
        """Moves are (array, verb, where as a share, elements, seed); "on" goes on where the last
        move ended, "lend" writes from memory that stays."""
        reached = [0] * len(self.arrays)
        for index, verb, share, count, seed in moves:
            numel = self.arrays[index].numel
            begin = reached[index] % numel if verb in ("on", "lend on") else int(share * numel)
            count = min(count, numel - begin)
            if verb == "read":
                self.check_read(writer, index, begin, count)
            else:
                self.write(writer, index, begin, count, seed, borrowed=verb.startswith("lend"))
                reached[index] = begin + count


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@contextmanager
def home_in(folder: Path, **options: Any) -> Iterator[Home]:
    home = Home(folder, **options)
    try:
        yield home
    finally:
        home.store.close()
        home.engine._engine = None
        assert leftovers(folder) == [] and threads() == []


def threads() -> list[str]:
    """Threads of ours that Python knows of: there are none, the core's own do what is done
    behind."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("infinity")]
