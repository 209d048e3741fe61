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
from ...ranks.transfer import Operation, Transfer, all_gather, gather


def owners(flat_param: FlatParam, begin: int, end: int) -> list[tuple[int, int]]:
    """Returns each rank's part of the elements ``begin`` to ``end``, counted from ``begin``."""
    parts = []
    for rank in range(flat_param.ranks.size):
        low, high = flat_param.layout.home_range("weight", rank)
        low, high = max(begin, low), min(end, high)
        parts.append((low - begin, max(low, high) - begin))
    return parts


def fetch(
    store: ArrayStore, flat_param: FlatParam, begin: int, end: int, out: torch.Tensor, what: str
) -> None:
    """Fills flat ``out`` with the weight's elements ``begin`` to ``end``. Every rank calls this.
    Blocks on the disk, and on other ranks."""
    pieces, first = (
        owners(flat_param, begin, end),
        begin - flat_param.layout.home_range("weight")[0],
    )
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


def averaging_nbytes(ranks: int, replicas: int, numel: int, dtype: torch.dtype) -> int:
    """Counts the memory in which ``numel`` elements of a gradient are averaged: themselves, their
    average, and what one rank receives at once with its sum in fp32, also of each replica."""
    part = min(numel, at_once(ranks, dtype.itemsize))
    of_replicas = torch.float32.itemsize * (1 + replicas * (replicas > 1))
    return 2 * numel * dtype.itemsize + part * (ranks * dtype.itemsize + of_replicas)


def average(
    traffic: Traffic, flat_param: FlatParam, begin: int, grad: torch.Tensor, what: str
) -> torch.Tensor:
    """Averages flat ``grad``, whose first element is number ``begin``, over the data ranks. Every
    rank calls this. Returns it with this rank's part averaged; the rest is undefined."""
    mine = grad.to("cpu", flat_param.spec.grad_dtype)
    out, most = torch.empty_like(mine), at_once(flat_param.ranks.size, mine.itemsize)
    for owner, (low, high) in enumerate(owners(flat_param, begin, begin + mine.numel())):
        for at in range(low, high, most):
            part = mine[at : min(high, at + most)]
            total = _sum_at(owner, traffic, flat_param, part, f"{what}, from element {begin + at}")
            if total is not None:
                torch.div(total, flat_param.ranks.data_size, out=total)
                out[at : at + part.numel()] = total
    return out


def _sum_at(
    owner: int, traffic: Traffic, flat_param: FlatParam, part: torch.Tensor, what: str
) -> torch.Tensor | None:
    """Sums ``part`` of all data ranks as whole gradients are: over the shard group, then over the
    replicas, in the order of the ranks. Returns the sum on the owner's ranks, None on the others.
    """
    ranks, start = flat_param.ranks, time.perf_counter()
    row, replicas, is_own = ranks.shard_group, ranks.replicate_group, owner == ranks.rank
    everyones = part.new_empty(ranks.size * is_own, part.numel())
    count = replicas.size if replicas is not None and is_own else 0
    sums = part.new_empty(count, part.numel(), dtype=torch.float32)
    total: list[torch.Tensor] = []

    def to_owner() -> list[Operation]:
        if row is None:
            everyones.copy_(part)
            return []
        each = [bytes_of(one) for one in everyones]
        return [gather(row.group, bytes_of(part), each, root=owner)]

    def over_replicas() -> list[Operation]:
        if is_own:
            total[:] = [flat_param.collectives.row_sum(everyones)]
        if not count:
            return []
        return [all_gather(replicas.group, bytes_of(sums.view(-1)), bytes_of(total[0]))]

    ranks.dp_group.pass_on(f"averaging {what}", Transfer(to_owner, over_replicas))
    traffic.received("reduce-scatter", everyones.nbytes - part.nbytes * is_own, what, start)
    if count:
        moved = sums.nbytes - total[0].nbytes
        traffic.received("all-gather over replicas", moved, what, start)
        total[0].copy_(sums[0])
        for each in sums[1:]:
            total[0].add_(each)
    return total[0] if is_own else None
