"""tiling: how wide a layer trains within one budget of device memory, against the number of its
tiles, and a vocabulary head with its loss, whole and in tiles.

factor   tiles of the largest weight; 1: whole
width    of a feed-forward, width -> 4 width -> width, that trains a step within the budget
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.core.machine.tiers import Tier
from infinity.core.wrap.lay_out import lay_out
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.settings import Settings

from .launch import environment

FACTORS = (1, 2, 4, 8, 16, 32, 64)
STEP = 64  # widths tried
TOKENS = 16
BASE = 1024  # the width that fits whole
HEAD = {"vocabulary": 262144, "width": 1024, "tokens": 1024}
HEAD_BUDGET = 48 * 1024 * 1024


def make_layer(width: int, device: str = "cpu") -> nn.Module:
    """Makes a feed-forward in bf16."""
    with torch.device(device):
        return nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        ).to(torch.bfloat16)


def config(budget: int | None) -> dict:
    """Makes a configuration with everything at home on the host, and no master."""
    return {
        "params": "host",
        "optimizer": "host",
        "device_memory": budget,
        "master": "none",
        "host_memory": "4TiB",
    }


def factor_of(width: int, budget: int | None) -> tuple[int, int]:
    """Counts the tiles of the largest weight in the plan, and the device bytes that are planned."""
    model = make_layer(width, "meta")
    plan, units = lay_out(
        model, torch.optim.SGD(model.parameters(), lr=0.1), infinity.Config.make(config(budget))
    )
    largest = 4 * width * width * 2
    tiles = [-(-largest // unit.at_once_nbytes) for unit in units if unit.at_once_nbytes]
    return max(tiles, default=1), plan.planned_nbytes(Tier.DEVICE)


def widest(budget: int, factor: int, most: int) -> int:
    """Finds the widest layer (a multiple of STEP, up to ``most``) that the budget holds in no more
    tiles than ``factor``."""
    low, high = STEP, most
    while low < high:
        middle = (low + high + STEP) // (2 * STEP) * STEP
        try:
            fits = factor_of(middle, budget)[0] <= factor
        except infinity.CapacityError:
            fits = False
        low, high = (middle, high) if fits else (low, middle - STEP)
    return low


def train(width: int, budget: int) -> tuple[float, int]:
    """Takes a step. Returns its seconds and the device bytes that were charged at most."""
    model = make_layer(width)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config(budget) | {"host_memory": None}
    )
    start = time.perf_counter()
    model(torch.randn(TOKENS, width, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    seconds = time.perf_counter() - start
    peak = infinity.stats(model).tiers["device"].peak_nbytes
    infinity.unwrap_model(model, optimizer)
    return seconds, peak


class Head(nn.Module):
    """Hidden states -> logits -> the loss of a language model."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Computes the loss. ``hidden``: tokens x width; ``labels``: tokens."""
        return nn.functional.cross_entropy(self.head(hidden).float(), labels)


def head(budget: int | None, vocabulary: int, width: int, tokens: int) -> dict:
    """Takes two steps of a head. Returns the seconds and the loss of the second, and the bytes that
    the process grew by at most."""
    torch.manual_seed(0)
    model = Head(vocabulary, width)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config(budget) | {"host_memory": None}
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    for _ in range(2):
        start = time.perf_counter()
        loss = model(
            torch.randn(tokens, width, dtype=torch.bfloat16),
            torch.randint(0, vocabulary, (tokens,)),
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "grown_nbytes": memory("VmHWM") - before, "loss": loss.item()}


def memory(name: str) -> int:
    """Returns bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) * 1024


def measure(settings: Settings) -> Measured:
    """Measures rows ``tiling.width.<factor>``; ``tiling.head.whole|tiles`` (seconds, and MiB beside
    what the engine holds)."""
    measured = _measure_widths(max(STEP, round(BASE * settings.scale) // STEP * STEP))
    found = _run_heads(settings)
    for name, results in found.items():
        for what, unit, end, scale in (
            ("seconds", "s", "", 1.0),
            ("grown_nbytes", "MiB", ".grown", 2.0**20),
        ):
            values = [result[what] / scale for result in results]
            ratios = _ratio(found, what) if name == "tiles" else {}
            measured.rows.append(row(f"tiling.head.{name}{end}", unit, values, ratios=ratios))
    return measured


def _measure_widths(base: int) -> Measured:
    """Measures how wide a layer trains in what one of width ``base`` takes whole."""
    budget = factor_of(base, None)[1]
    rows, points = [], []
    for factor in FACTORS:
        width = widest(budget, factor, 16 * base)
        seconds, peak = train(width, budget)
        if peak > budget:
            raise AssertionError(f"a layer {width} wide took {peak} of {budget} bytes")
        point = {"factor": factor, "width": width, "seconds": seconds}
        points.append(point | {"peak_nbytes": peak, "budget_nbytes": budget})
        ratios = {"untiled": width / points[0]["width"]}
        rows.append(row(f"tiling.width.{factor}", "wide", [width], ratios=ratios))
    return Measured(rows, series={"tiling.width": points})


def _run_heads(settings: Settings) -> dict[str, list[dict]]:
    """Runs the head whole and in tiles, in turns, each in a process of its own."""
    found: dict[str, list[dict]] = {"whole": [], "tiles": []}
    sizes = {name: max(64, round(value * settings.scale)) for name, value in HEAD.items()}
    for _ in range(min(3, settings.rounds)):
        for name, limit in (("whole", None), ("tiles", round(HEAD_BUDGET * settings.scale))):
            asked = json.dumps([limit, *sizes.values()])
            done = subprocess.run(
                [sys.executable, "-P", "-m", "bench.tiling", asked],
                capture_output=True,
                text=True,
                check=True,
                env=environment(),
            )
            found[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    for whole, tiles in zip(found["whole"], found["tiles"]):
        if abs(whole["loss"] - tiles["loss"]) > 1e-3 * abs(whole["loss"]):
            raise AssertionError(
                f"the losses differ: {whole['loss']} whole, {tiles['loss']} in tiles"
            )
    return found


def _ratio(found: dict[str, list[dict]], what: str) -> dict[str, float]:
    """How many times as much the whole head takes."""
    pairs = [
        whole[what] / max(1e-9, tiles[what]) for whole, tiles in zip(found["whole"], found["tiles"])
    ]
    return {"whole": sorted(pairs)[len(pairs) // 2]}


if __name__ == "__main__":
    print(json.dumps(head(*json.loads(sys.argv[1]))))
