"""ArrayParts: each parameter's place in one shard's flat arrays, this rank's slice, and reading.

slice   a rank's equal part of every array's flat elements; with one rank, all of them
part    the elements of an array that belong to one parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..distributed.collectives import Collectives
from ..storage.arrays import ArrayIO, StateArray
from .contents import Contents
from .flat_layout import FlatLayout
from .shard_spec import ShardSpec, elements_each


class ArrayParts:
    """One shard's flat arrays by parameter. To read a part, every rank must call."""

    def __init__(
        self,
        spec: ShardSpec,
        params: Sequence[torch.nn.Parameter],
        collectives: Collectives | None = None,
    ):
        self.spec, self.params = spec, tuple(params)
        self.collectives = collectives or Collectives()
        self.ranks = self.collectives.ranks
        self.names = [f"parameter {i} of a shard" for i in range(len(params))]  # until set
        self.layout = FlatLayout.of(params, self.ranks.size)
        self.slice_numel = self.layout.numel // self.ranks.size
        self.handles: list[Any] = []  # the ParamHandles of ``params``, once they are managed
        self.contents = Contents()
        self._assembled: dict[str, torch.Tensor] = {}  # whole arrays, in assembling()

    @property
    def arrays(self) -> dict[str, StateArray]:
        """The arrays at home, by their names."""
        return self.contents.arrays

    def own(self, name: str, rank: int | None = None) -> tuple[int, int]:
        """Returns (begin, end), in elements, of array ``name`` at home here (or on ``rank``)."""
        if name == "grad" and self.ranks.keeps_gradients:
            return 0, self.layout.numel
        each = self.slice_numel // elements_each(name)
        rank = self.ranks.rank if rank is None else rank
        return rank * each, (rank + 1) * each

    @property
    def own_slice(self) -> tuple[int, int]:
        """(begin, end) of the elements that the optimizer steps here."""
        return self.ranks.rank * self.slice_numel, (self.ranks.rank + 1) * self.slice_numel

    def slice_part(self, index: int, rank: int | None = None) -> tuple[int, int]:
        """Returns (begin, end), maybe empty, of parameter ``index`` in its rank's slice."""
        place = self.layout.placements[index]
        first = (self.ranks.rank if rank is None else rank) * self.slice_numel
        begin, end = max(place.offset, first), min(place.end, first + self.slice_numel)
        return begin, max(begin, end)

    def own_part(self, name: str, index: int) -> tuple[int, int]:
        """Returns (begin, end), maybe empty, of parameter ``index`` in ``name`` at home here."""
        (begin, end), (low, high) = self.part(name, index), self.own(name)
        begin, end = max(begin, low), min(end, high)
        return begin, max(begin, end)

    def part_at_home(self, name: str, index: int) -> tuple[int, int]:
        """Returns :meth:`own_part` in elements of the array at home."""
        begin, end = self.own_part(name, index)
        first = self.own(name)[0]
        return begin - first, end - first

    def part_of_param(self, name: str, index: int) -> tuple[int, int]:
        """Returns :meth:`own_part` in elements of the parameter's part."""
        begin, end = self.own_part(name, index)
        first = self.part(name, index)[0]
        return begin - first, end - first

    def name(self, names: Sequence[str]) -> None:
        """Sets the parameters' names, for messages."""
        self.names = list(names)

    def part(self, name: str, index: int) -> tuple[int, int]:
        """Returns (begin, end) of parameter ``index`` in the whole array ``name``."""
        place, each = self.layout.placements[index], elements_each(name)
        return place.offset // each, -(-place.end // each)

    @contextmanager
    def assembling(self, store: ArrayIO, names: Iterable[str]) -> Iterator[None]:
        """Gathers the whole arrays ``names``, from which :meth:`read_part` then reads inside the
        block. So the ranks meet once per array, not once per part. Every rank calls this."""
        wanted = [name for name in names if name in self.arrays] if self.ranks.size > 1 else []
        try:
            for name in wanted:
                pieces = [self.own(name, rank) for rank in range(self.ranks.size)]
                out = torch.empty(pieces[-1][1], dtype=self.arrays[name].dtype, device="cpu")
                first, last = self.own(name)
                out[first:last] = store.read(self.arrays[name], 0, last - first)
                self.collectives.assemble(
                    out, pieces, f"reading {name} of {self.names[0]} and its unit"
                )
                self._assembled[name] = out
            yield
        finally:
            self._assembled.clear()

    def read_part(
        self, store: ArrayIO, name: str, index: int, *, array: StateArray | None = None
    ) -> torch.Tensor:
        """Reads parameter ``index``'s part of array ``name``, flat. ``array``: another array of the
        same layout. Every rank calls this, except inside :meth:`assembling`."""
        begin, end = self.part(name, index)
        if name in self._assembled and array is None:
            return self._assembled[name][begin:end].clone()
        array = array or self.arrays[name]
        if self.ranks.size == 1:
            return store.read(array, begin, end)
        out = torch.empty(end - begin, dtype=array.dtype, device="cpu")
        low, high = self.part_of_param(name, index)
        if low < high:
            out[low:high] = store.read(array, *self.part_at_home(name, index))
        pieces = []
        for rank in range(self.ranks.size):
            low, high = self.own(name, rank)
            low, high = max(begin, low), min(end, high)
            pieces.append((low - begin, max(low, high) - begin))
        self.collectives.assemble(out, pieces, f"reading {name} of {self.names[index]}")
        return out

    def read_own_part(self, store: ArrayIO, name: str, index: int) -> torch.Tensor:
        """Reads the part of :meth:`read_part` that is at home here."""
        begin, end = self.part_at_home(name, index)
        if begin == end:
            return torch.empty(0, dtype=self.arrays[name].dtype, device="cpu")
        return store.read(self.arrays[name], begin, end)

    def see_own_part(self, store: ArrayIO, name: str, index: int) -> torch.Tensor:
        """Returns :meth:`read_own_part`, read-only: a view of a host home, not a copy."""
        begin, end = self.part_at_home(name, index)
        array = self.arrays[name]
        if begin < end and array.flat is not None and array.flat.is_cpu:
            return array.flat[begin:end]
        return self.read_own_part(store, name, index)
