"""ArrayParts: reads and writes each parameter's part of one flat param's flat arrays.

shard   a rank's equal part of every array's flat elements; with one rank, all of them
part    the elements of an array that belong to one parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ...ranks.collectives import Collectives
from ..homes.arrays import StateArray
from ..homes.write_behind import ArrayIO
from .home_arrays import HomeArrays


class ArrayParts:
    """The parts of one flat param's arrays, by array name and the parameter's index in the flat
    param."""

    def __init__(self, homes: HomeArrays, collectives: Collectives, names: list[str]):
        """``names``: of the parameters, for messages."""
        self._homes, self._layout, self._collectives = homes, homes.layout, collectives
        self._names, self._ranks = names, collectives.ranks
        self._assembled: dict[str, torch.Tensor] = {}  # whole arrays, in assembling()

    @contextmanager
    def assembling(self, store: ArrayIO, names: Iterable[str]) -> Iterator[None]:
        """Gathers the whole arrays ``names``, from which :meth:`read` then reads inside the block.
        So the ranks meet once per array, not once per part. Every rank calls this."""
        arrays, ranks = self._homes.arrays, self._ranks
        wanted = [name for name in names if name in arrays] if ranks.size > 1 else []
        try:
            for name in wanted:
                pieces = [self._layout.home_range(name, rank) for rank in range(ranks.size)]
                out = torch.empty(pieces[-1][1], dtype=arrays[name].dtype, device="cpu")
                first, last = self._layout.home_range(name)
                out[first:last] = store.read(arrays[name], 0, last - first)
                self._collectives.assemble(
                    out, f"reading {name} of {self._names[0]} and its unit", pieces
                )
                self._assembled[name] = out
            yield
        finally:
            self._assembled.clear()

    def read(
        self, store: ArrayIO, name: str, index: int, *, array: StateArray | None = None
    ) -> torch.Tensor:
        """Reads parameter ``index``'s part of array ``name``, flat. ``array``: another array of the
        same layout. Every rank calls this, except inside :meth:`assembling`."""
        layout = self._layout
        begin, end = layout.part(name, index)
        if name in self._assembled and array is None:
            return self._assembled[name][begin:end].clone()
        array = array or self._homes.arrays[name]
        if self._ranks.size == 1:
            return store.read(array, begin, end)
        out = torch.empty(end - begin, dtype=array.dtype, device="cpu")
        low, high = layout.part_of_param(name, index)
        if low < high:
            out[low:high] = store.read(array, *layout.part_at_home(name, index))
        pieces = []
        for rank in range(self._ranks.size):
            low, high = layout.home_range(name, rank)
            low, high = max(begin, low), min(end, high)
            pieces.append((low - begin, max(low, high) - begin))
        self._collectives.assemble(out, f"reading {name} of {self._names[index]}", pieces)
        return out

    def write(
        self,
        store: ArrayIO,
        name: str,
        index: int,
        part: torch.Tensor,
        *,
        version: int,
        begin: int = 0,
        stable: bool = False,
    ) -> None:
        """Writes ``part`` to parameter ``index``'s part of array ``name``, from element ``begin``
        on, as far as it is at home here. ``stable``: it does not change until all is at home."""
        self._homes.wait_readers()
        begin += self._layout.part(name, index)[0]
        low, high = self._layout.own_part(name, index)
        low, high = max(low, begin), min(high, begin + part.numel())
        if low < high:
            here, first = part[low - begin : high - begin], self._layout.home_range(name)[0]
            array = self._homes.arrays[name]
            store.write(array, low - first, here, version=version, stable=stable)
