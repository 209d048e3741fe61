"""Over ranks: brings the rows of a tile from the ranks that have them at home, and sends the
average of their gradients there.

Every rank runs the same tiles in the same order, and meets the others before each: a tile is
collective, as a gather of a whole unit is. Bytes pass through host memory. A gradient passes in
parts, so that its owner receives those of all ranks in one bucket.
"""

from __future__ import annotations

import time

import torch

from ...core.homes.store import ArrayStore
from ...core.machine.traffic import Traffic
from ...core.units.flat_param import FlatParam
from ...core.units.staged_reads import PIECE_NBYTES
from ...ranks.kinds import bytes_of
from ...ranks.transfer import Transfer, gather


def owners(flat_param: FlatParam, begin: int, end: int) -> list[tuple[int, int]]:
    """Returns each rank's part of the elements ``begin`` to ``end``, counted from ``begin``."""
    found = []
    for rank in range(flat_param.ranks.size):
        low, high = flat_param.layout.own("weight", rank)
        low, high = max(begin, low), min(end, high)
        found.append((low - begin, max(low, high) - begin))
    return found


def fetch(
    store: ArrayStore, flat_param: FlatParam, begin: int, end: int, out: torch.Tensor, what: str
) -> None:
    """Fills flat ``out`` with the weight's elements ``begin`` to ``end``. Every rank calls this.
    Blocks on the disk, and on other ranks."""
    pieces, first = owners(flat_param, begin, end), begin - flat_param.layout.own("weight")[0]
    low, high = pieces[flat_param.ranks.rank]
    if low < high:
        store.read(flat_param.weight, first + low, first + high, out=out[low:high])
    start = time.perf_counter()
    flat_param.collectives.assemble(out, f"bringing {what}", pieces)
    if flat_param.ranks.size > 1:
        nbytes = (out.numel() - high + low) * out.itemsize
        store.traffic.received("all-gather", nbytes, what, start)


def at_once(ranks: int, itemsize: int) -> int:
    """Returns the elements of a gradient that one rank receives from all at once."""
    return max(1, PIECE_NBYTES // (ranks * itemsize))


def averaging_nbytes(ranks: int, numel: int, dtype: torch.dtype) -> int:
    """Counts the memory in which ``numel`` elements of a gradient are averaged: themselves, their
    average, and what one rank receives at once with its sum in fp32."""
    part = min(numel, at_once(ranks, dtype.itemsize))
    return 2 * numel * dtype.itemsize + part * (ranks * dtype.itemsize + torch.float32.itemsize)


def average(
    traffic: Traffic, flat_param: FlatParam, begin: int, grad: torch.Tensor, what: str
) -> torch.Tensor:
    """Averages flat ``grad``, whose first element is number ``begin``, over the data ranks. Every
    rank calls this. Returns it with this rank's part averaged; the rest is undefined."""
    ranks, collectives = flat_param.ranks, flat_param.collectives
    mine = grad.to("cpu", flat_param.spec.grad_dtype)
    out, most = torch.empty_like(mine), at_once(ranks.size, mine.itemsize)
    for owner, (low, high) in enumerate(owners(flat_param, begin, begin + mine.numel())):
        for at in range(low, high, most):
            part, start = mine[at : min(high, at + most)], time.perf_counter()
            is_own = owner == ranks.rank
            everyones = part.new_empty(ranks.size * is_own, part.numel())
            to_owner = gather(
                ranks.shard_group.group,
                bytes_of(part),
                [bytes_of(row) for row in everyones],
                root=owner,
            )
            ranks.dp_group.pass_on(
                f"averaging {what}, from element {begin + at}",
                Transfer(lambda to_owner=to_owner: [to_owner]),
            )
            moved = everyones.nbytes - part.nbytes * is_own
            traffic.received("reduce-scatter", moved, what, start)
            if is_own:
                out[at : at + part.numel()] = collectives.average(everyones, what)
    return out
