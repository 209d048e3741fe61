"""small: what a step of a small model costs beside plain torch: the time that does not depend on
its size, for launches, locks and Python.

Chains of linear layers, each of them a unit, with torch's fused AdamW; from 4,160 parameters in a
unit, for which nearly all of a step is overhead, to a million.
"""

from __future__ import annotations

import tempfile
from functools import partial

import torch
from torch import nn

import infinity
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import paired
from infinity.tools.bench.settings import Settings

HOMES = ("device", "host", "nvme")
SIZES = {  # parameters -> width, layers, steps of a round
    "17K": (64, 4, 50),
    "530K": (256, 8, 20),
    "8.4M": (1024, 8, 4),
    "34M": (2048, 8, 2),
}
ROWS = 64  # of a batch


def make(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Makes a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(steps: int, x: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes some steps of a loop."""
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def measure(settings: Settings) -> Measured:
    """Measures rows ``small.<parameters>.<home>``: ms of a step, and its ratio to plain torch's.
    Above 1 ours is faster."""
    found = Measured([])
    for name, (width, layers, steps) in SIZES.items():
        x = torch.randn(ROWS, width)
        for home in HOMES:
            with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as disk:
                config = {"params": home, "optimizer": home, "nvme_paths": [disk]}
                ours = infinity.wrap_model(*make(width, layers), config)
                plain = make(width, layers)
                ways = {
                    "ours": partial(train, steps, x, *ours),
                    "torch": partial(train, steps, x, *plain),
                }
                for way in ways.values():
                    way()  # the first step measures the disk, and makes the state
                times = settings.alternate(ways)
                infinity.unwrap_model(*ours)
            wall = times["ours"].wall
            ratios = {"torch": paired(wall, times["torch"].wall)}
            milliseconds = [1e3 * each / steps for each in wall]
            found.rows.append(row(f"small.{name}.{home}", "ms", milliseconds, ratios=ratios))
    return found
