"""checkpoint: saving and loading, beside the disk that the files go to and come from.

A load begins with nothing of the files in the page cache, and with as much free memory as the files
have bytes that this machine need not ask for: a virtual machine which gives free memory back to its
host gets it again at a fraction of the disk's rate. The ceilings move as many bytes past the page
cache and do nothing else: a checkpoint cannot be written or read in less. State that is at home on
the disk is read and written there: its ceiling does both. What a save writes is new, which a file
system is slower at than at replacing: so much is said apart.

A stall is what a step takes longer because of a save: of one that the training waits for, and of
one beside its forward and backward. Their bound is the seconds of the save beyond those.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity import native
from infinity.core.machine.sizes import round_up
from infinity.core.run.registry import wrapped
from infinity.ext.checkpoint.file_writer import SLOT_NBYTES, SLOTS, FileWriter, make_slots
from infinity.ext.checkpoint.manifest import sync_file
from infinity.ext.checkpoint.removal import wait_for_space
from infinity.tools.bench.io import RAW_BLOCK, RAW_THREADS, Raw, TestFile
from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.rounds import Times, alternate
from infinity.tools.bench.settings import Settings

WIDTH, LAYERS = 2048, 24  # 100 M parameters in bf16 with split masters and bf16 moments: 0.8 GB
ROWS = 512  # of a batch, whose passes take about as long as a save
SMALL = 64  # layers where the benchmark is scaled down are narrower, not fewer


def measure(settings: Settings) -> Measured:
    """Measures rows checkpoint.save and checkpoint.load, of a state on the host and on NVMe (GB/s
    of the checkpoint's files), whose ceiling is the best of the raw disk's rounds, and the best
    rounds' shares; checkpoint.new_file, which a save is beside; and checkpoint.stall (seconds).
    """
    width = max(SMALL, int(WIDTH * settings.scale**0.5) // SMALL * SMALL)
    rows: list[Row] = []
    notes: list[str] = []
    for home in ("host", "nvme"):
        with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
            found, nbytes = _times(Path(folder), home, width, settings.rounds)
        rates = {
            name: [nbytes / seconds / 1e9 for seconds in times.wall]
            for name, times in found.items()
        }
        rates["copy"] = [
            rate / 2 for rate in rates["mixed"]
        ]  # half of what is moved there is read, half is written
        ceilings = (
            {"save": "write", "load": "read"}
            if home == "host"
            else {"save": "copy", "load": "copy"}
        )
        for way, raw in (ceilings | {"new_file": "write"}).items():
            rows.append(
                row(
                    f"checkpoint.{home}.{way}",
                    "GB/s",
                    rates[way],
                    ceiling=(f"raw disk, {raw}", rates[raw]),
                )
            )
        rows.append(_stall(home, found, notes))
        for way, ceiling in (*ceilings.items(), ("save", "new_file")):
            share = max(rates[way]) / max(rates[ceiling])
            notes.append(
                f"checkpoint.{home}.{way}: best of {settings.rounds} rounds {share:.2f} of the best"
                f" {ceiling}"
            )
    return Measured(rows, notes)


def _stall(home: str, found: dict[str, Times], notes: list[str]) -> Row:
    """Returns the row of a home's stall. Adds its bound to ``notes``."""
    step, passes = (found[name].wall for name in ("step", "passes"))
    beside, alone = (
        [long - short for long, short in zip(found[name].wall, step)]
        for name in ("step_beside", "step_waited")
    )
    bounds = [max(0.0, seconds - hidden) for seconds, hidden in zip(alone, passes)]
    waited, bound, hidden = map(statistics.median, (alone, bounds, passes))
    notes.append(
        f"checkpoint.{home}.stall: {waited:.2f} s if it is waited for, bound {bound:.2f} s beside"
        f" {hidden:.2f} s of passes"
    )
    ratios = {"waited for": statistics.median(beside) / waited}
    return row(f"checkpoint.{home}.stall", "s", beside, ratios=ratios)


def _times(folder: Path, home: str, width: int, rounds: int) -> tuple[dict[str, Times], int]:
    """The times of one home's jobs, in turns, and the bytes that each moves."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(
        torch.bfloat16
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = infinity.wrap_model(model, optimizer, _config(folder, home))
    inputs = torch.ones(ROWS, width, dtype=torch.bfloat16)

    def passes() -> None:
        model(inputs).sum().backward()

    def step(wait: bool | None = None) -> None:
        """Makes a step, with its updates; ``wait``: after a save."""
        if wait is not None:
            infinity.save_checkpoint(saved, model, optimizer, wait=wait)
        passes()
        optimizer.step()
        optimizer.zero_grad()
        engine.wait_idle()

    engine = wrapped(model).engine
    step()
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
            "passes": lambda: (passes(), optimizer.zero_grad()),
            "step": step,
            "step_waited": lambda: step(wait=True),
            "step_beside": lambda: step(wait=False),
            "end": engine.finish_background,
            "space": lambda: _free_space(folder / "new"),
            "write": lambda: raw.run("write"),
            "new_file": lambda: _write_new(folder / "new", nbytes),
            "forget": lambda: _forget(saved),
            "memory": lambda: native.Region(nbytes, huge_pages=True, touch_threads=1) and None,
            "load": lambda: infinity.load_checkpoint(saved, model, optimizer),
            "read": lambda: raw.run("read"),
            "mixed": lambda: raw.run("mixed"),
        }
        return alternate(jobs, rounds, in_order=True), nbytes


def _config(folder: Path, home: str) -> infinity.Config:
    if home == "host":
        return infinity.Config(params="host", optimizer="host")
    return infinity.Config(
        params="nvme", optimizer="nvme", nvme_paths=[str(folder)], host_memory="256MiB"
    )


def _raw_file(folder: Path, nbytes: int) -> TestFile:
    path = folder / "raw"
    with open(path, "wb") as file:
        for _ in range(0, nbytes, RAW_BLOCK):
            file.write(os.urandom(RAW_BLOCK))
        file.flush()
        os.fsync(file.fileno())
    return TestFile(str(path), nbytes)


def _write_new(path: Path, nbytes: int) -> None:
    """Writes as much as a save does to one file whose space is reserved, from memory that no cache
    holds, and syncs it."""
    slots = make_slots(SLOTS * SLOT_NBYTES)
    with FileWriter(path, nbytes, slots) as file:
        file.write(_memory(nbytes), stable=True)
        file.finish()
    sync_file(path)


def _free_space(path: Path) -> None:
    """Removes ``path``, and waits for the space of the last checkpoint: neither slows what is
    measured next."""
    path.unlink(missing_ok=True)
    wait_for_space()


@functools.cache
def _memory(nbytes: int) -> torch.Tensor:
    region = native.Region(nbytes, huge_pages=True, touch_threads=1)
    return native.tensor_at(region, region.address, nbytes, torch.uint8)


def _forget(saved: Path) -> None:
    """Has the system forget what it keeps of the files in memory; they are on the disk already."""
    for file in saved.glob("*/*"):
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
