"""touches: loops over the parameters of a wrapped model outside of its passes, beside plain torch
and beside a block of full_params round the whole loop.

clamp     every weight is clamped in place, as WGAN does
norms     the norm of every weight is read, as a logger does
average   a plain copy follows every weight, as a target network does
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

import infinity
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import Times, paired
from infinity.tools.bench.settings import Settings

BLOCKS, WIDTH = 400, 64
HOMES = ("host", "nvme")


def make() -> nn.Sequential:
    """Makes a chain of small blocks, each of them a unit."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    )


@torch.no_grad()
def clamp(params: Iterable[torch.Tensor], _copies: Sequence[torch.Tensor]) -> None:
    """Writes every parameter, clamped to a bound that shrinks, so that there is something to do."""
    bound = _copies[0].fill_(0.999 * float(_copies[0].view(-1)[0])).view(-1)[0].item()
    for param in params:
        param.clamp_(-bound, bound)


def norms(params: Iterable[torch.Tensor], _copies: Sequence[torch.Tensor]) -> list[float]:
    """Reads the norm of every parameter."""
    return [param.norm().item() for param in params]


@torch.no_grad()
def average(params: Iterable[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Moves every copy towards its parameter."""
    for param, copy in zip(params, copies):
        copy.lerp_(param, 0.01)


LOOPS = {"clamp": clamp, "norms": norms, "average": average}


def measure(settings: Settings) -> Measured:
    """Measures rows ``touches.<home>.<loop>``: ms for one loop over the parameters, and its ratios
    to plain torch and to full_params. Above 1 ours is faster."""
    found = Measured([])
    for home in HOMES:
        with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
            plain = make()
            model, _ = infinity.wrap_model(make(), None, {"params": home, "nvme_paths": [folder]})
            for name, loop in LOOPS.items():
                times = settings.alternate(_ways(loop, plain, model))
                _add_row(found, f"touches.{home}.{name}", times)
            infinity.unwrap_model(model)
    return found


def _ways(loop: Callable, plain: nn.Module, model: nn.Module) -> dict[str, Callable[[], object]]:
    def copies() -> list[torch.Tensor]:
        return [torch.full(param.shape, 0.1) for param in plain.parameters()]

    def in_full_params(its: list[torch.Tensor]) -> None:
        with infinity.full_params(model, writeback=loop is clamp) as params:
            loop(params.values(), its)

    return {
        "ours": partial(lambda its: loop(model.parameters(), its), copies()),
        "torch": partial(lambda its: loop(plain.parameters(), its), copies()),
        "full_params": partial(in_full_params, copies()),
    }


def _add_row(found: Measured, name: str, times: dict[str, Times]) -> None:
    ours = times["ours"].wall
    ratios = {way: paired(ours, times[way].wall) for way in ("torch", "full_params")}
    found.rows.append(row(name, "ms", [1e3 * each for each in ours], ratios=ratios))
