"""tensor_parallel: one model cut over the processes of this machine, trained by torch alone and
from every home, over gloo.

All systems take turns step by step in the same processes, so that ratios are of pairs. The loop is
bound by the processor and by gloo here; what it shows is what homes cost beside torch's own tensor
parallelism, where both hold the same weights, gradients and moments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.core.machine.tiers import Tier
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import Times, alternate, paired
from infinity.tools.bench.settings import Settings

from .launch import launch_each, run_as_rank

RANKS = (2, 4)
BATCH, LENGTH, VOCABULARY = 2, 128, 8192
HOMES = ("device", "host", "nvme")


def measure(settings: Settings) -> Measured:
    """Measures rows ``tensor_parallel.<processes>.<system>`` (tokens/s), ``.clip`` (seconds of a
    global norm) and ``.home`` (bytes per rank)."""
    found = Measured([])
    for ranks, told in launch_each(found, "tensor_parallel", __name__, RANKS, settings):
        _add_rows(found, ranks, told)
    return found


def _add_rows(found: Measured, ranks: int, told: dict[str, Any]) -> None:
    tokens, seconds = told["tokens"], told["seconds"]
    for system, times in seconds.items():
        ratios = {"torch": paired(times, seconds["torch"])} if system != "torch" else {}
        found.rows.append(
            row(
                f"tensor_parallel.{ranks}.{system}",
                "tokens/s",
                [tokens / each for each in times],
                ratios=ratios,
            )
        )
    for system, times in told["clip"].items():
        found.rows.append(
            row(f"tensor_parallel.{ranks}.{system}.clip", "ms", [1e3 * each for each in times])
        )
    found.rows.append(row(f"tensor_parallel.{ranks}.home", "MiB", [told["home_nbytes"] / 2**20]))
    found.rows.append(
        row(f"tensor_parallel.{ranks}.formula", "MiB", [told["formula_nbytes"] / 2**20])
    )
    for name in ("peak", "planned"):
        found.rows.append(
            row(
                f"tensor_parallel.{ranks}.device_{name}",
                "MiB",
                [told[f"device_{name}_nbytes"] / 2**20],
            )
        )


# --- one rank ---


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.width = nn.LayerNorm(width), width
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.second, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        q, k, v = (
            each(hidden).unflatten(-1, (-1, 64)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        x = x + self.o(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class _Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> Callable[[], None]:
    """Makes one step of a system, which ends with its last update at home."""
    from infinity.core.run.registry import RECORD

    def step() -> None:
        torch.distributed.barrier()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (record := vars(model).get(RECORD)) is not None:
            record.engine.wait_idle()

    return step


def _run_rank(folder: str, rounds: int, scale: float) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    import infinity
    from infinity.core.run.registry import wrapped

    width, layers = (512, 8) if scale >= 1 else (256, 4)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))

    def make(home: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = infinity.parallel.tensor_parallel(_Model(width, layers), mesh, quiet=True)
        # torch's fused step takes no mixed group.
        groups = [
            {"params": [p for p in model.parameters() if isinstance(p, DTensor) is is_cut]}
            for is_cut in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=home is None)
        if home is None:
            return model, optimizer
        config = {"params": home, "optimizer": home, "nvme_paths": [folder]}
        return infinity.wrap_model(model, optimizer, config, mesh=mesh)

    systems = {name: make(None if name == "torch" else name) for name in ("torch", *HOMES)}
    steppers = {name: _stepper(*system, tokens) for name, system in systems.items()}
    seconds = alternate(steppers, 3 * rounds, warm_up=2)
    clips: dict[str, Times] = {}
    for name in HOMES:
        model, optimizer = systems[name]
        infinity.clip_grad_norm_(optimizer, 1.0)  # from here on norms are taken as gradients land
        model(tokens).backward()
        clip = partial(infinity.clip_grad_norm_, optimizer, 1.0)
        clips |= alternate({name: clip}, rounds, warm_up=0)
        optimizer.zero_grad()
    engine = wrapped(systems["nvme"][0]).engine
    flat_params = [flat for unit in engine.job.units for flat in unit.flat_params]
    return {
        "tokens": tokens.numel(),
        "seconds": {name: times.wall for name, times in seconds.items()},
        "clip": {name: times.wall for name, times in clips.items()},
        "home_nbytes": sum(array.nbytes for flat in flat_params for array in flat.arrays.values()),
        # Weight, gradient and two moments, fp32.
        "formula_nbytes": sum(flat.layout.numel for flat in flat_params) * 16,
        "device_planned_nbytes": engine.job.planned.plan.planned_nbytes(Tier.DEVICE),
        "device_peak_nbytes": infinity.stats(systems["nvme"][0]).tiers["device"].peak_nbytes,
    }


if __name__ == "__main__":
    run_as_rank(_run_rank)
