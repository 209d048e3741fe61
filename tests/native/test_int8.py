"""8-bit block-wise moments: what the codes are, how they round, and that where they live changes no
bit.

Words used here:

**block**: 64 elements with one scale, the biased exponent of the largest. **reference**: the step
in numpy, written from the description in csrc/optim/int8.h, without its tricks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import at_home, differing, in_child, leftovers, loss_of, tokens, transformer, with_least
from native_arrays import hyper, seeded
from runs import adamw

import infinity
from infinity import native
from infinity.errors import UsageError

SEED = 60
UNITS = native.simd_units()
NUMEL = 3 * 4096
BLOCK = native.MOMENT_BLOCK
FIELD = {False: 15, True: 31}  # sq -> the largest exponent of a code
LAYOUT = dict(
    rule=native.Rule.ADAMW,
    weight=native.DType.FLOAT32,
    master=native.Master.OWN,
    grad=native.DType.FLOAT32,
)


def value_of(code: np.ndarray, scale: np.ndarray, sq: bool) -> np.ndarray:
    """float64 value of codes: small floats whose largest exponent is the scale's."""
    magnitude = code & (0xFF if sq else 0x7F)
    field, mantissa = magnitude >> 3, (magnitude & 7) / 8.0
    exponent = np.maximum(field, 1) + scale.astype(np.int64) - FIELD[sq] - 127
    value = np.where(field == 0, mantissa, 1 + mantissa) * 2.0**exponent
    return value if sq else np.where(code & 0x80, -value, value)


def random20(position: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The random bits of exp_avg and exp_avg_sq: a hash of block and place in it, rotated by the
    sixteen they are in."""
    block, element = position // BLOCK, position % BLOCK
    x = ((block * 16 + element % 16).astype(np.uint64) + (step * 0x9E3779B9)) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    turn = (element // 16 * 8).astype(np.uint64)
    x = ((x << turn) | (x >> (32 - turn))) & 0xFFFFFFFF
    return x & 0xFFFFF, x >> 12


def reference_codes(
    values: np.ndarray, twenty: np.ndarray, sq: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of fp32 values: the code below, or the one above with the probability of the
    distance."""
    words = np.abs(values).view(np.uint32)
    scale = words.reshape(-1, BLOCK).max(1) >> 23
    each = np.repeat(scale, BLOCK).astype(np.int64)
    largest = 255 if sq else 127
    table = np.arange(largest + 1)
    code = np.zeros(values.size, dtype=np.int64)
    for one in np.unique(each):
        at = each == one
        grid = value_of(table, np.full(table.size, one), sq)
        x = np.abs(values[at]).astype(np.float64)
        below = np.searchsorted(grid, x, side="right") - 1
        above = np.minimum(below + 1, largest)
        distance = np.where(
            above > below,
            (x - grid[below]) / np.where(above > below, grid[above] - grid[below], 1),
            0,
        )
        up = distance + twenty[at] / 2.0**20 >= 1
        if sq:
            up |= (below == 0) & (x > 0)  # what is divided by stays above zero
        code[at] = np.where(up, above, below)
    sign = 0 if sq else np.where(np.signbit(values), 0x80, 0)
    return (code | sign).astype(np.uint8), scale.astype(np.uint8)


class Moments:
    """One fp32 array with 8-bit moments, in memory."""

    def __init__(self, generator: torch.Generator, numel: int = NUMEL):
        self.weight = torch.randn(numel, generator=generator)
        self.m = native.encode_moments(0.1 * torch.randn(numel, generator=generator), sq=False)
        self.v = native.encode_moments(
            0.01 * torch.randn(numel, generator=generator).square(), sq=True
        )
        self.grad = 0.1 * torch.randn(numel, generator=generator)

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, *self.m, *self.v, self.grad]

    def step(self, made, *, threads: int = 1, runs=None) -> list[torch.Tensor]:
        """The tensors after a step; these stay."""
        tensors = [tensor.clone() for tensor in self.tensors()]
        weight, m, m_scale, v, v_scale, grad = (
            native.Extent.in_memory(tensor.data_ptr(), tensor.nbytes) for tensor in tensors
        )
        update = native.UnitUpdate(
            layout=native.Layout(**LAYOUT, moments=native.DType.INT8),
            count=self.weight.numel(),
            weight=weight,
            master=None,
            exp_avg=m,
            exp_avg_sq=v,
            grad=grad,
            exp_avg_scale=m_scale,
            exp_avg_sq_scale=v_scale,
            runs=[native.Run(*run) for run in runs or [(0, self.weight.numel(), made)]],
            version=1,
        )
        native.Updater(native.IoEngine(kind="threads", threads=1), 0, 0, 0, threads).submit(
            update
        ).wait()
        return tensors


def made(step: int = 3):
    return hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=step)


@pytest.mark.parametrize("sq", [False, True], ids=["exp_avg", "exp_avg_sq"])
def test_codes_mean_what_they_are_said_to(sq):
    """Method: decode every code under many scales, and encode what came out; float64 says the same
    values, and the codes come back. A value half a code further is another code: the comparison can
    fail."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(8)
    scales = torch.tensor(
        [60, 100, 127, 130, 140, 200, 240, 254], dtype=torch.uint8
    ).repeat_interleave(256 // BLOCK)
    codes.view(-1, BLOCK)[:, -1] = (
        255 if sq else 127
    )  # so that every block has a value as large as its scale
    values = native.decode_moments(codes, scales, sq=sq)
    expected = value_of(codes.numpy(), scales.repeat_interleave(BLOCK).numpy(), sq)
    assert np.array_equal(values.numpy(), expected.astype(np.float32))
    again = native.encode_moments(values, sq=sq)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    assert not torch.equal(native.encode_moments(values * 1.07, sq=sq)[0], codes)


@pytest.mark.parametrize("sq", [False, True], ids=["exp_avg", "exp_avg_sq"])
def test_nearest_rounding_is_within_a_twentyth(sq):
    """Method: encode random values over the codes' range to the nearest; the relative error is at
    most 1/16."""
    generator = seeded(SEED)
    binades = 13 if not sq else 29
    values = torch.exp2(-binades * torch.rand(NUMEL, generator=generator))
    values.view(-1, BLOCK)[:, 0] = 1.9
    found = native.decode_moments(*native.encode_moments(values, sq=sq), sq=sq)
    error = ((found - values).abs() / values).max().item()
    assert 1 / 32 < error <= 1 / 16


@pytest.mark.parametrize("unit", UNITS)
def test_a_step_is_the_reference_bit_for_bit(unit, monkeypatch):
    """Method: one AdamW step of every unit beside the numpy reference: weights, codes and
    scales."""
    monkeypatch.setenv("INFINITY_SIMD", unit)
    moments = Moments(seeded(SEED))
    weight, m, m_scale, v, v_scale, _ = moments.step(made())

    k = made()
    m_old = torch.from_numpy(
        value_of(moments.m[0].numpy(), moments.m[1].repeat_interleave(BLOCK).numpy(), False)
    )
    v_old = torch.from_numpy(
        value_of(moments.v[0].numpy(), moments.v[1].repeat_interleave(BLOCK).numpy(), True)
    )
    exact = Exact(moments.weight, m_old.float(), v_old.float(), moments.grad, k)
    assert torch.equal(weight, exact.weight)
    low, high = random20(np.arange(NUMEL), k.step)
    for name, codes, scale, values, twenty, sq in (
        ("exp_avg", m, m_scale, exact.m, low, False),
        ("exp_avg_sq", v, v_scale, exact.v, high, True),
    ):
        expected, scales = reference_codes(values.numpy(), twenty, sq)
        assert np.array_equal(scale.numpy(), scales), name
        assert np.array_equal(codes.numpy(), expected), name


class Exact:
    """The same step with fp32 moments, by the kernel that other tests compare with torch."""

    def __init__(self, weight, m, v, grad, made):
        self.weight, self.m, self.v, grad = (tensor.clone() for tensor in (weight, m, v, grad))
        extents = [
            native.Extent.in_memory(t.data_ptr(), t.nbytes)
            for t in (self.weight, self.m, self.v, grad)
        ]
        update = native.UnitUpdate(
            layout=native.Layout(**LAYOUT, moments=native.DType.FLOAT32),
            count=weight.numel(),
            weight=extents[0],
            master=None,
            exp_avg=extents[1],
            exp_avg_sq=extents[2],
            grad=extents[3],
            runs=[native.Run(0, weight.numel(), made)],
            version=1,
        )
        native.Updater(native.IoEngine(kind="threads", threads=1), 0, 0, 0, 1).submit(update).wait()


def test_units_threads_and_cuts_give_the_same_bits(monkeypatch):
    """Method: every unit, one to three threads, one run or several that end inside a block; another
    step number gives other codes, so the comparison can fail."""
    moments = Moments(seeded(SEED))
    monkeypatch.setenv("INFINITY_SIMD", "scalar")
    for runs in (None, [(0, 100, made()), (128, 4096 + 7, made()), (8192, NUMEL, made())]):
        expected = moments.step(made(), runs=runs)
        for unit in UNITS:
            monkeypatch.setenv("INFINITY_SIMD", unit)
            for threads in (1, 2, 3):
                found = moments.step(made(), threads=threads, runs=runs)
                assert all(torch.equal(one, other) for one, other in zip(found, expected)), (
                    unit,
                    threads,
                )
        monkeypatch.setenv("INFINITY_SIMD", "scalar")
    assert not torch.equal(moments.step(made(4))[1], moments.step(made(3))[1])


def test_rounding_is_unbiased():
    """Method: one value a tenth of the way between two codes, everywhere, stepped without moving;
    the mean of what is kept is the value, within five standard errors. Nearest rounding would
    always give the code below.
    """
    count = 64 * 4096
    moments = Moments(seeded(SEED), count)
    value = 1.0125  # codes are at 1.0 and 1.125
    moments.m = native.encode_moments(torch.full((count,), 2.0), sq=False)
    moments.v = native.encode_moments(torch.ones(count), sq=True)
    moments.grad = torch.full((count,), value)
    still = hyper(lr=0.0, beta1=0.0, beta2=0.0, eps=1e-8, step=5)
    _, m, m_scale, v, v_scale, _ = moments.step(still)
    for found, expected, below, above in (
        (native.decode_moments(m, m_scale, sq=False), value, 1.0, 1.125),
        (native.decode_moments(v, v_scale, sq=True), value**2, 1.0, 1.125),
    ):
        assert set(found.unique().tolist()) == {below, above}
        spread = 0.125 / 2 / count**0.5
        assert abs(found.double().mean().item() - expected) < 5 * spread
        assert abs(found.double().mean().item() - below) > 5 * spread


def test_what_is_divided_by_never_becomes_zero():
    """Method: exp_avg_sq of one block over forty binades; what was above zero stays above zero, and
    zero stays zero."""
    values = torch.exp2(-40 * torch.linspace(0, 1, BLOCK))
    values[7] = 0
    codes, scales = native.encode_moments(values, sq=True)
    assert ((native.decode_moments(codes, scales, sq=True) > 0) == (values > 0)).all()


@pytest.mark.parametrize("word", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(word):
    """Method: one gradient that is not finite; the weight it steps is not finite, and nor is the
    next step's."""
    moments = Moments(seeded(SEED))
    moments.grad[70] = word
    moments.weight, *rest = moments.step(made())
    assert torch.isfinite(moments.weight[:64]).all() and not torch.isfinite(moments.weight[70])
    m, m_scale, v, v_scale, _ = rest
    assert not torch.isfinite(native.decode_moments(m, m_scale, sq=False)[70])
    assert not torch.isfinite(native.decode_moments(v, v_scale, sq=True)[70])


def test_bad_updates_are_refused_with_the_numbers():
    moments = Moments(seeded(SEED))
    with pytest.raises(UsageError, match="run 32 to 64 starts inside a block of 64"):
        moments.step(made(), runs=[(32, 64, made())])
    moments.m = (moments.m[0], moments.m[1][:10])
    with pytest.raises(UsageError, match="a scale in memory for each of 192 blocks"):
        moments.step(made())


def test_flushing_subnormals_changes_no_code():
    """Method: torch.set_flush_denormal(True), under which a subnormal times anything is zero on
    this thread; codes that pass through subnormals are decoded and encoded all the same."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    scales = torch.full((8,), 100, dtype=torch.uint8)
    codes.view(-1, BLOCK)[:, -1] = 127
    expected = native.decode_moments(codes, scales, sq=False)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush subnormals")
        assert (torch.tensor([2.0**-130]) * 2).item() == 0, "the twin: this thread flushes"
        assert torch.equal(native.decode_moments(codes, scales, sq=False), expected)
        assert torch.equal(native.encode_moments(expected, sq=False)[0], codes)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("unit", UNITS)
def test_values_near_the_smallest_numbers_have_the_same_bits(unit, monkeypatch):
    """Method: a block whose largest gradient is 2^-92 and whose others are near 2^-117, so that
    scaling passes through inexact subnormals; every unit gives the scalar one's codes."""
    moments = Moments(seeded(SEED), 64 * 4096)
    moments.grad = moments.grad * 2.0**-114
    moments.grad.view(-1, BLOCK)[:, 0] = 2.0**-92
    moments.m = native.encode_moments(torch.zeros_like(moments.grad), sq=False)
    moments.v = native.encode_moments(torch.zeros_like(moments.grad), sq=True)
    monkeypatch.setenv("INFINITY_SIMD", "scalar")
    expected = moments.step(made(1))
    monkeypatch.setenv("INFINITY_SIMD", unit)
    assert all(torch.equal(one, other) for one, other in zip(moments.step(made(1)), expected))


@pytest.mark.parametrize(
    "codes, scales",
    [
        (torch.zeros(100, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)),
        (torch.zeros(64, dtype=torch.int64), torch.zeros(1, dtype=torch.uint8)),
        (torch.zeros(64, dtype=torch.uint8), torch.zeros(1, dtype=torch.float32)),
    ],
)
def test_codes_that_cannot_be_decoded_are_refused(codes, scales):
    with pytest.raises(UsageError):
        native.decode_moments(codes, scales, sq=False)


# --- the engine ---


def train(homes: tuple[str, str], folder, steps: int = 4, **more):
    model = transformer(SEED, blocks=3, dropout=0.0)
    optimizer = adamw(model, 1e-2)
    config = at_home(*homes, folder, param_dtype="bf16", **{"moments": "int8", **more})
    config = with_least(model, optimizer, config) if "nvme" in homes else config
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    losses = [one_step(model, optimizer, at) for at in range(steps)]
    return model, optimizer, losses


def one_step(model, optimizer, at: int) -> float:
    loss = loss_of(model, tokens(SEED + at))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_where_8_bit_moments_live_changes_no_bit(swap):
    """Method: four steps at five homes; losses, weights and moments are the same bits. fp32 moments
    give others."""

    def work():
        model, optimizer, losses = train(("device", "device"), swap)
        expected, state = model.state_dict(), optimizer.state_dict()["state"]
        for homes in (("host", "host"), ("nvme", "nvme"), ("host", "nvme"), ("device", "host")):
            model, optimizer, found = train(homes, swap)
            assert found == losses and differing(model.state_dict(), expected) == []
            for index, moments in optimizer.state_dict()["state"].items():
                assert all(torch.equal(moments[name], state[index][name]) for name in moments)
        assert train(("host", "host"), swap, moments="fp32")[2] != losses

    in_child(work)
    assert leftovers(swap) == []


def test_checkpoints_and_state_dicts_keep_8_bit_moments_bit_for_bit(swap, tmp_path):
    """Method: save after two steps; a run that loads it, and one that loads the plain state dicts,
    go on with the bits of the run that was never interrupted."""

    def work():
        model, optimizer, _ = train(("nvme", "nvme"), swap, steps=2)
        infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
        weights, state = model.state_dict(), optimizer.state_dict()
        expected = [one_step(model, optimizer, at) for at in (2, 3)]
        other, other_optimizer, _ = train(("host", "host"), swap, steps=0)
        infinity.load_checkpoint(tmp_path / "saved", other, other_optimizer)
        assert [one_step(other, other_optimizer, at) for at in (2, 3)] == expected
        third, third_optimizer, _ = train(("device", "nvme"), swap, steps=1)
        third.load_state_dict(weights)
        third_optimizer.load_state_dict(state)
        assert [one_step(third, third_optimizer, at) for at in (2, 3)] == expected

    in_child(work)


def test_8_bit_moments_take_a_quarter_of_the_bytes(swap):
    """Method: what is at home on disk with fp32 and with 8-bit moments: 12 and 6 bytes per
    parameter of bf16."""

    def work():
        planned = {}
        for moments in ("fp32", "int8"):
            model, _, _ = train(("nvme", "nvme"), swap, steps=1, moments=moments)
            planned[moments] = infinity.stats(model).tiers["nvme"].planned_nbytes
        assert planned["int8"] == planned["fp32"] // 2

    in_child(work)


def test_training_with_8_bit_moments_stays_near_the_exact_run(swap):
    """Method: 60 steps over the same batches with fp32 and with 8-bit moments; both learn, and end
    within 3 %."""

    def work():
        ends = {}
        for moments in ("fp32", "int8"):
            *_, losses = train(("device", "device"), swap, steps=60, moments=moments)
            assert sum(losses[-10:]) < 0.97 * sum(losses[:10])
            ends[moments] = sum(losses[-10:])
        assert abs(ends["int8"] / ends["fp32"] - 1) < 0.03

    in_child(work)
