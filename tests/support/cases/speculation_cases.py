"""What the tests of speculation share: models, jobs, and scripts that are played twice.

Words used here: see `test_speculation` (shadow, twins).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import parts_of
from models import (
    Fail,
    at_home,
    differing,
    least_host_memory,
    loss_of,
    seeded,
    tokens,
    transformer,
)
from torch import nn

import infinity

SEED = 29
LATE = "seed=1,delay=0.3,delay_seconds=0.001,reorder=0.3,short_transfer=0.3"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, which alternate in every unit."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


class Lion(torch.optim.Optimizer):
    """Recognised by its name and hyperparameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1})


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain, self.gains = nn.Linear(64, 64), nn.Parameter(torch.ones(64)), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * self.gain if self.gains else self.linear(x).tanh()


class Odd(nn.Module):
    """Four units: one is used twice, some may be skipped, and the backward may fail before it comes
    to the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.skipped, self.fails = (
            nn.ModuleList(Part() for _ in range(4)),
            set(),
            False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 2, 3, 2):
            x = x if index in self.skipped else self.blocks[index](x)
            x = Fail.apply(x) if self.fails and index == 1 else x
        return x


def loss_of_odd(model: nn.Module, seed: int) -> torch.Tensor:
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    return model(rows.to(next(model.parameters()).dtype)).float().square().mean()


def tiny(blocks: int = 2) -> dict[str, Any]:
    """A transformer of one unit more, whose embedding and head are one weight."""
    return {
        "build": lambda: transformer(SEED, width=32, blocks=blocks),
        "loss": lambda model, seed: loss_of(model, tokens(seed)),
    }


class Job:
    """A wrapped model with its optimizer, and all that is seen of them."""

    def __init__(
        self,
        folder: Path,
        speculate: bool,
        *,
        build: Any = None,
        make=adamw,
        home=("host", "host"),
        loss=loss_of_odd,
        **options,
    ):
        (folder / "swap").mkdir(exist_ok=True)
        self.folder, self.loss_of = folder, loss
        model, config = (
            (build or (lambda: seeded(SEED, Odd)))(),
            at_home(*home, folder / "swap", speculate=speculate, **options),
        )
        if config.get("host_memory") == "least":
            config["host_memory"] = (
                least_host_memory(model, make(model), config) + 4096
            )  # checksums of shadows
        self.model, self.optimizer = infinity.wrap_model(model, make(model), config)
        self.engine = parts_of(self.model).engine
        self.flat_params = [flat for unit in parts_of(self).units for flat in unit.flat_params]
        self.seen: list[torch.Tensor] = []
        self.shadows: list[tuple[int, int]] = []

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @property
    def kept(self) -> list[int]:
        return [kept for _, kept in self.shadows]

    def count(self) -> int:
        """Shadows that are there now."""
        return sum(flat.homes.shadow is not None for flat in self.flat_params)

    def see(self, value: torch.Tensor) -> None:
        self.seen.append(value.detach().clone())

    def backward(self, seed: int) -> None:
        torch.manual_seed(seed)
        loss = self.loss_of(self.model, seed)
        loss.backward()
        self.see(loss)

    def step(self) -> None:
        there, before = self.count(), infinity.stats(self.model).shadows["kept"]
        self.optimizer.step()
        self.shadows.append((there, infinity.stats(self.model).shadows["kept"] - before))
        self.optimizer.zero_grad()

    def clip(self, norm: float) -> None:
        self.see(torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm))

    def state(self) -> dict[str, torch.Tensor]:
        saved, found = self.optimizer.state_dict(), dict(self.model.state_dict())
        for index, of_one in saved["state"].items():
            found |= {f"{index}.{name}": torch.as_tensor(value) for name, value in of_one.items()}
        found["lr"] = torch.tensor([group["lr"] for group in saved["param_groups"]])
        return {name: value.clone() for name, value in found.items()}


def twins(script: Callable[[Job], Any], folder: Path, **setup: Any) -> Job:
    """Plays ``script`` twice and holds one against the other. Returns the job that speculated."""
    plain, ahead = (Job(folder, speculate, **setup) for speculate in (False, True))
    script(plain)
    script(ahead)
    assert len(plain.seen) == len(ahead.seen)
    assert (
        differing(*({str(n): value for n, value in enumerate(job.seen)} for job in (plain, ahead)))
        == []
    )
    assert differing(plain.state(), ahead.state()) == []
    assert sum(there for there, _ in plain.shadows) == 0
    for name, tier in infinity.stats(
        ahead.model
    ).tiers.items():  # what a user gathers is in nobody's plan
        theirs = infinity.stats(plain.model).tiers[
            name
        ]  # what a load keeps for a moment is in no plan
        assert tier.peak_nbytes <= tier.planned_nbytes + max(
            0, theirs.peak_nbytes - theirs.planned_nbytes
        )
        assert tier.planned_nbytes <= (tier.budget_nbytes or tier.planned_nbytes)
    return ahead


def steps(
    count: int, spoil: Callable[[Job], Any] = lambda job: None, at: tuple[int, ...] = (1,)
) -> Callable[[Job], None]:
    """``count`` steps of one backward each; in those ``at``, ``spoil`` comes between."""

    def script(job: Job) -> None:
        for step in range(count):
            job.backward(step)
            if step in at:
                job.ready = job.count()
                spoil(job)
            job.step()

    return script


HOMES: dict[str, dict[str, Any]] = {
    "host": {},
    "nvme": {"home": ("nvme", "nvme")},
    "weights on nvme": {"home": ("nvme", "host")},
    "state on nvme": {"home": ("host", "nvme")},
    "state on the device": {"home": ("host", "device")},
    "cached": {"home": ("nvme", "nvme"), "host_memory": "2MiB", **tiny(4)},
    "gradients on nvme": {"home": ("nvme", "nvme"), "host_memory": "least", **tiny(6)},
    "activations on the host": {"activations": "host", **tiny()},
    "activations on nvme": {"activations": "nvme", "home": ("nvme", "nvme"), **tiny()},
    "micro-batches": {"micro_batch": 1},
    "no checksums": {"checksums": False, "home": ("nvme", "nvme")},
    "threads": {"update_threads": 2},
    "a small window": {"device_memory": "512KiB", **tiny()},
    "trace": {"trace": "trace.json", "home": ("nvme", "nvme")},
}
both_ends = pytest.mark.parametrize("home", ["host", "nvme"])
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split": {"param_dtype": "bf16"},
    "fp32 gradients": {"param_dtype": "bf16", "grad_dtype": "fp32"},
    "fp32 master": {"param_dtype": "bf16", "master": "fp32"},
    "no master": {"param_dtype": "bf16", "master": "none"},
    "int8": {"moments": "int8"},
    "bf16 moments": {"moments": "bf16", "param_dtype": "bf16"},
}


def backwards(*counts: int) -> Callable[[Job], None]:
    """As many in each step."""

    def script(job: Job) -> None:
        for step, count in enumerate(counts):
            for turn in range(count):
                job.backward(10 * step + turn)
            job.step()

    return script
