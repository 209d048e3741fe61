"""What the tests of checkpoint share.

Words used here: **home**, **child** as in `models.py`. **the job**: seven blocks with dropout,
computing in bf16, AdamW with a schedule, no seeding inside the loop: only saved random state can
make a resumed run meet the same noise. **uninterrupted**: the job's weights, moments and losses
after every step, in one go.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import (
    at_home,
    differing,
    loss_of,
    tokens,
    transformer,
    with_least,
)
from runs import adamw

import infinity
import infinity.ext.checkpoint.pretrained
from infinity.ext.checkpoint.background_save import Saving

SEED = 40
LR = 1e-2


class Job:
    """A wrapped model, its optimizer and its scheduler, and the loop around them."""

    def __init__(
        self, homes: tuple[str, str], folder: Path, *, seed: int = SEED, **more: Any
    ) -> None:
        model = transformer(seed, blocks=more.pop("blocks", 3))
        optimizer = adamw(model, LR)
        config = {"param_dtype": "bf16", **at_home(*homes, folder), **more}
        config = with_least(model, optimizer, config) if "nvme" in homes else config
        self.model, self.optimizer = infinity.wrap_model(model, optimizer, config)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=LR, total_steps=64
        )
        self.losses: dict[int, float] = {}
        self.step = 0

    def run(self, until: int) -> Job:
        while self.step < until:
            # Data by the step's number, noise from the generators.
            loss = loss_of(self.model, tokens(SEED + self.step))
            loss = loss * (1 + 1e-3 * random.random() + 1e-3 * float(np.random.rand()))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses[self.step] = loss.item()
            self.step += 1
        return self

    def save(self, path: Path, *, wait: bool = True) -> Saving | None:
        extra = {"step": self.step, "scheduler": self.scheduler.state_dict()}
        return infinity.save_checkpoint(path, self.model, self.optimizer, extra, wait=wait)

    def load(self, path: Path) -> Job:
        extra = infinity.load_checkpoint(path, self.model, self.optimizer)
        self.step = extra["step"]
        self.scheduler.load_state_dict(extra["scheduler"])
        return self

    def state(self) -> dict[str, torch.Tensor]:
        state = dict(self.model.state_dict())
        for index, entry in self.optimizer.state_dict()["state"].items():
            state |= {f"{index} {name}": torch.as_tensor(value) for name, value in entry.items()}
        return state


def seed_everything() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, tuple[dict[str, torch.Tensor], dict[int, float]]]:
    """State and losses after every one of sixteen steps."""
    torch.set_num_threads(1)
    seed_everything()
    job = Job(("device", "device"), tmp_path_factory.mktemp("none"))
    return {until: (job.run(until).state(), dict(job.losses)) for until in range(17)}


def check_like(job: Job, uninterrupted: dict, first: int) -> None:
    state, losses = uninterrupted[job.step]
    assert {at: loss for at, loss in losses.items() if at >= first} == {
        a: x for a, x in job.losses.items() if a >= first
    }
    assert differing(job.state(), state) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of the job at step 2; to be copied, not changed."""
    torch.set_num_threads(1)
    seed_everything()
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    Job(("host", "host"), path.parent).run(2).save(path)
    return path
