"""Jobs of ranks that divide a batch by infinity.Shares (see `ranks`).

**pace**: see `infinity.distributed.shares`; here a job makes up each rank's, in place of the clock.
"""

from __future__ import annotations

from typing import Any

import models
import torch
import torch.distributed as dist
from rank_jobs import build, cloned, mesh_of
from torch import nn

import infinity
from infinity.runtime.pace import Pace

BATCH = 12


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch_of(step: int) -> torch.Tensor:
    """The global batch, equal on all ranks."""
    return models.tokens(7000 + step, BATCH)


def train(
    model: nn.Module, optimizer: Any, shares: Any, paces: Any, steps: range, *, clip: float | None
) -> tuple[list[float], list[int]]:
    """The loss of each step's whole batch, and this rank's shares."""
    losses, counts = [], []
    for step in steps:
        x = batch_of(step)[shares.slice]
        loss = models.loss_of(model, x)
        loss.backward()
        if clip is not None:
            infinity.clip_grad_norm_(optimizer, clip)
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(x))
        total = loss.detach() * len(x) / BATCH
        dist.all_reduce(total)
        losses.append(total.item())
        Pace.take = lambda pace: len(x) * paces(step)[dist.get_rank()]
        shares.after_step()
    return losses, counts


def divided(
    config: dict, *, paces: list[float], steps: int, clip=None, shape=None, names=None
) -> dict[str, Any]:
    take = Pace.take
    try:
        model = build()
        model, optimizer = infinity.wrap_model(
            model, sgd(model), config, mesh=mesh_of(shape, names)
        )
        shares = infinity.Shares(batch=BATCH)
        losses, counts = train(
            model, optimizer, shares, lambda step: paces, range(steps), clip=clip
        )
        return {"losses": losses, "counts": counts, "weights": cloned(model.state_dict())}
    finally:
        Pace.take = take
