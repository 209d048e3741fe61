"""Kinds: starts the collectives of a pass, and encodes them as numbers.

kind      which group's ranks, and what passes between them
numbers   enough to start a collective with dummy data, on a rank that has not reached it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

import torch
import torch.distributed as dist

from .collective_trace import Dummy
from .parallel_dims import ParallelDims

# Renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# That collectives may pass
DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Kind(IntEnum):
    """The kind of a collective."""

    GATHER = 1  # shards within a shard group
    GATHER_IN_NODE = 2
    REDUCE = 3  # over a shard group
    TELL = 4  # flags of gradients within a shard group
    GATHER_OVER_REPLICAS = 5
    NOTHING = 6  # other shard groups reduce here; this rank has no peer
    READ = 7  # shards within a shard group, from shared memory


def begin(ranks: ParallelDims, kind: Kind, sent: torch.Tensor, received: torch.Tensor) -> dist.Work:
    """Starts a collective of this ``kind`` that sends ``sent`` and fills ``received``: flat, of
    equal size on every rank. READ copies other ranks' shards only."""
    if kind is Kind.NOTHING:
        return _Over()
    if kind is Kind.READ:
        return ranks.shard_group.peer_memory.complete(received, sent.numel())
    group = _group_of(ranks, kind)
    if kind is Kind.REDUCE:
        return dist.all_to_all_single(
            bytes_of(received), bytes_of(sent), group=group, async_op=True
        )
    return all_gather(received, sent, group=group, async_op=True)


def count_begun(ranks: ParallelDims, kind: Kind, where: torch.device) -> int:
    """Counts the collectives that the transport of this ``kind`` has started. 0 if it does not
    count."""
    if kind is Kind.NOTHING:
        return 0
    if kind is Kind.READ:
        return ranks.shard_group.peer_memory.begun
    try:
        return _group_of(ranks, kind)._get_backend(where)._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return 0


def describe(
    ranks: ParallelDims, kind: Kind, sent: torch.Tensor, received: torch.Tensor
) -> tuple[int, ...]:
    """Encodes a collective as numbers: kind, whether it is among ranks with the same experts, both
    element counts, dtype, whether it is in host memory."""
    return (
        kind,
        ranks.ep_size > 1,
        sent.numel(),
        received.numel(),
        DTYPES.index(sent.dtype),
        sent.device.type == "cpu",
    )


def dummy_of(ranks_of: Callable[[bool], ParallelDims], numbers: Sequence[int]) -> Dummy:
    """Makes the collective of these ``numbers``: what starts it, with zeros, and what counts as
    :func:`count_begun`. ``ranks_of``: the ranks, given whether only those with the same experts
    take part."""
    kind, is_of_experts, *counts, dtype, is_on_host = numbers
    ranks = ranks_of(bool(is_of_experts))
    where = torch.device("cpu") if is_on_host else torch.accelerator.current_accelerator()

    def start() -> dist.Work:
        made = (torch.zeros(count, dtype=DTYPES[dtype], device=where) for count in counts)
        return begin(ranks, Kind(kind), *made)

    return start, partial(count_begun, ranks, Kind(kind), where)


def bytes_of(flat: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a flat tensor."""
    return flat.detach().view(torch.uint8)


def _group_of(ranks: ParallelDims, kind: Kind) -> dist.ProcessGroup:
    if kind is Kind.GATHER_OVER_REPLICAS:
        return ranks.replicate_group.bulk
    if kind is Kind.GATHER_IN_NODE:
        return ranks.node_group.bulk
    return {
        Kind.GATHER: ranks.shard_group.bulk,
        Kind.REDUCE: ranks.shard_group.reductions,
        Kind.TELL: ranks.shard_group.group,
    }[kind]


class _Over(dist.Work):
    """A completed collective: no other rank has these tensors."""

    def wait(self, *_: object) -> bool:
        return True
