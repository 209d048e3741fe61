"""What loops that know nothing of homes get: their optimizer's own precision, and a line that tells
where the state is."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ...choices import Unset
from ...config import Config
from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import Tier
from ...core.run.registry import wrapped
from ..packed.packed import dense_numel

logger = logging.getLogger(__name__)

PLACES = {"device": "on the device", "host": "on the host", "nvme": "on NVMe"}
AS_TORCH = (
    "bf16 weights are stepped as torch steps them, without fp32 masters, with moments in bf16"
    ' (master="split" is more exact)'
)
WITH_MASTERS = "16-bit weights have fp32 masters, which torch's have not, so numbers differ"


def is_unset(config: Config) -> bool:
    """Tells whether ``config`` leaves the precision of 16-bit weights open."""
    return isinstance(config.master, Unset) and isinstance(config.moments, Unset)


def as_torch_steps(config: Config, optimizers: Iterable[torch.optim.Optimizer]) -> Config:
    """Returns ``config`` with the precision of its ``optimizers``, if it gives none: Adam and AdamW
    keep no master of weights in bf16, and moments in bf16."""
    optimizers = list(optimizers)
    adam = all(isinstance(each, torch.optim.Adam) for each in optimizers)  # AdamW is one
    is_open = is_unset(config) and config.param_dtype is None
    if adam and is_open and _dtypes(optimizers) == {torch.bfloat16}:
        return dataclasses.replace(config, master="none", moments="bf16")
    return config


def tell_home(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Config, config: Config
) -> None:
    """Tells in one line, on the first rank: what is at home now, where, and in which precision.
    ``config``: what :func:`as_torch_steps` made of ``given``. A warning, so that it is seen."""
    job = wrapped(model).engine.job
    if not job.collectives.ranks.is_first:
        return
    count = sum(map(dense_numel, model.parameters()))
    planned = {tier.name.lower(): job.planned.plan.planned_nbytes(tier) for tier in Tier}
    where = [f"{format_nbytes(n)} {PLACES[name]}" for name, n in planned.items() if n]
    precision = ""
    if config is not given:
        precision = f"; {AS_TORCH}"
    elif is_unset(config) and _dtypes([optimizer]) & {torch.bfloat16, torch.float16}:
        precision = f"; {WITH_MASTERS}"
    logger.warning(
        "at home now: %s (%s parameters) and %s, planned with %s%s",
        type(model).__name__,
        f"{count:,}",
        type(optimizer).__name__,
        " and ".join(where),
        precision,
    )


def _dtypes(optimizers: Sequence[torch.optim.Optimizer]) -> set[torch.dtype]:
    groups = [group for each in optimizers for group in each.param_groups]
    return {param.dtype for group in groups for param in group["params"]}
