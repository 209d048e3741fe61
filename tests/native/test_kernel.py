"""The optimizer kernels: one formula, the same bits from every unit, thread count and cut, and
torch's numbers.

Words used here:

**unit**: one of `native.simd_units()`, chosen by INFINITY_SIMD. **special**: infinities, NaNs of
several payloads, zeros of both signs, subnormals, the largest and smallest numbers. **ulp**: of an
fp32 step, the distance between neighbouring fp32 numbers at the largest of |before|, |after| and
|after - before|. A weight that a step takes to almost zero keeps the rounding of what was
subtracted: measured by its own new ulp, any two correct AdamWs are hundreds apart there.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import every
from native_arrays import (
    Arrays,
    Form,
    MemorySteps,
    Unit,
    bits,
    different,
    every_form,
    from_bits,
    hyper,
    random_arrays,
    same_bits,
    seeded,
)

from infinity import native
from infinity.core.units.flat_param_spec import EVERY_MOMENT
from infinity.errors import UsageError
from infinity.ext.class_step.known_elsewhere import BY_RULE

Rule, Master = native.Rule, native.Master
UNITS = native.simd_units()
NUMEL = 3 * 4096  # one share for each of three threads
FACTORS = [0.37, 1.0 / 3.0, 65536.0, 0.9]

OTHERS = {  # rule -> hyperparameters
    Rule.ADADELTA: {"lr": 1.0, "beta2": 0.9, "eps": 1e-6},
    Rule.ADAGRAD: {"lr": 0.01, "lr_decay": 0.1, "eps": 1e-10},
    Rule.ADAMAX: {"lr": 2e-3},
    Rule.ADAN: {"lr": 1e-3, "beta1": 0.98, "beta2": 0.92, "beta3": 0.99},
    Rule.ADEMAMIX: {"lr": 1e-3, "alpha": 5.0},
    Rule.AMSGRAD: {"lr": 1e-3, "amsgrad": True},
    Rule.ASGD: {"lr": 0.1, "lambd": 0.01, "eta": 0.1},
    Rule.NADAM: {"lr": 2e-3, "momentum_decay": 0.004, "mu_product": 0.5},
    Rule.RADAM: {"lr": 1e-3},
    Rule.RMSPROP: {"lr": 0.01, "beta2": 0.99},
    Rule.RPROP: {"lr": 0.01, "beta1": 0.5, "beta2": 1.2, "smallest": 1e-6, "largest": 50.0},
}
SPECIAL_WORDS = {
    torch.float32: [
        0x00000000,
        0x80000000,
        0x00000001,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x80800000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F7F8000,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0xFFC00001,
        0x7F800001,
        0xFFFFFFFF,
        0x3F800000,
        0x33000000,
        0x477FF000,
        0x38800000,
    ],
    torch.bfloat16: [
        0x0000,
        0x8000,
        0x0001,
        0x8001,
        0x007F,
        0x0080,
        0x7F7F,
        0xFF7F,
        0x7F80,
        0xFF80,
        0x7FC0,
        0xFFC1,
        0x7F81,
        0xFFFF,
        0x3F80,
    ],
    torch.float16: [
        0x0000,
        0x8000,
        0x0001,
        0x8001,
        0x03FF,
        0x0400,
        0x7BFF,
        0xFBFF,
        0x7C00,
        0xFC00,
        0x7E00,
        0xFE01,
        0x7C01,
        0xFFFF,
        0x3C00,
    ],
}


@pytest.fixture(scope="module")
def steps() -> MemorySteps:
    return MemorySteps()


def special_arrays(form: Form, numel: int, generator: torch.Generator) -> Arrays:
    """Ordinary values with a special one at every third place of every array, independently."""
    arrays = random_arrays(form, numel, generator)
    for name, array in arrays.items():
        at = torch.rand(numel, generator=generator) < 1 / 3
        if array.dtype == torch.int16:  # the low half of a split master: any number is one
            array[at] = torch.randint(
                -(1 << 15), 1 << 15, (int(at.sum()),), dtype=torch.int16, generator=generator
            )
        else:
            words = from_bits(SPECIAL_WORDS[array.dtype], array.dtype)
            array[at] = words[torch.randint(len(words), (int(at.sum()),), generator=generator)]
    return arrays


def settings_of(rule: native.Rule) -> list[native.Hyperparameters]:
    """Hyperparameters that walk every branch of ``rule``, with 0 to 4 gradient factors between
    them."""
    if rule in (Rule.ADAMW, Rule.ADAM):
        return [
            hyper(lr=1e-3, step=1),
            hyper(lr=1e-3, weight_decay=0.1, step=2, grad_factors=FACTORS[:1]),
            hyper(lr=0.3, weight_decay=0.01, maximize=True, step=1000, grad_factors=FACTORS),
            hyper(
                lr=1e-3, beta1=0.4, beta2=0.5, eps=1e-3, step=3, grad_factors=FACTORS[:2]
            ),  # lerp from the other end
            hyper(lr=1e-3, beta1=0.0, beta2=0.0, eps=0.0, step=1, grad_factors=FACTORS[:3]),
        ]
    if rule in OTHERS:
        return [
            hyper(**OTHERS[rule], step=1, fresh=True),
            hyper(**OTHERS[rule], step=2, weight_decay=0.1, grad_factors=FACTORS[:1]),
            hyper(**OTHERS[rule], step=1000, maximize=True, weight_decay=0.01, decoupled=True),
            hyper(**OTHERS[rule], step=9, maximize=True, fresh=True),
            hyper(**OTHERS[rule] | {"momentum": 0.9}, step=7, grad_factors=FACTORS),
            hyper(**OTHERS[rule] | {"mu": 0.25}, step=3, centered=True),
            hyper(
                **OTHERS[rule] | {"beta3": 0.3, "weight_decay": 0.1},
                fixed_decay=True,
                decoupled=True,
            ),
        ]
    if rule == Rule.LION:
        return [
            hyper(lr=1e-3, beta1=0.9, beta2=0.99),
            hyper(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_factors=FACTORS[:2]),
            hyper(
                lr=0.1, beta1=0.0, beta2=0.0, maximize=True, weight_decay=0.3, grad_factors=FACTORS
            ),
        ]
    return [
        hyper(lr=0.1),
        hyper(lr=0.1, weight_decay=0.1, maximize=True, grad_factors=FACTORS[:1]),
        hyper(lr=0.1, momentum=0.9, step=1, grad_factors=FACTORS[:2]),
        hyper(
            lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1, step=2, grad_factors=FACTORS[:3]
        ),
        hyper(lr=0.1, momentum=0.9, nesterov=True, step=7, grad_factors=FACTORS),
        hyper(lr=0.1, momentum=0.9, nesterov=True, maximize=True, weight_decay=0.01, step=1),
    ]


def odd_cuts(numel: int, seed: int) -> list[int]:
    """Boundaries of runs that leave vector tails of every length."""
    rng = random.Random(seed)
    cuts, at = [0], 0
    while at < numel:
        at = min(numel, at + rng.choice([1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 61, 4099]))
        cuts.append(at)
    return cuts


# --- the same bits ---


@pytest.mark.parametrize("form", every(every_form(), 5), ids=str)
def test_every_unit_thread_count_and_cut_gives_the_same_bits(form, steps, monkeypatch):
    """Steps special and ordinary values by every unit, 1 to 3 threads, whole and in odd runs;
    scalar is the truth."""
    generator = seeded(100 + every_form().index(form))
    arrays = special_arrays(form, NUMEL, generator)
    for number, made in enumerate(settings_of(form.rule)):
        monkeypatch.setenv("INFINITY_SIMD", "scalar")
        expected = steps.whole(form, arrays, made)
        cuts = odd_cuts(NUMEL, seed=number)
        odd = [(begin, end, made) for begin, end in zip(cuts, cuts[1:])]
        for unit in UNITS:
            monkeypatch.setenv("INFINITY_SIMD", unit)
            for threads in (1, 2, 3):
                found = steps.whole(form, arrays, made, threads=threads)
                assert not different(expected, found), (unit, threads, number)
            assert not different(expected, steps(form, arrays, odd, threads=2)), (
                unit,
                "odd runs",
                number,
            )
        assert different(arrays, expected), "the twin: the step did nothing"


@pytest.mark.parametrize("unit", UNITS)
def test_elements_outside_the_runs_keep_every_bit(unit, steps, monkeypatch):
    """Steps runs with gaps between them and compares both sides of every boundary, in every array,
    of every form."""
    monkeypatch.setenv("INFINITY_SIMD", unit)
    generator = seeded(7)
    numel = 4096
    cuts = [0, 1, 18, 35, 36, 100, 1000, 1016, 2049, 2050, 4000, 4095]
    inside = torch.zeros(numel, dtype=torch.bool)
    ranges = list(zip(cuts[1::2], cuts[2::2]))
    for begin, end in ranges:
        inside[begin:end] = True
    for form in every_form():
        arrays = special_arrays(form, numel, generator)
        made = hyper(lr=0.1, weight_decay=0.1, momentum=0.9, step=2)
        found = steps(form, arrays, [(begin, end, made) for begin, end in ranges], threads=2)
        whole = steps.whole(form, arrays, made)
        for name in arrays:
            before, after = bits(arrays[name]), bits(found[name])
            assert torch.equal(before[~inside], after[~inside]), (form, name)
            assert torch.equal(bits(whole[name])[inside], after[inside]), (form, name)
        assert different(arrays, found)


def test_neighbouring_runs_keep_their_own_hyperparameters(steps):
    """Steps two halves with different rates, step counts and factors at once, and each alone."""
    generator = seeded(8)
    form = Form(Rule.ADAMW)
    arrays = random_arrays(form, 4096, generator)
    cut = 1237
    left, right = (
        hyper(lr=1e-3, step=1),
        hyper(lr=0.5, weight_decay=0.3, step=9, grad_factors=[0.5]),
    )
    both = steps(form, arrays, [(0, cut, left), (cut, 4096, right)])
    alone = [steps.whole(form, arrays, made) for made in (left, right)]
    for name in arrays:
        assert same_bits(both[name][:cut], alone[0][name][:cut])
        assert same_bits(both[name][cut:], alone[1][name][cut:])
    assert different(alone[0], alone[1])


# --- against torch ---


Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def plain(cls: type, **settings) -> Make:
    return lambda params: cls(params, foreach=False, **settings)


def of_path(rule: native.Rule, **settings) -> Make:
    """The class of another library, by its path, without foreach."""
    module, _, name = BY_RULE[rule].kind.rpartition(".")
    return lambda params: plain(getattr(pytest.importorskip(module), name), **settings)(params)


AGAINST_TORCH = {
    "AdamW": (
        Rule.ADAMW,
        plain(torch.optim.AdamW, lr=1e-3, weight_decay=0.01),
        dict(lr=1e-3, weight_decay=0.01),
    ),
    "AdamW no decay": (
        Rule.ADAMW,
        plain(torch.optim.AdamW, lr=1e-2, weight_decay=0),
        dict(lr=1e-2),
    ),
    "AdamW betas": (
        Rule.ADAMW,
        plain(
            torch.optim.AdamW, lr=3e-3, betas=(0.4, 0.95), eps=1e-5, weight_decay=0.3, maximize=True
        ),
        dict(lr=3e-3, beta1=0.4, beta2=0.95, eps=1e-5, weight_decay=0.3, maximize=True),
    ),
    "Adam": (Rule.ADAM, plain(torch.optim.Adam, lr=1e-3), dict(lr=1e-3)),
    "Adam decay": (
        Rule.ADAM,
        plain(torch.optim.Adam, lr=1e-3, weight_decay=0.1),
        dict(lr=1e-3, weight_decay=0.1),
    ),
    "SGD": (Rule.SGD, plain(torch.optim.SGD, lr=0.1), dict(lr=0.1)),
    "SGD decay": (
        Rule.SGD,
        plain(torch.optim.SGD, lr=0.1, weight_decay=0.1, maximize=True),
        dict(lr=0.1, weight_decay=0.1, maximize=True),
    ),
    "SGD momentum": (
        Rule.SGD,
        plain(torch.optim.SGD, lr=0.1, momentum=0.9),
        dict(lr=0.1, momentum=0.9),
    ),
    "SGD dampening": (
        Rule.SGD,
        plain(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.01),
        dict(lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.01),
    ),
    "SGD nesterov": (
        Rule.SGD,
        plain(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        dict(lr=0.1, momentum=0.9, nesterov=True),
    ),
    "Adadelta": (
        Rule.ADADELTA,
        plain(torch.optim.Adadelta, lr=1.0, weight_decay=0.01),
        OTHERS[Rule.ADADELTA] | {"weight_decay": 0.01},
    ),
    "Adagrad": (
        Rule.ADAGRAD,
        plain(torch.optim.Adagrad, lr=0.01, lr_decay=0.1, weight_decay=0.01),
        OTHERS[Rule.ADAGRAD] | {"weight_decay": 0.01},
    ),
    "Adamax": (
        Rule.ADAMAX,
        plain(torch.optim.Adamax, lr=2e-3, weight_decay=0.1, maximize=True),
        OTHERS[Rule.ADAMAX] | {"weight_decay": 0.1, "maximize": True},
    ),
    "RAdam": (
        Rule.RADAM,
        plain(torch.optim.RAdam, lr=1e-3, weight_decay=0.1),
        OTHERS[Rule.RADAM] | {"weight_decay": 0.1},
    ),
    "RAdam decoupled": (
        Rule.RADAM,
        plain(
            torch.optim.RAdam,
            lr=1e-3,
            betas=(0.5, 0.9),
            weight_decay=0.1,
            decoupled_weight_decay=True,
        ),
        OTHERS[Rule.RADAM] | {"beta1": 0.5, "beta2": 0.9, "weight_decay": 0.1, "decoupled": True},
    ),
    "AMSGrad": (
        Rule.AMSGRAD,
        plain(torch.optim.Adam, lr=1e-3, weight_decay=0.1, amsgrad=True),
        OTHERS[Rule.AMSGRAD] | {"weight_decay": 0.1},
    ),
    "AMSGrad decoupled": (
        Rule.AMSGRAD,
        plain(torch.optim.AdamW, lr=1e-3, betas=(0.4, 0.5), weight_decay=0.1, amsgrad=True),
        OTHERS[Rule.AMSGRAD] | {"beta1": 0.4, "beta2": 0.5, "weight_decay": 0.1, "decoupled": True},
    ),
    "ASGD": (
        Rule.ASGD,
        plain(torch.optim.ASGD, lr=0.1, lambd=0.01, t0=5, weight_decay=0.1),
        OTHERS[Rule.ASGD] | {"weight_decay": 0.1},
    ),
    "NAdam": (
        Rule.NADAM,
        plain(torch.optim.NAdam, lr=2e-3, weight_decay=0.1),
        OTHERS[Rule.NADAM] | {"weight_decay": 0.1},
    ),
    "NAdam decoupled": (
        Rule.NADAM,
        plain(torch.optim.NAdam, lr=2e-3, weight_decay=0.1, decoupled_weight_decay=True),
        OTHERS[Rule.NADAM] | {"weight_decay": 0.1, "decoupled": True},
    ),
    "RMSprop centred": (
        Rule.RMSPROP,
        plain(torch.optim.RMSprop, lr=0.01, weight_decay=0.01, centered=True),
        OTHERS[Rule.RMSPROP] | {"weight_decay": 0.01, "centered": True},
    ),
    "RMSprop": (
        Rule.RMSPROP,
        plain(torch.optim.RMSprop, lr=0.01, weight_decay=0.01),
        OTHERS[Rule.RMSPROP] | {"weight_decay": 0.01},
    ),
    "RMSprop momentum": (
        Rule.RMSPROP,
        plain(torch.optim.RMSprop, lr=0.01, momentum=0.9),
        OTHERS[Rule.RMSPROP] | {"momentum": 0.9},
    ),
    "AdEMAMix": (
        Rule.ADEMAMIX,
        of_path(Rule.ADEMAMIX, lr=1e-3, weight_decay=0.1),
        {"lr": 1e-3, "weight_decay": 0.1},
    ),
    "AdEMAMix schedules": (
        Rule.ADEMAMIX,
        of_path(
            Rule.ADEMAMIX,
            lr=1e-3,
            betas=(0.4, 0.9, 0.99),
            weight_decay=0.01,
            weight_decouple=True,
            fixed_decay=True,
            t_alpha_beta3=12,
        ),
        {
            "lr": 1e-3,
            "beta1": 0.4,
            "beta2": 0.9,
            "weight_decay": 0.01,
            "decoupled": True,
            "fixed_decay": True,
        },
    ),
    "Adan": (
        Rule.ADAN,
        of_path(Rule.ADAN, lr=1e-3, weight_decay=0.1),
        OTHERS[Rule.ADAN] | {"weight_decay": 0.1},
    ),
    "Adan decoupled": (
        Rule.ADAN,
        of_path(
            Rule.ADAN,
            lr=1e-3,
            betas=(0.9, 0.4, 0.95),
            weight_decay=0.1,
            weight_decouple=True,
            maximize=True,
        ),
        {
            "lr": 1e-3,
            "beta1": 0.9,
            "beta2": 0.4,
            "beta3": 0.95,
            "weight_decay": 0.1,
            "decoupled": True,
            "maximize": True,
        },
    ),
    "Rprop": (Rule.RPROP, plain(torch.optim.Rprop, lr=0.01), OTHERS[Rule.RPROP]),
}


def ulp(size: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(size.abs(), torch.tensor(torch.inf)) - size.abs()


def run_beside_torch(steps: MemorySteps, case: str, count: int, seed: int, **changed):
    """Weights before, ours and torch's after ``count`` steps of the same gradients, and the largest
    size on the way."""
    rule, make, values = AGAINST_TORCH[case]
    form, generator = Form(rule), seeded(seed)
    arrays = random_arrays(form, NUMEL, generator)
    for name in EVERY_MOMENT:
        if name in arrays:
            arrays[name].zero_()
    param = torch.nn.Parameter(arrays["weight"].clone())
    optimizer = make([param])
    before, largest = arrays["weight"].clone(), arrays["weight"].abs()
    group, counters = optimizer.param_groups[0] | changed, BY_RULE[rule].counters
    numbers = {} if counters is None else counters.first(group)
    for step in range(1, count + 1):
        arrays["grad"] = 0.1 * torch.randn(NUMEL, generator=generator)
        param.grad = arrays["grad"].clone()
        last = param.detach().clone()
        optimizer.step()
        counted, numbers = ({}, {}) if counters is None else counters.step(group, step, numbers)
        made = hyper(step=step, fresh=step == 1, **(values | changed | counted))
        arrays = steps.whole(form, arrays, made)
        after = param.detach()
        largest = torch.stack([largest, after.abs(), (after - last).abs()]).amax(0)
    return before, arrays, param.detach(), optimizer.state[param], largest


@pytest.mark.parametrize("case", AGAINST_TORCH)
def test_one_fp32_step_is_within_4_ulps_of_torch(case, steps):
    """Takes a first step beside torch.optim(foreach=False). Its twin, a learning rate off by 1 %,
    is far outside."""
    before, ours, theirs, state, largest = run_beside_torch(steps, case, 1, seed=31)
    assert ((ours["weight"] - theirs).abs() <= 4 * ulp(largest)).all()
    for torchs, name in BY_RULE[AGAINST_TORCH[case][0]].moments.items():
        if state.get(torchs) is not None:
            # torch's square root rounds a few numbers otherwise; acc_delta has squares of two
            most = 8 if torchs == "acc_delta" else 4
            assert ((ours[name] - state[torchs]).abs() <= most * ulp(state[torchs])).all()
    lr = AGAINST_TORCH[case][2]["lr"]
    _, wrong, theirs, _, largest = run_beside_torch(steps, case, 1, seed=31, lr=lr * 1.01)
    assert ((wrong["weight"] - theirs).abs() > 4 * ulp(largest)).float().mean() > 0.5
    assert not same_bits(before, theirs)


@pytest.mark.parametrize("case", AGAINST_TORCH)
def test_twenty_fp32_steps_stay_within_4_ulps_each_of_torch(case, steps):
    """Takes 20 steps of the same gradients beside torch: each may add 4 ulps of the largest size an
    element had, and the rounding of the moments (relative 2^-22 a step, carried on) may turn up to
    2^-20 of lr a step.
    """
    count = 20
    _, ours, theirs, _, largest = run_beside_torch(steps, case, count, seed=32)
    lr = AGAINST_TORCH[case][2]["lr"]
    bound = count * (4 * ulp(largest) + lr * 2**-20)
    assert ((ours["weight"] - theirs).abs() <= bound).all()
    _, wrong, theirs, _, largest = run_beside_torch(steps, case, count, seed=32, lr=lr * 1.01)
    assert (
        (wrong["weight"] - theirs).abs() > count * (4 * ulp(largest) + lr * 2**-20)
    ).float().mean() > 0.5


def test_lion_follows_its_paper(steps):
    """Ten steps beside Lion (Chen et al. 2023, algorithm 2), written with torch's operations as
    lion-pytorch is."""
    generator = seeded(33)
    form = Form(Rule.LION)
    arrays = random_arrays(form, NUMEL, generator)
    arrays["grad"][:100] = 0.0
    arrays["exp_avg"][:200] = 0.0  # 100 directions are exactly zero: sign(0) is 0
    lr, beta1, beta2, decay = 1e-2, 0.9, 0.99, 0.1
    weight, momentum = arrays["weight"].clone(), arrays["exp_avg"].clone()
    for step in range(1, 11):
        weight.mul_(1 - lr * decay)
        direction = momentum.clone().mul_(beta1).add_(arrays["grad"], alpha=1 - beta1).sign_()
        weight.add_(direction, alpha=-lr)
        momentum.mul_(beta2).add_(arrays["grad"], alpha=1 - beta2)
        arrays = steps.whole(
            form, arrays, hyper(lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, step=step)
        )
        assert (
            (arrays["exp_avg"] - momentum).abs() <= 4 * step * ulp(momentum.abs().clamp(min=1e-3))
        ).all()
        assert (
            (arrays["weight"] - weight).abs() <= 4 * step * ulp(weight.abs().clamp(min=lr))
        ).all()
        assert (direction[:100] == 0).all()


# --- against the formula in numpy, bit for bit ---


def numpy_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fp32 a * b + c, rounded once.

    The product of two fp32 is exact in float64 (48 of 53 bits), the sum is not, and rounding it
    again to fp32 would be a second rounding. So the sum is rounded to odd: its error is found
    exactly (Knuth's TwoSum), and where there is one and the sum's last bit is even, the sum's
    neighbour on the error's side is taken, which is odd. Rounding that to fp32 gives what a single
    rounding would (Boldo and Melquiond 2008; 53 >= 24 + 2).
    """
    with np.errstate(all="ignore"):
        product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = product + c
        other = total - product
        error = (product - (total - other)) + (c - other)
        inexact = np.isfinite(total) & (error != 0) & (total.view(np.int64) % 2 == 0)
        toward = np.where(error > 0, np.inf, -np.inf)
        return np.where(inexact, np.nextafter(total, toward), total).astype(np.float32)


def test_the_reference_fma_rounds_once():
    """Compares it with libm's fmaf, on values that a double rounding gets wrong among others."""
    libm = ctypes.CDLL("libm.so.6")
    libm.fmaf.restype, libm.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    rng = np.random.default_rng(41)
    print("seed 41")
    a, b, c = (rng.standard_normal(20000).astype(np.float32) for _ in range(3))
    c[:10000] *= np.float32(2.0) ** rng.integers(-60, 60, 10000).astype(np.float32)
    # (1 + 2^-12) * (1 + 2^-12) is half an ulp above 1 + 2^-11; 2^-60 more or less decides.
    a[:2] = b[:2] = 1 + 2**-12
    c[:2] = 2**-60, -(2**-60)
    ours = numpy_fma(a, b, c)
    assert ours.tolist() == [
        libm.fmaf(*values) for values in zip(a.tolist(), b.tolist(), c.tolist())
    ]
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice[:2] != ours[:2]).any(), "the twin: rounding twice is wrong somewhere"


def numpy_adamw(
    arrays: dict[str, np.ndarray], made: native.Hyperparameters
) -> dict[str, np.ndarray]:
    """AdamW in fp32: every line one correctly rounded operation (numpy's fp32 sqrt and division
    are)."""
    f = np.float32
    p, m, v, g = (arrays[name].copy() for name in ("weight", "exp_avg", "exp_avg_sq", "grad"))

    def full(value: float) -> np.ndarray:
        return np.full_like(p, value)

    with np.errstate(all="ignore"):
        for factor in made.grad_factors:
            g = g * f(factor)
        if made.maximize:
            g = -g
        if made.weight_decay:
            p = p * f(1 - made.lr * made.weight_decay)
        rate = f(1 - made.beta1)
        if rate < f(0.5):
            m = numpy_fma(full(rate), g - m, m)
        else:
            m = numpy_fma(full(rate - f(1)), g - m, g)
        v = numpy_fma(f(1 - made.beta2) * g, g, v * f(made.beta2))
        denominator = np.sqrt(v) / f((1 - made.beta2**made.step) ** 0.5) + f(made.eps)
        p = p + f(-(made.lr / (1 - made.beta1**made.step))) * m / denominator
    return {"weight": p, "exp_avg": m, "exp_avg_sq": v, "grad": arrays["grad"]}


@pytest.mark.parametrize("number", range(5))
def test_adamw_is_its_formula_bit_for_bit(number, steps):
    """Ten steps beside the formula in numpy. (torch's own fp32 sqrt goes through MKL's VML on the
    CPU, which does not round correctly: it is the one operation in which torch and the formula
    differ.)"""
    made = settings_of(Rule.ADAMW)[number]
    generator = seeded(42 + number)
    form = Form(Rule.ADAMW)
    arrays = random_arrays(form, NUMEL, generator)
    finite = from_bits(
        [0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x7F000000, 0x3F800000], torch.float32
    )
    for name in arrays:
        at = torch.rand(NUMEL, generator=generator) < 0.1
        arrays[name][at] = finite[torch.randint(len(finite), (int(at.sum()),), generator=generator)]
    arrays["exp_avg_sq"].abs_()
    expected = {name: array.numpy().copy() for name, array in arrays.items()}
    for step in range(made.step, made.step + 10):
        made.step = step
        arrays["grad"] = torch.randn(NUMEL, generator=generator) * 10.0 ** (step % 5 - 3)
        expected["grad"] = arrays["grad"].numpy().copy()
        arrays, expected = steps.whole(form, arrays, made), numpy_adamw(expected, made)
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            ours, theirs = arrays[name], torch.from_numpy(expected[name])
            nan = ours.isnan() & theirs.isnan()  # which of two NaNs survives is nobody's formula
            wrong = (bits(ours) != bits(theirs)) & ~nan
            assert not wrong.any(), (step, name, int(wrong.sum()))
    twin = hyper(lr=made.lr * (1 + 2**-20), beta1=made.beta1, beta2=made.beta2, step=made.step)
    assert not np.array_equal(
        numpy_adamw(expected, twin)["weight"], numpy_adamw(expected, made)["weight"]
    )


# --- gradient factors ---


@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", range(native.MAX_GRAD_FACTORS + 1))
def test_gradient_factors_round_as_in_place_multiplications_would(grad, count, steps):
    """The first momentum of SGD is the scaled gradient itself: compares it with `grad.mul_(factor)`
    in sequence."""
    generator = seeded(61)
    form = Form(
        Rule.SGD, grad if grad != torch.float32 else torch.float32, Master.OWN, grad, torch.float32
    )
    arrays = random_arrays(form, NUMEL, generator)
    factors = [0.37, 1.0 / 3.0, 3.0, 0.999][:count]
    expected = arrays["grad"].clone()
    for factor in factors:
        expected.mul_(torch.tensor(factor).item())
    found = steps.whole(form, arrays, hyper(momentum=0.9, step=1, grad_factors=factors))
    assert same_bits(found["exp_avg"], expected.float())
    assert same_bits(found["grad"], arrays["grad"]), "the gradient itself was changed"
    if (
        count >= 2 and grad != torch.float32
    ):  # the twin: one product of all factors rounds otherwise
        at_once = arrays["grad"].clone().mul_(float(np.prod(factors)))
        assert not same_bits(at_once, expected)


def test_a_negative_or_zero_factor_is_a_factor_like_any_other(steps):
    """Scales by -2 and by 0: signs of zero follow the multiplication."""
    generator = seeded(62)
    form = Form(Rule.SGD, torch.bfloat16, Master.OWN, torch.bfloat16)
    arrays = random_arrays(form, 4096, generator)
    for factor in (-2.0, 0.0, -0.0):
        found = steps.whole(form, arrays, hyper(momentum=0.9, step=1, grad_factors=[factor]))
        assert same_bits(found["exp_avg"], arrays["grad"].clone().mul_(factor).float())


# --- what has no kernel ---


def test_a_layout_without_a_kernel_is_refused():
    """Tries combinations that nobody defined, then hyperparameters that no step has."""
    updater = native.Updater(native.IoEngine(kind="threads"), 0, 0, 0, 1)
    wrong = [
        Form(Rule.ADAMW, torch.float32, Master.SPLIT, torch.float32),
        Form(Rule.ADAMW, torch.float16, Master.SPLIT, torch.float32),
        Form(Rule.ADAMW, torch.float32, Master.OWN, torch.bfloat16),
        Form(Rule.ADAMW, torch.bfloat16, Master.OWN, torch.float16),
        Form(Rule.ADAMW, torch.float32, Master.OWN, torch.float32, torch.float16),
    ]
    for form in wrong:
        arrays = {name: torch.zeros(4096, dtype=dtype) for name, dtype in form.dtypes.items()}
        with pytest.raises(UsageError, match="no optimizer kernel"):
            updater.submit(Unit(form, arrays).whole(hyper()))
    arrays = random_arrays(Form(), 4096, seeded(71))
    for made, tells in ((hyper(step=0), "not 0"), (hyper(grad_factors=[1.0] * 5), "at most 4")):
        with pytest.raises(UsageError, match=tells):
            updater.submit(Unit(Form(), arrays).whole(made))
    unit = Unit(Form(), arrays)
    updater.submit(unit.whole(hyper())).wait()  # refused calls broke nothing
    assert different(arrays, unit.arrays())


def test_a_unit_the_processor_lacks_is_refused_by_name(monkeypatch):
    """Sets INFINITY_SIMD to nonsense, to nothing, and to each unit there is."""
    assert UNITS[-1] == "scalar"
    for unit in UNITS:
        monkeypatch.setenv("INFINITY_SIMD", unit)
        assert native.simd_unit() == unit
    for automatic in ("", "auto"):
        monkeypatch.setenv("INFINITY_SIMD", automatic)
        assert native.simd_unit() == UNITS[0]
    monkeypatch.setenv("INFINITY_SIMD", "mmx")
    with pytest.raises(UsageError, match="mmx.*scalar"):
        native.simd_unit()


# --------------------------------------------------------------------------------------------------
# Against exact arithmetic
# --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lr=st.floats(1e-6, 1.0),
    beta1=st.floats(0.0, 0.999),
    beta2=st.floats(0.5, 0.9999),
    eps=st.floats(1e-12, 1e-3),
    weight_decay=st.floats(0.0, 0.3),
    step=st.integers(1, 100_000),
    seed=st.integers(0, 2**32),
    decades=st.floats(0.0, 6.0),
)
def test_a_step_is_near_the_one_in_float64(
    steps, lr, beta1, beta2, eps, weight_decay, step, seed, decades
):
    """Method: AdamW of arbitrary hyperparameters over values of several magnitudes, beside the same
    formula in float64 on the same fp32 inputs: weight, exp_avg and exp_avg_sq within a few ulps of
    the terms that are added up. A formula that lacks the bias correction is outside: the bound can
    fail."""
    form, generator = Form(), seeded(seed)
    arrays = random_arrays(form, 4096, generator)
    for name in ("grad", "exp_avg", "exp_avg_sq"):
        arrays[name] *= 10 ** (decades * (torch.rand(4096, generator=generator) - 0.5))
    made = hyper(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step)
    found = steps.whole(form, arrays, made)

    p, g, m, v = (arrays[name].double() for name in ("weight", "grad", "exp_avg", "exp_avg_sq"))
    m1, v1 = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    change = lr / (1 - beta1**step) * m1 / ((v1 / (1 - beta2**step)).sqrt() + eps)
    p1 = p * (1 - lr * weight_decay) - change
    ulp = 2.0**-23
    # 1 - beta in fp32, of which a beta near 1 leaves few bits, is the largest error of the moments.
    assert ((found["exp_avg"] - m1).abs() <= 4 * ulp * torch.maximum(m.abs(), g.abs())).all()
    assert ((found["exp_avg_sq"] - v1).abs() <= 4 * ulp * torch.maximum(v, g * g)).all()
    slack = change.abs() * (
        torch.maximum(m.abs(), g.abs()) / m1.abs().clamp_min(1e-300) + torch.maximum(v, g * g) / v1
    )
    assert (
        (found["weight"] - p1).abs() <= ulp * (2 * p.abs() + 8 * change.abs() + 8 * slack)
    ).all()
    if step < 5 and lr > 1e-3 and beta2 > 0.9:
        wrong = p * (1 - lr * weight_decay) - lr * m1 / (v1.sqrt() + eps)
        assert not ((wrong - p1).abs() <= ulp * (2 * p.abs() + 8 * change.abs() + 8 * slack)).all()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shift", [2, 30])
def test_a_written_only_weight_may_lie_at_any_address(unit, shift, monkeypatch):
    """Method: bf16 weights beside an fp32 master are stored past the caches where their address
    allows it; at one that does not, every unit gives the scalar unit's bits, and writes nothing
    around them."""
    form = Form(weight=torch.bfloat16, master=Master.FLOAT32, grad=torch.bfloat16)
    arrays = random_arrays(form, 4096, seeded(7))
    monkeypatch.setenv("INFINITY_SIMD", "scalar")
    expected = MemorySteps().whole(form, arrays, hyper(step=1))

    monkeypatch.setenv("INFINITY_SIMD", unit)
    held = torch.full((4096 * 2 + 64,), 0x55, dtype=torch.uint8)
    stepped = Unit(form, arrays)
    stepped.extents["weight"] = native.Extent.in_memory(held.data_ptr() + shift, 4096 * 2)
    native.Updater(native.IoEngine(kind="threads", threads=1), 0, 0, 0, 1).submit(
        stepped.whole(hyper(step=1))
    ).wait()
    weight = held[shift : shift + 4096 * 2].clone().view(torch.bfloat16)
    assert same_bits(weight, expected["weight"])
    assert (held[:shift] == 0x55).all() and (held[shift + 4096 * 2 :] == 0x55).all()
