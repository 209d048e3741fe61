"""FlatParamSpec: the arrays of a flat param, their dtypes, bytes and homes."""

from __future__ import annotations

import pytest
import torch

from infinity import native
from infinity.core.machine.tiers import Tier
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec, block_numel, home_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OWN, SPLIT, FLOAT32 = native.Master.OWN, native.Master.SPLIT, native.Master.FLOAT32


def frozen(dtype: torch.dtype = BF16, moments: torch.dtype = F32) -> FlatParamSpec:
    return FlatParamSpec(F32, dtype, OWN, BF16, moments, (), stepped=False)


@pytest.mark.parametrize(
    "dtype, configured, master",
    [
        (BF16, "split", SPLIT),
        (F16, "split", FLOAT32),  # its halves are no float16
        (BF16, "float32", FLOAT32),
        (BF16, "none", OWN),
        (F32, "float32", OWN),
        (F32, "split", OWN),
    ],
)
def test_a_trained_weight_has_the_configured_master_unless_it_is_its_own(dtype, configured, master):
    before = frozen(dtype)
    trained = before.trained(configured, dict.fromkeys(MOMENTS, F32))
    assert (trained.master, trained.moments, trained.stepped) == (master, MOMENTS, True)
    assert (trained.dtype, trained.wrapped_dtype, trained.grad_dtype) == (dtype, F32, BF16)
    assert (before.master, before.moments, before.stepped) == (OWN, (), False)


@pytest.mark.parametrize(
    "master, arrays",
    [("split", {"master": torch.int16}), ("float32", {"master": F32}), ("none", {})],
)
def test_a_trained_shard_has_a_master_if_any_moments_and_a_gradient(master, arrays):
    """Twin: a frozen one has the weight alone."""
    expected = {"weight": BF16, **arrays, "exp_avg": F32, "exp_avg_sq": F32, "grad": BF16}
    dtypes = frozen().trained(master, dict.fromkeys(MOMENTS, F32)).array_dtypes()
    assert dtypes == expected and list(dtypes) == list(expected)
    assert frozen().array_dtypes() == {"weight": BF16}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_each_moment_has_a_scale_if_it_is_8_bit_and_none_otherwise(count):
    moments = ["exp_avg", "exp_avg_sq"][:count]
    for dtype in (torch.uint8, BF16):
        dtypes = (
            frozen(F32, dtype).trained("none", dict.fromkeys(MOMENTS[:count], dtype)).array_dtypes()
        )
        scales = [f"{name}_scale" for name in moments if dtype == torch.uint8]
        assert list(dtypes) == ["weight", *moments, *scales, "grad"]
        assert all(dtypes[name] == dtype for name in (*moments, *scales))


def test_bytes_are_counted_per_element_and_a_scale_is_for_64():
    """Twin: the same flat param with other moments has other bytes."""
    wide, eight = (
        frozen(BF16, dtype).trained("split", dict.fromkeys(MOMENTS, dtype)).nbytes_per_element
        for dtype in (F32, torch.uint8)
    )
    common = {"weight": 2, "master": 2, "grad": 2}
    assert wide == {**common, "exp_avg": 4, "exp_avg_sq": 4}
    scale = 1 / 64
    scales = {"exp_avg_scale": scale, "exp_avg_sq_scale": scale}
    assert eight == {**common, "exp_avg": 1, "exp_avg_sq": 1, **scales}
    assert block_numel("exp_avg_scale") == 64 and block_numel("exp_avg") == 1


@pytest.mark.parametrize("optimizer", [Tier.NVME, Tier.HOST, Tier.DEVICE])
def test_arrays_lie_at_their_tier_but_scales_are_never_on_disk(optimizer):
    weights, grad = Tier.NVME, Tier.DEVICE
    names = ("weight", "grad", "master", "exp_avg", "exp_avg_sq")
    homes = [home_of(name, weights, optimizer, grad) for name in names]
    assert homes == [weights, grad, optimizer, optimizer, optimizer]
    scales = {Tier.NVME: Tier.HOST}.get(optimizer, optimizer)
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        assert home_of(name, weights, optimizer, grad) is scales
