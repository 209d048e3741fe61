"""A wrapped model trains as plain torch does, and neither homes, budgets, engines nor faults that heal change a bit.

Words used here: **home**, **least** as in `models.py`; **run**, **plain**, **wrapped**, **same bits**, **yardstick** as
in `runs.py`. **prescribed**: with gradients that the test gives, so that two optimizers see the same ones.
**well-conditioned**: AdamW with eps=1e-3; the rounding of a gradient then moves an update by rounding only, so that
plain and wrapped can be held to rtol 1e-5, atol 2e-6, a hundredth of what a forgotten weight decay does in a step.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    TIERS,
    Block,
    at_home,
    differing,
    environment,
    gradients,
    in_child,
    least_host_memory,
    leftovers,
    loss_of,
    prescribed,
    seeded,
    survey,
    ties_away,
    tokens,
    transformer,
    with_least,
)
from runs import Run, Yardstick, adamw, check_same_bits, plain_run, same_bits, ulp, wrapped_run
from torch import nn
from torch.nn import functional as F

import infinity
from infinity import native

SEED = 20
LR = 1e-2
STEPS = 4
CLIP_STEPS = (1, 3)
HOMES = [(params, optimizer) for params in TIERS for optimizer in TIERS]
DTYPES = {"fp32": None, "bf16": "bf16"}

every_home = pytest.mark.parametrize("homes", HOMES, ids="-".join)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


# ---------------------------------------------------------------------------------------------------------------------
# Where state lives changes no bit
# ---------------------------------------------------------------------------------------------------------------------


def train_at(config: dict[str, Any], *, look: Callable[[nn.Module], None] = lambda model: None, noise: int = 0) -> Run:
    """The run that all tests of this section share: dropout on, every step's noise seeded, two steps clipped."""
    return wrapped_run(
        transformer(SEED),
        [tokens(SEED + step) for step in range(STEPS)],
        lr=LR,
        config=config,
        look=look,
        loss_of=loss_of,
        clip_steps=CLIP_STEPS,
        before_forward=lambda step: torch.manual_seed(100 * noise + step),
    )


@pytest.fixture(scope="module")
def on_device() -> dict[str, Run]:
    """The runs with everything on the device: what all others are held against."""
    torch.set_num_threads(1)
    return {name: train_at({"params": "device", "optimizer": "device", "param_dtype": d}) for name, d in DTYPES.items()}


def a_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = transformer(SEED)
    return model, adamw(model, LR)


def planned(config: dict[str, Any], tier: str) -> int:
    model, optimizer = infinity.wrap_model(*a_model(), config)
    return infinity.stats(model).tiers[tier].planned_nbytes


@every_dtype
@pytest.mark.parametrize("budget", ["least", *(pytest.param(b, marks=pytest.mark.slow) for b in ("middle", "ample"))])
@every_home
def test_homes_and_budgets_change_no_bit(homes, budget, dtype, on_device, tmp_path):
    """Method: train with every pair of homes under three host budgets; losses, norms, weights (the masters, in bf16)
    and moments have the bits of the run on the device, and what was charged stayed within plan and budget."""
    config = at_home(*homes, tmp_path, param_dtype=DTYPES[dtype])
    least = least_host_memory(*a_model(), config)
    ample = planned({**config, "host_memory": "1GiB"}, "host")
    assert least <= ample
    config["host_memory"] = {"least": least, "middle": (least + ample) // 2, "ample": "1GiB"}[budget]
    charged = {}

    run = train_at(config, look=lambda model: charged.update(infinity.stats(model).tiers))

    check_same_bits(run, on_device[dtype])
    for tier, account in charged.items():
        assert account.peak_nbytes <= account.planned_nbytes, f"{tier}: {account}"
        assert account.budget_nbytes is None or account.peak_nbytes <= account.budget_nbytes, f"{tier}: {account}"
    assert (charged["nvme"].peak_nbytes > 0) == ("nvme" in homes)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("budget", ["middle", "ample"])
def test_budgets_between_the_least_and_plenty_change_no_bit(budget, on_device, tmp_path):
    """Method: as above, with everything at home on disk."""
    test_homes_and_budgets_change_no_bit(("nvme", "nvme"), budget, "bf16", on_device, tmp_path)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_update_threads_changes_no_bit(threads, on_device, tmp_path):
    """Method: as above, with the optimizer's kernels on one thread and on three."""
    config = at_home("host", "nvme", tmp_path, param_dtype="bf16", update_threads=threads)
    check_same_bits(train_at(config), on_device["bf16"])


def test_one_byte_less_than_the_least_budget_is_refused(tmp_path):
    """Method: the twin of the above; the budget that the CapacityError names works, and one byte less raises."""
    config = at_home("nvme", "nvme", tmp_path)
    least = least_host_memory(*a_model(), config)
    infinity.wrap_model(*a_model(), {**config, "host_memory": least})
    with pytest.raises(infinity.CapacityError, match=f"{least} bytes"):
        infinity.wrap_model(*a_model(), {**config, "host_memory": least - 1})
    assert leftovers(tmp_path) == []


def test_least_budget_sends_gradients_to_disk(tmp_path):
    """Method: compare what is planned for the disk under the least and an ample host budget; so that the tests above
    are known to have had gradients at home on NVMe."""
    config = at_home("nvme", "nvme", tmp_path)
    gradient_nbytes = sum(p.nbytes for p in transformer(SEED).parameters())
    assert planned(with_least(*a_model(), config), "nvme") >= planned(config, "nvme") + gradient_nbytes


@pytest.mark.parametrize("noise", [1])
def test_other_noise_is_seen(noise, on_device, tmp_path):
    """Method: the twin; with other dropout the same comparison raises."""
    with pytest.raises(AssertionError, match="losses"):
        check_same_bits(train_at(at_home("host", "host", tmp_path), noise=noise), on_device["fp32"])


def io_engines() -> list[Any]:
    refused = native.uring_refusal()
    return [pytest.param("uring", marks=pytest.mark.skipif(bool(refused), reason=f"io_uring: {refused}")), "threads"]


@every_dtype
@pytest.mark.parametrize("engine", io_engines())
def test_io_engine_changes_no_bit(engine, dtype, on_device, tmp_path):
    """Method: train from NVMe under the least budget with each I/O engine; the bits are those of the device."""
    with environment(INFINITY_IO=engine):
        config = with_least(*a_model(), at_home("nvme", "nvme", tmp_path, param_dtype=DTYPES[dtype]))
        check_same_bits(train_at(config), on_device[dtype])


@every_dtype
@pytest.mark.parametrize("unit", native.simd_units())
def test_simd_unit_changes_no_bit(unit, dtype, on_device, tmp_path):
    """Method: train with each SIMD unit of this processor; the bits are those of the default one."""
    with environment(INFINITY_SIMD=unit):
        assert native.simd_unit() == unit
        config = with_least(*a_model(), at_home("nvme", "nvme", tmp_path, param_dtype=DTYPES[dtype]))
        check_same_bits(train_at(config), on_device[dtype])


@pytest.mark.parametrize("engine", io_engines())
@pytest.mark.parametrize("faults", ["seed=3,short_transfer=0.3,delay=0.1,reorder=0.3", "seed=4,short_transfer=0.9"])
def test_faults_that_heal_change_no_bit(faults, engine, on_device, tmp_path):
    """Method: shorten, delay and reorder transfers by seed; the bits are those of the run without."""
    with environment(INFINITY_FAULTS=faults, INFINITY_IO=engine):
        config = with_least(*a_model(), at_home("nvme", "nvme", tmp_path, param_dtype="bf16"))
        check_same_bits(train_at(config), on_device["bf16"])


@pytest.mark.parametrize("units", [("Block",), ("Attention", "Linear"), ("TinyTransformer",)], ids="-".join)
def test_choice_of_units_changes_no_bit(units, on_device, tmp_path):
    """Method: move modules of other classes as one; the bits stay."""
    config = with_least(*a_model(), at_home("nvme", "nvme", tmp_path, units=units))
    check_same_bits(train_at(config), on_device["fp32"])


@pytest.mark.parametrize("paths", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_disks_change_no_bit(paths, on_device, tmp_path):
    """Method: spread the homes over several folders; the bits stay, and every folder is emptied."""
    folders = [tmp_path / str(i) for i in range(paths)]
    for folder in folders:
        folder.mkdir()
    config = at_home("nvme", "nvme", tmp_path) | {"nvme_paths": [str(folder) for folder in folders]}
    check_same_bits(train_at(with_least(*a_model(), config)), on_device["fp32"])
    assert [leftovers(folder) for folder in folders] == [[]] * paths


@every_home
def test_device_budget_changes_no_bit(homes, on_device, tmp_path):
    """Method: give the device the least that its CapacityError names; the bits stay and the peak is within it."""
    config = at_home(*homes, tmp_path)
    with pytest.raises(infinity.CapacityError) as refused:
        infinity.wrap_model(*a_model(), {**config, "device_memory": 1})
    words = str(refused.value).split(" bytes)")[1]
    config["device_memory"] = int(words.rsplit("(", 1)[1])
    seen = []
    run = train_at(config, look=lambda model: seen.append(infinity.stats(model).tiers["device"]))
    check_same_bits(run, on_device["fp32"])
    assert seen[0].peak_nbytes <= seen[0].planned_nbytes <= config["device_memory"]


class HalfUsed(nn.Module):
    """Blocks of which each has a parameter that no loss depends on, or a trainable part beside a large frozen one."""

    class Part(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.base = nn.Linear(64, 64)
            self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
            if kind == "unused":
                self.unused = nn.Parameter(torch.zeros(3))
            else:
                self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(self.down(x)) + torch.tanh(self.base(x))

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part(kind) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("kind", ["unused", "adapters"])
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_parameters_without_gradients_do_not_break_the_plan(kind, home, tmp_path):
    """Method: train eight blocks of which each has a parameter that gets no gradient; the device's peak stays within
    its plan from the first step on."""
    model = seeded(SEED, lambda: HalfUsed(kind))
    optimizer = adamw(model, LR)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    for step in range(3):
        model(torch.randn(2, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        device = infinity.stats(model).tiers["device"]
        assert device.peak_nbytes <= device.planned_nbytes, f"step {step}: {device}"


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers as plain torch
# ---------------------------------------------------------------------------------------------------------------------


def test_fp32_equals_plain_adamw_over_several_steps(tmp_path):
    """Method: train plain, plain with 4 ulps of disturbance, and wrapped from NVMe under the least budget; every
    weight is as near to plain torch as rounding explains."""
    batches = [tokens(SEED + step) for step in range(6)]
    loop = {"lr": LR, "clip_steps": CLIP_STEPS, "loss_of": loss_of, "before_forward": torch.manual_seed}
    model = transformer(SEED)
    plain = plain_run(copy.deepcopy(model), batches, **loop)
    nudged = plain_run(copy.deepcopy(model), batches, nudged=True, **loop)
    yardstick = Yardstick.measure(plain, nudged, lr=LR)
    assert yardstick.share_within(1e-2 * LR) > 0.8
    config = with_least(*a_model(), at_home("nvme", "nvme", tmp_path))
    yardstick.check(wrapped_run(model, batches, config=config, **loop))


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, as its users write it."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                beta1, beta2 = group["betas"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                direction = state["exp_avg"].mul(beta1).add(param.grad, alpha=1 - beta1).sign()
                param.add_(direction, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(param.grad, alpha=1 - beta2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=LR),
    "AdamW-settings": lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    "AdamW-low-beta1": lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.3, 0.9)),
    "AdamW-maximize": lambda p: torch.optim.AdamW(p, lr=LR, maximize=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=LR, foreach=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=LR, fused=True),
    "AdamW-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(LR)),
    "Adam": lambda p: torch.optim.Adam(p, lr=LR),
    "Adam-decay": lambda p: torch.optim.Adam(p, lr=LR, weight_decay=0.3),
    "Adam-foreach": lambda p: torch.optim.Adam(p, lr=LR, weight_decay=0.3, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=LR),
    "SGD-decay": lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.3),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.1),
    "SGD-dampening": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, dampening=0.4),
    "SGD-nesterov": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True),
    "SGD-maximize": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.5, maximize=True, foreach=True),
    "Lion": lambda p: Lion(p, lr=LR),
    "Lion-decay": lambda p: Lion(p, lr=LR, betas=(0.95, 0.98), weight_decay=0.3),
}

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
# The hardest home and the easiest: what holds in both may be expected between them.
both_ends = pytest.mark.parametrize("home", ["nvme", "device"])


def hardest(home: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **more: Any) -> dict[str, Any]:
    """Everything at home on ``home``; on disk with the least host memory, so with gradients on disk too."""
    config = at_home(home, home, folder, **more)
    return with_least(model, optimizer, config) if home == "nvme" else config


def within_ulps(ours: dict, theirs: dict, largest: dict, count: int) -> None:
    """Raises unless every element is within ``count`` ulps; the ulp is that of the largest value the element has had,
    which ``largest`` keeps: an element that passes zero keeps the rounding of where it came from."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        largest[name] = torch.maximum(expected.abs(), largest[name])
        size = ulp(largest[name])
        outside = ~((ours[name] - expected).abs() <= count * size)  # so that a NaN fails
        worst = ((ours[name] - expected).abs() / size).max().item() if outside.any() else 0
        assert not bool(outside.any()), f"{name}: {int(outside.sum())} elements are up to {worst:.1f} ulps off, not {count}"


def sizes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().abs() for name, value in model.state_dict().items()}


@every_optimizer
@both_ends
def test_prescribed_gradients_step_as_in_torch(make, home, tmp_path):
    """Method: give the same gradients to a plain and a wrapped optimizer; after one step every weight is within 4 ulps
    of torch's, after five within 4 ulps a step, and so are moments, step counts and what torch keeps beside them."""
    plain = prescribed(SEED)
    model = copy.deepcopy(plain)
    plain_optimizer, optimizer = make(plain.parameters()), make(model.parameters())
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
    largest = sizes_of(plain)
    for step in range(5):
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            one(gradients(plain, SEED + step)).backward()
            its.step()
            its.zero_grad()
        within_ulps(model.state_dict(), plain.state_dict(), largest, 4 * (step + 1))
    ours, theirs = optimizer.state_dict(), plain_optimizer.state_dict()
    for index, expected in theirs["state"].items():
        for key, value in expected.items():
            found = ours["state"][index][key]
            assert (found.dtype, found.shape) == (value.dtype, value.shape), key
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-7, msg=lambda m: f"{index} {key}: {m}")


@every_optimizer
def test_optimizer_state_has_the_keys_that_torch_keeps(make, tmp_path):
    """Method: after a step, compare the keys of state_dict() with the plain optimizer's: no more, no fewer."""
    plain, model = prescribed(SEED), prescribed(SEED)
    plain_optimizer, optimizer = make(plain.parameters()), make(model.parameters())
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", tmp_path))
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        one(gradients(plain, SEED)).backward()
        its.step()
    ours, theirs = optimizer.state_dict(), plain_optimizer.state_dict()
    assert {i: set(s) for i, s in ours["state"].items()} == {i: set(s) for i, s in theirs["state"].items()}
    assert [set(group) for group in ours["param_groups"]] == [set(group) for group in theirs["param_groups"]]


@pytest.mark.parametrize("change", [{"lr": 1.001 * LR}, {"weight_decay": 0.0101}, {"betas": (0.9, 0.9991)}], ids=str)
def test_slightly_wrong_hyperparameters_are_seen(change):
    """Method: the twin; with one hyperparameter a little off, plain torch itself is further than 4 ulps away."""
    one, other = prescribed(SEED), prescribed(SEED)
    largest = sizes_of(one)
    for model, settings in ((one, {}), (other, change)):
        optimizer = torch.optim.AdamW(model.parameters(), **{"lr": LR, **settings})
        for step in range(2):
            model(gradients(one, SEED + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(AssertionError, match="ulps off"):
        within_ulps(other.state_dict(), one.state_dict(), largest, 8)


# --- bf16 with a split master: a reference in plain torch, bit for bit ---


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """a b + c of fp32 tensors, rounded once: the product of two fp32 numbers is exact in fp64."""
    b = b if torch.is_tensor(b) else torch.tensor(b, dtype=torch.float32)
    return (a.double() * b.double() + c.double()).float()


def test_ties_away_is_what_it_says():
    """Method: compare with torch's rounding where that is no tie, and with the definition at ties."""
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(SEED))
    assert torch.equal(ties_away(values), values.bfloat16())
    tie = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32).view(torch.float32)
    assert torch.equal(ties_away(tie).abs().view(torch.int16), ((tie.abs().view(torch.int32) >> 16) + 1).to(torch.int16))


class ReferenceAdamW:
    """AdamW over fp32 masters that the test keeps; ``round`` makes the weights of a plain model of them.

    The order of operations is torch's (`torch/optim/adam.py`, single tensor); each lerp and addcmul rounds as one
    fused multiply-add, and the square root is the nearest one.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: dict[str, torch.Tensor],
        *,
        lr: float = LR,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        round: Callable[[torch.Tensor], torch.Tensor] = ties_away,
        keep: Callable[[torch.Tensor], torch.Tensor] = lambda moment: moment,
    ) -> None:
        self.model, self.round, self.keep = model, round, keep
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.masters = {name: value.detach().float().clone() for name, value in masters.items()}
        self.m = {name: torch.zeros_like(value) for name, value in self.masters.items()}
        self.v = {name: torch.zeros_like(value) for name, value in self.masters.items()}
        self.steps = dict.fromkeys(self.masters, 0)
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        for name, param in self.model.named_parameters():
            param.copy_(self.round(self.masters[name]))

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        beta1, beta2 = self.betas
        for name, grad in grads.items():
            self.steps[name] += 1
            count = self.steps[name]
            p, g, m, v = self.masters[name], grad.float(), self.m[name], self.v[name]
            p = p * (1 - self.lr * self.weight_decay)
            m = fma(g - m, 1 - beta1, m)
            v = fma(g * (1 - beta2), g, v * beta2)
            root = v.double().sqrt().float()
            denominator = root / (1 - beta2**count) ** 0.5 + self.eps
            p = p + (m * -(self.lr / (1 - beta1**count))) / denominator
            self.masters[name], self.m[name], self.v[name] = p, self.keep(m), self.keep(v)
        self.write()


def bf16_transformer() -> nn.Module:
    return transformer(SEED).bfloat16()


def named_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("micro_steps", [1, 3])
@both_ends
def test_bf16_split_master_equals_the_reference_bit_for_bit(home, micro_steps, clip, tmp_path):
    """Method: train a bf16 model wrapped, and a plain one whose fp32 masters the test keeps and rounds; losses, norms,
    weights and moments have the same bits, with clipping and accumulated gradients too."""
    plain = bf16_transformer()
    model = copy.deepcopy(plain)
    reference = ReferenceAdamW(plain, dict(plain.named_parameters()))
    optimizer = adamw(model, LR)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
    for step in range(STEPS):
        seen = []
        for one in (plain, model):
            losses = []
            for micro in range(micro_steps):
                torch.manual_seed(10 * step + micro)
                loss = loss_of(one, tokens(SEED + 10 * step + micro)) / micro_steps
                loss.backward()
                losses.append(loss.detach())
            norm = torch.nn.utils.clip_grad_norm_(one.parameters(), clip) if clip else torch.tensor(0.0)
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


@pytest.mark.parametrize("settings", [{"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.2}, {"weight_decay": 0.0}], ids=str)
@pytest.mark.parametrize("grad_dtype", [None, "fp32"])
def test_prescribed_bf16_steps_equal_the_reference_bit_for_bit(settings, grad_dtype, tmp_path):
    """Method: as above over many more steps of prescribed gradients, large and tiny, in bf16 and in fp32."""
    plain = prescribed(SEED).bfloat16()
    model = copy.deepcopy(plain)
    reference = ReferenceAdamW(plain, dict(plain.named_parameters()), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **settings)
    config = hardest("nvme", model, optimizer, tmp_path, grad_dtype=grad_dtype)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    for step in range(25):
        given = {n: (g * 10.0 ** (step % 9 - 4)).bfloat16() for n, g in gradients(plain, SEED + step).items()}
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(given)
        assert differing(model.state_dict(), plain.state_dict()) == [], f"after step {step}"


def test_reference_with_ties_to_even_is_seen(tmp_path):
    """Method: the twin; a reference whose weights round to even parts from the engine at the first tie, which this
    gradient makes: from 1 + 2^-7 (odd in bf16) down by exactly half a bf16 ulp."""
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
    """Method: train an fp32 model in bf16; it equals a bf16 model whose masters began as the fp32 values, bit for bit,
    and state_dict() and unwrap_model() give the fp32 masters."""
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
    assert differing({n: t for n, t in model.state_dict().items() if n in start}, reference.masters) == []
    for step in range(3):
        for one in (plain, model):
            torch.manual_seed(step)
            loss_of(one, tokens(SEED + step)).backward()
        reference.step(named_grads(plain))
        plain.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert differing({n: t for n, t in model.state_dict().items() if n in start}, reference.masters) == []
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert differing(dict(model.named_parameters()), reference.masters) == []


@both_ends
def test_fp32_master_of_a_bf16_model_equals_the_reference_bit_for_bit(home, tmp_path):
    """Method: master="fp32"; weights are the masters' nearest bf16, ties to even, as torch rounds."""
    plain = prescribed(SEED).bfloat16()
    model = copy.deepcopy(plain)
    reference = ReferenceAdamW(plain, dict(plain.named_parameters()), round=torch.Tensor.bfloat16)
    optimizer = adamw(model, LR)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path, master="fp32"))
    for step in range(8):
        given = {n: g.bfloat16() for n, g in gradients(plain, SEED + step).items()}
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(given)
    assert differing(model.state_dict(), plain.state_dict()) == []


def test_bf16_moments_equal_the_reference_bit_for_bit(tmp_path):
    """Method: moments="bf16"; a reference whose moments are rounded to bf16 after every step has the same bits."""
    plain = prescribed(SEED).bfloat16()
    model = copy.deepcopy(plain)
    reference = ReferenceAdamW(plain, dict(plain.named_parameters()), keep=lambda moment: moment.bfloat16().float())
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
    """Method: master="none"; after one step every weight is within an ulp of its own dtype of what torch's fused AdamW
    makes of it (the others round every intermediate, and in fp16 lose eps), and an update far below half an ulp leaves
    the weight alone however often it is repeated, as without a master it must."""
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
    assert all(torch.equal(value[large[name]], kept[name][large[name]]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("unscale", [True, False], ids=["unscaled first", "unscaled in step"])
@both_ends
def test_fp16_with_grad_scaler_skips_an_overflow_exactly(home, unscale, tmp_path):
    """Method: train in fp16 with a scale that overflows first; the overflowing step changes no bit of weights, moments
    or counts, and the run equals a reference with fp32 masters, bit for bit."""
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
        grads = {name: grad.float() * torch.tensor(1 / scale) for name, grad in named_grads(plain).items()}
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
    masters = {name: value for name, value in model.state_dict().items() if name in reference.masters}
    assert differing(masters, reference.masters) == []
    steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
    assert steps == {12 - skipped}


# ---------------------------------------------------------------------------------------------------------------------
# The ordinary loop, in all its shapes
# ---------------------------------------------------------------------------------------------------------------------


def well_conditioned(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3, weight_decay=0.1)


Loop = Callable[[nn.Module, torch.optim.Optimizer], Any]


def assert_trains_alike(
    loop: Loop,
    model: nn.Module,
    home: str,
    folder: Path,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = well_conditioned,
    rtol: float = 1e-5,
    atol: float = 2e-6,
    **more: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Runs ``loop`` on a plain copy and on the wrapped model; what it returns, weights, buffers and optimizer state
    agree. Returns the wrapped pair."""
    plain = copy.deepcopy(model)
    plain_optimizer = make(plain)
    optimizer = make(model)
    torch.manual_seed(SEED)
    expected = loop(plain, plain_optimizer)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, folder, **more))
    torch.manual_seed(SEED)
    found = loop(model, optimizer)

    def close(ours: Any, theirs: Any, what: str) -> None:
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}")

    close(found, expected, "what the loop saw")
    close(model.state_dict(), plain.state_dict(), "state_dict")
    ours, theirs = optimizer.state_dict(), plain_optimizer.state_dict()
    assert ours["state"].keys() == theirs["state"].keys(), "not the same parameters have state"
    for index, state in theirs["state"].items():
        mine = ours["state"][index]
        close(mine, {key: value for key, value in state.items() if key in mine}, f"state of parameter {index}")
    for mine, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert mine.keys() == group.keys()
        for key in ("lr", "weight_decay", "params", "betas", "initial_lr"):
            assert mine.get(key) == group.get(key), key
    return model, optimizer


def simple_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    loss = loss_of(model, tokens(SEED + step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("fault", ["no weight decay", "a lost step", "a stale unit"])
def test_a_wrong_optimizer_is_seen(fault, tmp_path):
    """Method: the twin of everything below; a wrapped loop with one fault is told from the plain one."""

    def loop(model, optimizer):
        if isinstance(optimizer, torch.optim.AdamW):
            return [simple_step(model, optimizer, step) for step in range(3)]
        if fault == "no weight decay":
            optimizer.param_groups[0]["weight_decay"] = 0.0
        losses = [simple_step(model, optimizer, step) for step in range(3 - (fault == "a lost step"))]
        if fault == "a stale unit":
            with infinity.full_params(model, ["blocks.1"], writeback=True) as params:
                params["blocks.1.norm2.bias"].add_(1e-4)
        return losses + losses[: 3 - len(losses)]

    with pytest.raises(AssertionError):
        assert_trains_alike(loop, transformer(SEED), "host", tmp_path)


def decay_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices and vectors apart, as most training scripts have it, and the embedding with its own rate."""
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "tokens" not in n]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.2},
            {"params": vectors, "weight_decay": 0.0, "lr": 3 * LR},
            {"params": [model.tokens.weight], "betas": (0.5, 0.9), "eps": 1e-2},
        ],
        lr=LR,
        eps=1e-3,
    )


@both_ends
def test_param_groups(home, tmp_path):
    """Method: three groups with other rates, decays and betas, which divide every block; equal to plain torch."""
    assert_trains_alike(lambda m, o: [simple_step(m, o, s) for s in range(3)], transformer(SEED), home, tmp_path, make=decay_groups)


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    "Lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=LR, total_steps=8),
    "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@both_ends
def test_scheduler_created_after_the_wrap(make_scheduler, home, tmp_path):
    """Method: a scheduler over what wrap_model returned steers it as it does plain torch, betas included."""

    def loop(model, optimizer):
        scheduler = make_scheduler(optimizer)
        seen = []
        for step in range(5):
            seen.append(simple_step(model, optimizer, step))
            scheduler.step()
            seen += [torch.tensor(optimizer.param_groups[0][key]) for key in ("lr", "betas")]
        return seen

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("warning", ["ignore", "error"])
def test_scheduler_created_before_the_wrap(make_scheduler, warning, tmp_path):
    """Method: a scheduler over the plain optimizer steers the wrapped one after it, and without a warning."""
    plain, model = transformer(SEED), transformer(SEED)
    plain_optimizer, optimizer = well_conditioned(plain), well_conditioned(model)
    plain_scheduler, scheduler = make_scheduler(plain_optimizer), make_scheduler(optimizer)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest("nvme", model, optimizer, tmp_path))
    torch.manual_seed(SEED)
    expected = []
    for step in range(5):
        expected.append(simple_step(plain, plain_optimizer, step))
        plain_scheduler.step()
    torch.manual_seed(SEED)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter(warning)
        for step in range(5):
            found.append(simple_step(model, optimizer, step))
            scheduler.step()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]


@both_ends
def test_learning_rate_as_tensor(home, tmp_path):
    """Method: a tensor as lr, changed in place between the steps by hand and by a scheduler."""

    def loop(model, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        seen = []
        for step in range(4):
            seen.append(simple_step(model, optimizer, step))
            scheduler.step()
            optimizer.param_groups[0]["lr"].mul_(0.9)
            seen.append(optimizer.param_groups[0]["lr"].clone())
        return seen

    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(LR), eps=1e-3, weight_decay=0.1)

    assert_trains_alike(loop, transformer(SEED), home, tmp_path, make=make)


@both_ends
def test_momentum_switched_on_later(home, tmp_path):
    """Method: SGD without momentum gets some from its group (as OneCycleLR does it) after the wrap; equal to plain
    torch, or a typed error, and never a crash."""

    def loop(model, optimizer):
        for step in range(4):
            simple_step(model, optimizer, step)
            optimizer.param_groups[0]["momentum"] = 0.9

    def work():
        try:
            assert_trains_alike(loop, transformer(SEED), home, tmp_path, make=lambda m: torch.optim.SGD(m.parameters(), lr=LR))
        except infinity.InfinityError as error:
            assert "momentum" in str(error)

    in_child(work)


@pytest.mark.parametrize("how", ["optimizer", "model", "by hand"])
@pytest.mark.parametrize("set_to_none", [True, False])
@both_ends
def test_zero_grad_in_both_forms(home, set_to_none, how, tmp_path):
    """Method: zero by the optimizer, by the model and by hand; zeros are applied by the next step where a parameter
    got nothing else (moments decay, weight decay acts, the count goes up), and None is not, as in torch."""
    skipped = ("pairs.1.matrix", "pairs.5.vector", "scalar")

    def zero(model, optimizer):
        if how == "optimizer":
            return optimizer.zero_grad(set_to_none=set_to_none)
        if how == "model":
            return model.zero_grad(set_to_none=set_to_none)
        for param in model.parameters():
            if param.grad is not None:
                param.grad = None if set_to_none else torch.zeros_like(param.grad)

    def loop(model, optimizer):
        shapes = prescribed(SEED)
        seen = []
        for step in range(4):
            model(gradients(shapes, SEED + step, without=skipped if step % 2 else ())).backward()
            optimizer.step()
            zero(model, optimizer)
            seen.append(torch.tensor([p.grad is None for p in model.parameters()]))
        return seen

    _, optimizer = assert_trains_alike(loop, prescribed(SEED), home, tmp_path)
    steps = [int(state["step"]) for state in optimizer.state_dict()["state"].values()]
    assert set(steps) == ({4, 2} if set_to_none else {4})


@both_ends
def test_step_without_any_gradient_changes_nothing(home, tmp_path):
    """Method: call step() before any backward, and twice after one; torch applies a gradient as often as it is asked
    to, the engine once: the second step must apply it again or raise, never do nothing."""
    model = prescribed(SEED)
    optimizer = well_conditioned(model)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
    before = model.state_dict()
    optimizer.step()
    assert differing(model.state_dict(), before) == []
    plain = prescribed(SEED)
    plain_optimizer = well_conditioned(plain)
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        one(gradients(plain, SEED)).backward()
        its.step()
    plain_optimizer.step()
    try:
        optimizer.step()
    except infinity.UsageError as error:
        assert "zero_grad" in str(error) or "backward" in str(error)
    else:
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)


CLIPS: dict[str, Callable[[list], Any]] = {
    "norm": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1),
    "norm-foreach": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "norm-single": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, foreach=False),
    "norm-inf": lambda p: torch.nn.utils.clip_grad_norm_(p, 1e-3, norm_type=float("inf")),
    "norm-1-foreach": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5, norm_type=1.0, foreach=True),
    "total-norm": lambda p: torch.nn.utils.get_total_norm([q.grad for q in p if q.grad is not None]),
    "total-norm-foreach": lambda p: torch.nn.utils.get_total_norm([q.grad for q in p if q.grad is not None], foreach=True),
    "clip-with-norm": lambda p: torch.nn.utils.clip_grads_with_norm_(p, 0.1, torch.tensor(3.0)),
    "clip-with-norm-foreach": lambda p: torch.nn.utils.clip_grads_with_norm_(p, 0.1, torch.tensor(3.0), foreach=True),
    "value": lambda p: torch.nn.utils.clip_grad_value_(p, 1e-3),
    "value-foreach": lambda p: torch.nn.utils.clip_grad_value_(p, 1e-3, foreach=True),
    "twice": lambda p: [torch.nn.utils.clip_grad_norm_(p, 0.1), torch.nn.utils.clip_grad_norm_(p, 0.05)],
    "seven-times": lambda p: [torch.nn.utils.clip_grad_norm_(p, 0.1 * 0.8**i) for i in range(7)],
    "value-then-norm": lambda p: [torch.nn.utils.clip_grad_value_(p, 1e-3), torch.nn.utils.clip_grad_norm_(p, 0.01)],
    "by-hand": lambda p: [q.grad.mul_(0.1) for q in p if q.grad is not None][:0],
    "by-hand-foreach": lambda p: torch._foreach_mul_([q.grad for q in p if q.grad is not None], 0.1),
    "stacked": lambda p: torch.stack([q.grad.norm() for q in p if q.grad is not None]),
    "flattened": lambda p: torch.cat([q.grad.flatten() for q in p if q.grad is not None]).norm(),
    "cat": lambda p: torch.cat([q.grad for q in p if q.grad is not None and q.dim() == 1]).norm(),
    "row": lambda p: [q.grad[0].zero_() for q in p if q.grad is not None and q.dim() == 2][:0],
    "row-set": lambda p: [q.grad.__setitem__(0, 0.5) for q in p if q.grad is not None and q.dim() == 2][:0],
    "view": lambda p: [q.grad.view(-1)[:3].mul_(5.0) for q in p if q.grad is not None][:0],
    "data": lambda p: [q.grad.data.mul_(0.3) for q in p if q.grad is not None][:0],
    "copy": lambda p: [q.grad.copy_(torch.full_like(q.grad, 0.01)) for q in p if q.grad is not None][:0],
    "assigned": lambda p: [setattr(q, "grad", q.grad * 0.5) for q in p if q.grad is not None][:0],
    "in-place-assigned": lambda p: [setattr(q, "grad", q.grad.__imul__(0.5)) for q in p if q.grad is not None][:0],
    "noise": lambda p: [q.grad.add_(torch.ones_like(q.grad), alpha=1e-3) for q in p if q.grad is not None][:0],
    "masked": lambda p: [q.grad.__setitem__(q.grad > 0, 0.0) for q in p if q.grad is not None][:0],
    "nan-to-num": lambda p: [torch.nan_to_num_(q.grad, 0.0) for q in p if q.grad is not None][:0],
    "finite": lambda p: torch.stack([torch.isfinite(q.grad).all() for q in p if q.grad is not None]),
}


@pytest.fixture(scope="module")
def clipped(tmp_path_factory) -> Callable[[str], dict[str, str]]:
    """What went wrong with each way to change gradients, by home: tried in children, for some may crash."""

    @functools.cache
    def tried(home: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("swap")

        def check(name: str) -> None:
            def loop(model, optimizer):
                loss_of(model, tokens(SEED)).backward()
                seen = CLIPS[name](list(model.parameters()))
                optimizer.step()
                return seen if seen is not None else []

            with contextlib.suppress(infinity.UsageError):
                assert_trains_alike(loop, transformer(SEED, dropout=0.0), home, folder)

        return survey(CLIPS, check)

    return tried


@pytest.mark.parametrize("clip", CLIPS)
@both_ends
def test_changing_gradients_between_backward_and_step(clip, home, clipped):
    """Method: clip, scale and edit gradients in the ways that training code has; what it sees and what the step does
    are plain torch's, or a UsageError says that this way is not open."""
    complaint = clipped(home).get(clip)
    assert complaint is None, complaint


@pytest.mark.parametrize(
    "clip", ["norm", "norm-foreach", "norm-single", "norm-inf", "total-norm", "value", "value-foreach", "by-hand", "data", "finite"]
)
@both_ends
def test_common_ways_to_change_gradients_are_open(clip, home, tmp_path):
    """Method: what the contract names (norms, scaling, clipping by norm or value) works, and no UsageError is raised."""

    def loop(model, optimizer):
        loss_of(model, tokens(SEED)).backward()
        CLIPS[clip](list(model.parameters()))
        optimizer.step()

    assert_trains_alike(loop, transformer(SEED, dropout=0.0), home, tmp_path)


def test_max_grad_norm_clips_as_the_call_does(tmp_path):
    """Method: the config's max_grad_norm gives the bits of clip_grad_norm_ before each step."""
    states = []
    for settings, clip in (({"max_grad_norm": 0.3}, False), ({}, True)):
        model, optimizer = a_model()
        model, optimizer = infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", tmp_path, **settings))
        for step in range(3):
            torch.manual_seed(step)
            loss_of(model, tokens(SEED + step)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert differing(*states) == []


def test_error_if_nonfinite_raises_as_torch_does(tmp_path):
    """Method: clip gradients that are not finite with error_if_nonfinite=True."""
    model = prescribed(SEED)
    optimizer = well_conditioned(model)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest("nvme", model, optimizer, tmp_path))
    given = gradients(prescribed(SEED), SEED)
    given["scalar"].fill_(float("inf"))
    model(given).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@both_ends
def test_parameters_without_a_gradient_keep_their_count(home, tmp_path):
    """Method: leave different parameters out of every step; counts, moments and weights are torch's, which counts
    for each parameter alone."""
    without = [(), ("pairs.0.vector",), ("pairs.0.vector", "pairs.1.matrix", "scalar"), ("transposed",)]

    def loop(model, optimizer):
        shapes = prescribed(SEED)
        for step, names in enumerate(without):
            model(gradients(shapes, SEED + step, without=names)).backward()
            assert {n for n, p in model.named_parameters() if p.grad is None} == set(names)
            optimizer.step()
            optimizer.zero_grad()

    _, optimizer = assert_trains_alike(loop, prescribed(SEED), home, tmp_path)
    names = [name for name, _ in prescribed(SEED).named_parameters()]
    steps = {names[i]: int(state["step"]) for i, state in optimizer.state_dict()["state"].items()}
    assert steps == {name: sum(name not in left for left in without) for name in names}


@both_ends
def test_frozen_parameters_stay(home, tmp_path):
    """Method: freeze a block, the embedding and half of another block; only the rest is in the optimizer."""
    model = transformer(SEED)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].attention.requires_grad_(False)
    model.positions.requires_grad_(False)

    def make(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=1e-3)

    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    model, _ = assert_trains_alike(lambda m, o: [simple_step(m, o, s) for s in range(3)], model, home, tmp_path, make=make)
    state = model.state_dict()
    assert differing({name: state[name] for name in frozen}, frozen) == []


@both_ends
def test_freezing_and_unfreezing_parameters_of_the_optimizer(home, tmp_path):
    """Method: the optimizer has all parameters; some are frozen at the wrap and thawed later, others frozen later."""
    model = transformer(SEED)
    model.blocks[0].requires_grad_(False)
    model.positions.requires_grad_(False)

    def loop(model, optimizer):
        seen = [simple_step(model, optimizer, 0)]
        model.blocks[0].requires_grad_(True)
        model.positions.requires_grad_(True)
        model.blocks[2].requires_grad_(False)
        for step in (1, 2):
            loss_of(model, tokens(SEED + step)).backward()
            seen.append(torch.tensor([p.grad is None for p in model.parameters()]))
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_trains_alike(loop, model, home, tmp_path)


@both_ends
def test_parameters_outside_the_optimizer_gather_gradients_as_in_torch(home, tmp_path):
    """Method: the optimizer has only the head; the rest still gets gradients, which nobody zeroes."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss_of(model, tokens(SEED + step)).backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_trains_alike(
        loop,
        transformer(SEED),
        home,
        tmp_path,
        make=lambda m: torch.optim.AdamW(m.blocks[2].parameters(), lr=LR, eps=1e-3),
    )


@both_ends
def test_state_and_gradients_from_before_the_wrap_are_honoured(home, tmp_path):
    """Method: train two steps by torch alone, half of a third, then wrap and go on."""
    model = transformer(SEED)
    optimizer = well_conditioned(model)
    torch.manual_seed(SEED)
    for step in range(2):
        simple_step(model, optimizer, step)
    loss_of(model, tokens(SEED + 2)).backward()
    plain, plain_optimizer = copy.deepcopy((model, optimizer))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        one.grad = other.grad.clone()  # deepcopy leaves it out
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        torch.manual_seed(1)
        loss_of(one, tokens(SEED + 3)).backward()
        its.step()
        its.zero_grad()
        simple_step(one, its, 4)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    assert {int(s["step"]) for s in optimizer.state_dict()["state"].values()} == {4}


class Normed(nn.Module):
    """Convolution, batch norm, a module that is called twice, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.shared = nn.Conv2d(8, 8, 1)
        self.again = self.shared
        self.linear = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.again(torch.relu(self.shared(self.norm(self.first(x))))).mean((2, 3))
        return self.out(self.linear(torch.tanh(self.linear(x))))


def image(step: int) -> torch.Tensor:
    return torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(step))


@both_ends
def test_buffers_shared_modules_and_modules_called_twice(home, tmp_path):
    """Method: batch norm's running statistics, a counter, a module under two names, a module used twice a forward."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss = model(image(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen += [loss.detach(), model(image(9))]
            model.train()
        return seen

    model, _ = assert_trains_alike(loop, seeded(SEED, Normed), home, tmp_path)
    assert model.again is model.shared and int(model.calls) == 6
    assert "hidden" not in model.state_dict()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_ends
def test_eval_between_steps_and_between_forward_and_backward(home, mode, tmp_path):
    """Method: look at another batch between steps, and between a forward and its backward."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss = loss_of(model, tokens(SEED + step))
            model.eval()
            with mode():
                seen.append(model(tokens(99)).clone().detach())
            model.train()
            loss.backward()
            with mode():
                seen.append(loss_of(model.eval(), tokens(98)).clone().detach())
            model.train()
            optimizer.step()
            with mode():
                seen.append(loss_of(model.eval(), tokens(97)).clone().detach())
            model.train()
            optimizer.zero_grad()
        return [torch.tensor(t.tolist()) for t in seen]

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


def test_first_forward_in_inference_mode_does_not_spoil_training(tmp_path):
    """Method: the very first forward is under inference_mode; what the engine allocates then must still be good for
    autograd."""

    def loop(model, optimizer):
        with torch.inference_mode():
            model(tokens(1))
        return [simple_step(model, optimizer, step) for step in range(2)]

    for home in ("host", "nvme"):
        assert_trains_alike(loop, transformer(SEED), home, tmp_path)


RECOMPUTE = {"reentrant": {"use_reentrant": True}, "saved": {"use_reentrant": False}}


@pytest.mark.parametrize("kind", RECOMPUTE.values(), ids=RECOMPUTE)
@pytest.mark.parametrize("where", ["around", "inside", "both"])
@both_ends
def test_recomputed_activations(home, where, kind, tmp_path):
    """Method: torch.utils.checkpoint of either kind around every block, inside every block, and nested; with dropout,
    whose noise the recomputation must meet again."""
    model = transformer(SEED)
    if where in ("around", "both"):
        model.around = kind
    if where in ("inside", "both"):
        for block in model.blocks:
            block.inside = kind

    def loop(model, optimizer):
        return [simple_step(model, optimizer, step) for step in range(3)]

    model, _ = assert_trains_alike(loop, model, home, tmp_path)
    device = infinity.stats(model).tiers["device"]
    assert device.peak_nbytes <= device.planned_nbytes


@pytest.mark.parametrize("kind", RECOMPUTE.values(), ids=RECOMPUTE)
def test_several_blocks_in_one_checkpoint(kind, tmp_path):
    """Method: one checkpoint over all three blocks, and one over each of them inside it."""
    from torch.utils.checkpoint import checkpoint

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(64, 2, 0.1) for _ in range(3))

        def run(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, **kind)
            return x

        def forward(self, x):
            return checkpoint(self.run, x, **kind)

    def loop(model, optimizer):
        for step in range(2):
            x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(step), requires_grad=True)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_alike(loop, seeded(SEED, Nested), "nvme", tmp_path)


@both_ends
def test_hooks_of_the_user_on_saved_tensors(home, tmp_path):
    """Method: save_on_cpu and a pair of counting hooks around the forward; no weight at home reaches them empty."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.untyped_storage().nbytes() >= tensor.nbytes)
        return tensor.clone()

    def loop(model, optimizer):
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(model, tokens(SEED))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = loss_of(model, tokens(SEED + 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)
    assert sizes and all(sizes)


@both_ends
def test_gradient_accumulation(home, tmp_path):
    """Method: three micro-batches a step, the last through a graph that is kept and run backward twice."""

    def loop(model, optimizer):
        norms = []
        for step in range(2):
            for micro in range(3):
                loss = loss_of(model, tokens(SEED + 3 * step + micro)) / 3
                loss.backward(retain_graph=micro == 2)
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


@both_ends
def test_several_losses_and_several_forwards_before_one_backward(home, tmp_path):
    """Method: two losses of one forward, and two forwards, each backward on its own and as a sum, in either order."""

    def loop(model, optimizer):
        a, b = loss_of(model, tokens(SEED)), loss_of(model, tokens(SEED + 1))
        (a + 0.5 * b).backward()
        optimizer.step()
        optimizer.zero_grad()
        logits = model(tokens(SEED + 2))
        logits.square().mean().backward(retain_graph=True)
        logits.logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        a, b = loss_of(model, tokens(SEED + 3)), loss_of(model, tokens(SEED + 4))
        a.backward()
        b.backward()
        optimizer.step()
        optimizer.zero_grad()
        unused = loss_of(model, tokens(SEED + 5))  # never run backward
        c = loss_of(model, tokens(SEED + 6))
        del unused
        c.backward()
        optimizer.step()

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


@both_ends
def test_gradient_penalty_of_second_order(home, tmp_path):
    """Method: a penalty on the gradient with respect to the input (twice differentiable), as in WGAN-GP; equal to
    plain torch, or a typed error."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x):
            return self.layers(x)

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
            score = model(x).sum()
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            (score + 10 * penalty).backward()
            seen.append(penalty.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def work():
        with contextlib.suppress(infinity.UsageError):
            assert_trains_alike(loop, seeded(SEED, Critic), home, tmp_path)

    in_child(work)


@both_ends
def test_gradients_of_parameters_by_autograd_grad(home, tmp_path):
    """Method: torch.autograd.grad with respect to parameters, and backward(inputs=...); plain torch's, or a typed
    error; other gradients are not disturbed."""

    def loop(model, optimizer):
        loss = loss_of(model, tokens(SEED))
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return [grad.clone() for grad in found]

    def with_inputs(model, optimizer):
        loss = loss_of(model, tokens(SEED))
        loss.backward(inputs=[model.blocks[1].norm1.weight])
        seen = torch.tensor([p.grad is None for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        return seen

    def work():
        for one in (loop, with_inputs):
            with contextlib.suppress(infinity.UsageError):
                assert_trains_alike(one, transformer(SEED), home, tmp_path)

    in_child(work)


@both_ends
def test_backward_through_a_graph_from_before_the_step(home, tmp_path):
    """Method: run backward through a graph whose weights a step has changed since; torch refuses, because the gradient
    would be of other weights than the loss, and so must the engine."""
    plain = transformer(SEED)
    plain_optimizer = well_conditioned(plain)
    model = transformer(SEED)
    optimizer = well_conditioned(model)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))

    def stale(model, optimizer):
        one, other = loss_of(model, tokens(SEED)), loss_of(model, tokens(SEED + 1))
        one.backward()
        optimizer.step()
        optimizer.zero_grad()
        other.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale(plain, plain_optimizer)
    with pytest.raises(RuntimeError):
        stale(model, optimizer)


@both_ends
def test_closure(home, tmp_path):
    """Method: step(closure) runs it with gradients on and returns what it returned, also under no_grad."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, tokens(SEED + step))
                loss.backward()
                return loss

            with torch.no_grad() if step == 1 else contextlib.nullcontext():
                seen.append(optimizer.step(closure).detach())
        return seen

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


def test_step_hooks_of_the_optimizer_run(tmp_path):
    """Method: hooks before and after the step, registered on what wrap_model returned, and on the plain optimizer."""
    model, optimizer = a_model()
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("plain before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("plain after"))
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", tmp_path))
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    simple_step(model, optimizer, 0)
    assert {"before", "after"} <= set(calls)
    assert {"plain before", "plain after"} <= set(calls), "hooks of the optimizer that was wrapped are lost"


@both_ends
def test_hooks_on_parameters_and_modules(home, tmp_path):
    """Method: tensor hooks on parameters that change the gradient, full backward hooks, forward hooks that read the
    weight, registered before and after the wrap."""
    seen = []

    def dress(model):
        model.tokens.weight.register_hook(lambda grad: grad * 2)
        model.blocks[0].norm1.weight.register_hook(lambda grad: grad + 0.1)
        model.blocks[1].register_full_backward_hook(lambda m, gi, go: seen.append(len(gi)))
        model.norm.register_forward_hook(lambda m, args, out: out * m.weight.mean())
        return model

    def loop(model, optimizer):
        losses = [simple_step(model, optimizer, 0)]
        model.norm.bias.register_hook(lambda grad: grad * 3)
        return losses + [simple_step(model, optimizer, step) for step in (1, 2)]

    plain, model = dress(transformer(SEED)), dress(transformer(SEED))
    plain_optimizer, optimizer = well_conditioned(plain), well_conditioned(model)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
    losses = []
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        torch.manual_seed(SEED)
        losses.append(loop(one, its))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    assert len(seen) == 6


@pytest.mark.parametrize("where", ["forward", "backward", "in the loss", "in recomputation"])
@both_ends
def test_a_failed_pass_leaves_no_trace(home, where, tmp_path):
    """Method: one of three steps is first tried with an exception in its middle, then again; losses, weights and
    moments have the bits of a run without the failure."""

    class Fault(Exception):
        pass

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            raise Fault

    def try_to(model):
        handle = None
        if where == "forward":
            handle = model.blocks[1].feed[1].register_forward_pre_hook(lambda *args: raise_fault())
        elif where == "backward":
            handle = model.blocks[1].feed[1].register_forward_hook(lambda m, args, out: Failing.apply(out))
        elif where == "in recomputation":
            handle = model.blocks[1].register_forward_pre_hook(
                lambda *args: raise_fault() if torch._C._current_graph_task_id() != -1 else None
            )
        try:
            with pytest.raises(Fault):
                loss = loss_of(model, tokens(50))
                if where == "in the loss":
                    raise Fault
                loss.backward()
        finally:
            if handle:
                handle.remove()

    def raise_fault():
        raise Fault

    def run(with_failure: bool):
        model = transformer(SEED)
        if where == "in recomputation":
            model.around = {"use_reentrant": False}
        optimizer = adamw(model, LR)
        model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
        losses = []
        for step in range(3):
            if with_failure and step == 1:
                try_to(model)
                optimizer.zero_grad()
            torch.manual_seed(step)
            losses.append(simple_step(model, optimizer, step))
        moments = {f"{i}.{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
        return {str(i): loss for i, loss in enumerate(losses)}, model.state_dict(), moments

    for ours, theirs in zip(run(True), run(False)):
        assert differing(ours, theirs) == []


@pytest.mark.parametrize("home", TIERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inference_without_optimizer(home, dtype, tmp_path):
    """Method: wrap without an optimizer; None comes back for it, outputs have the bits of the plain model's, weights
    stream from their home, and the device never holds them all."""
    plain = transformer(SEED, blocks=6).eval()
    model = copy.deepcopy(plain)
    config = at_home(home, "auto", tmp_path, param_dtype=DTYPES[dtype])
    if DTYPES[dtype]:
        plain.bfloat16()
    wrapped, none = infinity.wrap_model(model, config=config)
    assert wrapped is model and none is None
    with torch.no_grad():
        for step in range(3):
            assert same_bits(model(tokens(step)), plain(tokens(step)))
    stats = infinity.stats(model)
    total = sum(p.nbytes for p in plain.parameters())
    assert stats.tiers["device"].peak_nbytes <= stats.tiers["device"].planned_nbytes
    if home != "device":
        assert stats.tiers["device"].peak_nbytes < 0.8 * total
        assert stats.edges["host->device"].nbytes >= 3 * total * 0.5
    if home == "nvme":
        assert stats.edges["nvme->host"].nbytes >= 3 * total * 0.5
    with torch.inference_mode():
        assert torch.equal(model(tokens(1)), plain(tokens(1)))


@both_ends
def test_backward_without_optimizer_gives_gradients_of_inputs(home, tmp_path):
    """Method: a frozen wrapped model passes gradients to its input, as a perceptual loss or a teacher does."""
    plain = seeded(SEED, lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)))
    plain.requires_grad_(False)
    model, _ = infinity.wrap_model(copy.deepcopy(plain), None, at_home(home, "auto", tmp_path))
    grads = []
    for one in (plain, model):
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        one(x).square().sum().backward()
        grads.append(x.grad)
    assert same_bits(*grads)


@both_ends
def test_two_wrapped_models_in_one_graph(home, tmp_path):
    """Method: a student learns from a wrapped teacher, both streaming; then two trained models in one loss."""
    plain_teacher, plain = transformer(SEED + 1), transformer(SEED)
    teacher, model = copy.deepcopy(plain_teacher), copy.deepcopy(plain)
    plain_pair = [well_conditioned(plain), well_conditioned(plain_teacher)]
    pair = [well_conditioned(model), well_conditioned(teacher)]
    model, pair[0] = infinity.wrap_model(model, pair[0], hardest(home, model, pair[0], tmp_path))
    teacher, pair[1] = infinity.wrap_model(teacher, pair[1], hardest(home, teacher, pair[1], tmp_path))

    def loop(student, teacher, optimizers):
        losses = []
        for step in range(3):
            ids = tokens(SEED + step)
            if step:
                target = teacher(ids)
            else:
                with torch.no_grad():
                    target = teacher(ids)
            loss = F.mse_loss(student(ids), target) + loss_of(student, ids)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    torch.manual_seed(SEED)
    expected = loop(plain, plain_teacher, plain_pair)
    torch.manual_seed(SEED)
    found = loop(model, teacher, pair)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(teacher.state_dict(), plain_teacher.state_dict(), rtol=1e-5, atol=2e-6)


@both_ends
def test_autocast(home, tmp_path):
    """Method: fp32 weights under torch.autocast to bf16; its cache of cast weights must not outlive a step."""

    def loop(model, optimizer):
        losses = []
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, tokens(SEED + step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    assert_trains_alike(loop, transformer(SEED), home, tmp_path, rtol=1e-4, atol=1e-5)


class Recurrent(nn.Module):
    """Modules that use their children's weights themselves: an LSTM, multi-head attention, parametrized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.orthogonal = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x)
        return self.orthogonal(torch.relu(self.normed(self.encoder(x))))


@both_ends
def test_modules_that_use_their_childrens_weights(home, tmp_path):
    """Method: torch's own modules that bypass their children's forward, in training and in their fast path."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen += [loss.detach(), model(x)]
            model.train()
        return seen

    assert_trains_alike(loop, seeded(SEED, Recurrent), home, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_share_storage_without_being_one(tmp_path):
    """Method: tie two parameters by their data, not by identity: torch updates the shared bytes twice. The engine must
    do the same or refuse; training them apart would be another model."""

    def build():
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        model[2].weight.data = model[0].weight.data
        return model

    def loop(model, optimizer):
        for step in range(2):
            model(torch.randn(3, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, model = seeded(SEED, build), seeded(SEED, build)
    plain_optimizer = well_conditioned(plain)
    loop(plain, plain_optimizer)
    try:
        model, optimizer = infinity.wrap_model(model, well_conditioned(model), at_home("host", "host", tmp_path))
    except infinity.ConfigError:
        return
    loop(model, optimizer)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)


@both_ends
def test_a_worker_process_that_ends_leaves_the_job_alone(home, tmp_path):
    """Method: a data loader with forked workers, and a forked child that exits by itself (so that its exit handlers
    run), while a wrapped model trains; it trains on, with its swap file in place."""
    import os

    def work():
        model, optimizer = a_model()
        model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
        simple_step(model, optimizer, 0)
        before = sorted(os.listdir(tmp_path))
        loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, num_workers=2, multiprocessing_context="fork")
        for step, _ in enumerate(loader):
            simple_step(model, optimizer, step)
        child = os.fork()
        if not child:
            import atexit

            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
        assert sorted(os.listdir(tmp_path)) == before, "the child removed its parent's swap folder"
        simple_step(model, optimizer, 9)
        return None

    in_child(work)


Pair = collections.namedtuple("Pair", "x state")


@dataclasses.dataclass
class Output:
    x: torch.Tensor
    state: list


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "namedtuple", "dataclass", "odict", "object"])
@both_ends
def test_what_a_forward_returns_is_handed_on_as_it_is(kind, home, tmp_path):
    """Method: modules that return containers, with a list in them that the module and its caller both keep and change,
    as caches are; types and identities are those that the module returned."""

    class Thing:
        def __init__(self, x, state):
            self.x, self.state = x, state

    make = {
        "tuple": lambda x, s: (x, s), "list": lambda x, s: [x, s], "dict": lambda x, s: {"x": x, "state": s},
        "namedtuple": Pair, "dataclass": Output, "odict": lambda x, s: collections.OrderedDict(x=x, state=s),
        "object": Thing,
    }[kind]  # fmt: skip

    class Layer(nn.Linear):
        def forward(self, x, state):
            state.append(x.sum().item())
            self.returned = make(super().forward(x), state)
            return self.returned

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(64, 64) for _ in range(4))

        def forward(self, x):
            state: list = []
            for layer in self.layers:
                out = layer(x, state)
                assert out is layer.returned and type(out) is type(make(x, state))
                if isinstance(out, dict):
                    x, kept = out["x"], out["state"]
                elif isinstance(out, (tuple, list)):
                    x, kept = out
                else:
                    x, kept = out.x, out.state
                assert kept is state
            assert len(state) == 4
            return x

    def loop(model, optimizer):
        for step in range(2):
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_alike(loop, seeded(SEED, Stack), home, tmp_path)


class Wandering(nn.Module):
    """Blocks that are skipped, repeated and called in changing order, and one that calls itself."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            x = x + torch.tanh(self.linear(self.norm(x)))
            return self(x, depth - 1) if depth else x

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(self.Step() for _ in range(8))
        self.path: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.path:
            x = self.steps[index](x, depth=index % 3)
        return x


@both_ends
def test_another_way_through_the_model_every_time(home, tmp_path):
    """Method: a seeded path through eight blocks, another one each step, with repeats, skips and recursion."""
    paths = [torch.randint(8, (6,), generator=torch.Generator().manual_seed(SEED + i)).tolist() for i in range(8)]

    def loop(model, optimizer):
        seen = []
        for path in paths:
            model.path = path
            loss = model(torch.ones(2, 64)).square().mean()
            loss.backward()
            seen.append(torch.tensor([p.grad is None for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    model, _ = assert_trains_alike(loop, seeded(SEED, Wandering), home, tmp_path)
    device = infinity.stats(model).tiers["device"]
    assert device.peak_nbytes <= device.planned_nbytes


@both_ends
def test_a_wrapped_part_of_a_larger_model(home, tmp_path):
    """Method: wrap the backbone only; a plain head and a plain input layer around it train with an optimizer of their
    own, in the same backward."""
    plain, model = transformer(SEED), transformer(SEED)
    heads = [seeded(1, lambda: nn.Linear(67, 3)) for _ in range(2)]
    plain_optimizer, optimizer = well_conditioned(plain), well_conditioned(model)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
    losses = []
    for one, its, head in ((plain, plain_optimizer, heads[0]), (model, optimizer, heads[1])):
        whole = nn.Sequential(one, head)
        others = torch.optim.AdamW(head.parameters(), lr=LR, eps=1e-3)
        torch.manual_seed(SEED)
        for step in range(3):
            loss = whole(tokens(step)).square().mean()
            loss.backward()
            losses.append(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
            its.step()
            others.step()
            whole.zero_grad()
    torch.testing.assert_close(losses[3:], losses[:3], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(heads[1].state_dict(), heads[0].state_dict(), rtol=1e-5, atol=2e-6)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "anomaly detection": torch.autograd.set_detect_anomaly,
    "deterministic algorithms": deterministic,
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("cpu"),
    "default device meta": lambda: torch.device("meta"),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@both_ends
def test_modes_of_torch_change_nothing(mode, home, tmp_path):
    """Method: wrap and train inside a mode of torch that has nothing to do with it; the bits of a run outside."""
    states = []
    ids = [tokens(SEED + step) for step in range(2)]
    for inside in (False, True):
        model = transformer(SEED, dropout=0.0)
        optimizer = adamw(model, LR)
        config = hardest(home, model, optimizer, tmp_path)
        enter = MODES[mode] if inside else contextlib.nullcontext
        with enter(*([True] if enter is torch.autograd.set_detect_anomaly else [])):
            model, optimizer = infinity.wrap_model(model, optimizer, config)
            for batch in ids:
                loss_of(model, batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            states.append(dict(model.state_dict()))
            state = optimizer.state_dict()["state"]
            states[-1] |= {f"{i} {k}": v for i, entry in state.items() for k, v in entry.items() if k != "step"}
            # torch itself counts in fp64 where that is the default dtype.
            assert {float(entry["step"]) for entry in state.values()} == {2.0}
            assert {entry["step"].dtype for entry in state.values()} <= {torch.float32, torch.float64}
        del model, optimizer
    assert differing(*states) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_ends
def test_wrapping_inside_a_mode_without_gradients(home, mode, tmp_path):
    """Method: call wrap_model under no_grad and inference_mode, train outside; the bits of a wrap outside, or a typed
    error at the wrap."""
    states = []
    for enter in (contextlib.nullcontext, mode):
        model = transformer(SEED, dropout=0.0)
        optimizer = adamw(model, LR)
        config = hardest(home, model, optimizer, tmp_path)
        try:
            with enter():
                model, optimizer = infinity.wrap_model(model, optimizer, config)
        except infinity.InfinityError:
            return
        for step in range(2):
            loss_of(model, tokens(SEED + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
        del model, optimizer
    assert differing(*states) == []


@both_ends
def test_an_embedding_that_renormalises_itself(home, tmp_path):
    """Method: nn.Embedding with max_norm and padding_idx changes its own weight in every forward."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(67, 64, max_norm=0.5, padding_idx=0)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def loop(model, optimizer):
        losses = []
        for step in range(3):
            loss = model(tokens(SEED + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    assert_trains_alike(loop, seeded(SEED, Bag), home, tmp_path)


@both_ends
def test_functional_call_with_other_tensors(home, tmp_path):
    """Method: torch.func.functional_call replaces the parameters for one call; output and gradients are those of the
    tensors that were given, and the model is untouched."""
    plain, model = transformer(SEED, dropout=0.0), transformer(SEED, dropout=0.0)
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), at_home(home, home, tmp_path))
    before = dict(model.state_dict())
    found = []
    for one in (plain, model):
        given = {name: (2 * value).detach().requires_grad_() for name, value in plain.named_parameters()}
        out = torch.func.functional_call(one, given, (tokens(SEED),)).square().mean()
        found.append([out.detach(), *torch.autograd.grad(out, list(given.values()), allow_unused=True)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
    assert differing(dict(model.state_dict()), before) == []
    simple_step(model, optimizer, 0)


# ---------------------------------------------------------------------------------------------------------------------
# transformers, accelerate, peft
# ---------------------------------------------------------------------------------------------------------------------


def gpt2(**changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 67, "n_positions": 32, "bos_token_id": 0,
             "eos_token_id": 1, "pad_token_id": 2}  # fmt: skip
    config = transformers.GPT2Config(**{**sizes, **changes})
    return seeded(SEED, lambda: transformers.GPT2LMHeadModel(config))


@both_ends
def test_generate_between_steps(home, tmp_path):
    """Method: greedy and sampled generation between steps gives the tokens that plain torch's does."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss = model(tokens(SEED + step), labels=tokens(SEED + step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            prompt = {"input_ids": tokens(SEED)[:, :4], "attention_mask": torch.ones(3, 4, dtype=torch.long)}
            seen.append(model.generate(**prompt, max_new_tokens=5, do_sample=False))
            seen.append(model.generate(**prompt, max_new_tokens=5, num_beams=2, do_sample=False))
            model.train()
        return [tensor.clone() for tensor in seen]

    assert_trains_alike(loop, gpt2(), home, tmp_path)


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens(i, 1)[0], "labels": tokens(i, 1)[0]} for i in range(count)]


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **changes: Any) -> Any:
    import transformers

    arguments = {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 2, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "seed": SEED,
        "max_grad_norm": 0.5, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**{**arguments, **changes})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=rows(40), eval_dataset=rows(4), optimizers=(optimizer, scheduler)
    )


@pytest.mark.filterwarnings("ignore")
@both_ends
def test_trainer_of_transformers(home, tmp_path):
    """Method: Trainer for five steps with accumulation, clipping and a schedule, once with the plain pair and once with
    the wrapped one; the logged losses and norms and the weights agree, and evaluation runs."""
    pytest.importorskip("accelerate")
    plain, model = gpt2(), gpt2()
    optimizer = well_conditioned(model)
    (tmp_path / "swap").mkdir()
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path / "swap"))
    logs = []
    for one, its in ((plain, well_conditioned(plain)), (model, optimizer)):
        job = trainer(one, its, tmp_path / "out")
        job.train()
        logs.append([{k: entry[k] for k in ("loss", "grad_norm", "learning_rate")} for entry in job.state.log_history[:5]])
        logs[-1].append({"eval_loss": job.evaluate()["eval_loss"]})
    for ours, theirs in zip(*logs, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_trainer_saves_a_wrapped_model_that_transformers_loads(tmp_path):
    """Method: Trainer.save_model on a wrapped model; from_pretrained gives its weights."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = gpt2()
    (tmp_path / "swap").mkdir()
    model, optimizer = infinity.wrap_model(model, well_conditioned(model), at_home("nvme", "nvme", tmp_path / "swap"))
    job = trainer(model, optimizer, tmp_path / "out", max_steps=2)
    job.train()
    job.save_model(str(tmp_path / "saved"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert differing(loaded.state_dict(), model.state_dict()) == []


@pytest.mark.filterwarnings("ignore")
def test_trainer_resumes_from_its_own_checkpoint(tmp_path):
    """Method: Trainer with save_steps=2 over a wrapped pair; another Trainer over a fresh pair resumes from it and ends
    as the one that was not interrupted."""
    pytest.importorskip("accelerate")
    ends = []
    for resume in (False, True):
        swap = tmp_path / f"swap{resume}"
        swap.mkdir()
        model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        optimizer = well_conditioned(model)
        model, optimizer = infinity.wrap_model(model, optimizer, hardest("nvme", model, optimizer, swap))
        job = trainer(model, optimizer, tmp_path / "out", save_strategy="steps", save_steps=2, max_steps=4)
        job.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2") if resume else None)
        ends.append(model.state_dict())
        del model, optimizer, job
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@both_ends
def test_prepare_of_accelerate(home, tmp_path):
    """Method: Accelerator.prepare on the wrapped pair, a loader and a scheduler; its loop equals the plain one."""
    accelerate = pytest.importorskip("accelerate")

    def run(model, optimizer):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader([tokens(i, 1)[0] for i in range(12)], batch_size=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        seen = []
        for ids in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, ids)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(loss.detach())
        return [torch.as_tensor(item) for item in seen], accelerator.unwrap_model(model)

    plain, model = transformer(SEED), transformer(SEED)
    optimizer = well_conditioned(model)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
    torch.manual_seed(SEED)
    expected, _ = run(plain, well_conditioned(plain))
    torch.manual_seed(SEED)
    found, inner = run(model, optimizer)
    assert inner is model
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore")
@both_ends
def test_adapters_of_peft(home, tmp_path):
    """Method: LoRA over a wrapped GPT-2; adapters train as in plain torch, merging and disabling them works or says
    why not, and the peak stays within the plan."""
    peft = pytest.importorskip("peft")

    def build():
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.0)
        return peft.get_peft_model(gpt2(n_layer=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), settings)

    def loop(model, optimizer):
        losses = []
        for step in range(3):
            loss = model(input_ids=tokens(SEED + step), labels=tokens(SEED + step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    plain, model = seeded(SEED, build), seeded(SEED, build)

    def make(m):
        return torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=LR, eps=1e-3)

    expected = loop(plain, make(plain))
    optimizer = make(model)
    model, optimizer = infinity.wrap_model(model, optimizer, hardest(home, model, optimizer, tmp_path))
    torch.testing.assert_close(loop(model, optimizer), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    device = infinity.stats(model).tiers["device"]
    assert device.peak_nbytes <= device.planned_nbytes
    adapters = peft.get_peft_model_state_dict(model)
    assert differing(adapters, {name: value for name, value in peft.get_peft_model_state_dict(model).items()}) == []
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(model(input_ids=tokens(1)).logits, plain(input_ids=tokens(1)).logits)


class Rescaled(nn.Module):
    """Halves its blocks' weights in the first forward of an evaluation, from outside the blocks (as RWKV does)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.halved = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and not self.halved:
            with torch.no_grad():
                for block in self.blocks:
                    block.weight.div_(2)
            self.halved = True
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_weights_changed_in_place_from_outside_their_block(home, tmp_path):
    """Method: a model that rescales its blocks inside its own forward; outputs and the state dict are plain torch's."""
    plain = seeded(SEED, Rescaled).eval()
    model, _ = infinity.wrap_model(seeded(SEED, Rescaled).eval(), None, at_home(home, "auto", tmp_path))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(torch.ones(2, 16)), plain(torch.ones(2, 16)))
    assert differing(model.state_dict(), plain.state_dict()) == []
