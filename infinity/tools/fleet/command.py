"""`infinity fleet`: divides a fleet's workers of several kinds over its jobs: shares of the time,
the first rounds, and when each job ends."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...untrusted import printable, read_table
from ..cli.answers import print_object
from ..cli.options import FLAG, one_of, takes
from ..cli.values import a_path, columns, parse_seconds
from .fleet import (
    EQUAL,
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


OPTIONS = (
    ("jobs", takes("JOBS", a_path), "a TOML file of workers and jobs"),
    (
        "--policy",
        one_of(*POLICIES, default="max-min"),
        "equal progress (default), the earliest end of all, or the most steps for a dollar",
    ),
    ("--json", FLAG, "the allocation as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the allocation beside its baseline, its first rounds, and the predicted ends."""
    fleet = read_fleet(args.jobs)
    allocation = allocate(fleet, args.policy)
    ends, equal = finish_times(fleet, args.policy), finish_times(fleet, EQUAL)
    rounds = Rounds(fleet, allocation.shares)
    first = [rounds.next() for _ in range(TRIED_ROUNDS)][:ROUNDS]
    rates = (fleet.rates * allocation.shares).sum(axis=1)
    if args.json:
        jobs = {
            name: {
                "shares": dict(zip(fleet.workers, map(float, shares))),
                "steps_per_second": float(rate),
                "finish_seconds": ends[name].seconds,
                "equal_finish_seconds": equal[name].seconds,
                "dollars": ends[name].dollars,
            }
            for name, shares, rate in zip(fleet.jobs, allocation.shares, rates)
        }
        report = {"policy": args.policy, "objective": float(allocation.objective), "jobs": jobs}
        print_object(report | {"rounds": first, "received": rounds.received.tolist()})
        return 0
    table = [("job", *fleet.workers, "steps/s", "ends after", "if equal", "dollars")]
    for name, shares, rate in zip(fleet.jobs, allocation.shares, rates):
        dollars = "-" if ends[name].dollars is None else f"{ends[name].dollars:,.2f}"
        hours = _hours(ends[name].seconds), _hours(equal[name].seconds)
        table.append((name, *(f"{share:.1%}" for share in shares), f"{rate:.4g}", *hours, dollars))
    shown = [("round", *fleet.workers)]
    for number, runs in enumerate(first, start=1):
        shown.append((str(number), *(", ".join(names) or "-" for names in runs.values())))
    lines = [_headline(args.policy, fleet, allocation, ends), "", *columns(table), ""]
    lines += [*_beside(ends, equal), "", *columns(shown)]
    print(printable("\n".join(lines + _short(fleet, allocation.shares, rounds.received))))
    return 0


def read_fleet(path: Path) -> Fleet:
    """Reads a fleet. Raises ConfigError for a file that is none."""
    content = read_table(path)
    workers, jobs = _tables(path, content, "workers"), _tables(path, content, "jobs")
    _check_keys(content, ("workers", "jobs"), str(path))
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


def _headline(policy: str, fleet: Fleet, allocation: Allocation, ends: dict[str, Finish]) -> str:
    if policy == "cheapest":
        return "cheapest: the most steps for a dollar"
    if policy == "makespan":
        # Of the table: shares are found anew when a job ends, so the last one ends earlier
        last = max(end.seconds for end in ends.values())
        return f"makespan: the last job ends after {_hours(last)}"
    text = f"max-min: every job gets at least {allocation.objective:.4g} times its equal share"
    if any(job.weight != 1 for job in fleet.jobs.values()):
        text += ", times its weight"
    if any(job.gpus != 1 for job in fleet.jobs.values()):
        text += ", divided by its GPUs"
    return text


def _beside(ends: dict[str, Finish], equal: dict[str, Finish]) -> Iterator[str]:
    """Compares with the baseline, in which each job gets an equal part of every kind."""
    for what, of in (("mean", lambda each: sum(each) / len(each)), ("last", max)):
        ours, theirs = (of([end.seconds for end in each.values()]) for each in (ends, equal))
        yield (
            f"{what} end: {_hours(ours)}; if every job had an equal part of each kind:"
            f" {_hours(theirs)}, {theirs / ours:.2f} times"
        )


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
