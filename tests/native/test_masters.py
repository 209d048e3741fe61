"""Master weights of the optimizer kernels: splits and joins are exact, and rounding is to the
nearest.

Words used here: **unit** as in `test_kernel`. **low half**: the lower 16 bits of an fp32 master.
"""

from __future__ import annotations

import pytest
import torch
from native_arrays import (
    Form,
    MemorySteps,
    bits,
    decode,
    different,
    encode,
    from_bits,
    hyper,
    random_arrays,
    same_bits,
    seeded,
)

from infinity import native
from infinity.errors import UsageError

Rule, Master = native.Rule, native.Master
UNITS = native.simd_units()
NUMEL = 3 * 4096  # one share for each of three threads


@pytest.fixture(scope="module")
def steps() -> MemorySteps:
    return MemorySteps()


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Unsigned representation as int64."""
    return bits(tensor).to(torch.int64) & ((1 << (8 * tensor.element_size())) - 1)


LOW_HALVES = [
    0x0000,
    0x0001,
    0x1234,
    0x7FFE,
    0x7FFF,
    0x8000,
    0x8001,
    0x8002,
    0xABCD,
    0xFFFE,
    0xFFFF,
]


@pytest.fixture(scope="module")
def all_masters() -> torch.Tensor:
    """Every high half with every sampled low half, and more low halves at random: 65536 x 16
    masters."""
    generator = torch.Generator().manual_seed(51)
    lows = torch.tensor(LOW_HALVES + torch.randint(0, 1 << 16, (5,), generator=generator).tolist())
    high = torch.arange(1 << 16)
    return from_bits(((high[:, None] << 16) | lows).flatten(), torch.float32)


def test_a_split_master_joins_to_the_same_bits(all_masters):
    """Splits and joins every high half with sampled low halves, ties among them; only NaNs may
    change."""
    parts = encode(Form(weight=torch.bfloat16, master=Master.SPLIT), all_masters)
    joined = native.join_master(parts["weight"], parts["master"])
    number = ~all_masters.isnan()
    assert torch.equal(bits(joined)[number], bits(all_masters)[number])
    assert number.sum() > 65000 * 16


def test_a_join_is_the_formula_as_integers():
    """Joins every weight with sampled low halves: ((bits(weight) - (L >> 15)) << 16) | L, modulo
    2^32."""
    weight = torch.arange(1 << 16).repeat_interleave(len(LOW_HALVES))
    low = torch.tensor(LOW_HALVES).repeat(1 << 16)
    joined = native.join_master(
        from_bits(weight, torch.bfloat16), from_bits(low, torch.float16).view(torch.int16)
    )
    formula = (((weight - (low >> 15)) << 16) | low) & 0xFFFFFFFF
    assert torch.equal(words_of(joined), formula)
    assert not torch.equal(
        words_of(joined), ((weight << 16) | low) & 0xFFFFFFFF
    )  # the twin: without the borrow


def test_a_split_weight_is_the_nearest_bf16_ties_away_from_zero(all_masters):
    """Compares the distance to the weight with that to its neighbours, in float64, with infinity
    standing for 2^128."""
    finite = all_masters[all_masters.isfinite()]
    weight = encode(Form(weight=torch.bfloat16, master=Master.SPLIT), finite)["weight"]
    magnitude = words_of(weight) & 0x7FFF

    def value(word: torch.Tensor) -> torch.Tensor:
        found = from_bits(word, torch.bfloat16).double()
        return found.where(word < 0x7F80, torch.tensor(2.0**128, dtype=torch.float64))

    size = finite.double().abs()
    distance = (value(magnitude) - size).abs()
    below = (size - value((magnitude - 1).clamp(min=0))).abs()
    above = (value((magnitude + 1).clamp(max=0x7F80)) - size).abs()
    assert (magnitude <= 0x7F80).all()
    assert (distance <= above).all()
    assert (distance <= below).all()
    tie = (words_of(finite) & 0xFFFF) == 0x8000
    assert tie.sum() > 60000
    assert (value(magnitude)[tie] > size[tie]).all(), "a tie was rounded toward zero"
    assert torch.equal(words_of(weight) >> 15, words_of(finite) >> 31), "a sign was lost"
    even = finite.to(torch.bfloat16)  # the twin: torch's ties to even differ, and in ties only
    assert not same_bits(even, weight)
    assert same_bits(even[~tie], weight[~tie])


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_splits_and_joins_as_the_functions_do(unit, steps, all_masters, monkeypatch):
    """Steps every split master with a learning rate of zero, which loads and stores it: not one bit
    may change but those of a NaN: there is one."""
    monkeypatch.setenv("INFINITY_SIMD", unit)
    form = Form(Rule.SGD, torch.bfloat16, Master.SPLIT, torch.float32)
    arrays = encode(form, all_masters)
    arrays |= {"exp_avg": torch.zeros(len(all_masters)), "grad": torch.zeros(len(all_masters))}
    after = steps.whole(form, arrays, hyper(lr=0.0), threads=2)
    nan = arrays["weight"].isnan()
    assert set(words_of(after["weight"][nan]).tolist()) == {0x7FC0}
    kept = {name: values[~nan] for name, values in arrays.items()}
    assert not different(kept, {name: values[~nan] for name, values in after.items()})
    moved = steps.whole(
        form, arrays | {"grad": torch.ones(len(all_masters))}, hyper(lr=1.0), threads=2
    )
    assert different(arrays, moved)


@pytest.mark.parametrize("unit", UNITS)
def test_infinity_stays_infinity_and_nan_stays_nan(unit, steps, monkeypatch):
    """Steps NaN, infinite and largest masters, and NaN and infinite gradients, through every kind
    of master."""
    monkeypatch.setenv("INFINITY_SIMD", unit)
    nans = [0x7FC00000, 0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FFFFFFF, 0x7FFF8000]
    words = (
        nans
        + [nan | 0x80000000 for nan in nans]
        + [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000]
    )
    masters = from_bits((words * 4096)[:4096], torch.float32)
    sixteen = [
        (dtype, master)
        for dtype in (torch.bfloat16, torch.float16)
        for master in (Master.FLOAT32, Master.OWN)
    ]
    for weight, master in [(torch.float32, Master.OWN), (torch.bfloat16, Master.SPLIT), *sixteen]:
        form = Form(Rule.SGD, weight, master, torch.float32)
        zero = {"exp_avg": torch.zeros(4096), "grad": torch.zeros(4096)}
        before = encode(form, masters) | zero
        start = decode(form, before)
        after = steps.whole(form, before, hyper(lr=0.0))
        end = decode(form, after)
        assert torch.equal(end.isnan(), masters.isnan()), (weight, master)
        assert torch.equal(after["weight"].isnan(), masters.isnan()), (weight, master)
        assert torch.equal(bits(end)[~end.isnan()], bits(start)[~end.isnan()])
        assert torch.equal(end.isinf(), start.isinf())
        for bad in (torch.nan, torch.inf):
            spoiled = steps.whole(form, before | {"grad": torch.full((4096,), bad)}, hyper(lr=1.0))
            assert not spoiled["weight"].isfinite().any(), (
                "a number came out of a gradient that was none"
            )
            assert not decode(form, spoiled).isfinite().any()


def test_a_split_and_a_whole_fp32_master_are_the_same_master(steps):
    """Takes 20 AdamW steps both ways: the masters agree bit for bit, the weights up to ties."""
    generator = seeded(52)
    forms = [
        Form(Rule.ADAMW, torch.bfloat16, master, torch.bfloat16)
        for master in (Master.SPLIT, Master.FLOAT32)
    ]
    start = torch.randn(NUMEL, generator=generator)
    rest = {
        k: v
        for k, v in random_arrays(forms[0], NUMEL, generator).items()
        if k not in ("weight", "master")
    }
    runs = [encode(form, start) | rest for form in forms]
    for step in range(1, 21):
        grad = (0.1 * torch.randn(NUMEL, generator=generator)).bfloat16()
        made = hyper(lr=1e-3, weight_decay=0.01, step=step)
        runs = [
            steps.whole(form, arrays | {"grad": grad}, made) for form, arrays in zip(forms, runs)
        ]
        split, whole = (decode(form, arrays) for form, arrays in zip(forms, runs))
        assert same_bits(split, whole)
        tie = (words_of(whole) & 0xFFFF) == 0x8000
        assert same_bits(runs[0]["weight"][~tie], runs[1]["weight"][~tie])
    assert not same_bits(split, start)
    own = steps.whole(
        Form(Rule.ADAMW, torch.bfloat16, Master.OWN, torch.bfloat16),
        {"weight": start.bfloat16()} | runs[0] | {"weight": start.bfloat16()},
        made,
    )
    assert not same_bits(
        own["weight"].float(), whole
    )  # the twin: without a master the low bits are gone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_are_rounded_as_torch_casts(dtype, steps):
    """Sets own and fp32-mastered weights to a spread of values by one SGD step and compares with
    torch's cast."""
    generator = seeded(53)
    words = torch.randint(0, 1 << 32, (NUMEL,), generator=generator)
    values = from_bits(words, torch.float32)
    values = values.where(~values.isnan(), torch.tensor(0.0))
    form = Form(Rule.SGD, dtype, Master.FLOAT32, torch.float32)
    arrays = encode(form, values) | {"exp_avg": torch.zeros(NUMEL), "grad": torch.zeros(NUMEL)}
    arrays["weight"].zero_()
    after = steps.whole(form, arrays, hyper(lr=0.0))
    assert same_bits(after["weight"], values.to(dtype))
    own = Form(Rule.SGD, dtype, Master.OWN, torch.float32)
    arrays = {
        "weight": torch.zeros(NUMEL, dtype=dtype),
        "exp_avg": torch.zeros(NUMEL),
        "grad": -values,
    }
    # p - lr * g with p = 0: 0 and not -0 where the value is zero
    assert same_bits(steps.whole(own, arrays, hyper(lr=1.0))["weight"], (values + 0.0).to(dtype))


@pytest.mark.parametrize("short", ["weight", "low"])
def test_splitting_into_a_tensor_that_is_too_short_is_refused(short):
    """Gives a weight or a low half of 10 elements for 50 masters; what lies behind the 10 must
    stay."""
    weight, low = torch.zeros(100, dtype=torch.bfloat16), torch.zeros(100, dtype=torch.int16)
    master = torch.full((50,), 1.2345678)
    with pytest.raises(UsageError):
        native.split_master(
            master, weight[: 10 if short == "weight" else 50], low[: 10 if short == "low" else 50]
        )
    assert weight[50:].count_nonzero() == low[50:].count_nonzero() == 0
    assert (weight if short == "weight" else low)[10:].count_nonzero() == 0


def test_joining_a_low_half_that_is_too_short_is_refused():
    """Gives 10 low halves for 50 weights."""
    with pytest.raises(UsageError):
        native.join_master(
            torch.ones(50, dtype=torch.bfloat16), torch.zeros(100, dtype=torch.int16)[:10]
        )


@pytest.mark.parametrize("wrong", ["dtype", "strides"])
def test_splitting_something_else_is_refused(wrong):
    """Gives a float64 master, and one whose elements do not lie together."""
    master = torch.ones(8, dtype=torch.float64) if wrong == "dtype" else torch.ones(16)[::2]
    with pytest.raises(UsageError, match="contiguous CPU tensor of torch.float32"):
        native.split_master(
            master, torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int16)
        )
