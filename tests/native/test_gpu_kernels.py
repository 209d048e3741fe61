"""The GPU's kernels have the bits of the processor's. On a GPU where there is one; everywhere,
their own source run by a processor, thread by thread.

Words used here:

**form, arrays**: see `homes`. **stand-in**: the `_cuda` module of the same sources, compiled for
this processor with a launch that runs each block's threads in turns (`csrc/tests/cuda_on_cpu.h`).
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

import prepared
import pytest
import torch
from gpu_stand_in import build_stand_in
from marks import few
from native_arrays import bits, same_bits

from infinity import native
from infinity.core.units.flat_param_spec import MOMENTS as BITS_8
from infinity.errors import UsageError
from infinity.ext.class_step.known_elsewhere import BY_RULE

SEED = 20261121
COUNT = 64 * 9 + 40  # quads, a tail, and a block that is not full
RULES = {name.lower(): rule for name, rule in native.Rule.__members__.items()}
FORMS = [
    (torch.float32, native.Master.OWN, torch.float32),
    (torch.bfloat16, native.Master.SPLIT, torch.bfloat16),
    (torch.bfloat16, native.Master.SPLIT, torch.float32),
    (torch.bfloat16, native.Master.FLOAT32, torch.bfloat16),
    (torch.bfloat16, native.Master.OWN, torch.bfloat16),
    (torch.float16, native.Master.FLOAT32, torch.float16),
    (torch.float16, native.Master.OWN, torch.float32),
]
MOMENTS = [torch.float32, torch.bfloat16, torch.uint8]
# Rules with a third moment in every group, which have none in 8 bits
NEVER_NARROW = {
    rule.name.lower()
    for rule, known in BY_RULE.items()
    if any(known.moments[name] not in BITS_8 for name in known.moments.keys() - known.only_with)
}


@pytest.fixture(scope="module")
def stand_in() -> ModuleType:
    """The GPU's module, for this processor."""
    return build_stand_in()


def state(weight, master, grad, moments, generator) -> dict[str, torch.Tensor]:
    """Arrays of COUNT elements in whole blocks of 64, with zeros, large and small numbers among
    them."""
    padded = 4096  # what the processor's update takes
    values = torch.randn(padded, generator=generator) * torch.logspace(-6, 2, padded)
    values[::17] = 0
    arrays = {
        "weight": values.to(weight),
        "grad": (torch.randn(padded, generator=generator) * 0.1).to(grad),
    }
    if master == native.Master.FLOAT32:
        arrays["master"] = values.clone()
        arrays["weight"] = values.to(weight)
    elif master == native.Master.SPLIT:
        arrays["master"] = torch.empty(padded, dtype=torch.int16)
        native.split_master(values, arrays["weight"], arrays["master"])
    for name, sq in (("exp_avg", False), ("exp_avg_sq", True)):
        moment = torch.randn(padded, generator=generator) * 1e-2
        moment = moment.square() if sq else moment
        moment[COUNT:] = 0
        if moments == torch.uint8:
            arrays[name], arrays[name + "_scale"] = native.encode_moments(moment, sq=sq)
        else:
            arrays[name] = moment.to(moments)
    if moments != torch.uint8:
        for name in native.MOMENTS[len(native.SCALED_MOMENTS) :]:
            other = torch.randn(padded, generator=generator).abs() * 1e-5
            arrays[name] = other.to(moments)
    return arrays


def hyperparameters(step: int, *, third: bool) -> native.Hyperparameters:
    """``third``: with the switches of rules that may have a third moment."""
    hyper = native.Hyperparameters()
    hyper.smallest, hyper.largest, hyper.eta, hyper.mu = 1e-6, 50.0, 1e-2, 0.5
    hyper.momentum_decay, hyper.mu_product = 4e-3, 0.5
    hyper.beta3, hyper.alpha, hyper.fixed_decay = 0.99, 5.0, step == 3
    hyper.fresh = step == 1
    hyper.amsgrad = hyper.centered = third
    hyper.lr, hyper.weight_decay, hyper.step = 1e-2, 0.1, step
    hyper.momentum, hyper.dampening, hyper.nesterov = 0.9, 0.0, True
    hyper.maximize = step % 2 == 0
    hyper.grad_factors = [0.7, 3.0]
    return hyper


def on_processor(layout, arrays, runs) -> None:
    engine = native.make_io_engine(kind="threads")
    updater = native.Updater(engine, 0, 0, 0, 1)
    extents = {
        name: native.Extent.in_memory(array.data_ptr(), array.nbytes)
        for name, array in arrays.items()
    }
    count = arrays["weight"].numel()
    updater.submit(
        native.UnitUpdate(
            layout=layout,
            count=count,
            runs=runs,
            version=1,
            label=0,
            after=None,
            **{
                name: extents.get(name)
                for name in (
                    "weight",
                    "master",
                    "grad",
                    *native.MOMENTS,
                    "exp_avg_scale",
                    "exp_avg_sq_scale",
                )
            },
        )
    ).wait()


def on_module(module, layout, arrays, runs, stream: int = 0) -> None:
    module.step(
        layout,
        runs=runs,
        stream=stream,
        **{name: array.data_ptr() for name, array in arrays.items()},
    )


def compare(run_ours, weight, master, grad, moments, rule) -> None:
    """Three steps by both, on copies of the same arrays."""
    layout = native.Layout(
        rule=RULES[rule],
        weight=native.DTYPES[weight],
        master=master,
        grad=native.DTYPES[grad],
        moments=native.MOMENT_DTYPES[moments],
    )
    ours = state(weight, master, grad, moments, torch.Generator().manual_seed(SEED))
    theirs = {name: array.clone() for name, array in ours.items()}
    before = ours["weight"].clone()
    for step in (1, 2, 3):
        # Two runs: the second from a later block on, with a rate of its own.
        first, second = (hyperparameters(step, third="moment_3" in ours) for _ in range(2))
        second.lr = 3e-3
        runs = [native.Run(0, 128, first), native.Run(192, COUNT, second)]
        on_processor(layout, theirs, runs)
        run_ours(layout, ours, runs)
    assert not same_bits(before, ours["weight"])
    for name in ours:
        assert torch.equal(bits(ours[name]), bits(theirs[name])), name


def compare_or_refuse(step, weight, master, grad, moments, rule) -> None:
    """Compares as :func:`compare` does, or sees that a rule has no such moments."""
    if moments == torch.uint8 and rule in NEVER_NARROW:
        with pytest.raises(UsageError, match="needs an extent for moment_3"):
            compare(step, weight, master, grad, moments, rule)
        return
    compare(step, weight, master, grad, moments, rule)


@pytest.mark.parametrize("rule", few(RULES, 2))
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize(("weight", "master", "grad"), FORMS, ids=str)
def test_a_step_has_the_processors_bits(stand_in, weight, master, grad, moments, rule):
    """Every form and rule, quads, tails and blocks, gradients scaled twice, against the processor's
    unit, or refused there."""
    compare_or_refuse(partial(on_module, stand_in), weight, master, grad, moments, rule)


@pytest.mark.parametrize(
    "out", few([None, torch.bfloat16, torch.float32, torch.float16], 2), ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_scan_casts_sums_squares_and_finds_what_is_not_finite(stand_in, dtype, out):
    """Over two chunks and a tail: casts as torch's, the sum of squares within fp64 rounding,
    repeatable, the flag set only where it must be."""
    count = 64 * 1024 + 4 * 301 + 3
    values = torch.randn(count, generator=torch.Generator().manual_seed(SEED)).to(dtype)

    def scan(source: torch.Tensor) -> tuple[float, float, torch.Tensor | None]:
        cast = torch.empty(count, dtype=out) if out is not None else None
        total, flag = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
        workspace = torch.zeros(stand_in.scan_workspace_nbytes(count), dtype=torch.uint8)
        stand_in.scan(
            grad=source.data_ptr(),
            grad_dtype=native.DTYPES[dtype],
            out=cast.data_ptr() if cast is not None else 0,
            out_dtype=native.DTYPES[out or torch.float32],
            count=count,
            sum=total.data_ptr(),
            not_finite=flag.data_ptr(),
            workspace=workspace.data_ptr(),
        )
        return total.item(), flag.item(), cast

    total, flag, cast = scan(values)
    assert total == pytest.approx(values.double().square().sum().item(), rel=1e-12)
    assert total == scan(values)[0] and flag == 0
    if cast is not None:
        assert same_bits(cast, values.to(out))
    for bad in (float("inf"), float("-inf"), float("nan")):
        for place in (0, 64 * 1024 - 1, count - 1):
            spoiled = values.clone()
            spoiled[place] = bad
            assert scan(spoiled)[1] == 1


def test_bad_input_is_a_usage_error(stand_in):
    """A layout without a kernel, and a run that begins within a quad or a block."""
    wrong = native.Layout(
        rule=native.Rule.ADAMW,
        weight=native.DType.FLOAT16,
        master=native.Master.SPLIT,
        grad=native.DType.FLOAT16,
        moments=native.DType.FLOAT32,
    )
    with pytest.raises(UsageError, match="no GPU kernel"):
        stand_in.step(wrong, weight=0, grad=0, runs=[])
    right = native.Layout(
        rule=native.Rule.ADAMW,
        weight=native.DType.FLOAT32,
        master=native.Master.OWN,
        grad=native.DType.FLOAT32,
        moments=native.DType.FLOAT32,
    )
    runs = [native.Run(2, 8, native.Hyperparameters())]
    with pytest.raises(UsageError, match="an array for each of its moments"):
        stand_in.step(right, weight=0, grad=0, exp_avg=64, runs=runs)
    with pytest.raises(UsageError, match="multiple of 4"):
        stand_in.step(right, weight=0, grad=0, exp_avg=64, exp_avg_sq=64, runs=runs)
    narrow = native.Layout(
        rule=native.Rule.AMSGRAD,
        weight=native.DType.FLOAT32,
        master=native.Master.OWN,
        grad=native.DType.FLOAT32,
        moments=native.DType.INT8,
    )
    every = {name: 64 for name in ("weight", "grad", *native.MOMENTS)}
    runs = [native.Run(0, 64, hyperparameters(1, third=True))]
    with pytest.raises(UsageError, match="a third moment has none in 8 bits"):
        stand_in.step(narrow, runs=runs, **every)


@pytest.mark.parametrize("offset, ends_well", [(16, True), (4, False), (8, False)])
def test_the_stand_in_ends_at_a_misaligned_vector(offset, ends_well, stand_in):
    """A GPU faults at it, a processor forgives it. The check is one of the stand-in."""
    script = f"""
import torch
from gpu_stand_in import load_stand_in
from pathlib import Path
from infinity import native
layout = native.Layout(
    rule=native.Rule.ADAMW, weight=native.DType.FLOAT32, master=native.Master.OWN,
    grad=native.DType.FLOAT32, moments=native.DType.FLOAT32,
)
weight, grad, exp_avg, exp_avg_sq = arrays = torch.zeros(4, 64).unbind()
assert all(each.data_ptr() % 16 == 0 for each in arrays)
load_stand_in(Path({stand_in.__file__!r})).step(
    layout, weight=weight.data_ptr() + {offset}, grad=grad.data_ptr(),
    exp_avg=exp_avg.data_ptr(), exp_avg_sq=exp_avg_sq.data_ptr(),
    runs=[native.Run(0, 8, native.Hyperparameters())],
)
"""
    done = prepared.run("-c", script)
    assert (done.returncode == 0) == ends_well, done.stderr
    assert ends_well or done.returncode < 0, "by a signal"


def test_the_module_for_gpus_is_built_where_there_is_a_compiler():
    """`_cuda` imports without a GPU or a driver, and says that there is none."""
    import shutil

    try:
        from infinity import _cuda
    except ImportError:
        assert shutil.which("nvcc") is None, "nvcc is here, but infinity._cuda was not built"
        pytest.skip("no nvcc: the GPU's module is not built here")
    told = _cuda.device()
    assert told.get("refusal") or told["capability"] >= (8, 0)


@pytest.mark.parametrize("nbytes", [4096, 65536, 2 * 65536 + 3 * 4096], ids=str)
def test_checksums_are_those_of_the_processor(nbytes, stand_in):
    """One for each block of 64 KiB, from pieces that threads sum apart; the last block may be
    shorter. Failing twin: one bit changed."""
    data = torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED)
    )
    expected = [native.crc32c(block) for block in data.split(native.CHECKSUM_NBYTES)]
    assert stand_in.checksums(data.data_ptr(), nbytes) == expected
    data[nbytes - 1] ^= 1
    found = stand_in.checksums(data.data_ptr(), nbytes)
    assert found[:-1] == expected[:-1] and found[-1] != expected[-1]
