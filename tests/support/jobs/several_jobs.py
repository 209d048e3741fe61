"""Jobs of ranks whose model has several optimizers (see `ranks`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity


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
    """Trains, saves, goes on, and loads into another model. Then one rank steps another one."""
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
    again(torch.ones(2, 16)).sum().backward()
    try:
        others[dist.get_rank()].step()
        said = "nothing"
    except infinity.InfinityError as error:
        said = type(error).__name__
    clipped = [
        _train(*each, seed=3, clips=True)
        for each in (_pair(), infinity.wrap_model(*_pair(), config))
    ]
    apart = max(abs(one - other) for one, other in zip(*clipped))
    return {
        "same": losses == expected,
        "resumed": resumed == more,
        "said": said,
        "clipped": apart < 1e-6 < abs(clipped[0][-1] - _train(*_pair(), seed=3)[-1]),
    }
