"""meshes: steps of four ranks over a slow network, beside those that `infinity plan --mesh`
predicts, for four meshes of them.

The network decides: each rank is a node with one device, and sends at a modelled rate. What is
held is the order of the meshes, and how far each step is from its prediction.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from measure_cluster import ANY
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import infinity
from bench.launch import launch_delayed, run_as_rank
from infinity.config import Config
from infinity.core.run.registry import engine_of
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.settings import Settings
from infinity.tools.plan.plan_job import Job
from infinity.tools.plan.plan_mesh import plan_meshes

RANKS, RATE, LATENCY_SECONDS = 4, 4e6, 1e-3
MESHES = ("dp=4", "dp=2,tp=2", "tp=4", "pp=4")
SAMPLES, LENGTH, STEPS = 8, 32, 3
CONFIG = {  # ranks of other nodes share no memory
    "params": "host",
    "optimizer": "host",
    "device_memory": "2GiB",
    "host_memory": "2GiB",
    "share_homes": False,
}
PLANS = "INFINITY_BENCH_PLANS"  # the plans, for the ranks


def measure(settings: Settings) -> Measured:
    """Measures rows ``meshes.<mesh>`` (steps/s) against the prediction, and notes both orders."""
    plans = {mesh: _plan(mesh) for mesh in MESHES}
    variables = {PLANS: json.dumps(plans)}
    told = launch_delayed(
        "meshes", __file__, RANKS, LATENCY_SECONDS, settings, rate=RATE, **variables
    )
    if isinstance(told, str):
        return Measured([], [f"meshes: {told}"])
    found = Measured([])
    for mesh, seconds in told.items():
        predicted = plans[mesh]["step_seconds"]
        steps = [1 / each for each in seconds]
        ceiling = ("predicted", [1 / predicted] * len(steps))
        found.rows.append(row(f"meshes.{mesh}", "steps/s", steps, ceiling=ceiling))
        found.notes.append(f"meshes.{mesh}: predicted {predicted:.3f} s, {plans[mesh]['why']}")
    on_paper = sorted(plans, key=lambda mesh: plans[mesh]["step_seconds"])
    measured = sorted(told, key=lambda mesh: min(told[mesh]))
    orders = " < ".join(on_paper), " < ".join(measured)
    found.notes.append(f"meshes: on paper {orders[0]}; measured {orders[1]}")
    return found


def _model() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    )


def _adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-4)]


def _plan(mesh: str) -> dict[str, Any]:
    """Plans one mesh, for nodes that the network alone holds up."""
    with torch.device("meta"):
        model = _model()
    config = Config.make(CONFIG)
    batch = {"batch": SAMPLES, "length": LENGTH, "checkpointing": False}
    job = Job(model, model.config, _adamw(model), config, batch)
    machine = replace(ANY, network=RATE, latency=LATENCY_SECONDS, device_memory=1 << 34)
    found = plan_meshes(job, machine, RANKS, mesh, _adamw)
    return found["meshes"][0]


# --- one rank ---


def _run_rank(folder: str, rounds: int, scale: float) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    plans = json.loads(os.environ[PLANS])
    return {mesh: _seconds(plan, rounds) for mesh, plan in plans.items()}


def _seconds(plan: dict[str, Any], rounds: int) -> list[float]:
    """Returns the seconds of a step in each round."""
    sizes = plan["mesh"]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = _model()
    if sizes["tp"] > 1:
        model = infinity.parallel.tensor_parallel(model, mesh["tp"], quiet=True)
    (optimizer,) = _adamw(model)
    samples = SAMPLES // sizes["dp"]
    tokens = torch.zeros(samples, LENGTH, dtype=torch.long)
    if sizes["pp"] > 1:
        pipe, optimizer = infinity.parallel.pipeline(
            model,
            mesh,
            optimizer,
            CONFIG,
            schedule=plan["schedule"],
            micro_batches=plan["micro_batches"],
            chunks=len(plan["layers"]) // sizes["pp"],
            quiet=True,
        )
        wrapped: Any = pipe.chunks

        def passes() -> None:
            pipe.step(input_ids=tokens, labels=tokens)

    else:
        wrapped, optimizer = infinity.wrap_model(model, optimizer, CONFIG, mesh=mesh)

        def passes() -> None:
            wrapped(input_ids=tokens, labels=tokens).loss.backward()

    def run(steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            passes()
            optimizer.step()
            optimizer.zero_grad()
        engine_of(wrapped).wait_idle()
        dist.barrier()
        return (time.perf_counter() - start) / steps

    run(2)
    seconds = [run(STEPS) for _ in range(rounds)]
    infinity.unwrap_model(wrapped, optimizer)
    return seconds


if __name__ == "__main__":
    run_as_rank(_run_rank)
