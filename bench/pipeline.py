"""pipeline: one model cut into stages over the processes of this machine, trained by torch's own
schedules alone and from every home, over gloo.

All systems take turns step by step in the same processes, so that ratios are of pairs. On a machine
whose processes share its cores a rank that stands idle costs nothing, so that schedules are not
compared with each other here, but each with itself without the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.core.machine.tiers import Tier
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import alternate, paired
from infinity.tools.bench.settings import Settings

from .launch import launch_each, run_as_rank

RANKS = (2, 4)
SCHEDULES = ("1F1B", "LoopedBFS")
MICRO, EACH, LENGTH = 8, 1, 128  # micro-batches, sequences in each, tokens of a sequence
HOMES = ("device", "host", "nvme")


def measure(settings: Settings) -> Measured:
    """Measures rows ``pipeline.<processes>.<schedule>.<system>`` (tokens/s), and what a step of
    each home moves and holds. With four processes also ``<schedule>-dp2``: two stages of two data
    ranks, beside FSDP2 that offloads to the CPU.
    """
    found = Measured([])
    for ranks, told in launch_each(found, "pipeline", __name__, RANKS, settings):
        for schedule, of_one in told["seconds"].items():
            beside = next(iter(of_one))  # torch, or FSDP2
            for system, times in of_one.items():
                ratios = {beside: paired(times, of_one[beside])} if system != beside else {}
                rates = [told["tokens"] / each for each in times]
                found.rows.append(
                    row(f"pipeline.{ranks}.{schedule}.{system}", "tokens/s", rates, ratios=ratios)
                )
        for name, value in told["counts"].items():
            found.rows.append(
                row(
                    f"pipeline.{ranks}.{name}",
                    "times" if name.endswith(".loads") else "MiB",
                    [value],
                )
            )
    return found


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _run_rank(folder: str, rounds: int, scale: float) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    width, layers = (512, 8) if scale >= 1 else (256, 8)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    x = torch.randn(MICRO * EACH, LENGTH, width, generator=torch.Generator().manual_seed(1))
    seconds: dict[str, dict[str, list[float]]] = {}
    counts: dict[str, float] = {}
    for schedule in SCHEDULES:
        systems = {
            home: _system(schedule, home, mesh, width, layers, folder) for home in (None, *HOMES)
        }
        steps = {home or "torch": _stepper(*system, x) for home, system in systems.items()}
        seconds[schedule] = {
            name: times.wall for name, times in alternate(steps, 3 * rounds, warm_up=2).items()
        }
        for home in HOMES:
            counts |= {
                f"{schedule}.{home}.{name}": value
                for name, value in _count(*systems[home], x).items()
            }
    if dist.get_world_size() == 4:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        for schedule in SCHEDULES:
            systems = {
                home: _system(schedule, home, both, width, layers, folder)
                for home in ("fsdp2", "device", "host")
            }
            steps = {name: _stepper(*system, x) for name, system in systems.items()}
            seconds[f"{schedule}-dp2"] = {
                name: times.wall for name, times in alternate(steps, 3 * rounds, warm_up=2).items()
            }
    return {"tokens": MICRO * EACH * LENGTH, "seconds": seconds, "counts": counts}


def _system(
    schedule: str, home: str | None, mesh: Any, width: int, layers: int, folder: str
) -> tuple:
    from torch.distributed.pipelining import PipelineStage, schedules

    import infinity

    ranks, rank = mesh["pp"].size(), mesh.get_local_rank("pp")
    numbers = [rank] if schedule == "1F1B" else [rank, rank + ranks]
    count = ranks * len(numbers)
    torch.manual_seed(0)
    chain = [_Layer(width) for _ in range(layers)]
    each = layers // count
    chunks = [
        nn.ModuleDict({str(n): chain[n] for n in range(number * each, (number + 1) * each)})
        for number in numbers
    ]
    parts: list[nn.Module] = [_Chunk(chunk) for chunk in chunks]
    if home == "fsdp2":
        _flat_param(parts, mesh["dp"])
    optimizer = torch.optim.AdamW(
        [p for part in parts for p in part.parameters()], lr=1e-4, fused=home != "fsdp2"
    )
    if home not in (None, "fsdp2"):
        config = {"params": home, "optimizer": home, "nvme_paths": [folder]}
        parts, optimizer = infinity.wrap_model(parts, optimizer, config, mesh=mesh)
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(part, n, count, torch.device("cpu"), group=group)
        for part, n in zip(parts, numbers)
    ]
    made = getattr(schedules, f"Schedule{schedule}")(
        stages[0] if schedule == "1F1B" else stages, MICRO, loss_fn=nn.functional.mse_loss
    )
    if home not in (None, "fsdp2"):
        infinity.parallel.attach(made)
    return made, parts, optimizer, numbers, count


def _flat_param(parts: list[nn.Module], mesh: Any) -> None:
    """Shards every layer by FSDP2, with its weights and its optimizer's state on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    for part in parts:
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


class _Chunk(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def _stepper(
    schedule: Any, parts: list, optimizer: Any, numbers: list[int], count: int, x: torch.Tensor
) -> Callable[[], None]:
    """Makes one step of a system, which ends with its last update at home."""
    from infinity.core.run.registry import RECORD

    def step() -> None:
        torch.distributed.barrier()
        schedule.step(
            *((x,) if 0 in numbers else ()), **({"target": x} if count - 1 in numbers else {})
        )
        optimizer.step()
        optimizer.zero_grad()
        if (record := vars(parts[0]).get(RECORD)) is not None:
            record.engine.wait_idle()

    return step


def _count(
    schedule: Any, parts: list, optimizer: Any, numbers: list[int], count: int, x: torch.Tensor
) -> dict[str, float]:
    """Counts what one more step moves of the weights, and what the device holds at most beside what
    was planned."""
    import infinity
    from infinity.core.run.registry import wrapped

    engine = wrapped(parts).engine
    weights = sum(unit.weight_nbytes for unit in engine.job.units)
    before = engine.job.traffic.edges["host->device"].nbytes
    _stepper(schedule, parts, optimizer, numbers, count, x)()
    return {
        "loads": (engine.job.traffic.edges["host->device"].nbytes - before) / weights,
        "device_peak": infinity.stats(parts[0]).tiers["device"].peak_nbytes / 2**20,
        "device_planned": engine.job.planned.plan.planned_nbytes(Tier.DEVICE) / 2**20,
    }


if __name__ == "__main__":
    run_as_rank(_run_rank)
