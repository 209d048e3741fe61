"""A flat param's arrays in plain memory, a store that keeps what it was asked for, and ranks that
are told what the others have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from infinity.core.machine.tiers import Tier
from infinity.core.units.flat_param import FlatParam
from infinity.ranks.parallel_dims import ParallelDims


@dataclass(eq=False)
class MemoryArray:
    """Stands for a StateArray in host memory; ``tier`` only says where it is."""

    name: str
    flat: torch.Tensor
    tier: Tier = Tier.HOST
    region: None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype


@dataclass
class Write:
    """A write that a store was asked for."""

    name: str
    begin: int
    numel: int
    version: int
    stable: bool


class MemoryStore:
    """Reads and writes such arrays. Keeps the writes, and whether it is ``guarding`` now."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.is_guarding = False

    def read(self, array: MemoryArray, begin: int, end: int) -> torch.Tensor:
        return array.flat[begin:end].clone()

    def write(
        self,
        array: MemoryArray,
        begin: int,
        source: torch.Tensor,
        *,
        version: int,
        stable: bool = False,
    ) -> None:
        assert source.dtype == array.dtype and source.dim() == 1
        array.flat[begin : begin + source.numel()] = source
        self.writes.append(Write(array.name, begin, source.numel(), version, stable))

    @property
    @contextmanager
    def guard(self) -> Iterator[None]:
        self.is_guarding = True
        yield
        self.is_guarding = False


@dataclass
class Told:
    """Stands for collectives: rank ``rank`` of ``size``, told by ``wholes`` what all ranks have at
    a meeting of that name. Keeps the names of meetings."""

    rank: int
    size: int = 2
    shard: str = "parameters"
    wholes: dict[str, torch.Tensor] = field(default_factory=dict)
    meetings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = ParallelDims(rank=self.rank, size=self.size, shard=self.shard)

    def assemble(self, out: torch.Tensor, what: str, pieces: list[tuple[int, int]]) -> None:
        self.meetings.append(what)
        assert len(pieces) == self.size
        assert out.numel() == max(end for begin, end in pieces if begin < end)
        for peer, (begin, end) in enumerate(pieces):
            if peer != self.rank and begin < end:
                out[begin:end] = self.wholes[what][begin:end]


class Counted:
    """An update or a read: counts its waits, and whether ``store`` guarded them."""

    def __init__(self, store: MemoryStore | None = None):
        self.waits, self.done, self.was_guarded, self._store = 0, False, False, store

    def wait(self) -> None:
        self.waits, self.done = self.waits + 1, True
        self.was_guarded = self._store is not None and self._store.is_guarding


def give_arrays(flat_param: FlatParam, fill: int = 0) -> FlatParam:
    """Gives ``flat_param`` the arrays of its spec, of this rank's size and full of ``fill``."""
    for name, dtype in flat_param.spec.array_dtypes().items():
        begin, end = flat_param.layout.home_range(name)
        flat_param.arrays[name] = MemoryArray(name, torch.full((end - begin,), fill, dtype=dtype))
    return flat_param
