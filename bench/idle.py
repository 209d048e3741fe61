"""idle: how much of a step any lane stood still although its inputs and its buffer were there.

The main job, with its timeline, at home on the host and on NVMe. The law is at most 1 % for every
lane.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import infinity
from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.settings import Settings
from infinity.tools.watch.trace import last_steps, read, summary

from .systems import VOCABULARY, make_model

MOST = 0.01  # of a step
WARM_UP, STEPS = 2, 5
BATCH, LENGTH = 4, 256
HOMES = {
    "host": {"params": "host", "optimizer": "host"},
    "nvme": {"params": "nvme", "optimizer": "nvme"},
}


def measure(settings: Settings) -> Measured:
    """Measures rows idle.host and idle.nvme: shares of the steps in percent."""
    rows: list[Row] = []
    notes: list[str] = []
    for home, homes in HOMES.items():
        shares = []
        for _ in range(settings.rounds):
            with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as path:
                found = _idle(Path(path), homes, settings)
            shares.append(100 * found["share"])
            lanes = ", ".join(f"{lane} {share:.2%}" for lane, share in found["lanes"].items())
            notes.append(f"idle.{home}: {lanes}")
            if (worst := found["worst"]) is not None:
                notes.append(
                    f"idle.{home}: worst {worst['lane']}, {worst['name']},"
                    f" {1e3 * worst['seconds']:.1f} ms"
                )
        rows.append(row(f"idle.{home}", "%", shares))
    over = [each.name for each in rows if each.low > 100 * MOST]
    notes += [f"{name} is over {MOST:.0%} in every round" for name in over]
    return Measured(rows, notes)


def _idle(folder: Path, homes: dict, settings: Settings) -> dict:
    """Returns what the timeline of the job's last steps says."""
    model = make_model("tiny" if settings.scale < 1 else "134M")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {"trace": str(folder / "trace.json"), "nvme_paths": [str(folder)], **homes}
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    for _ in range(WARM_UP + STEPS):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    infinity.unwrap_model(model, optimizer)
    events = read(folder / "trace.json")
    return summary(last_steps(events, STEPS))["idle_while_ready"]
