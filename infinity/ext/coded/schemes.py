"""Schemes: how the numbers of a coded weight follow from its codes and scales.

unpack         makes the dense weight
shape          of the dense weight, from that of its codes
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # the numbers of MXFP4 (OCP 2023); then negative
BLOCK, NESTED_BLOCK = 64, 256  # NF4: numbers that share a scale; scales that share one


@dataclass(frozen=True)
class Scaled:
    """FP8 or int8 with a scale for each block of rows and columns, or one for the whole weight.

    block
        Rows and columns of a block.
    """

    block: tuple[int, int]

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Makes the dense weight, in fp32, with the bits of transformers and torchao."""
        dense, each = _numbers(codes), scales.float()
        if each.numel() == 1:
            return dense.mul_(each.reshape(()))
        rows, columns = codes.shape[-2:]
        if rows % self.block[0] == 0 and columns % self.block[1] == 0:
            blocks = dense.unflatten(-1, (-1, self.block[1])).unflatten(-3, (-1, self.block[0]))
            blocks.mul_(each[..., :, None, :, None])
            return dense
        each = each.repeat_interleave(self.block[0], -2)[..., :rows, :]
        return dense.mul_(each.repeat_interleave(self.block[1], -1)[..., :columns])

    def shape(self, codes: torch.Size) -> torch.Size:
        """Returns the shape of the dense weight."""
        return codes


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of codes in fp32. On a processor e4m3 is read as fp16 of a 256th:
    torch's own conversion takes six times as long."""
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu" or not codes.numel():
        return codes.float()
    signed, unsigned = codes.view(torch.int8), codes.view(torch.uint8)
    if signed.max() == 127 or unsigned.max() == 255:  # the codes of NaN
        return codes.float()
    # Sign, 4 bits of exponent, 3 of mantissa -> sign, 5 and 10
    halves = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return halves.view(torch.float16).float().mul_(256)


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4 as gpt-oss has its experts: ``[experts, outputs, groups, bytes]`` of two numbers each,
    with an exponent for each group, for a weight ``[experts, inputs, outputs]``."""

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Makes the dense weight, in bf16, with the bits of transformers."""
        table = torch.tensor([*FP4, *(-number for number in FP4)], device=codes.device)
        dense = torch.empty(self.shape(codes.shape), dtype=torch.bfloat16, device=codes.device)
        for to, of_one, powers in zip(dense, codes, scales):
            halves = torch.stack([of_one & 15, of_one >> 4], dim=-1).flatten(-2)
            numbers = torch.ldexp(table[halves.int()], powers.int().unsqueeze(-1) - 127)
            to.copy_(numbers.flatten(1).T)
        return dense

    def shape(self, codes: torch.Size) -> torch.Size:
        """Returns the shape of the dense weight."""
        experts, outputs, groups, width = codes
        return torch.Size([experts, 2 * groups * width, outputs])


@dataclass(frozen=True)
class Gguf:
    """A type of GGUF's: rows of blocks, each with its scales among its codes.

    kind
        Name of the type, such as "Q4_K".
    """

    kind: str

    @staticmethod
    def kinds() -> set[str]:
        """Returns the types that diffusers unpacks, with the bits of gguf."""
        library = importlib.import_module("diffusers.quantizers.gguf.utils")
        return {each.name for each in library.dequantize_functions}

    def unpack(self, codes: torch.Tensor) -> torch.Tensor:
        """Makes the dense weight, in fp32, with the bits of gguf."""
        library = importlib.import_module("diffusers.quantizers.gguf.utils")
        (kind,) = (each for each in library.dequantize_functions if each.name == self.kind)
        numel, nbytes = library.GGML_QUANT_SIZES[kind]
        blocks = codes.reshape(-1, nbytes)
        dense = library.dequantize_functions[kind](blocks, numel, nbytes, torch.float32)
        return dense.reshape(self.shape(codes.shape))

    def shape(self, codes: torch.Size) -> torch.Size:
        """Returns the shape of the dense weight."""
        library = importlib.import_module("gguf")
        numel, nbytes = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[self.kind]]
        return torch.Size([*codes[:-1], codes[-1] // nbytes * numel])


@dataclass(frozen=True)
class Nf4:
    """NF4 of bitsandbytes with double quantisation (Dettmers et al. 2023), of experts.

    Codes are ``[experts, rows, columns / 2]``. The scales of an expert are bytes: an 8-bit
    scale for each block, fp32 scales of these, and the fp32 offset that was subtracted before.
    """

    dtype: torch.dtype  # of the dense weight

    @staticmethod
    def scales_of(state: Any) -> torch.Tensor:
        """Returns the scales of one expert as ``[1, bytes]``. ``state``: bitsandbytes' of it."""
        parts = state.absmax, state.state2.absmax, state.offset.reshape(1)
        return torch.cat([each.contiguous().view(torch.uint8) for each in parts])[None]

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Makes the dense weight, with the bits of bitsandbytes."""
        library = importlib.import_module("bitsandbytes.functional")
        dense = torch.empty(self.shape(codes.shape), dtype=self.dtype, device=codes.device)
        count = -(-dense[0].numel() // BLOCK)
        own = -(-count // NESTED_BLOCK)
        table = _table_of_scales(codes.device)
        for to, of_one, of_row in zip(dense, codes, scales[:, 0]):
            of_scales, offset = of_row[count:].clone().view(torch.float32).split([own, 1])
            nested = library.QuantState(
                of_scales, code=table, blocksize=NESTED_BLOCK, dtype=torch.float32
            )
            form = {"shape": to.shape, "dtype": self.dtype, "blocksize": BLOCK, "quant_type": "nf4"}
            state = library.QuantState(
                of_row[:count].contiguous(), offset=offset[0], state2=nested, **form
            )
            to.copy_(library.dequantize_4bit(of_one.reshape(-1, 1), state))
        return dense

    def shape(self, codes: torch.Size) -> torch.Size:
        """Returns the shape of the dense weight."""
        return torch.Size([*codes[:-1], 2 * codes[-1]])


@cache
def _table_of_scales(device: torch.device) -> torch.Tensor:
    library = importlib.import_module("bitsandbytes.functional")
    return library.create_dynamic_map().to(device)


@dataclass(frozen=True)
class Transposed:
    """The transposed matrices of another scheme."""

    scheme: Scaled | Nf4

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Makes the dense weight."""
        return self.scheme.unpack(codes, scales).transpose(-1, -2)

    def shape(self, codes: torch.Size) -> torch.Size:
        """Returns the shape of the dense weight."""
        *rest, rows, columns = self.scheme.shape(codes)
        return torch.Size([*rest, columns, rows])


Scheme = Scaled | Mxfp4 | Gguf | Nf4 | Transposed
