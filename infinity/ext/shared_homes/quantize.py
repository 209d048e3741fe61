"""Quantize: encodes gathered weights as 8-bit codes with one scale per block of 256 elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...core.seams import Extension
from ...ranks.parallel_dims import ParallelDims

CODED_BLOCK = 256  # elements per scale, if gathered weights are compressed


def encode_blocks(values: torch.Tensor) -> torch.Tensor:
    """Encodes flat floats (whole blocks of 256) as bytes: int8 codes, then an fp32 scale per block.
    The error is at most half a step, 1/254 of the block's largest value."""
    blocks = values.to(torch.float32).view(-1, CODED_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    codes = torch.where(scales > 0, blocks / scales, 0).round_().to(torch.int8)
    return torch.cat([codes.view(torch.uint8).view(-1), scales.view(torch.uint8).view(-1)])


def decode_blocks(encoded: torch.Tensor, out: torch.Tensor, parts: int) -> None:
    """Decodes ``parts`` consecutive encodings into flat ``out``."""
    for source, target in zip(encoded.view(parts, -1), out.view(parts, -1)):
        codes = source[: target.numel()].view(torch.int8).view(-1, CODED_BLOCK)
        scales = source[target.numel() :].clone().view(torch.float32).unsqueeze(1)
        target.view(-1, CODED_BLOCK).copy_(codes * scales)


class BlockCodes:
    """The encoding of gathered weights as 8-bit codes."""

    said, way_out = "compressed", "compress_gathers=False"
    encode, decode = staticmethod(encode_blocks), staticmethod(decode_blocks)


class CompressedGathers(Extension):
    """Sends gathered weights as 8-bit codes, if the configuration says so."""

    @classmethod
    def describe_ranks(cls, config: Any, ranks: ParallelDims) -> ParallelDims:
        """Returns ``ranks`` with the encoding."""
        return replace(ranks, encoding=BlockCodes()) if config.compress_gathers else ranks
