"""experts: layers of Qwen3-MoE's shape, whose experts move apart or whole, by the share hit.

apart    the router's choice moves; whole: every expert, as of any other layer
frozen   adapters are trained; nf4, fp8: beside frozen experts that are packed; trained: the experts
         are, by AdamW
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import paired
from infinity.tools.bench.settings import Settings

from .launch import environment

# Of Qwen3-30B-A3B, with half of its width and of its experts, 8 of which a token gets
HIDDEN, INNER, EXPERTS, TOP, LAYERS = 1024, 384, 64, 8, 2
TOKENS = (1, 4, 32)
STEPS = 4


class Layers(nn.Module):
    """Experts of transformers under a router that hits as many as it is told."""

    def __init__(self, experts: int):
        super().__init__()
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            num_experts=experts,
            num_experts_per_tok=TOP,
        )
        config._experts_implementation = "grouped_mm"  # eager makes a whole gradient an expert
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.layers = nn.ModuleList(Qwen3MoeExperts(config) for _ in range(LAYERS))
        for param in self.layers.parameters():
            nn.init.normal_(param, std=0.02)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Computes the layers. ``chosen``: layers x tokens x experts of a token."""
        x = x * self.scale
        weights = torch.full(chosen.shape[1:], 1 / TOP, dtype=x.dtype)
        for layer, index in zip(self.layers, chosen):
            x = x + layer(x, index, weights)
        return x


def run(way: str, use: str, home: str, tokens: int, experts: int, swap: str) -> dict:
    """Takes steps. Returns the seconds of one, the share of experts that it hits, and the bytes
    that it moves to the device, over those of the experts hit."""
    import infinity
    from infinity.core.units.arrival import Arrival

    if way == "whole":
        Arrival.bring_rows = lambda self, choose: None
    torch.manual_seed(0)
    model = Layers(experts).to(torch.bfloat16)
    if use != "trained":
        model.layers.requires_grad_(False)
    if use in PACKED:
        infinity.quantize(model, use)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    config = {"params": home, "optimizer": home, "nvme_paths": [swap]}
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    generator = torch.Generator().manual_seed(1)
    begin, hit, before = 0.0, 0, infinity.stats(model)
    for step in range(STEPS + 2):
        if step == 2:
            begin, hit, before = time.perf_counter(), 0, infinity.stats(model)
        x = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
        scores = torch.rand(LAYERS, tokens, experts, generator=generator)
        chosen = scores.topk(TOP, dim=-1).indices
        hit += sum(len(index.unique()) for index in chosen)
        model(x, chosen).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds, after = time.perf_counter() - begin, infinity.stats(model)
    own = model.layers[0].parameters()
    parts = [part for param in own for part in (_parts(param) if use in PACKED else [param])]
    each = sum(part[0].nbytes for part in parts)
    moved = after.edges["host->device"].nbytes - before.edges["host->device"].nbytes
    return {
        "seconds": seconds / STEPS,
        "share": hit / (STEPS * LAYERS * experts),
        "moved_nbytes": moved / STEPS,
        "hit_nbytes": hit * each / STEPS,
    }


def measure(settings: Settings) -> Measured:
    """Measures rows ``experts.<use>.<home>.<tokens>`` (seconds of a step, with its ratio to whole),
    and their bytes beside those of the experts hit."""
    experts = EXPERTS if settings.scale >= 1 else 16
    rows, points = [], []
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as swap:
        for use in ("frozen", *PACKED, "trained"):
            for home in ("host", "nvme"):
                for tokens in TOKENS:
                    found = [
                        [_in_process([way, use, home, tokens, experts, swap]) for way in WAYS]
                        for _ in range(min(3, settings.rounds))
                    ]
                    apart, whole = ([each[i] for each in found] for i in range(2))
                    seconds = [[each["seconds"] for each in its] for its in (apart, whole)]
                    ratios = {"whole": paired(*seconds)}
                    name = f"experts.{use}.{home}.{tokens}"
                    rows.append(row(name, "s", seconds[0], ratios=ratios))
                    moved = apart[0]["moved_nbytes"] / apart[0]["hit_nbytes"]
                    rows.append(row(f"{name}.moved", "of what is hit", [moved]))
                    points.append(apart[0] | {"name": name, "whole": whole[0]})
    return Measured(rows, series={"experts": points})


WAYS = ("apart", "whole")
PACKED = ("nf4", "fp8")


def _parts(weight: torch.Tensor) -> list[torch.Tensor]:
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


def _in_process(asked: list) -> dict:
    command = [sys.executable, "-P", "-m", "bench.experts", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(run(*json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # what it made need not be taken down
