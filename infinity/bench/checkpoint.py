"""checkpoint: saving and loading, beside the disk that the files go to and come from.

A load begins with nothing of the files in the page cache. The ceilings move as many bytes past it and do nothing else: a checkpoint
cannot be written or read in less.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

import infinity

from ..machine.sizes import round_up
from .io import RAW_BLOCK, RAW_THREADS, Raw, TestFile
from .results import Measured, Row, row
from .rounds import Times, alternate
from .settings import Settings

WIDTH, LAYERS = 2048, 24  # 100 M parameters in bf16 with split masters and bf16 moments: 0.8 GB
SMALL = 64  # layers where the benchmark is scaled down are narrower, not fewer


def measure(settings: Settings) -> Measured:
    """Measures rows checkpoint.save and checkpoint.load, of a state on the host and on NVMe (GB/s of the checkpoint's files), whose
    ceiling is the best of the raw disk's rounds, and the best rounds' shares."""
    width = max(SMALL, int(WIDTH * settings.scale**0.5) // SMALL * SMALL)
    rows: list[Row] = []
    notes: list[str] = []
    for home in ("host", "nvme"):
        with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
            found, nbytes = _times(Path(folder), home, width, settings.rounds)
        for way, raw in (("save", "write"), ("load", "read")):
            ours, disk = ([nbytes / seconds / 1e9 for seconds in found[name].wall] for name in (way, raw))
            rows.append(row(f"checkpoint.{home}.{way}", "GB/s", ours, ceiling=("raw disk", disk)))
            notes.append(f"checkpoint.{home}.{way}: best of {len(ours)} rounds {max(ours) / max(disk):.2f} of the raw disk's best")
    return Measured(rows, notes)


def _times(folder: Path, home: str, width: int, rounds: int) -> tuple[dict[str, Times], int]:
    """The times of one home's jobs, in turns, and the bytes that each moves."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = infinity.wrap_model(model, optimizer, _config(folder, home))
    model(torch.ones(1, width, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = folder / "checkpoint"
    infinity.save_checkpoint(saved, model, optimizer)
    files = list(saved.glob("*/*.safetensors"))
    nbytes = sum(file.stat().st_size for file in files)
    with ExitStack() as stack:
        raw = Raw(_raw_file(folder, round_up(nbytes, RAW_THREADS * RAW_BLOCK)))
        stack.callback(raw.close)
        stack.callback(infinity.unwrap_model, model)
        jobs: dict[str, Callable[[], object]] = {
            "save": lambda: infinity.save_checkpoint(saved, model, optimizer),
            "write": lambda: raw.run("write"),
            "forget": lambda: _forget(saved),
            "load": lambda: infinity.load_checkpoint(saved, model, optimizer),
            "read": lambda: raw.run("read"),
        }
        return alternate(jobs, rounds), nbytes


def _config(folder: Path, home: str) -> infinity.Config:
    if home == "host":
        return infinity.Config(params="host", optimizer="host")
    return infinity.Config(params="nvme", optimizer="nvme", nvme_paths=[str(folder)], host_memory="256MiB")


def _raw_file(folder: Path, nbytes: int) -> TestFile:
    path = folder / "raw"
    with open(path, "wb") as file:
        for _ in range(0, nbytes, RAW_BLOCK):
            file.write(os.urandom(RAW_BLOCK))
        file.flush()
        os.fsync(file.fileno())
    return TestFile(str(path), nbytes)


def _forget(saved: Path) -> None:
    """Has the system forget what it keeps of the files in memory; they are on the disk already."""
    for file in saved.glob("*/*"):
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
