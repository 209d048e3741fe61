"""What the tests of contract share.

Words used here: **home**, **least**, **child** as in `models.py`. **at rest**: outside a forward or
backward, when a parameter's bytes are at home and it holds none. **touch**: anything that would
need those bytes. What may crash is done in a child: a crash is then one failed test.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    TIERS,
    at_home,
    loss_of,
    tokens,
    transformer,
    with_least,
)
from opened import opened
from runs import adamw
from torch import nn

import infinity

SEED = 30
LR = 1e-2
MIB = 2**20
every_home = pytest.mark.parametrize("home", TIERS)
both_ends = pytest.mark.parametrize("home", ["nvme", "device"])


def wrapped(
    home: str, folder: Path, model: nn.Module | None = None, **more: Any
) -> tuple[Any, Any]:
    """A wrapped transformer (or ``model``); on disk with the least host memory, so with gradients
    on disk too."""
    model = transformer(SEED) if model is None else model
    optimizer = adamw(model, LR)
    config = at_home(home, home, folder, **more)
    return infinity.wrap_model(
        model, optimizer, with_least(model, optimizer, config) if home == "nvme" else config
    )


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, at: int = 0
) -> torch.Tensor:
    """Forward and backward of one batch, and a step where there is an optimizer."""
    torch.manual_seed(at)
    loss = loss_of(model, tokens(SEED + at))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def hooks_of(module: nn.Module) -> dict[str, int]:
    names = [
        name for name in vars(module) if "hook" in name and isinstance(vars(module)[name], dict)
    ]
    return {name: len(vars(module)[name]) for name in names}


def held(folder: Path) -> tuple[int, int, list[str]]:
    """Descriptors, threads, and swap files in ``folder`` and rings that this process holds."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    swap = [target for target in targets if target.startswith(f"{folder}/") or "io_uring" in target]
    return len(targets), opened().threads, swap
