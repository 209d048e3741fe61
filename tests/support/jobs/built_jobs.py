"""Jobs of ranks that have built a model in two ways (see `ranks`).

**apart**: what rank 1 does to the model that both ranks have made.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_jobs import mesh_of
from ranks import serve, told
from torch import nn

import infinity
from infinity.core.wrap import agreement


class Level(enum.Enum):
    """A setting whose text is one of this process."""

    HIGH = object()


class Gate(nn.Module):
    """A module of a user's, with settings in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.heads, self.scale, self.act = 2, 0.5, F.relu
        self.shapes, self.scaled = (8, 8), functools.partial(torch.mul, other=2)
        # What ranks may have of their own
        self.rank, self.device_name, self._calls = dist.get_rank(), f"gpu:{dist.get_rank()}", 0
        self.is_main, self.log_dir = dist.get_rank() == 0, f"runs/{dist.get_rank()}"
        self.start_time = 1.5 + dist.get_rank()
        # Whose text has an address, or no end
        self.squash, self.level, self.looped = torch.Tensor.relu, Level.HIGH, []
        self.looped.append(self.looped)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.act(self.inner(x)) * self.scale)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    convolved = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 8, 2), nn.Flatten())
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Gate(), nn.Dropout(0.0), convolved)


def reordered(param: nn.Parameter) -> None:
    """Stores ``param`` with its dims in the reverse order; its values stay."""
    dims = list(reversed(range(param.dim())))
    param.data = param.data.permute(dims).contiguous().permute(dims)


def strided(param: nn.Parameter) -> None:
    whole = torch.empty(64)
    whole.as_strided((8, 8), (1, 8)).copy_(param.data)
    param.data = whole.as_strided((8, 8), (1, 8))


def with_gaps(param: nn.Parameter) -> None:
    """Every other column of a wider matrix: flat arrays have no gaps, so this is row-major."""
    wide = torch.zeros(8, 16)
    wide[:, ::2] = param.data
    param.data = wide[:, ::2]


APART: dict[str, Callable[[nn.Sequential], Any]] = {
    "transposed": lambda model: reordered(model[0].weight),
    "as_strided": lambda model: strided(model[2].inner.weight),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "gaps": lambda model: with_gaps(model[0].weight),
    "an activation": lambda model: model.__setitem__(1, nn.GELU()),
    "a dropout": lambda model: setattr(model[3], "p", 0.1),
    "a module more": lambda model: model.append(nn.Dropout(0.1)),
    "a function": lambda model: setattr(model[2], "act", F.gelu),
    "heads": lambda model: setattr(model[2], "heads", 4),
    "a method": lambda model: setattr(model[2], "squash", torch.Tensor.tanh),
    "a partial": lambda model: setattr(model[2], "scaled", functools.partial(torch.mul, other=3)),
    "its own": lambda model: model[2].__dict__.update(seed=dist.get_rank(), _calls=5),
}


def trained(model: nn.Module, optimizer: Any, *, count: int = 2) -> torch.Tensor:
    for number in range(count):
        x = torch.randn(
            4, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())
        )
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def differs(
    apart: str, config: dict[str, Any], *, replicas: bool = False, fault: bool = False
) -> dict[str, Any]:
    """Trains a model that rank 1 has built ``apart``. ``fault``: nobody compares."""
    mesh = mesh_of((2, 1), ("dp_replicate", "dp_shard")) if replicas else None
    found: dict[str, Any] = {}

    def run(model: nn.Sequential) -> torch.Tensor:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
        weights = trained(model, optimizer)
        infinity.unwrap_model(model, optimizer)
        return weights

    model, compared = build(), (agreement.describe_modules, agreement.describe_orders)
    if dist.get_rank():
        APART[apart](model)
    if fault:
        agreement.describe_modules = agreement.describe_orders = lambda *_, **__: {}
    try:
        found["said"] = told(lambda: found.update(weights=run(model)))
    finally:
        agreement.describe_modules, agreement.describe_orders = compared
    found["right"] = run(build())
    return found


def in_two_orders(config: dict[str, Any], folder: str) -> list[bool]:
    """Tells whether weights are near those of the usual order if all ranks store a weight in
    another one, if optimizer state or loaded values come in one, and if a checkpoint is loaded
    into one."""
    rank = dist.get_rank()

    def wrapped(*, turned: bool, foreign: bool = False) -> tuple[Any, Any]:
        model = build()
        if turned:
            reordered(model[0].weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if foreign:
            for param in model.parameters():
                moments = [torch.ones_like(param).mul_(0.25) for _ in range(2)]
                moments[0][..., ::3] = 0.125
                if rank:  # the same values in another order
                    dims = list(reversed(range(param.dim())))
                    moments = [each.permute(dims).contiguous().permute(dims) for each in moments]
                state = {"step": torch.tensor(1.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
                optimizer.state[param] = state
        return infinity.wrap_model(model, optimizer, config)

    def end(pair: tuple[Any, Any]) -> torch.Tensor:
        weights = trained(*pair)
        infinity.unwrap_model(*pair)
        return weights

    right, found = end(wrapped(turned=False)), []
    found.append(torch.allclose(end(wrapped(turned=True)), right))
    with_state = end(wrapped(turned=False, foreign=True))
    found.append(torch.allclose(end(wrapped(turned=True, foreign=True)), with_state))
    pair = wrapped(turned=True)
    trained(*pair, count=1)
    infinity.save_checkpoint(folder, *pair)
    expected = end(pair)
    pair = wrapped(turned=False)
    infinity.load_checkpoint(folder, *pair)
    found.append(torch.allclose(end(pair), expected))
    pair, loaded = wrapped(turned=False), build()
    with torch.no_grad():
        loaded[0].weight.mul_(0.5)
    values = {name: value.detach().clone() for name, value in loaded.state_dict().items()}
    if rank:
        values["0.weight"] = values["0.weight"].t().contiguous().t()
    pair[0].load_state_dict(values)
    model = loaded
    plain = infinity.wrap_model(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    found.append(torch.allclose(end(pair), end(plain)))
    return found


if __name__ == "__main__":
    serve(globals())
