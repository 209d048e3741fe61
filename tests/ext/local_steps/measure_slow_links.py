"""slow_links: what a link of 100 ms costs two groups that train apart (`infinity.LocalSteps`).

Each process is a group, in a network namespace of its own. Ways take turns, a whole period at a
time: no exchange at all (`alone`), an average every 100 steps that is streamed and applied 50 steps
later (`ours`), the same without a delay (`waited`), and the mean gradient in every step (`each`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.launch import launch_delayed, run_as_rank
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import Times, alternate, paired
from infinity.tools.bench.settings import Settings

RANKS, LATENCY_SECONDS = 2, 0.1
PERIOD, DELAY = 100, 50
FEW = 4  # steps of the way that meets in each
WIDTH, BATCH, BLOCKS = 512, 256, 8
WAYS: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "ours": {"every": PERIOD, "delay": DELAY},
    "waited": {"every": PERIOD},
    "each": {"every": 1, "lr": 1, "momentum": 0},
}


def measure(settings: Settings) -> Measured:
    """Measures rows ``slow_links.<way>`` (ms per step), with ratios to the groups alone: below 1,
    the link costs time. ``.cpu``: of the processors; ``.stalled``: the part in which the loop
    waited for the link; other work on the machine blurs these less. ``.received``: KiB per step."""
    found = Measured([])
    told = launch_delayed("slow_links", __file__, RANKS, LATENCY_SECONDS, settings)
    if isinstance(told, str):
        found.notes.append(f"slow_links: {told}")
        return found
    for way, seconds in told["seconds"].items():
        ratios = {} if way == "alone" else {"alone": paired(seconds, told["seconds"]["alone"])}
        found.rows.append(
            row(f"slow_links.{way}", "ms", [1e3 * each for each in seconds], ratios=ratios)
        )
        cpu = told["cpu"][way]
        ratios = {} if way == "alone" else {"alone": paired(cpu, told["cpu"]["alone"])}
        found.rows.append(
            row(f"slow_links.{way}.cpu", "ms", [1e3 * each for each in cpu], ratios=ratios)
        )
        if way in told["stalled"]:
            found.rows.append(row(f"slow_links.{way}.stalled", "ms", [1e3 * told["stalled"][way]]))
            found.rows.append(row(f"slow_links.{way}.received", "KiB", [told["received"][way]]))
    return found


def _make(local: dict[str, Any] | None) -> tuple[Any, Any, Any]:
    import infinity

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("slow", "dp"))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)]
    model: Any = nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = infinity.wrap_model(
        model, optimizer, {"params": "host", "optimizer": "host"}, mesh=mesh["dp"]
    )
    made = None if local is None else infinity.LocalSteps(model, mesh["slow"], **local)
    return model, optimizer, made


def _run_rank(folder: str, rounds: int, scale: float) -> dict[str, Any]:
    import infinity
    from infinity.core.run.registry import wrapped

    torch.set_num_threads(1)
    batch = torch.randn(max(1, round(BATCH * scale)), WIDTH)
    made = {way: _make(local) for way, local in WAYS.items()}

    def stepping(way: str) -> Callable[[], Times]:
        model, optimizer, local = made[way]
        steps = FEW if way == "each" else PERIOD

        def run() -> Times:
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            for _ in range(steps):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if local is not None:
                    local.after_step()
            wrapped(model).engine.wait_idle()
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            return Times([wall / steps], [cpu / steps])

        return run

    times = alternate({way: stepping(way) for way in WAYS}, rounds)
    moved = {
        way: (infinity.stats(model).collectives["slow axis"], local.steps)
        for way, (model, _, local) in made.items()
        if local is not None
    }
    return {
        "seconds": {way: each.wall for way, each in times.items()},
        "cpu": {way: each.cpu for way, each in times.items()},
        "stalled": {way: axis.stall_seconds / steps for way, (axis, steps) in moved.items()},
        # What is under way at the end is not counted
        "received": {
            way: axis.nbytes / 1024 / (steps - (DELAY if way == "ours" else 0))
            for way, (axis, steps) in moved.items()
        },
    }


if __name__ == "__main__":
    run_as_rank(_run_rank)
