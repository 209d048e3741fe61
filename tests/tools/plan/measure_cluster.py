"""cluster: steps on modelled disks and over a modelled network, beside those that `infinity plan
--machine` predicts for such machines.

The prediction is made from the plan before the model is wrapped, for machines of which one resource
is the modelled one, and all others are so fast that it decides. What is predicted is how much
passes there, and that nothing else holds it up.

message   what one rank sends another in a ring. Over gloo it takes a round trip: the receiver says
          first that it is ready
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import infinity
from bench.launch import doubles, launch_delayed, run_as_rank
from infinity import native
from infinity.config import Config
from infinity.core.machine.disk_profile import DiskProfile
from infinity.core.run.registry import wrapped
from infinity.core.wrap.lay_out import lay_out
from infinity.ranks.parallel_dims import ParallelDims
from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.settings import Settings
from infinity.tools.plan.cluster import ClusterPrediction, predict_cluster
from infinity.tools.plan.machine_file import Machine

WIDTHS = {1: 1024, 2: 1024, 8: 2048}  # disks -> of the layers: a layer's array lies on all of them
LAYERS, ROWS = 8, 16  # few rows, so that arithmetic is nothing
STEPS = 3  # of a round
MIB = 1024 * 1024
RATE = 1e9  # bytes per second of a modelled disk
RANKS, LATENCY_SECONDS = (2, 4), 5e-3
FAST, LARGE = 1e15, 1 << 50
ANY = Machine(
    name="modelled",
    devices=1,
    device_memory=LARGE,
    device_flops=FAST,
    host_memory=LARGE,
    host_bandwidth=FAST,
    checksum_rate=FAST,
    disks=1,
    disk_capacity=LARGE,
    disk_read=FAST,
    disk_write=FAST,
    device_link=FAST,
    host_link=FAST,
    network=FAST,
    latency=1 / FAST,
)


def measure(settings: Settings) -> Measured:
    """Measures rows cluster.disks1, cluster.disks2 and cluster.disks8, cluster.latency2 and
    cluster.latency4 (steps/s) against the prediction."""
    rows, notes = _on_disks(settings)
    for ranks in RANKS:
        told = launch_delayed("cluster", __file__, ranks, LATENCY_SECONDS, settings)
        if isinstance(told, str):
            notes.append(f"cluster.latency{ranks}: {told}")
            continue
        found = [1 / each for each in told["seconds"]]
        rows.append(
            row(
                f"cluster.latency{ranks}",
                "steps/s",
                found,
                ceiling=("predicted", [1 / told["predicted"]] * len(found)),
            )
        )
        notes.append(
            f"cluster.latency{ranks}: predicted {told['predicted']:.2f} s, {told['gathers']}"
            f" gathers in rings of {ranks}"
        )
    return Measured(rows, notes)


def _on_disks(settings: Settings) -> tuple[list[Row], list[str]]:
    layers = max(2, round(LAYERS * settings.scale))
    rows: list[Row] = []
    notes: list[str] = []
    for count, width in WIDTHS.items():
        with (
            tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder,
            ExitStack() as stack,
        ):
            disks = _model_disks(Path(folder).resolve(), count, stack)
            predicted, seconds = _times(disks, width, layers, settings.rounds)
        expected = predicted.step_seconds
        found = [1 / each for each in seconds]
        rows.append(
            row(
                f"cluster.disks{count}",
                "steps/s",
                found,
                ceiling=("predicted", [1 / expected] * len(found)),
            )
        )
        moved = {edge: nbytes / 1e6 for edge, nbytes in predicted.edges.items() if "nvme" in edge}
        notes.append(
            f"cluster.disks{count}: predicted {expected:.2f} s by the {predicted.bottleneck}, "
            + ", ".join(f"{edge} {each:.0f} MB" for edge, each in moved.items())
        )
    return rows, notes


def _model_disks(folder: Path, count: int, stack: ExitStack) -> list[Path]:
    """Makes ``count`` modelled disks, and has this process take them for disks until ``stack``
    closes."""
    disks = [folder / f"disk{index}" for index in range(count)]
    for disk in disks:
        disk.mkdir()
    (folder / "model.json").write_text(json.dumps({str(disk): RATE for disk in disks}))
    profile = asdict(DiskProfile(RATE, RATE, RATE, MIB, 64))
    (folder / "disks.json").write_text(
        json.dumps({f"model {disk} {kind}": profile for disk in disks for kind in native.IO_KINDS})
    )
    environment = {
        "INFINITY_MODEL_DISKS": str(folder / "model.json"),
        "INFINITY_CACHE": str(folder),
    }
    stack.enter_context(mock.patch.dict(os.environ, environment))
    stack.enter_context(mock.patch.object(native, "disks", doubles().DoubledDisks()))
    return disks


def _times(
    disks: list[Path], width: int, layers: int, rounds: int
) -> tuple[ClusterPrediction, list[float]]:
    """What is predicted for a step, and the seconds of one in each round."""
    host_memory = f"{max(64, 32 * len(disks))}MiB"
    config = {
        "params": "nvme",
        "optimizer": "nvme",
        "nvme_paths": [str(disk) for disk in disks],
        "host_memory": host_memory,
    }
    machine = replace(ANY, disks=len(disks), disk_read=RATE, disk_write=RATE)
    return _predict_and_run(_layers(width, layers), config, machine, 1, rounds)


def _layers(width: int, count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).to(
        torch.bfloat16
    )


def _predict_and_run(
    model: nn.Module, config: dict[str, Any], machine: Machine, nodes: int, rounds: int
) -> tuple[ClusterPrediction, list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan, units = lay_out(
        model, optimizer, Config(**config), ParallelDims(size=nodes, local_size=1)
    )
    predicted = predict_cluster(plan, units, machine, nodes, compute=0.0)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    inputs = torch.ones(ROWS, model[0].in_features, dtype=torch.bfloat16)

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            model(inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        wrapped(model).engine.wait_idle()
        return (time.perf_counter() - start) / steps

    run(2)
    seconds = [run(STEPS) for _ in range(rounds)]
    infinity.unwrap_model(model, optimizer)
    return predicted, seconds


def _run_rank(folder: str, rounds: int, scale: float) -> dict[str, Any]:
    """One rank of those whose messages take their time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine = replace(ANY, latency=2 * LATENCY_SECONDS)
    config = {"params": "host", "optimizer": "host", "units": ["Linear"]}
    predicted, seconds = _predict_and_run(
        _layers(64, LAYERS), config, machine, dist.get_world_size(), rounds
    )
    return {"predicted": predicted.step_seconds, "gathers": predicted.gathers, "seconds": seconds}


if __name__ == "__main__":
    run_as_rank(_run_rank)
