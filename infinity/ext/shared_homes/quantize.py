"""Quantize: encodes gathered weights as 8-bit codes with one scale per block of 256 elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ... import native
from ...core.machine.device import Device
from ...core.machine.sizes import round_down, round_up
from ...core.machine.tiers import Tier
from ...core.plan.unit_sizes import UnitSize
from ...core.run.job import Job
from ...core.seams import Events, Extension, Term
from ...core.units.staged_reads import PIECE_NBYTES
from ...ranks.collectives import Collectives
from ...ranks.parallel_dims import ParallelDims
from ...ranks.pending import Pending

CODES = "codes of gathered weights"  # the name of their bytes in plans
CODED_BLOCK = 256  # elements per scale, if gathered weights are compressed


def encode_blocks(values: torch.Tensor) -> torch.Tensor:
    """Encodes flat floats (whole blocks of 256) as bytes: int8 codes, then an fp32 scale per block.
    The error is at most half a step, 1/254 of the block's largest value."""
    blocks = values.to(torch.float32).view(-1, CODED_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    codes = torch.where(scales > 0, blocks / scales, 0).round_().to(torch.int8)
    return torch.cat([codes.view(torch.uint8).view(-1), scales.view(torch.uint8).view(-1)])


def decode_blocks(encoded: torch.Tensor, rows: torch.Tensor) -> None:
    """Decodes consecutive encodings into ``rows``, one into each."""
    for source, target in zip(encoded.view(len(rows), -1), rows):
        codes = source[: target.numel()].view(torch.int8).view(-1, CODED_BLOCK)
        scales = source[target.numel() :].clone().view(torch.float32).unsqueeze(1)
        target.view(-1, CODED_BLOCK).copy_(codes * scales)


def bytes_under_way(shards: int, flats: int = 1) -> float:
    """Returns the bytes that codes take for each element of a shard: those of two units of
    ``flats`` flat params, one more bucket, and what encoding and decoding one takes in fp32."""
    codes = (shards + 1) * (1 + torch.float32.itemsize / CODED_BLOCK)
    return (2 * flats + 1) * codes + 4 * torch.float32.itemsize


class BlockCodes:
    """The encoding of gathered weights as 8-bit codes.

    bucket   elements of each shard that are encoded, sent and decoded at once
    """

    said, way_out = "compressed", "compress_gathers=False"

    def __init__(self, bucket: int | None = None):
        """``bucket``: None is a whole shard."""
        self._bucket = bucket

    def gather(
        self, rows: torch.Tensor, rank: int, what: str, send: Callable[..., Pending]
    ) -> Pending | None:
        """Gathers ``rows``, the shards of all ranks, of which row ``rank`` is there. Every rank
        calls this. Blocks until all buckets but the last one are decoded, and returns that.

        ``send(codes, own, what, then)`` starts to gather ``own`` of all ranks into ``codes``, and
        calls ``then`` when they are there.
        """
        pending = None
        for begin in range(0, rows.size(1), self._bucket or rows.size(1)):
            before, part = pending, rows[:, begin : begin + (self._bucket or rows.size(1))]
            own = encode_blocks(part[rank])
            codes = own.new_empty(len(rows) * own.numel())
            said = f"{what} from {begin}" if begin else what
            pending = send(codes, own, said, partial(decode_blocks, codes, part))
            if before is not None:
                before.wait()
        return pending


class CompressedGathers(Extension):
    """Sends gathered weights as 8-bit codes, if the configuration says so: within a
    ``device_memory``, in buckets."""

    _charge: native.Charge

    @staticmethod
    def bucket(config: Any, shards: int) -> int | None:
        """Returns the elements of a shard in one bucket: so many that all codes under way are two
        pieces. None without a budget."""
        if config.device_memory is None:
            return None
        most = int(2 * PIECE_NBYTES / bytes_under_way(shards))
        return max(CODED_BLOCK, round_down(most, CODED_BLOCK))

    @classmethod
    def describe_ranks(cls, config: Any, ranks: ParallelDims) -> ParallelDims:
        """Returns ``ranks`` with the encoding."""
        if not config.compress_gathers:
            return ranks
        return replace(ranks, encoding=BlockCodes(cls.bucket(config, ranks.size)))

    @classmethod
    def terms(cls, config: Any, units: Sequence[UnitSize], device: Device) -> Iterator[Term]:
        """Yields the bytes of codes on their way."""
        if not config.compress_gathers:
            return
        most = 0.0
        for unit in units:
            sharded = [flat for flat in unit.flat_params if flat.shards > 1]
            for flat in sharded:
                numel = flat.numel // flat.shards
                at_once = min(numel, cls.bucket(config, flat.shards) or numel)
                most = max(most, at_once * bytes_under_way(flat.shards, len(sharded)))
        yield Term(Tier.DEVICE, CODES, round_up(int(most), native.BLOCK_NBYTES))

    @classmethod
    def begin(
        cls, config: Any, device: Device, collectives: Collectives, events: Events
    ) -> CompressedGathers | None:
        """Returns the extension, which charges the codes, if the configuration says so."""
        if not config.compress_gathers:
            return None
        made = cls()
        events.allocated.append(made.charge)
        return made

    def charge(self, job: Job) -> None:
        """Charges the planned bytes."""
        planned = job.planned.plan.terms[Tier.DEVICE].get(CODES, 0)
        self._charge = job.ledger.reserve(Tier.DEVICE, planned, CODES)
