"""startup: from a model on ``meta`` and a safetensors folder to a wrapped model, beside reading
that folder.

inference   no optimizer: weights go home, nothing else is needed
training    AdamW: homes also take masters and moments, six times the bytes of the file
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import safetensors.torch
import torch

import infinity
from infinity import native
from infinity.ext.rates.rates import disk_seconds
from infinity.tools.bench.io import Raw, TestFile
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import Times, alternate, paired
from infinity.tools.bench.settings import Settings

from .launch import environment
from .llama import SHAPES, Llama

SHARDS = 4  # files of the folder
HOMES, USES = ("host", "nvme"), ("inference", "training")


def make_folder(folder: Path, shape: str) -> int:
    """Writes random bf16 weights for that model, a few files of them. Returns their bytes."""
    with torch.device("meta"):
        tensors = list(Llama(SHAPES[shape]).to(torch.bfloat16).state_dict().items())
    each = -(-len(tensors) // SHARDS)
    for part in range(SHARDS):
        chosen = {
            name: torch.randn(tensor.shape).to(tensor.dtype)
            for name, tensor in tensors[part * each : (part + 1) * each]
        }
        if chosen:
            path = folder / f"model-{part}.safetensors"
            safetensors.torch.save_file(chosen, path)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return sum(path.stat().st_size for path in folder.iterdir())


def start(shape: str, home: str, use: str, weights: str, swap: str) -> float:
    """Measures the seconds of ``wrap_model``, with memory that the machine has at hand: what a
    virtual machine has given back to its host comes at a twentieth of the rate, whoever asks for
    it."""
    native.Region(round(0.9 * psutil.virtual_memory().available), True, os.cpu_count() or 1)
    with torch.device("meta"):
        model = Llama(SHAPES[shape]).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5) if use == "training" else None
    config = {"params": home, "optimizer": home, "weights": weights, "nvme_paths": [swap]}
    begin = time.perf_counter()
    infinity.wrap_model(model, optimizer, config)
    return time.perf_counter() - begin


def read_raw(folder: Path) -> None:
    """Reads the folder past the page cache, by a few threads."""
    for path in sorted(folder.iterdir()):
        raw = Raw(TestFile(str(path), path.stat().st_size))
        raw.run("read")
        raw.close()


def load_whole(folder: Path) -> None:
    """Loads every tensor into memory, as safetensors loads it from a disk."""
    for path in sorted(folder.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    held = [
        {name: value.clone() for name, value in safetensors.torch.load_file(path).items()}
        for path in sorted(folder.iterdir())
    ]
    del held


def measure(settings: Settings) -> Measured:
    """Measures rows ``startup.<home>.<use>``: GB of the folder per second, beside the disk
    alone."""
    shape = "1.1B" if settings.scale >= 1 else "tiny"
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        weights, swap = Path(folder, "weights"), Path(folder, "swap")
        weights.mkdir()
        swap.mkdir()
        nbytes = make_folder(weights, shape)
        jobs: dict[str, Callable[[], object]] = {
            "raw": lambda: read_raw(weights),
            "safetensors": lambda: load_whole(weights),
        }
        for home in HOMES:
            for use in USES:
                jobs[f"{home}.{use}"] = lambda asked=[shape, home, use, str(weights), str(swap)]: (
                    _in_process(asked)
                )
        times = alternate(jobs, min(3, settings.rounds))
        written = nbytes / disk_seconds([str(swap)], nbytes, nbytes) / 1e9
    rivals = {name: times.pop(name).wall for name in ("raw", "safetensors")}
    read = [nbytes / seconds / 1e9 for seconds in rivals["raw"]]
    rows = []
    for name, found in times.items():
        # To be at home on a disk the weights are also written.
        limit = (
            ("reading", read)
            if name.startswith("host")
            else ("reading and writing", [min(rate, written) for rate in read])
        )
        rates = [nbytes / seconds / 1e9 for seconds in found.wall]
        ratios = {rival: paired(found.wall, theirs) for rival, theirs in rivals.items()}
        rows.append(row(f"startup.{name}", "GB/s", rates, ceiling=limit, ratios=ratios))
    return Measured(rows)


def _in_process(asked: list[str]) -> Times:
    """The seconds of :func:`start` in a process that ends with what it made."""
    command = [sys.executable, "-P", "-m", "bench.startup", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    seconds = json.loads(done.stdout.strip().splitlines()[-1])
    return Times([seconds], [0.0])


if __name__ == "__main__":
    print(json.dumps(start(*json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # what it made need not be taken down
