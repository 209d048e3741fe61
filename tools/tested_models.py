"""Trains every architecture of the tests at every home, and prints the table of docs/models.md.

python tools/tested_models.py
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests/support" / name) for name in ("models", "cases"))]

from runs import Run, check_same_bits, wrapped_run  # noqa: E402
from zoo import ZOO, Architecture, make_batch, make_model, seed_everything  # noqa: E402

SEED, LR = 7, 1e-3
STEPS = (0, 1)
HOMES = {  # the table's columns -> a configuration; the first is what the others are compared with
    "device": {"params": "device", "optimizer": "device"},
    "host": {"params": "host", "optimizer": "host", "host_memory": "64MiB"},
    "nvme": {"params": "nvme", "optimizer": "nvme", "host_memory": "64MiB"},
    "weights on host, optimizer on nvme": {"params": "host", "optimizer": "nvme"},
}


def trained(entry: Architecture, home: dict[str, str]) -> Run:
    """Trains the architecture for two steps, one of them clipped, at a home."""
    model = make_model(entry, SEED)
    batches = [make_batch(entry, SEED + step) for step in STEPS]
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        return wrapped_run(
            copy.deepcopy(model),
            batches,
            config=home | {"nvme_paths": [folder]},
            lr=LR,
            clip_steps=(0,),
            before_forward=lambda step: seed_everything(STEPS[step]),
        )


def has_same_bits(entry: Architecture, first: Run, home: dict[str, str]) -> bool:
    """Returns whether losses, norms, weights, buffers and moments have the first run's bits."""
    try:
        check_same_bits(first, trained(entry, home))
    except AssertionError:
        return False
    return True


def families() -> dict[str, list[Architecture]]:
    """Returns the architectures of each family that can be trained here."""
    found: dict[str, list[Architecture]] = defaultdict(list)
    for entry in ZOO.values():
        if not entry.missing():
            found[entry.family].append(entry)
    return found


def table() -> str:
    """Makes the table, in Markdown: of each family, how many of its models have the same bits."""
    first, *others = HOMES
    rows = [f"| family | {' | '.join(HOMES)} | models |", f"|---|{'---|' * len(HOMES)}---|"]
    for family, entries in families().items():
        counts = dict.fromkeys(HOMES, 0)
        for entry in entries:
            run = trained(entry, HOMES[first])
            counts[first] += 1
            for name in others:
                counts[name] += has_same_bits(entry, run, HOMES[name])
        cells = " | ".join(f"{count} of {len(entries)}" for count in counts.values())
        rows.append(f"| {family} | {cells} | {', '.join(entry.name for entry in entries)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    (ROOT / "build").mkdir(exist_ok=True)
    print(table())
