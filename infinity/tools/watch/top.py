"""`infinity top`: shows the jobs of this machine, for each rank: tiers, every edge's rate against
its measured limit, the unit that computes, loss, speed, and the remaining time."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ConfigError, UsageError
from ..cli.answers import print_object
from ..cli.options import FLAG, rating, takes
from ..cli.values import a_path, rating_of
from .prometheus import place_of
from .prometheus import run as publish
from .run_files import is_number, is_stalled, silence

WIDTH = 80  # characters of a line, at most
BAR, EDGE_BAR = 24, 12


OPTIONS = (
    ("run", takes("RUN", a_path, nargs="?"), "folder of one job (default: all that run)"),
    ("--once", FLAG, "print once and end"),
    (
        "--interval",
        takes("SECONDS", float, default=1.0),
        "between two looks (default 1)",
    ),
    rating("for how long it lasts"),
    (
        "--prometheus",
        takes("PORT|FILE", place_of),
        "publish the figures for Prometheus until Ctrl-C or SIGTERM: at a port of localhost,"
        " or as a file *.prom",
    ),
    ("--json", FLAG, "print once, as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the jobs, once or until interrupted."""
    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"--interval {args.interval}: give 0.05 to 3600 seconds")
    if args.prometheus is not None:
        if args.json:
            raise ConfigError("--json and --prometheus both say what to print: give one of them.")
        publish(args.prometheus, lambda: look(args.run), args.interval, once=args.once)
    elif args.json:
        print_object({"runs": look(args.run)})
    elif args.once or not sys.stdout.isatty():
        print("\n".join(lines(look(args.run), rating_of(args))))
    else:
        _live(args)
    return 0


def look(folder: Path | None) -> list[dict[str, Any]]:
    """Reads the status of every rank of the running jobs, or of the job in ``folder``, running or
    not. Raises ConfigError if ``folder`` has none."""
    from ...core.machine import disk_profile
    from . import run_files

    if folder is not None and next(run_files.read(folder, run_files.STATUS), None) is None:
        raise ConfigError(
            f"{folder} has no status of a job: give the folder that infinity.Watch wrote to, or"
            " none for all that run"
        )
    folders = (
        [folder]
        if folder is not None
        else [
            each
            for each in run_files.runs(disk_profile.cache_folder() / "runs")
            if run_files.is_running(each)
        ]
    )
    jobs = [
        {"folder": str(each), "running": run_files.is_running(each)} | _ranks(each, folder)
        for each in folders
    ]
    for job in jobs:
        for status in job["ranks"]:
            if not job["running"] or run_files.has_ended({"ranks": [status]}):
                status["remaining_seconds"] = None  # what is over takes no more time
    return jobs


def _ranks(run: Path, asked: Path | None) -> dict[str, Any]:
    """Reads the status of every rank of a run. A newer version's is ``refused`` beside the other
    jobs. Raises UsageError for it if the run was ``asked`` for."""
    from . import run_files

    try:
        return {"ranks": list(run_files.read_known(run, run_files.STATUS))}
    except UsageError as error:
        if asked is not None:
            raise
        return {"ranks": [], "refused": str(error)}


def _live(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    look(args.run), (rating := rating_of(args))  # raise errors before the screen is taken over
    try:
        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            while True:
                live.update(Text("\n".join(lines(look(args.run), rating))), refresh=True)
                time.sleep(args.interval)
    except KeyboardInterrupt:
        return  # Ctrl-C is the way to quit


def lines(jobs: list[dict[str, Any]], rating: float | None = None) -> Iterator[str]:
    """Yields the lines of a screen, which fit :data:`WIDTH`. Text from files is made printable.
    Values of a wrong type are shown as a dash, or left out. ``rating``: bytes that a drive may be
    written in all."""
    for line in _lines(jobs, rating):
        yield from _folded(line)


def _folded(line: str) -> list[str]:
    """Breaks a line that is too wide between its words, and a word that is too wide."""
    begin = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.wrap(line, WIDTH, subsequent_indent=begin, break_on_hyphens=False) or [""]


def _lines(jobs: list[dict[str, Any]], rating: float | None) -> Iterator[str]:
    from ...core.machine import disk_profile
    from . import run_files

    if not jobs:
        yield (
            f"No running job is found in {disk_profile.cache_folder() / 'runs'}: `infinity train`"
            " is one once its model is built, and a loop with infinity.Watch(model). A job with"
            " another INFINITY_CACHE is in that folder's runs."
        )
    for job in jobs:
        state = run_files.state_of(job, time.time())
        yield f"{_shortened(job['folder'], WIDTH - len(state) - 2)}  {state}"
        if "refused" in job:
            yield f" {job['refused']}"
        for status in job["ranks"]:
            yield from _rank(status)
            for line in (audit_line(status), endurance_line(status, rating)):
                if line is not None:
                    yield f"   {line}"


def _shortened(path: str, width: int) -> str:
    """Writes a path in ``width`` characters: from the home folder, or its end."""
    home = f"{Path('~').expanduser()}{os.sep}"
    path = path.replace(home, f"~{os.sep}", 1) if path.startswith(home) else path
    return path if len(path) <= width else f"...{path[3 - width :]}"


def _rank(status: dict[str, Any]) -> Iterator[str]:
    from ...core.machine.sizes import format_nbytes
    from ...untrusted import printable
    from .time_shares import shares_text

    def number(value: Any, form: str = ",.0f") -> str:
        return f"{value:{form}}" if is_number(value) else "-"

    step, of = number(status.get("step")), status.get("steps")
    doing = printable(f"{status.get('phase', '')} {status.get('unit', '')}").strip()[:60]
    seconds = status.get("remaining_seconds")
    left = "" if seconds is None else f" {remaining(seconds)} left"
    yield (
        f" rank {number(status.get('rank'))}  step {step}{f' of {number(of)}' if of else ''}  loss"
        f" {number(status.get('loss'), '.4f')}  {number(status.get('tokens_per_second'))} tokens/s"
        f"{' ' * bool(left)}{left}  {doing}"
    )
    if is_stalled(status, now := time.time()):
        yield f"   (said {silence([status], now):.0f} s ago)"
    shares = status.get("shares")
    if isinstance(shares, dict) and all(map(is_number, shares.values())):
        yield f"   {printable(shares_text(shares))}"
    for tier, of_tier in _tables(status.get("tiers")):
        charged, planned, budget = (
            of_tier.get(f"{name}_nbytes") for name in ("charged", "planned", "budget")
        )
        if is_number(charged) and is_number(planned) and max(charged, planned) > 0:
            most = budget if is_number(budget) and budget > 0 else max(planned, charged)
            yield (
                f"   {printable(tier):<8}{bar(charged / most)} {format_nbytes(charged):>11} of"
                f" {format_nbytes(most)}"
            )
    for edge, moved in _tables(status.get("edges")):
        rate, limit = moved.get("rate"), moved.get("limit")
        if is_number(rate) and moved.get("nbytes"):
            share = (
                f"{bar(rate / limit, EDGE_BAR)} {rate / limit:>4.0%} of {limit / 1e9:.2f} GB/s"
                if is_number(limit) and limit > 0
                else ""
            )
            yield (
                f"   {printable(edge):<18} {rate / 1e9:>6.2f} GB/s  stalled"
                f" {number(moved.get('stalled'), '.0%'):>4}  {share}".rstrip()
            )


def audit_line(status: dict[str, Any]) -> str | None:
    """Says what the job has audited; None without audits."""
    from ...ext.audit.told import line_of
    from ...untrusted import printable

    audited = status.get("audited")
    line = line_of(audited) if isinstance(audited, dict) else None
    return None if line is None else printable(line)


def endurance_line(status: dict[str, Any], rating: float | None) -> str | None:
    """Returns how long the drives of a job last; None if it has written nothing to them."""
    from ..plan.endurance import Endurance

    written = status.get("written")
    rates = (
        [written.get(key) for key in ("nbytes", "seconds", "drives")]
        if isinstance(written, dict)
        else []
    )
    if not rates or not all(is_number(each) and each > 0 for each in rates):
        return None
    endurance = Endurance.of_step(*rates, rating)
    return None if endurance is None else endurance.line


def _tables(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        yield from ((name, entry) for name, entry in value.items() if isinstance(entry, dict))


def bar(share: float, width: int = BAR) -> str:
    """Draws a share, clamped to 0 to 1, as a bar of ``width`` characters."""
    filled = round(width * min(1.0, max(0.0, share)))
    return "#" * filled + "." * (width - filled)


def remaining(seconds: Any) -> str:
    """Writes seconds as hours and minutes, or minutes and seconds; "-" if unknown."""
    if not is_number(seconds) or not 0 <= seconds < 1e9:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{rest:02d}s"
