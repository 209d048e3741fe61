"""Encoding: the weight and master that parameter values become, and comparison of bits."""

from __future__ import annotations

import math

import pytest
import torch

from infinity import native
from infinity.core.units.encoding import encode, same_bits
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OWN, SPLIT, FLOAT32 = native.Master.OWN, native.Master.SPLIT, native.Master.FLOAT32


def spec(dtype: torch.dtype, master: native.Master, *, stepped: bool = True) -> FlatParamSpec:
    return FlatParamSpec(F32, dtype, master, F32, F32, MOMENTS, stepped)


def values(dtype: torch.dtype = F32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(257, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_a_weight_without_a_master_is_the_rounded_value_alone(dtype):
    """Frozen weights have none, whatever the spec says of masters; twin: stepped ones have."""
    for each in (spec(dtype, OWN), spec(dtype, FLOAT32, stepped=False)):
        arrays = encode(each, values())
        assert arrays.keys() == {"weight"}
        assert arrays["weight"].dtype == dtype
        assert torch.equal(arrays["weight"], values().to(dtype))
    assert encode(spec(dtype, FLOAT32), values()).keys() == {"weight", "master"}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("given", [F32, torch.float64, BF16])
def test_a_float32_master_is_the_value_and_the_weight_rounds_it(dtype, given):
    arrays = encode(spec(dtype, FLOAT32), values(given))
    assert arrays["master"].dtype == F32 and arrays["weight"].dtype == dtype
    assert torch.equal(arrays["master"], values(given).float())
    assert torch.equal(arrays["weight"], values(given).float().to(dtype))


@pytest.mark.parametrize("given", [F32, F16, torch.float64])
def test_a_split_master_and_its_weight_make_up_the_float32_value(given):
    arrays = encode(spec(BF16, SPLIT), values(given))
    weight, low = arrays["weight"], arrays["master"]
    assert weight.dtype == BF16 and low.dtype == torch.int16
    bits = values(given).float().view(torch.int32)
    upper = (bits + 0x8000) >> 16  # the nearest, ties away from zero
    assert torch.equal(weight.view(torch.int16), upper.to(torch.int16))
    assert torch.equal(low.to(torch.int32), bits - (upper << 16))


def test_a_split_master_of_a_strided_value_is_that_of_its_elements():
    strided = values()[::2]
    arrays = encode(spec(BF16, SPLIT), strided)
    expected = encode(spec(BF16, SPLIT), strided.clone())
    assert all(torch.equal(arrays[name], expected[name]) for name in ("weight", "master"))


def test_bfloat16_values_have_zeros_for_a_split_master():
    """Twin: other values do not."""
    arrays = encode(spec(BF16, SPLIT), values(BF16))
    assert torch.equal(arrays["weight"], values(BF16))
    assert arrays["master"].dtype == torch.int16 and not arrays["master"].any()
    assert encode(spec(BF16, SPLIT), values())["master"].any()


@pytest.mark.parametrize("dtype", [BF16, F16, F32, torch.float64])
def test_bits_are_the_same_where_nan_meets_itself_and_not_where_signs_of_zero_differ(dtype):
    a = torch.tensor([1.0, math.nan, 0.0, -0.0, 2.0], dtype=dtype)
    b = torch.tensor([1.0, math.nan, -0.0, -0.0, 3.0], dtype=dtype)
    assert same_bits(a, b).tolist() == [True, True, False, True, False]


def test_bits_of_bytes_are_compared_one_by_one():
    a = torch.tensor([0, 128, 255], dtype=torch.uint8)
    assert same_bits(a, a.clone()).tolist() == [True, True, True]
    assert same_bits(a, a + 1).tolist() == [False, False, False]
