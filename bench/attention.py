"""attention: neighborhood attention in tiles beside torch's own, forward and backward on a
processor: seconds, and the most bytes that a process grows by.

dense    attention of all tokens to all; masked: the same under a mask of the windows
stride   queries that share a window; with 256, the queries of a tile, no tile needs a mask
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import infinity
from infinity.ext.attention.attention_tiles import axes_of
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.settings import Settings

from .launch import environment
from .tiling import memory

TOKENS, WIDTH = 32768, 64
WAYS = ("dense", "masked", "stride1", "stride256")


def run(way: str, tokens: int) -> dict[str, float]:
    """Takes one forward and backward of one head, windows of a sixteenth of the tokens. Returns the
    seconds and the bytes that the process grew by at most."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, WIDTH, requires_grad=True) for _ in range(3))
    attend(way, *(each[:, :, :512] for each in (q, k, v))).sum().backward()  # loads kernels
    q.grad = k.grad = v.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start = memory("VmRSS"), time.perf_counter()
    attend(way, q, k, v).square().sum().backward()
    return {"seconds": time.perf_counter() - start, "grown_nbytes": memory("VmHWM") - before}


def attend(way: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes one way of attention."""
    n = q.shape[2]
    window = max(2, n // 16)
    if way == "dense":
        return scaled_dot_product_attention(q, k, v)
    if way == "masked":
        (axis,) = axes_of(n, window)
        first, last = (torch.from_numpy(each)[:, None] for each in axis.windows_in_tokens())
        keys = torch.arange(n)
        mask = (first <= keys).logical_and_(keys <= last)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)
    stride = min(int(way.removeprefix("stride")), window)
    return infinity.neighborhood_attention(
        q, k, v, shape=n, window=window, stride=stride, backend="tiles"
    )


def measure(settings: Settings) -> Measured:
    """Measures rows ``attention.dense|masked|stride1|stride256`` (seconds; MiB, with gradients)."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    tokens = settings.scaled(TOKENS, 512)
    for _ in range(settings.rounds):
        for name in WAYS:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "bench.attention", json.dumps([name, tokens])],
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
