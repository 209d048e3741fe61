"""Coded weights: dense tensors to whoever computes, codes to whoever moves them.

Twins: another scale gives another weight; a function of the dense weight is no longer coded.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from infinity.state.coded import Coded, Fp8, Mxfp4, noting_unpacked

BF16 = torch.bfloat16


def fp8(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype = BF16) -> Coded:
    draws = torch.Generator().manual_seed(0)
    codes = torch.randn(shape, generator=draws).to(torch.float8_e4m3fn)
    counts = [-(-size // each) for size, each in zip(shape[-2:], block)]
    scales = torch.rand((*shape[:-2], *counts), generator=draws) + 0.5
    return Coded(codes, scales, Fp8(block), dtype)


def mxfp4(experts: int = 4) -> Coded:
    draws = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (experts, 6, 2, 16), dtype=torch.uint8, generator=draws)
    powers = torch.randint(120, 130, (experts, 6, 2), dtype=torch.uint8, generator=draws)
    return Coded(codes, powers, Mxfp4(), BF16)


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
    weight = Coded(codes, torch.tensor(3.0), Fp8((8, 8)), torch.float32)
    assert torch.equal(weight.dequantize(), codes.float() * 3)


def test_products_and_their_gradients_are_those_of_the_dense_weight():
    weight = nn.Parameter(fp8((64, 128), (32, 32)), requires_grad=False)
    x = torch.randn(2, 3, 128, dtype=BF16, generator=torch.Generator().manual_seed(1))
    found = []
    for each in (weight, weight.dequantize()):
        given = x.clone().requires_grad_()
        out = nn.functional.linear(given, each)
        out.square().sum().backward()
        found.append((out.detach(), given.grad))
    assert all(map(torch.equal, *found))
    assert torch.equal(x @ weight.t(), x @ weight.dequantize().t())
    assert type(weight + 0) is torch.Tensor


@pytest.mark.parametrize("make", [mxfp4, lambda: fp8((4, 32, 64), (16, 32))])
@pytest.mark.parametrize(
    "at", [2, -1, torch.tensor(1), torch.tensor([3, 0, 3]), slice(1, 3), torch.ones(4).bool()]
)
def test_some_experts_are_those_of_the_dense_weight(make, at):
    """Claim: bits, and that an index of experts unpacks these alone."""
    weight = make()
    with noting_unpacked() as made:
        found = weight[at]
    assert torch.equal(found, weight.dequantize()[at])
    alone = isinstance(at, (int, torch.Tensor)) and getattr(at, "dtype", None) != torch.bool
    assert made[0].dense.numel() == (found.numel() if alone else weight.numel())


@pytest.mark.parametrize(
    "copied",
    [
        lambda weight: weight.detach(),
        lambda weight: weight.clone(),
        lambda weight: weight.to("cpu", copy=True),
        copy.deepcopy,
        lambda weight: nn.Parameter(weight, requires_grad=False),
        lambda weight: pickle.loads(pickle.dumps(weight)),
    ],
    ids=["detach", "clone", "to", "deepcopy", "Parameter", "pickle"],
)
def test_copies_keep_the_codes(copied):
    weight = mxfp4()
    other = copied(weight)
    assert isinstance(other, Coded) and other.scheme == weight.scheme and other.dtype == BF16
    assert torch.equal(other.codes, weight.codes) and torch.equal(other.scales, weight.scales)
    assert type(weight.float()) is torch.Tensor


def test_a_module_can_be_moved_and_described():
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(fp8((64, 64), (32, 32)), requires_grad=False)
    assert "Coded((64, 64), torch.bfloat16" in repr(layer.weight)
    meta = copy.deepcopy(layer).to("meta")
    assert meta.weight.is_meta and meta.weight.codes.is_meta and not layer.weight.is_meta
    assert layer.weight.numel() == 64 * 64 and layer.weight.is_floating_point()
