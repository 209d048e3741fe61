"""shares: infinity.Shares beside an even split, on two processes of which one is half as fast.

slowed     the second process sleeps as long as each of its blocks has computed
modelled   blocks sleep instead of computing, the second process's twice as long for each sample: so
           other processes of the machine make no difference

Both splits take turns in the same processes, over gloo. Gradients stay whole until the step
(ZeRO-1), so that no process waits for the other inside of a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.launch import launch_each, run_as_rank
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import alternate, paired
from infinity.tools.bench.settings import Settings

BATCH, TOKENS, WIDTH, BLOCKS = 96, 16, 512, 2
MODELLED_WIDTH, MODELLED_SECONDS = 64, 1e-3  # of a sample in the forward of a block
SETTLING, STEPS = 40, 3  # steps until shares have settled, and of a turn


def measure(settings: Settings) -> Measured:
    """Measures rows ``shares.slowed`` and ``shares.modelled`` (samples/s) with their ratios to the
    even split, and ``.first``, the samples that the faster process gets."""
    found = Measured([])
    for _, told in launch_each(found, "shares", __file__, (2,), settings):
        for name, (seconds, share) in told.items():
            rates = [STEPS * BATCH / each for each in seconds["shares"]]
            ratios = {"even": paired(seconds["shares"], seconds["even"])}
            found.rows.append(row(f"shares.{name}", "samples/s", rates, ratios=ratios))
            found.rows.append(row(f"shares.{name}.first", "samples", [share]))
    return found


# --- one rank ---


class _Then(torch.autograd.Function):
    """Passes a tensor on. Its backward calls ``then``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.then()
        return grad, None


class _Block(nn.Module):
    """The feed-forward of a transformer. Then it sleeps ``factor`` times as long as it computed,
    and ``seconds`` for each sample; in the backward ``2 * seconds``."""

    def __init__(self, width: int, factor: float, seconds: float):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self._factor, self._seconds, self._began = factor, seconds, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._begin()
        last = _Then.apply(x, lambda: self._sleep(2 * self._seconds * len(x)))
        found = _Then.apply(self.layers(last), self._begin)
        self._sleep(self._seconds * len(x))
        return found

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _sleep(self, seconds: float) -> None:
        time.sleep(self._factor * (time.perf_counter() - self._began) + seconds)


def _run_rank(folder: str, rounds: int, scale: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    rank = dist.get_rank()
    found = {"slowed": _run(WIDTH, rounds, scale, factor=rank, seconds=0.0)}
    seconds = MODELLED_SECONDS * scale * (1 + rank)
    found["modelled"] = _run(MODELLED_WIDTH, rounds, scale, factor=0.0, seconds=seconds)
    return found


def _run(
    width: int, rounds: int, scale: float, **slowness: float
) -> tuple[dict[str, list[float]], int]:
    """Returns the seconds of each turn with either split, and the first process's share."""
    import infinity

    torch.manual_seed(0)
    model: Any = nn.Sequential(*[_Block(width, **slowness) for _ in range(BLOCKS)])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {"params": "host", "optimizer": "host", "shard": "optimizer"}
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    shares = infinity.Shares(batch=BATCH, model=model)
    batch = torch.randn(BATCH, max(1, int(TOKENS * scale)), width)

    def step() -> None:
        x = batch[shares.slice].requires_grad_()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.after_step()

    for _ in range(SETTLING):
        step()
    splits = {"shares": shares.state_dict(), "even": {"shares": [1] * dist.get_world_size()}}

    def turn(split: dict[str, Any]) -> None:
        shares.load_state_dict(split)
        for _ in range(STEPS):
            step()
        dist.barrier()

    times = alternate(
        {name: lambda split=split: turn(split) for name, split in splits.items()}, rounds
    )
    seconds = {name: each.wall for name, each in times.items()}
    return seconds, splits["shares"]["shares"][0]


if __name__ == "__main__":
    run_as_rank(_run_rank)
