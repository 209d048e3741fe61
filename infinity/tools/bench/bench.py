"""`infinity bench`: measures this machine with the engine's loops, against hardware ceilings.

Benchmarks of the whole engine, and comparisons with other systems, run from a checkout: `python -m
bench`. That command shares the options and the measuring code here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError, UsageError
from ...files.outputs import Output, check_outputs
from ..cli.answers import print_object
from ..cli.options import FLAG, HIDDEN, NUMBER, REPEATED, Parser, takes
from ..cli.values import positive_real, real_from_zero
from .themes import IN_ALL, THEMES

MOST_THREADS = 1024
NAMED = takes("FILE")
SIZES = (1e9, 8e9, 70e9)  # parameters of models, of which a line each tells


class _Choices(tuple):
    """The installed themes. Accepts every name, since `run` says more of one that is not there."""

    def __contains__(self, theme: object) -> bool:
        return True


MEASURING = (  # of every theme, here and in a checkout
    ("--json", FLAG, "one JSON object on stdout"),
    ("--save", takes("PATH"), "write the JSON to PATH: a file that ends in .json, or a folder"),
    ("--resume", NAMED, "measure what an interrupted run left, into its file"),
    (
        "--folder",
        REPEATED | takes("DIR"),
        "on the disk to measure (default: here); of machine more than one: each, and all",
    ),
    ("--only", REPEATED | takes("ROW"), "rows whose names begin so: adam.split"),
    ("--html", NAMED, "a page with tables, curves and roofline"),
    ("--rounds", NUMBER, "repeat N times, report the median", 5),
    (
        "--seconds",
        takes("S", real_from_zero, default=0.0),
        "further rounds of each loop for so long, or until its interval is within 3 %%; of"
        " machine: of all rounds (default 90)",
    ),
    ("--scale", takes("X", float, default=1.0), "times the usual sizes (default 1)"),
    ("--threads", NUMBER, "of every loop (default: all processors)"),
    (
        "--parameters",
        takes("N", positive_real),
        "of the model in the last line (default: a line each for 1e9, 8e9 and 70e9)",
    ),
    (
        "--tokens",
        takes("N", positive_real, default=4096.0),
        "of its step in the last line (default 4096)",
    ),
    ("--machine-file", NAMED, "of machine: its rates, for `infinity plan --machine FILE`"),
    (
        "--keep-profile",
        FLAG,
        "of io: its rates replace the disk's stored profile, which the engine plans by",
    ),
    ("--overwrite", FLAG, "replace output files that exist"),
)
KNOWN = _Choices((*THEMES, "all", "compare"))
OPTIONS = (
    (
        "theme",
        takes("THEME", nargs="?", default="machine", choices=KNOWN),
        f"what to measure: {', '.join(KNOWN[:-1])} (default: machine, what limits training"
        " here); or `compare`: two result files, or one and this machine",
    ),
    ("more", takes("THEME|FILE", nargs="*"), "further themes, or files"),
    *MEASURING,
    ("--bound", takes("X", real_from_zero), "of compare: how much slower fails (0)"),
    ("--csv", FLAG, "of compare: comma-separated values on stdout"),
    ("--tex", FLAG, "of compare: a LaTeX table on stdout"),
    ("--no-rivals", FLAG, HIDDEN),  # of `python -m bench`, which measures rivals
    # Of the report, which only a checkout has
    *((option, {}, HIDDEN) for option in ("--results", "--out", "--svg")),
)


def _refuse_options(args: argparse.Namespace) -> None:
    """Raises UsageError for an option of measuring beside `compare`, which it would not use."""
    for name, usual in vars(Parser("", MEASURING).parse_args([])).items():
        if name not in ("json", "folder") and getattr(args, name) != usual:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is of measuring, not of compare: leave it out")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmarks, prints tables, and writes the file of `--save`; or compares files.
    Raises UsageError for a theme that is not installed."""
    if args.theme == "compare":
        from . import compare

        _refuse_options(args)
        args.files, args.bound = args.more, args.bound or 0.0
        args.folder = (args.folder or ["."])[0]
        return compare.run(args)
    for name in ("bound", "csv", "tex"):
        if getattr(args, name) not in (None, False):
            raise UsageError(f"--{name} is of `infinity bench compare`: leave it out")
    names = [args.theme, *args.more]
    if unknown := [name for name in names if name not in THEMES and name != "all"]:
        raise UsageError(
            f"{no_theme(unknown[0], [*THEMES, 'all', 'compare'])} The engine's own benchmarks are"
            f" not installed. Run `python -m bench {unknown[0]}` from the root of a checkout.\n"
            "`infinity bench --help` lists all options."
        )
    for name in ("results", "out", "svg"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is of `python -m bench report`: leave it out")
    chosen = [theme for name in names for theme in (IN_ALL if name == "all" else (name,))]
    return measure(args, THEMES, tuple(dict.fromkeys(chosen)))


def no_theme(name: str, known: Sequence[str]) -> str:
    """Returns the message for a name that is not a theme."""
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}."
    return f"{name} is not a benchmark: {meant}"


def measure(args: argparse.Namespace, themes: Mapping[str, str], chosen: Sequence[str]) -> int:
    """Measures the ``chosen`` themes, prints a table for each and writes the file of `--save`, row
    by row: what was measured before an interruption stays.

    ``themes``: name -> module, or module:function.
    """
    from infinity.tools.bench import machine, page, plots, results
    from infinity.tools.bench.rounds import PROGRESS

    settings = _settings(args)
    if settings.other_folders and "machine" not in chosen:
        raise UsageError("several --folder are of `bench machine`: give one")
    if args.resume is not None and args.save is not None:
        raise UsageError("--resume goes on in its own file: leave out --save")
    if args.keep_profile and ("io" not in chosen or results.is_quick(settings.kept())):
        raise UsageError(
            "--keep-profile is of `bench io` at scale 1 with five rounds or more: a quick look"
            " replaces no profile"
        )
    outputs = []
    if args.machine_file is not None:
        if "machine" not in chosen or args.only:
            raise UsageError("--machine-file is of `bench machine` and all its rows: leave it out")
        outputs.append(
            Output("--machine-file", Path(args.machine_file), made=machine.BEGIN.encode())
        )
    if args.html is not None:
        plots.require()
        outputs.append(Output("--html", Path(args.html), made=page.HEAD.encode()))
    check_outputs(outputs, [], overwrite=args.overwrite)
    measured, so_far, shown = results.Measured([]), results.Measured([]), _Shown()
    path = _output(args)
    run = results.Run(
        "all" if args.theme == "all" else "+".join(chosen), settings, getattr(args, "paths", None)
    )
    if args.resume is not None:
        path = Path(args.resume)
        chosen = _resume(path, run, measured, chosen)
    elif path is not None and path.is_dir():
        path = results.new_path(run.content(measured), path)

    def save(*parts: results.Measured, complete: bool = False) -> None:
        nonlocal so_far
        so_far = whole = results.Measured([])
        for part in (measured, *parts):
            whole.add(part)
        if settings.only:
            whole.rows = [row for row in whole.rows if settings.wants(row.name)]
        if path is not None and (whole.rows or whole.notes):
            results.write(run.content(whole, complete=complete), path)

    def show(rows: Sequence[Any]) -> None:
        shown.show(rows)
        save(results.Measured([*shown.rows]))

    settings = replace(settings, show=show, keep=save)
    with _stdout_for(args.json), _ended_by_signal():
        busy = results.busy()  # before anything is measured
        try:
            for number, theme in enumerate(chosen, start=1):
                name, _, function = themes[theme].partition(":")
                module = importlib.import_module(name)
                if number == 1 and busy:
                    print(busy, file=sys.stderr, flush=True)
                PROGRESS.begin(number, len(chosen), theme)
                with settings.torch_threads():
                    result = getattr(module, function or "measure")(settings)
                result.rows = [row for row in result.rows if settings.wants(row.name)]
                shown.end(result.rows)
                run.done.append(theme)
                measured.add(result)
                save()
        except BaseException:
            PROGRESS.clear()
            shown.end([row for row in so_far.rows if row not in measured.rows])
            if path is not None and path.is_file():
                print(
                    f"kept what was measured: {path} (go on with --resume {path})", file=sys.stderr
                )
            raise
        if settings.only and not (measured.rows or measured.series):
            raise UsageError(f"--only {' '.join(settings.only)}: no row's name begins so")
        for note in [*measured.notes, *results.remarks(measured.rows, settings)]:
            print(f"({note})")
        sentences = (
            sentence
            for parameters in (SIZES if args.parameters is None else [args.parameters])
            for sentence in (
                machine.limit_of(measured.rows, parameters, args.tokens),
                results.bound_of(measured.rows, parameters),
            )
            if sentence
        )
        notes = [*dict.fromkeys(sentences)]  # one reason for silence is of all sizes
        print(*notes, sep="\n", end="\n" if notes else "")
    if args.html is not None:
        page.write(run.content(measured), notes, Path(args.html))
        print(args.html, file=sys.stderr)
    if args.machine_file is not None:
        date = datetime.date.today().isoformat()
        file = Path(args.machine_file)
        machine.write_machine_file(measured.rows, settings.folders, date, file)
        print(file, file=sys.stderr)
    if args.json:
        print_object(run.content(measured))
    save(complete=True)
    if path is not None and path.is_file():
        print(path, file=sys.stderr)
    return 0


def _resume(path: Path, run: Any, measured: Any, chosen: Sequence[str]) -> tuple[str, ...]:
    """Takes over what an interrupted run has measured. Returns the themes that it left. Raises
    ConfigError for another run's file."""
    from infinity.tools.bench import results

    kept, now = results.read(path), run.content(measured)
    if kept.get("complete", True):
        raise ConfigError(f"--resume {path} is complete: measure anew, with --save")
    for each in (kept, now):  # two disks are no one run
        each["disk"] = each.get("machine", {}).get("disk")
    for name in ("theme", "hardware", "commit", "settings", "disk"):
        if kept.get(name) != now[name]:
            raise ConfigError(
                f"--resume {path} has {name} {kept.get(name)!r}, and this run {now[name]!r}: give"
                " the options of that run, on its machine and at its commit"
            )
    measured.rows += [results.row_of(each) for each in kept["rows"]]
    measured.notes += kept["notes"]
    measured.series |= kept["series"]
    measured.rivals |= kept["rivals"]
    run.done += kept["done"]
    return tuple(theme for theme in chosen if theme not in run.done)


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Has SIGTERM end the run as Ctrl-C does, which removes its files."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread, which alone has handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Shown:
    """The rows of a theme that are printed already: each as soon as it is measured, and again with
    its ratios if rivals were measured after it."""

    def __init__(self) -> None:
        self._ratios: dict[str, int] = {}  # of a printed row, by name
        self.rows: list[Any] = []

    def show(self, rows: Sequence[Any]) -> None:
        """Prints rows, the first of a theme below the table's header."""
        from infinity.tools.bench import results
        from infinity.tools.bench.rounds import PROGRESS

        if rows:
            PROGRESS.clear()
            print(results.table(rows, header=not self._ratios), flush=True)
            self._ratios |= {row.name: len(row.ratios) for row in rows}
            self.rows += [row for row in rows if row not in self.rows]

    def end(self, rows: Sequence[Any]) -> None:
        """Ends a theme: prints what was not printed yet."""
        self.show([row for row in rows if row.name not in self._ratios])
        if beside := [row for row in rows if len(row.ratios) > self._ratios[row.name]]:
            print("beside rivals, as many times as fast (or as little):")
            self.show(beside)
        self._ratios, self.rows = {}, []


def _output(args: argparse.Namespace) -> Path | None:
    """Returns the file or the folder of `--save`, which is made. Raises ConfigError for a file that
    is there, unless it may be replaced."""
    if args.save is None:
        return None
    from infinity.tools.bench.results import BEGIN

    path = Path(args.save)
    if not path.is_dir() and (path.suffix or path.exists()):
        check_outputs([Output("--save", path, made=BEGIN)], [], overwrite=args.overwrite)
        if path.suffix != ".json":
            raise ConfigError(f"--save {path}: give a file that ends in .json, or a folder")
        if path.exists() and path.stat().st_size and not args.overwrite:
            raise ConfigError(
                f"--save {path} holds a result. Give another name, a folder, or --overwrite to"
                " replace it."
            )
        return path
    path.mkdir(exist_ok=True)
    return path


@contextlib.contextmanager
def _stdout_for(is_json: bool) -> Iterator[None]:
    """Reserves stdout for the object of `--json`: redirects all other output to stderr."""
    if not is_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def check_folder(folder: str) -> None:
    """Raises ConfigError unless ``folder`` is one."""
    if not Path(folder).is_dir():
        what = "is a file" if Path(folder).exists() else "is not there"
        raise ConfigError(f"--folder {folder} {what}: give a folder on the disk to measure")


def _settings(args: argparse.Namespace):
    from infinity.tools.bench.settings import Settings

    if (args.threads or 1) > MOST_THREADS:
        raise ConfigError(f"--threads {args.threads}: give at most {MOST_THREADS}")
    if not 0 < args.scale <= 100:
        raise ConfigError(f"--scale {args.scale}: give a number above 0, and at most 100")
    folders = args.folder or ["."]
    for folder in folders:
        check_folder(folder)
    devices = [os.stat(folder).st_dev for folder in folders]
    if len({*devices}) < len(devices):
        raise ConfigError(f"--folder {' '.join(folders)}: two are on one disk, give one of each")
    if args.save is not None and not Path(args.save).parent.is_dir():
        raise ConfigError(f"--save {args.save}: there is no folder {Path(args.save).parent}")
    chosen = {"threads": args.threads} if args.threads else {}
    return Settings(
        folder=folders[0],
        other_folders=tuple(folders[1:]),
        only=tuple(args.only or ()),
        rounds=args.rounds,
        scale=args.scale,
        seconds=args.seconds,
        rivals=getattr(args, "rivals", None) or not args.no_rivals,
        retune=getattr(args, "retune", False),
        keep_profile=args.keep_profile,
        **chosen,
    )
