"""Prints the tables of docs/what-fits.md: models x machines, as `infinity plan` has them.

python tools/what_fits.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from infinity.errors import CapacityError  # noqa: E402
from infinity.tools.cli import parse  # noqa: E402
from infinity.tools.cli.amounts import format_seconds  # noqa: E402
from infinity.tools.plan import plan  # noqa: E402

MODELS = ("llama-1b", "llama-8b", "qwen3-14b", "qwen3-32b", "llama-70b")
MACHINES = ("laptop", "rtx3090", "rtx4090", "a100", "h100", "h200")
OPTIONS = "--batch-tokens 16K --sequence-length 2048 --gradient-checkpointing --json".split()
MESH_MODELS = ("llama-8b", "llama-70b")
MOMENTS: tuple[list[str], ...] = ([], ["--moments", "int8"])  # of the two tables of one rank
HOMES = ("device", "host", "nvme")
MESH_ROWS = tuple(f"{model}, {home}" for model in MESH_MODELS for home in HOMES)
NODES = ("two-rtx3090", "four-rtx4090", "dgx2", "dgx-a100", "dgx-h100", "dgx-b200")
MESH_OPTIONS = "--batch-tokens 64K --sequence-length 4096 --gradient-checkpointing --mesh auto"


def cell(model: str, machine: str, options: list[str]) -> str:
    """Returns where the state lives, and how long a step takes."""
    words = ["plan", "--model", model, "--machine", machine]
    try:
        found = plan.make(parse([*words, *OPTIONS, *options]))
    except CapacityError:
        return "does not fit"
    tiers = [tier for tier in ("device", "host", "nvme") if share_of(found, tier) > 0.02]
    seconds = format_seconds(found["step_seconds"])
    return f"{' + '.join(tiers)}: {seconds}, {found['tokens_per_second']:,.0f} tokens/s"


def share_of(found: dict, tier: str) -> float:
    """Returns the share of weights and optimizer state that is at home on ``tier``."""
    what = ("weights", "optimizer state")
    nbytes = {
        name: sum(of_tier["parts"].get(part, 0) for part in what)
        for name, of_tier in found["tiers"].items()
    }
    return nbytes[tier] / max(1, sum(nbytes.values()))


def mesh_cell(row: str, machine: str) -> str:
    """Returns the best mesh of one node for "model, home", and how long a step takes."""
    model, _, home = row.partition(", ")
    words = ["plan", "--model", model, "--machine", machine, *MESH_OPTIONS.split()]
    homes = ["--params", home, "--optimizer", home]
    try:
        best = plan.make(parse([*words, *homes]))["meshes"][0]
    except CapacityError:
        return "does not fit"
    axes = " ".join(f"{axis}{size}" for axis, size in best["mesh"].items() if size > 1)
    slower = f", {best['times_resident']:.3g} x" if best["times_resident"] >= 1.005 else ""
    return f"{axes}: {format_seconds(best['step_seconds'])}{slower}"


def table(options: list[str]) -> str:
    """Makes the table of one rank, in Markdown."""
    return _table(MODELS, MACHINES, lambda model, machine: cell(model, machine, options))


def meshes() -> str:
    """Makes the table of meshes, in Markdown."""
    return _table(MESH_ROWS, NODES, mesh_cell)


def sample(week: int) -> list[tuple[int, str, str, str]]:
    """Plans a cell of each machine, in one of the two tables of one rank: the table's number, row,
    column and cell. In ten weeks all cells have their turn."""
    found = []
    for number, machine in enumerate(MACHINES):
        turn = number + week
        which, model = turn % len(MOMENTS), MODELS[turn % len(MODELS)]
        found.append((which, model, machine, cell(model, machine, MOMENTS[which])))
    return found


def sample_of_meshes(week: int) -> list[tuple[int, str, str, str]]:
    """Plans a cell of each machine in the table of meshes, and one of each row, as :func:`sample`
    does."""
    cells = [(MESH_ROWS[(at + week) % len(MESH_ROWS)], name) for at, name in enumerate(NODES)]
    return [(0, row, machine, mesh_cell(row, machine)) for row, machine in cells]


def _table(names: tuple, machines: tuple, cell_of: Callable[[str, str], str]) -> str:
    rows = [f"| | {' | '.join(machines)} |", f"|---|{'---|' * len(machines)}"]
    rows += [
        f"| {name} | {' | '.join(cell_of(name, machine) for machine in machines)} |"
        for name in names
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    for options in MOMENTS:
        print(table(options))
        print()
    print(meshes())
