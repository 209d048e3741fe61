"""`infinity fleet`: divides a fleet's workers of several kinds over its jobs: shares of the time,
the first rounds, and when each job ends."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...untrusted import printable, read_table
from ..cli.values import a_path, columns, parse_seconds
from .fleet import (
    POLICIES,
    Allocation,
    Finish,
    Fleet,
    FleetJob,
    Rounds,
    Workers,
    allocate,
    finish_times,
)

ROUNDS, TRIED_ROUNDS = 5, 1000  # that are shown, and that are compared with the shares
LEAST_SHORT = 0.01  # of the rounds, which is worth a line
WORKER_KEYS = ("count", "dollars_per_hour")
JOB_KEYS = ("steps", "rates", "gpus", "weight", "deadline")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers the command."""
    parser = subparsers.add_parser("fleet", help="who of several jobs gets which GPUs, and when")
    parser.add_argument("jobs", type=a_path, metavar="JOBS", help="a TOML file of workers and jobs")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default="max-min",
        help="equal progress (default), the earliest end of all, or the most steps for a dollar",
    )
    parser.add_argument(
        "--json", action="store_true", help="the allocation as one JSON object on stdout"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the allocation, its first rounds, and the predicted ends."""
    fleet = read_fleet(args.jobs)
    allocation = allocate(fleet, args.policy)
    ends = finish_times(fleet, args.policy)
    rounds = Rounds(fleet, allocation.shares)
    first = [rounds.next() for _ in range(TRIED_ROUNDS)][:ROUNDS]
    if args.json:
        report = _report(args.policy, fleet, allocation, ends, first)
        print(json.dumps(report | {"received": rounds.received.tolist()}))
    else:
        lines = _lines(args.policy, fleet, allocation, ends, first)
        lines += _short(fleet, allocation.shares, rounds.received)
        print(printable("\n".join(lines)))
    return 0


def read_fleet(path: Path) -> Fleet:
    """Reads a fleet. Raises ConfigError for a file that is none."""
    found = read_table(path)
    workers, jobs = _tables(path, found, "workers"), _tables(path, found, "jobs")
    _check_keys(found, ("workers", "jobs"), str(path))
    for kind, table in workers.items():
        _check_keys(table, WORKER_KEYS, f"{path}: workers.{kind}", needed="count")
    for name, table in jobs.items():
        _check_keys(table, JOB_KEYS, f"{path}: jobs.{name}", needed="steps")
        if not isinstance(table.get("rates"), dict):
            raise ConfigError(f"{path}: jobs.{name}: rates must be a table, as {{ h100 = 2.5 }}")
        if "deadline" in table:
            table["deadline"] = parse_seconds(table["deadline"], f"jobs.{name}: deadline")
    return Fleet(
        {kind: Workers(**table) for kind, table in workers.items()},
        {name: FleetJob(**table) for name, table in jobs.items()},
    )


def _tables(path: Path, found: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    tables = found.get(name)
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise ConfigError(f"{path} needs tables [{name}.NAME], at least one")
    return tables


def _check_keys(
    table: dict[str, Any], known: Collection[str], where: str, *, needed: str = ""
) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f": did you mean {near[0]}?" if near else f": there are {', '.join(known)}"
            raise ConfigError(f"{where}: no such key: {key}{hint}")
    if needed and needed not in table:
        raise ConfigError(f"{where}: {needed} is missing")


def _report(
    policy: str,
    fleet: Fleet,
    allocation: Allocation,
    ends: dict[str, Finish],
    rounds: list[dict[str, list[str]]],
) -> dict[str, Any]:
    return {
        "policy": policy,
        "objective": float(allocation.objective),
        "jobs": {
            name: {
                "shares": dict(zip(fleet.workers, map(float, shares))),
                "steps_per_second": float(rate),
                "finish_seconds": ends[name].seconds,
                "dollars": ends[name].dollars,
            }
            for name, shares, rate in zip(fleet.jobs, allocation.shares, _rates(fleet, allocation))
        },
        "rounds": rounds,
    }


def _rates(fleet: Fleet, allocation: Allocation) -> Any:
    return (fleet.rates * allocation.shares).sum(axis=1)


def _lines(
    policy: str,
    fleet: Fleet,
    allocation: Allocation,
    ends: dict[str, Finish],
    rounds: list[dict[str, list[str]]],
) -> list[str]:
    least = f"every job gets at least {float(allocation.objective):.4g} times its equal share"
    if any(job.weight != 1 for job in fleet.jobs.values()):
        least += ", times its weight"
    if any(job.gpus != 1 for job in fleet.jobs.values()):
        least += ", divided by its GPUs"
    told = {
        "max-min": least,
        # Of the table: shares are found anew when a job ends, so the last one ends earlier
        "makespan": f"the last job ends after {_hours(max(end.seconds for end in ends.values()))}",
        "cheapest": "the most steps for a dollar",
    }[policy]
    table = [("job", *fleet.workers, "steps/s", "ends after", "dollars")]
    for name, shares, rate in zip(fleet.jobs, allocation.shares, _rates(fleet, allocation)):
        end = ends[name]
        dollars = "-" if end.dollars is None else f"{end.dollars:,.2f}"
        of_kinds = (f"{share:.1%}" for share in shares)
        table.append((name, *of_kinds, f"{rate:.4g}", _hours(end.seconds), dollars))
    first = [("round", *fleet.workers)]
    for number, runs in enumerate(rounds, start=1):
        first.append((str(number), *(", ".join(names) or "-" for names in runs.values())))
    return [f"{policy}: {told}", "", *columns(table), "", *columns(first)]


def _short(fleet: Fleet, shares: np.ndarray, received: np.ndarray) -> list[str]:
    """Names jobs that get fewer rounds than their shares."""
    lines = []
    for at, name in enumerate(fleet.jobs):
        got, due = received[at].sum(), shares[at].sum()
        if got < due - LEAST_SHORT:
            lines.append(
                f"{name} runs in {got:.1%} of {TRIED_ROUNDS} rounds, not in {due:.1%}: a job of"
                " several GPUs needs them free at the same time"
            )
    return ["", *lines] if lines else []


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h"
