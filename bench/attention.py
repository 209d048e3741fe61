"""attention: neighborhood attention in tiles beside torch's dense attention, forward and backward
on a processor: seconds, and the most bytes that a process grows by.

stride   queries that share a window; with 256, the queries of a tile, no tile needs a mask
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

import infinity
from infinity.bench.results import Measured, row
from infinity.bench.settings import Settings

from .launch import environment
from .tiling import memory

TOKENS, WIDTH = 32768, 64
STRIDES = {"dense": None, "stride1": 1, "stride256": 256}


def run(stride: int | None, tokens: int) -> dict[str, float]:
    """Takes one forward and backward of one head, over windows of a sixteenth of the tokens; of all
    if ``stride`` is None. Returns the seconds and the bytes that the process grew by at most."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, WIDTH, requires_grad=True) for _ in range(3))
    attend(q[:, :, :512], k[:, :, :512], v[:, :, :512], stride).sum().backward()  # loads kernels
    q.grad = k.grad = v.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start = memory("VmRSS"), time.perf_counter()
    attend(q, k, v, stride).square().sum().backward()
    return {"seconds": time.perf_counter() - start, "grown_nbytes": memory("VmHWM") - before}


def attend(q, k, v, stride: int | None) -> torch.Tensor:
    """Computes dense attention, or that over windows."""
    if stride is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)
    n = q.shape[2]
    window = max(2, n // 16)
    return infinity.neighborhood_attention(
        q, k, v, shape=n, window=window, stride=min(stride, window), backend="tiles"
    )


def measure(settings: Settings) -> Measured:
    """Measures rows ``attention.dense|stride1|stride256`` (seconds, and MiB beside the tensors)."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in STRIDES}
    tokens = settings.scaled(TOKENS, 512)
    for _ in range(settings.rounds):
        for name, stride in STRIDES.items():
            done = subprocess.run(
                [sys.executable, "-P", "-m", "bench.attention", json.dumps([stride, tokens])],
                capture_output=True,
                text=True,
                check=True,
                env=environment(OMP_NUM_THREADS=str(settings.threads)),
            )
            found[name].append(json.loads(done.stdout))
    rows = []
    for name, results in found.items():
        for what, unit, end, scale in (
            ("seconds", "s", "", 1.0),
            ("grown_nbytes", "MiB", ".grown", 2.0**20),
        ):
            ours = [result[what] / scale for result in results]
            dense = sorted(result[what] / scale for result in found["dense"])
            ratio = dense[len(dense) // 2] / max(1e-9, sorted(ours)[len(ours) // 2])
            ratios = {} if name == "dense" else {"dense": ratio}
            rows.append(row(f"attention.{name}{end}", unit, ours, ratios=ratios))
    return Measured(rows)


if __name__ == "__main__":
    print(json.dumps(run(*json.loads(sys.argv[1]))))
