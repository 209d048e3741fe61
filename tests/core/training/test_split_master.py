"""bf16 with a split master, bit for bit, against a reference in plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from models import (
    at_home,
    differing,
    gradients,
    loss_of,
    prescribed,
    ties_away,
    tokens,
    transformer,
)
from runs import adamw
from torch import nn
from training_cases import (
    LR,
    SEED,
    STEPS,
    ReferenceAdamW,
    bf16_transformer,
    both_ends,
    hardest,
    named_grads,
    sizes_of,
    within_ulps,
)

import infinity


def test_ties_away_is_what_it_says():
    """Method: compare with torch's rounding where that is no tie, and with the definition at
    ties."""
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(SEED))
    assert torch.equal(ties_away(values), values.bfloat16())
    tie = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32).view(torch.float32)
    assert torch.equal(
        ties_away(tie).abs().view(torch.int16),
        ((tie.abs().view(torch.int32) >> 16) + 1).to(torch.int16),
    )


@pytest.mark.parametrize(
    "settings",
    [{"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.2}, {"weight_decay": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("grad_dtype", [None, "fp32"])
def test_prescribed_bf16_steps_equal_the_reference_bit_for_bit(settings, grad_dtype, tmp_path):
    """Method: as above over many more steps of prescribed gradients, large and tiny, in bf16 and in
    fp32."""
    plain = prescribed(SEED).bfloat16()
    model = copy.deepcopy(plain)
    reference = ReferenceAdamW(plain, dict(plain.named_parameters()), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **settings)
    config = hardest("nvme", model, optimizer, tmp_path, grad_dtype=grad_dtype)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    for step in range(25):
        given = {
            n: (g * 10.0 ** (step % 9 - 4)).bfloat16()
            for n, g in gradients(plain, SEED + step).items()
        }
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(given)
        assert differing(model.state_dict(), plain.state_dict()) == [], f"after step {step}"


def test_reference_with_ties_to_even_is_seen(tmp_path):
    """Method: the twin; a reference whose weights round to even parts from the engine at the first
    tie, which this gradient makes: from 1 + 2^-7 (odd in bf16) down by exactly half a bf16 ulp."""
    weight = torch.full((64,), 1 + 2**-7, dtype=torch.bfloat16)
    model = nn.LayerNorm(64, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.copy_(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-8)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", tmp_path))
    model.weight.grad = torch.ones(64, dtype=torch.bfloat16)
    optimizer.step()
    tie = weight.float() - 2**-8
    assert not torch.equal(ties_away(tie), tie.bfloat16())
    assert torch.equal(model.state_dict()["weight"], ties_away(tie))


@pytest.mark.parametrize("master", ["split", "fp32"])
@both_ends
def test_narrow_param_dtype_keeps_the_models_values_as_master(master, home, tmp_path):
    """Method: train an fp32 model in bf16; it equals a bf16 model whose masters began as the fp32
    values, bit for bit, and state_dict() and unwrap_model() give the fp32 masters."""
    model = transformer(SEED)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    plain = bf16_transformer()
    rounding = ties_away if master == "split" else torch.Tensor.bfloat16
    reference = ReferenceAdamW(plain, dict(model.named_parameters()), round=rounding)
    optimizer = adamw(model, LR)
    config = hardest(home, model, optimizer, tmp_path, param_dtype="bf16", master=master)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    start = dict(model.named_parameters())
    assert all(p.dtype == torch.bfloat16 for p in start.values())
    assert (
        differing({n: t for n, t in model.state_dict().items() if n in start}, reference.masters)
        == []
    )
    for step in range(3):
        for one in (plain, model):
            torch.manual_seed(step)
            loss_of(one, tokens(SEED + step)).backward()
        reference.step(named_grads(plain))
        plain.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert (
        differing({n: t for n, t in model.state_dict().items() if n in start}, reference.masters)
        == []
    )
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert differing(dict(model.named_parameters()), reference.masters) == []


@both_ends
def test_fp32_master_of_a_bf16_model_equals_the_reference_bit_for_bit(home, tmp_path):
    """Method: master="fp32"; weights are the masters' nearest bf16, ties to even, as torch
    rounds."""
    plain = prescribed(SEED).bfloat16()
    model = copy.deepcopy(plain)
    reference = ReferenceAdamW(plain, dict(plain.named_parameters()), round=torch.Tensor.bfloat16)
    optimizer = adamw(model, LR)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path, master="fp32")
    )
    for step in range(8):
        given = {n: g.bfloat16() for n, g in gradients(plain, SEED + step).items()}
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(given)
    assert differing(model.state_dict(), plain.state_dict()) == []


def test_bf16_moments_equal_the_reference_bit_for_bit(tmp_path):
    """Method: moments="bf16"; a reference whose moments are rounded to bf16 after every step has
    the same bits."""
    plain = prescribed(SEED).bfloat16()
    model = copy.deepcopy(plain)
    reference = ReferenceAdamW(
        plain, dict(plain.named_parameters()), keep=lambda moment: moment.bfloat16().float()
    )
    optimizer = adamw(model, LR)
    config = hardest("nvme", model, optimizer, tmp_path, moments="bf16")
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    for step in range(8):
        given = {n: g.bfloat16() for n, g in gradients(plain, SEED + step).items()}
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(given)
    assert differing(model.state_dict(), plain.state_dict()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both_ends
def test_without_master_the_update_is_in_the_parameters_own_dtype(dtype, home, tmp_path):
    """Method: master="none"; after one step every weight is within an ulp of its own dtype of what
    torch's fused AdamW makes of it (the others round every intermediate, and in fp16 lose eps), and
    an update far below half an ulp leaves the weight alone however often it is repeated, as without
    a master it must."""
    plain = prescribed(SEED).to(dtype)
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, fused=True)
    config = hardest(home, model, optimizer, tmp_path, master="none")
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    largest = sizes_of(plain)
    given = {n: g.to(dtype) for n, g in gradients(plain, SEED).items()}
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        one(given).backward()
        its.step()
        its.zero_grad()
    within_ulps(model.state_dict(), plain.state_dict(), largest, 1)

    kept = model.state_dict()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1e-7, 0.0
    for _ in range(3):
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad()
    large = {name: value.abs() > 0.01 for name, value in kept.items()}
    assert all(
        torch.equal(value[large[name]], kept[name][large[name]])
        for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("unscale", [True, False], ids=["unscaled first", "unscaled in step"])
@both_ends
def test_fp16_with_grad_scaler_skips_an_overflow_exactly(home, unscale, tmp_path):
    """Method: train in fp16 with a scale that overflows first; the overflowing step changes no bit
    of weights, moments or counts, and the run equals a reference with fp32 masters, bit for bit."""
    model = transformer(SEED, blocks=2)
    plain = transformer(SEED, blocks=2).half()
    reference = ReferenceAdamW(plain, dict(model.named_parameters()), round=torch.Tensor.half)
    optimizer = adamw(model, LR)
    config = hardest(home, model, optimizer, tmp_path, param_dtype="fp16", grad_dtype="fp32")
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    skipped = 0
    for step in range(12):
        before, scale = model.state_dict(), scaler.get_scale()
        torch.manual_seed(step)
        (loss_of(plain, tokens(SEED + step)) * scale).backward()
        grads = {
            name: grad.float() * torch.tensor(1 / scale)
            for name, grad in named_grads(plain).items()
        }
        plain.zero_grad()
        torch.manual_seed(step)
        scaler.scale(loss_of(model, tokens(SEED + step))).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < scale:
            skipped += 1
            assert not all(torch.isfinite(grad).all() for grad in grads.values())
            assert differing(model.state_dict(), before) == []
        else:
            reference.step(grads)
    assert 0 < skipped < 10, f"{skipped} of 12 steps were skipped: the test sees one kind only"
    masters = {
        name: value for name, value in model.state_dict().items() if name in reference.masters
    }
    assert differing(masters, reference.masters) == []
    steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
    assert steps == {12 - skipped}


@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("micro_steps", [1, 3])
@both_ends
def test_bf16_split_master_equals_the_reference_bit_for_bit(home, micro_steps, clip, tmp_path):
    """Method: train a bf16 model wrapped, and a plain one whose fp32 masters the test keeps and
    rounds; losses, norms, weights and moments have the same bits, with clipping and accumulated
    gradients too."""
    plain = bf16_transformer()
    model = copy.deepcopy(plain)
    reference = ReferenceAdamW(plain, dict(plain.named_parameters()))
    optimizer = adamw(model, LR)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path)
    )
    for step in range(STEPS):
        seen = []
        for one in (plain, model):
            losses = []
            for micro in range(micro_steps):
                torch.manual_seed(10 * step + micro)
                loss = loss_of(one, tokens(SEED + 10 * step + micro)) / micro_steps
                loss.backward()
                losses.append(loss.detach())
            norm = (
                torch.nn.utils.clip_grad_norm_(one.parameters(), clip)
                if clip
                else torch.tensor(0.0)
            )
            seen.append(torch.stack([*losses, norm.float()]))
        assert torch.equal(*seen), f"step {step}: {seen}"
        reference.step(named_grads(plain))
        plain.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert differing(model.state_dict(), plain.state_dict()) == []
    names = [name for name, _ in plain.named_parameters()]
    state = optimizer.state_dict()["state"]
    assert differing({n: state[i]["exp_avg"] for i, n in enumerate(names)}, reference.m) == []
    assert differing({n: state[i]["exp_avg_sq"] for i, n in enumerate(names)}, reference.v) == []
