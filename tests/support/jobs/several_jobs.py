"""Jobs of ranks whose model has several optimizers (see `ranks`)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import infinity
from infinity.ranks.transfer import group_timeout


def _pair() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    first = [*model[:2].parameters(), model[2].weight]
    second = [model[2].bias, *model[3].parameters()]
    return model, [
        torch.optim.SGD(first, lr=0.1, momentum=0.9),
        torch.optim.SGD(second, lr=0.2, momentum=0.5),
    ]


def _clip(optimizer: torch.optim.Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if hasattr(params[0], "_infinity"):
        infinity.clip_grad_norm_(optimizer, 0.05)
    else:
        nn.utils.clip_grad_norm_(params, 0.05)


def _train(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int, *, clips: bool = False
) -> list[float]:
    """Every rank has the same batch, so that the average is what one process computes. The second
    one steps every other time. ``clips``: each by the norm of its own gradients."""
    generator, losses = torch.Generator().manual_seed(seed), []
    for number in range(4):
        loss = model(torch.randn(4, 16, generator=generator)).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers[: 1 + number % 2]:
            if clips:
                _clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def several(folder: str, shard: str) -> dict[str, Any]:
    """Trains, saves, goes on, and loads into another model. Then ranks step different ones."""
    config = {"params": "host", "optimizer": "host", "shard": shard}
    plain = _pair()
    expected = _train(*plain, seed=1)
    model, optimizers = infinity.wrap_model(*_pair(), config)
    losses = _train(model, optimizers, seed=1)
    infinity.save_checkpoint(Path(folder) / "saved", model, optimizers)
    more = _train(model, optimizers, seed=2)
    again, others = infinity.wrap_model(*_pair(), config)
    infinity.load_checkpoint(Path(folder) / "saved", again, others)
    resumed = _train(again, others, seed=2)
    clipped = [
        _train(*each, seed=3, clips=True)
        for each in (_pair(), infinity.wrap_model(*_pair(), config))
    ]
    apart = max(abs(one - other) for one, other in zip(*clipped))
    return {
        "same": losses == expected,
        "resumed": resumed == more,
        "said": _said_by_ranks_that_part(config),
        "clipped": apart < 1e-6 < abs(clipped[0][-1] - _train(*_pair(), seed=3)[-1]),
    }


def _said_by_ranks_that_part(config: dict[str, Any]) -> str:
    """Has each rank step another optimizer. One waits for the other one until the groups' timeout,
    which is shorter for this model."""
    timeout = group_timeout()
    distributed_c10d._set_pg_timeout(timedelta(seconds=8), dist.group.WORLD)
    try:
        model, optimizers = infinity.wrap_model(*_pair(), config)
        model(torch.ones(2, 16)).sum().backward()
        optimizers[dist.get_rank()].step()
        return "nothing"
    except infinity.InfinityError as error:
        return type(error).__name__
    finally:
        distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)


def stages(shard: str) -> dict[str, Any]:
    """Trains in two stages, the second by a later optimizer over the wrapped model; then tries one
    over parameters that were frozen."""

    def trained(wraps: bool) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
        model[0].requires_grad_(False)
        params = [param for param in model.parameters() if param.requires_grad]
        former, later = (torch.optim.AdamW(params, lr=rate) for rate in (0.01, 0.02))
        if wraps:
            config = {"params": "host", "optimizer": "host", "shard": shard}
            model, former = infinity.wrap_model(model, former, config)
        losses = _train(model, [former], seed=1)
        model(torch.ones(2, 16)).sum().backward()
        if wraps:
            model, later = infinity.wrap_model(model, later)
        return losses + _train(model, [later], seed=2), (model, former, later)

    expected, _ = trained(False)
    losses, (model, former, later) = trained(True)
    said = {}
    for name, tried in (
        ("former", former.step),
        ("frozen", lambda: infinity.wrap_model(model, torch.optim.SGD(model[0].parameters()))),
    ):
        try:
            tried()
        except infinity.InfinityError as error:
            said[name] = type(error).__name__ if name == "former" else str(error)
    goes_on = len(_train(model, [later], seed=3)) == 4
    apart = max(abs(one - other) for one, other in zip(losses, expected))
    return {"same": apart < 1e-6, "goes_on": goes_on, **said}
