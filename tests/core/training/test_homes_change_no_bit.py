"""Where state lives changes no bit of a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    TIERS,
    at_home,
    environment,
    least_host_memory,
    leftovers,
    loss_of,
    seeded,
    tokens,
    transformer,
    with_least,
)
from runs import Run, adamw, check_same_bits, wrapped_run
from torch import nn
from training_cases import CLIP_STEPS, DTYPES, LR, SEED, STEPS, a_model

import infinity
from infinity import native

HOMES = [(params, optimizer) for params in TIERS for optimizer in TIERS]

every_home = pytest.mark.parametrize("homes", HOMES, ids="-".join)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def train_at(
    config: dict[str, Any],
    *,
    look: Callable[[nn.Module], None] = lambda model: None,
    noise: int = 0,
) -> Run:
    """The run that all tests of this section share: dropout on, every step's noise seeded, two
    steps clipped."""
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
    return {
        name: train_at({"params": "device", "optimizer": "device", "param_dtype": d})
        for name, d in DTYPES.items()
    }


def planned(config: dict[str, Any], tier: str) -> int:
    model, optimizer = infinity.wrap_model(*a_model(), config)
    return infinity.stats(model).tiers[tier].planned_nbytes


@every_dtype
@pytest.mark.parametrize(
    "budget", ["least", *(pytest.param(b, marks=pytest.mark.slow) for b in ("middle", "ample"))]
)
@every_home
def test_homes_and_budgets_change_no_bit(homes, budget, dtype, on_device, tmp_path):
    """Method: train with every pair of homes under three host budgets; losses, norms, weights (the
    masters, in bf16) and moments have the bits of the run on the device, and what was charged
    stayed within plan and budget.
    """
    config = at_home(*homes, tmp_path, param_dtype=DTYPES[dtype])
    least = least_host_memory(*a_model(), config)
    ample = planned({**config, "host_memory": "1GiB"}, "host")
    assert least <= ample
    config["host_memory"] = {"least": least, "middle": (least + ample) // 2, "ample": "1GiB"}[
        budget
    ]
    charged = {}

    run = train_at(config, look=lambda model: charged.update(infinity.stats(model).tiers))

    check_same_bits(run, on_device[dtype])
    for tier, account in charged.items():
        assert account.peak_nbytes <= account.planned_nbytes, f"{tier}: {account}"
        assert account.budget_nbytes is None or account.peak_nbytes <= account.budget_nbytes, (
            f"{tier}: {account}"
        )
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
    """Method: the twin of the above; the budget that the CapacityError names works, and one byte
    less raises."""
    config = at_home("nvme", "nvme", tmp_path)
    least = least_host_memory(*a_model(), config)
    infinity.wrap_model(*a_model(), {**config, "host_memory": least})
    with pytest.raises(infinity.CapacityError, match=f"{least} bytes"):
        infinity.wrap_model(*a_model(), {**config, "host_memory": least - 1})
    assert leftovers(tmp_path) == []


def test_least_budget_sends_gradients_to_disk(tmp_path):
    """Method: compare what is planned for the disk under the least and an ample host budget; so
    that the tests above are known to have had gradients at home on NVMe."""
    config = at_home("nvme", "nvme", tmp_path)
    gradient_nbytes = sum(p.nbytes for p in transformer(SEED).parameters())
    assert (
        planned(with_least(*a_model(), config), "nvme") >= planned(config, "nvme") + gradient_nbytes
    )


@pytest.mark.parametrize("noise", [1])
def test_other_noise_is_seen(noise, on_device, tmp_path):
    """Method: the twin; with other dropout the same comparison raises."""
    with pytest.raises(AssertionError, match="losses"):
        check_same_bits(train_at(at_home("host", "host", tmp_path), noise=noise), on_device["fp32"])


def io_engines() -> list[Any]:
    refused = native.uring_refusal()
    return [
        pytest.param(
            "uring", marks=pytest.mark.skipif(bool(refused), reason=f"io_uring: {refused}")
        ),
        "threads",
    ]


@every_dtype
@pytest.mark.parametrize("engine", io_engines())
def test_io_engine_changes_no_bit(engine, dtype, on_device, tmp_path):
    """Method: train from NVMe under the least budget with each I/O engine; the bits are those of
    the device."""
    with environment(INFINITY_IO=engine):
        config = with_least(
            *a_model(), at_home("nvme", "nvme", tmp_path, param_dtype=DTYPES[dtype])
        )
        check_same_bits(train_at(config), on_device[dtype])


@every_dtype
@pytest.mark.parametrize("unit", native.simd_units())
def test_simd_unit_changes_no_bit(unit, dtype, on_device, tmp_path):
    """Method: train with each SIMD unit of this processor; the bits are those of the default
    one."""
    with environment(INFINITY_SIMD=unit):
        assert native.simd_unit() == unit
        config = with_least(
            *a_model(), at_home("nvme", "nvme", tmp_path, param_dtype=DTYPES[dtype])
        )
        check_same_bits(train_at(config), on_device[dtype])


@pytest.mark.parametrize(
    "units", [("Block",), ("Attention", "Linear"), ("TinyTransformer",)], ids="-".join
)
def test_choice_of_units_changes_no_bit(units, on_device, tmp_path):
    """Method: move modules of other classes as one; the bits stay."""
    config = with_least(*a_model(), at_home("nvme", "nvme", tmp_path, units=units))
    check_same_bits(train_at(config), on_device["fp32"])


@pytest.mark.parametrize("paths", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_mlp_offload_several_disks_change_no_bit(paths, on_device, tmp_path):
    """Method: spread the homes over several folders; the bits stay, and every folder is emptied."""
    folders = [tmp_path / str(i) for i in range(paths)]
    for folder in folders:
        folder.mkdir()
    config = at_home("nvme", "nvme", tmp_path) | {"nvme_paths": [str(folder) for folder in folders]}
    check_same_bits(train_at(with_least(*a_model(), config)), on_device["fp32"])
    assert [leftovers(folder) for folder in folders] == [[]] * paths


@every_home
def test_device_budget_changes_no_bit(homes, on_device, tmp_path):
    """Method: give the device the least that its CapacityError names; the bits stay and the peak is
    within it."""
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
    """Blocks of which each has a parameter that no loss depends on, or a trainable part beside a
    large frozen one."""

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
    """Method: train eight blocks of which each has a parameter that gets no gradient; the device's
    peak stays within its plan from the first step on."""
    model = seeded(SEED, lambda: HalfUsed(kind))
    optimizer = adamw(model, LR)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    for step in range(3):
        model(
            torch.randn(2, 64, generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        device = infinity.stats(model).tiers["device"]
        assert device.peak_nbytes <= device.planned_nbytes, f"step {step}: {device}"
