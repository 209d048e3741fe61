"""What a machine's next part would bring: the same plan with a disk or memory more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ...errors import CapacityError, ConfigError
from ..cli.amounts import format_seconds
from .machine_file import Machine
from .plan_job import Job, plan_cluster

PARTS = {"disk": "one more disk", "memory": "twice the memory"}


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
        try:
            other = plan_cluster(replace(job, config=configure(larger)), larger, nodes)
        except (CapacityError, ConfigError):
            continue  # the same memory for more ranks
        rows[part] = {
            "step_seconds": other["step_seconds"],
            "times": other["tokens_per_second"] / found["tokens_per_second"],
        }
    return {"next": rows}


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
