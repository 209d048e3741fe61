"""`infinity bench compare A B [C ...]`: runs beside the first, row by row, with what their rounds
allow to be said.

ratio     how much longer B took than A: above 1 it is slower, whichever way the row counts
verdict   faster or slower when the 95 % interval of the ratio excludes 1, and the bound

Two runs can differ by more than their rounds say: the machine's speed changes between them. So a
row that has a ceiling gets a verdict only if its share of the ceiling changed as well, and one
that has none only if it changed by more than each ceiling did. A change of the code is measured in
turns, by `python -m bench against`.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, UsageError
from ..cli.answers import print_object
from ..cli.options import FLAG, takes
from ..cli.values import real_from_zero
from . import facts, intervals
from .results import Measured, Row, Run, is_quick, read, row_of
from .settings import Settings
from .themes import THEMES

WITH_CEILING = "no difference can be seen: its ceiling changed as much"
WITH_MACHINE = "no difference can be seen: the machine changed as much"
DRIFT = 1.1  # between the ceilings of two runs
# What must be the same, or two figures are of different work
SAME = ("scale", "threads")


@dataclass(frozen=True)
class Compared:
    """One row of both runs. ``ratio``: of seconds, B over A; with its interval."""

    name: str
    unit: str
    first: float
    second: float
    ratio: float
    interval: intervals.Interval | None
    verdict: str


OPTIONS = (  # of `python -m bench compare`
    ("files", takes("FILE", nargs="+"), "two result files or more; or one, and this machine now"),
    ("--json", FLAG, "one JSON object on stdout"),
    ("--csv", FLAG, "comma-separated values on stdout"),
    ("--tex", FLAG, "a LaTeX table on stdout"),
    ("--folder", takes("DIR", default="."), "on the disk to measure"),
    (
        "--bound",
        takes("X", real_from_zero, default=0.0),
        "how much slower fails, with confidence: 0.05 is 5 %% (default 0)",
    ),
)


def run(args: argparse.Namespace) -> int:
    """Prints the comparison of the first file with each other one. Returns 1 if a row is slower
    than the bound, with confidence."""
    if sum((args.json, args.csv, args.tex)) > 1:
        raise UsageError("--json, --csv and --tex each need stdout: give one")
    if not args.files:
        raise UsageError("compare takes two result files or more, or one and this machine")
    first, *others = [read(Path(each)) for each in args.files]
    others = others or [_measured_now(first, args.folder, getattr(args, "themes", THEMES))]
    # Before anything is printed: one of them may be of other work
    pairs = [(check(first, each), compare(first, each, bound=args.bound)) for each in others]
    names = args.files[1:] or ["this machine"]
    if args.csv:
        print(as_csv([(name, rows) for name, (_, rows) in zip(names, pairs)]), end="")
    elif args.json:
        as_dicts = [{"file": name} | as_json(*pair) for name, pair in zip(names, pairs)]
        print_object(as_dicts[0] if len(as_dicts) == 1 else {"compared": as_dicts})
    elif args.tex:
        print(*(as_tex(rows) for _, rows in pairs), sep="\n\n")
    else:
        for name, (differences, rows) in zip(names, pairs):
            which = [f"B is {name}"] if len(pairs) > 1 else []
            print("\n".join([*which, *differences, table(rows)]))
    return 1 if any(each.verdict == "slower" for _, rows in pairs for each in rows) else 0


def check(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Returns what makes the two runs differ besides the code. Raises ConfigError if they did
    different work."""
    for name in SAME:
        pair = [each.get("settings", {}).get(name) for each in (first, second)]
        if None not in pair and pair[0] != pair[1]:
            raise ConfigError(
                f"the runs have {name} {pair[0]} and {pair[1]}: figures of different work are not"
                f" compared. Run one again with --{name} of the other."
            )
    warnings = [f"differs: {each}" for each in facts.differences(first, second)]
    drifts = _drifts(first, second)
    if drifts:
        (name, ceiling), drift = max(drifts.items(), key=lambda each: max(each[1], 1 / each[1]))
        if max(drift, 1 / drift) > DRIFT:
            warnings.append(
                f"differs: {ceiling}, the ceiling of {name}, is {drift:.2f} times A's in B"
            )
    for which, each in zip("AB", (first, second)):
        if not each.get("complete", True):
            warnings.append(f"{which} is of a run that was interrupted")
        if is_quick(each.get("settings", {})):
            warnings.append(f"{which} is of a quick look")
        load = max(each.get("load", {"": 0.0}).values())
        if load > 0.5 * (each.get("machine", {}).get("cores") or 1):
            warnings.append(f"{which} was measured beside other work (load {load:g})")
    return warnings


def _drifts(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Returns by how much each ceiling of both runs changed, by its row and its name."""
    limits = [
        {
            (each["name"], each["ceiling"]["name"]): each["ceiling"]["value"]
            for each in run["rows"]
            if each.get("ceiling")
        }
        for run in (first, second)
    ]
    return {key: limits[1][key] / limits[0][key] for key in limits[0].keys() & limits[1].keys()}


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], *, bound: float = 0.0
) -> list[Compared]:
    """Compares the rows that both runs have. Raises ConfigError if there are none."""
    rows = [{each["name"]: row_of(each) for each in run["rows"]} for run in (first, second)]
    drift = max([max(each, 1 / each) for each in _drifts(first, second).values()], default=1.0) - 1
    ratios = [
        _compared(rows[0][name], rows[1][name], bound, drift) for name in rows[0] if name in rows[1]
    ]
    if not ratios:
        raise ConfigError("the runs have no row in common: compare runs of one theme")
    return ratios


def _compared(first: Row, second: Row, bound: float, drift: float) -> Compared:
    """``drift``: of the machine between the runs, which a row without a ceiling must exceed."""
    over, under = (second, first) if first.better == "less" else (first, second)
    interval = intervals.of_ratio(over.rounds, under.rounds)
    ratio = over.median / under.median if under.median else float("inf")
    verdict = intervals.verdict(interval, bound=bound)
    before, after = ((each.ceiling or {}).get("shares", []) for each in (first, second))
    if verdict in ("slower", "faster") and first.better == "more" and before and after:
        if intervals.verdict(intervals.of_ratio(before, after), bound=bound) != verdict:
            verdict = WITH_CEILING
    elif intervals.verdict(interval, bound=max(bound, drift)) != verdict:
        verdict = WITH_MACHINE
    return Compared(first.name, first.unit, first.median, second.median, ratio, interval, verdict)


def table(found: Sequence[Compared]) -> str:
    """Formats a comparison as text."""
    width = max(len(each.name) for each in found)
    lines = [f"{'':<{width}} {'A':>10} {'B':>10}  {'time B/A':>8}  {'95 %':^15}"]
    for each in found:
        lines.append(
            f"{each.name:<{width}} {each.first:>10.3f} {each.second:>10.3f}  {each.ratio:>8.3f}"
            f"  {_spread(each):^15}  {each.verdict} ({each.unit})"
        )
    return "\n".join(lines)


def _spread(each: Compared) -> str:
    return f"{each.interval[0]:.3f} - {each.interval[1]:.3f}" if each.interval else ""


def as_json(differences: list[str], found: Sequence[Compared]) -> dict[str, Any]:
    """Returns a comparison as plain data."""
    slower = [each.name for each in found if each.verdict == "slower"]
    return {"differences": differences, "rows": [asdict(each) for each in found], "slower": slower}


def as_csv(compared: Sequence[tuple[str, Sequence[Compared]]]) -> str:
    """Formats comparisons, each with the name of B's file, as comma-separated values."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "unit", "a", "b", "time_b_over_a", "low", "high", "verdict", "file"])
    for file, rows in compared:
        for each in rows:
            figures = (each.first, each.second, each.ratio, *(each.interval or ("", "")))
            writer.writerow([each.name, each.unit, *figures, each.verdict, file])
    return text.getvalue()


def as_tex(found: Sequence[Compared]) -> str:
    """Formats a comparison as a LaTeX table."""
    lines = [r"\begin{tabular}{lrrrll}", r"row & A & B & time B/A & 95\,\% & verdict \\ \hline"]
    for each in found:
        name = each.name.replace("_", r"\_")
        lines.append(
            f"{name} & {each.first:.3f} & {each.second:.3f} & {each.ratio:.3f} &"
            rf" {_spread(each)} & {each.verdict} \\"
        )
    return "\n".join([*lines, r"\end{tabular}"])


def _measured_now(
    first: Mapping[str, Any], folder: str, themes: Mapping[str, str]
) -> dict[str, Any]:
    """Measures the themes of a file on this machine, with its settings."""
    chosen = list(THEMES) if first["theme"] == "all" else first["theme"].split("+")
    if missing := [theme for theme in chosen if theme not in themes]:
        raise UsageError(
            f"{missing[0]} is measured in a checkout: `python -m bench {missing[0]} --save FILE`,"
            " then compare the two files"
        )
    kept = first.get("settings")
    if kept is None:
        raise ConfigError("the file does not say its settings: measure, and compare two files")
    names = ("rounds", "scale", "seconds", "threads")
    settings = Settings(
        folder=folder,
        rivals=False,
        only=tuple(kept.get("only", ())),
        **{name: kept[name] for name in names if name in kept},
    )
    run, measured = Run(first["theme"], settings), Measured([])
    for theme in chosen:
        print(f"measuring {theme}", file=sys.stderr)
        name, _, function = themes[theme].partition(":")
        module = importlib.import_module(name)
        with settings.torch_threads():
            measured.add(getattr(module, function or "measure")(settings))
    return run.content(measured)
