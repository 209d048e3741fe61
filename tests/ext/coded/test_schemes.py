"""Schemes: the numbers that codes and scales stand for are those of their library.

Twins: another scale gives another weight.
"""

from __future__ import annotations

import pytest
import torch
from test_coded import fp8

from infinity.ext.coded.coded import Coded
from infinity.ext.coded.schemes import Nf4, Scaled

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("codes", [range(256), range(127), [*range(127), *range(128, 255)], []])
def test_every_code_is_its_number(codes, dtype):
    """Claim: torch's bits for every code, NaN and zeros of both signs included."""
    codes = torch.tensor(list(codes), dtype=torch.uint8).view(dtype).reshape(1, -1)
    block = (1, max(1, codes.numel()))
    scales = torch.ones(1, min(1, codes.numel()))
    found = Coded(codes, scales, Scaled(block), torch.float32).dequantize()
    assert torch.equal(found.view(torch.int32), codes.float().view(torch.int32))


@pytest.mark.parametrize("shape, block", [((48, 64), (16, 32)), ((50, 70), (16, 32))])
def test_every_number_has_the_scale_of_its_block(shape, block):
    weight = fp8(shape, block, torch.float32)
    dense = weight.dequantize()
    for row, column in ((0, 0), (15, 31), (16, 32), (shape[0] - 1, shape[1] - 1)):
        scale = weight.scales[row // block[0], column // block[1]]
        assert dense[row, column] == weight.codes[row, column].float() * scale
    other = Coded(weight.codes, weight.scales + 1, weight.scheme, torch.float32)
    assert not torch.equal(other.dequantize(), dense)


def test_one_scale_is_of_the_whole_weight():
    codes = torch.randn(8, 8).to(torch.float8_e4m3fn)
    weight = Coded(codes, torch.tensor(3.0), Scaled((8, 8)), torch.float32)
    assert torch.equal(weight.dequantize(), codes.float() * 3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_scale_for_each_row(dtype):
    draws = torch.Generator().manual_seed(0)
    codes = (100 * torch.randn(3, 4, 8, generator=draws)).clamp(-127, 127).to(dtype)
    scales = torch.rand(3, 4, 1, generator=draws)
    dense = Scaled((1, 8)).unpack(codes, scales)
    assert torch.equal(dense, codes.float() * scales)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("shape", [(3, 64, 96), (2, 5, 30)])
def test_nf4_has_the_bits_of_bitsandbytes(shape, dtype):
    """Claim: also of weights whose last block is shorter. Twin: scales of another expert."""
    library = pytest.importorskip("bitsandbytes.functional")
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = [
        library.quantize_4bit(each, quant_type="nf4", compress_statistics=True) for each in given
    ]
    codes = torch.stack([each.reshape(shape[1], shape[2] // 2) for each, _ in made])
    scales = torch.stack([Nf4.scales_of(state) for _, state in made])
    dense = Nf4(dtype).unpack(codes, scales)
    assert torch.equal(dense, torch.stack([library.dequantize_4bit(*each) for each in made]))
    assert Nf4(dtype).shape(codes.shape) == dense.shape == torch.Size(shape)
    assert not torch.equal(Nf4(dtype).unpack(codes, scales.roll(1, 0)), dense)
