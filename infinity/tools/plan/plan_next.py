"""What a machine's next part would bring: the same plan with a disk or memory more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ...errors import CapacityError, ConfigError
from ..cli.amounts import format_seconds
from .machine_file import Machine
from .plan_job import Job, seconds_on

PARTS = {"disk": "one more disk", "memory": "twice the memory"}
RECOMPUTE, CHOOSE, MOMENTS = "--gradient-checkpointing", "--recompute", "--moments int8"
INEXACT = {MOMENTS: ", not exact: it rounds the moments to 8 bits"}
GAIN = 1.05  # times the tokens, from which an option is told


def plan_next(
    job: Job,
    found: dict[str, Any],
    machine: Machine,
    nodes: int,
    configure: Callable[[Machine], Any],
) -> dict[str, Any]:
    """Plans the training of ``found`` on a machine with one part more, for each that may matter.
    ``configure``: the configuration with the budgets of a machine."""
    rows = {}
    for part, larger in _larger(machine, found):
        if row := _row(job, found, larger, nodes, lambda: {"config": configure(larger)}):
            rows[part] = row
    return {"next": rows}


def plan_faster(
    job: Job,
    found: dict[str, Any],
    machine: Machine,
    nodes: int,
    configure: Callable[..., Any],
    recomputed: Any,
    blocks: Any = None,
) -> dict[str, Any]:
    """Plans the training of ``found`` with each option that may make it faster on the same machine,
    and returns those that do. ``recomputed``: what forwards save that are computed again;
    ``blocks``: what there is to choose for."""
    from .work import has_sizes  # imports torch

    ways: dict[str, Callable[[], dict[str, Any]]] = {}
    if not job.batch["checkpointing"] and not job.config.recompute:
        batch = {**job.batch, "checkpointing": True}
        ways[RECOMPUTE] = lambda: {"batch": batch, "saved": recomputed}
        if blocks is not None and has_sizes(machine):
            ways[CHOOSE] = lambda: {
                "config": configure(machine, recompute=True),
                "saved": recomputed,
                "blocks": blocks,
            }
    if job.config.moments == "fp32":
        ways[MOMENTS] = lambda: {"config": configure(machine, moments="int8")}
    rows = {option: _row(job, found, machine, nodes, way) for option, way in ways.items()}
    return {"faster": {option: row for option, row in rows.items() if row and row["times"] >= GAIN}}


def _row(
    job: Job,
    found: dict[str, Any],
    machine: Machine,
    nodes: int,
    changes: Callable[[], dict[str, Any]],
) -> dict[str, float]:
    """Returns what a plan with ``changes`` of the job brings; empty if it does not fit."""
    try:
        seconds = seconds_on(replace(job, **changes()), machine, nodes)
    except (CapacityError, ConfigError):
        return {}  # the same memory for more ranks
    return {
        "step_seconds": seconds,
        "times": found["tokens_per_step"] / seconds / found["tokens_per_second"],
    }


def _larger(machine: Machine, found: dict[str, Any]) -> Iterator[tuple[str, Machine]]:
    if found["edges"]["nvme->host"] or found["edges"]["host->nvme"]:
        yield "disk", replace(machine, disks=machine.disks + 1)
        yield "memory", replace(machine, host_memory=2 * machine.host_memory)


def next_line(rows: dict[str, dict[str, float]], nodes: int) -> str:
    """Returns the line of a terminal, the part that brings most first."""
    whose = "" if nodes == 1 else " a node"
    said = [
        f"{row['times']:.2f} x with {PARTS[part]}{whose}"
        f" ({format_seconds(row['step_seconds'])} a step)"
        for part, row in sorted(rows.items(), key=lambda each: -each[1]["times"])
    ]
    return f"tokens/s would be {', '.join(said)}"


def faster_lines(rows: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yields a line of a terminal for each option, the one that brings most first."""
    for option, row in sorted(rows.items(), key=lambda each: -each[1]["times"]):
        seconds = format_seconds(row["step_seconds"])
        yield (
            f"tokens/s would be {row['times']:.2f} x with {option} ({seconds} a"
            f" step{INEXACT.get(option, '')})"
        )
