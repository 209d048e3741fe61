"""`infinity bench`: measures this machine with the engine's loops, against hardware ceilings.

Benchmarks of the whole engine, and comparisons with other systems, run from a checkout: `python -m
bench`. That command shares the options and the measuring code here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError, UsageError
from ...files.outputs import Output, check_outputs
from ..cli.values import a_count

THEMES = {
    "io": "infinity.tools.bench.io",
    "adam": "infinity.tools.bench.adam",
    "copy": "infinity.tools.bench.copies",
}
MOST_THREADS = 1024
IN_CHECKOUT = (
    "attention",
    "checkpoint",
    "cluster",
    "disks",
    "experts",
    "rules",
    "optimizers",
    "gpu",
    "gpu_train",
    "idle",
    "integrations",
    "late_device",
    "late_updates",
    "meetings",
    "meshes",
    "shares",
    "packed",
    "past_host",
    "pipeline",
    "pool",
    "ranks",
    "report",
    "slow_links",
    "startup",
    "step",
    "tensor_parallel",
    "tiling",
    "touches",
    "train",
    "train_1b",
    "train_ways",
    "update",
)


class _Choices(tuple):
    """The installed themes. Accepts those of a checkout too, which `run` refuses by name."""

    def __contains__(self, theme: object) -> bool:
        return super().__contains__(theme) or theme in IN_CHECKOUT


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Registers the command."""
    parser = subparsers.add_parser(
        "bench", help="measure this machine's disk, Adam and copies beside their ceilings"
    )
    themes = _Choices((*THEMES, "all"))
    parser.add_argument(
        "theme", metavar="THEME", choices=themes, help=f"what to measure: {', '.join(themes)}"
    )
    add_options(parser)
    parser.add_argument(
        "--no-rivals",
        action="store_true",
        help=argparse.SUPPRESS,  # of `python -m bench`, which measures rivals
    )
    for option in ("--results", "--out", "--svg"):  # of the report, which only a checkout has
        parser.add_argument(option, help=argparse.SUPPRESS)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every theme, here and in a checkout."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--save", metavar="PATH", help="the same in a file, or one of a folder")
    parser.add_argument(
        "--folder", default=".", metavar="DIR", help="on the disk to measure (default: here)"
    )
    parser.add_argument(
        "--rounds",
        type=a_count,
        default=5,
        metavar="N",
        help="of which the median is given (default 5)",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="times the usual sizes (default 1)"
    )
    parser.add_argument(
        "--threads",
        type=a_count,
        metavar="N",
        help="for the optimizer's kernels (default: all processors)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace output files that are none of ours"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmarks, prints tables, and writes the file of `--save`. Raises UsageError for a
    theme that needs a checkout."""
    if args.theme in IN_CHECKOUT:
        raise UsageError(
            f"{args.theme} is one of the engine's own benchmarks, which are not installed. Run"
            f" `python -m bench {args.theme}` from the root of a checkout."
        )
    for name in ("results", "out", "svg"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is of `python -m bench report`: leave it out")
    return measure(args, THEMES, tuple(THEMES) if args.theme == "all" else (args.theme,))


def measure(args: argparse.Namespace, themes: Mapping[str, str], chosen: Sequence[str]) -> int:
    """Measures the ``chosen`` themes, prints a table for each and writes `--save`.

    ``themes``: name -> module, or module:function.
    """
    from infinity.tools.bench import results
    from infinity.tools.bench.rounds import PROGRESS

    _check_output(args)
    shown = _Shown()
    measured = results.Measured([])

    def keep(found: results.Measured) -> Path | None:
        if args.save is None:
            return None
        content, path = results.result(args.theme, found), Path(args.save)
        if path.is_dir():
            return results.save(content, path)
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    settings = replace(_settings(args), show=shown.show, keep=keep)
    with _stdout_for(args.json):
        busy = results.busy()  # before anything is measured
        for number, theme in enumerate(chosen, start=1):
            name, _, function = themes[theme].partition(":")
            module = importlib.import_module(name)
            if number == 1 and busy:
                print(busy, file=sys.stderr, flush=True)
            PROGRESS.begin(number, len(chosen), theme)
            found = getattr(module, function or "measure")(settings)
            shown.end(found.rows)
            measured.add(found)
        for note in [*measured.notes, *results.spread(measured.rows)]:
            print(f"({note})")
        if told := results.bound_of(measured.rows):
            print(told)
    if args.json:
        print(json.dumps(results.result(args.theme, measured)))
    if (saved := keep(measured)) is not None and Path(args.save).is_dir():
        print(saved, file=sys.stderr)
    return 0


class _Shown:
    """The rows of a theme that are printed already: each as soon as it is measured, and again with
    its ratios if rivals were measured after it."""

    def __init__(self) -> None:
        self._ratios: dict[str, int] = {}  # of a printed row, by name

    def show(self, rows: Sequence[Any]) -> None:
        """Prints rows, the first of a theme below the table's header."""
        from infinity.tools.bench import results
        from infinity.tools.bench.rounds import PROGRESS

        if rows:
            PROGRESS.clear()
            print(results.table(rows, header=not self._ratios), flush=True)
            self._ratios |= {row.name: len(row.ratios) for row in rows}

    def end(self, rows: Sequence[Any]) -> None:
        """Ends a theme: prints what was not printed yet."""
        self.show([row for row in rows if row.name not in self._ratios])
        if beside := [row for row in rows if len(row.ratios) > self._ratios[row.name]]:
            print("beside rivals, as many times as fast (or as little):")
            self.show(beside)
        self._ratios = {}


def _check_output(args: argparse.Namespace) -> None:
    if args.save is not None and not Path(args.save).is_dir():
        from infinity.tools.bench.results import BEGIN

        check_outputs([Output("--save", Path(args.save), made=BEGIN)], [], overwrite=args.overwrite)


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


def _settings(args: argparse.Namespace):
    from infinity.tools.bench.settings import Settings

    if (args.threads or 1) > MOST_THREADS:
        raise ConfigError(f"--threads {args.threads}: give at most {MOST_THREADS}")
    if not 0 < args.scale <= 100:
        raise ConfigError(f"--scale {args.scale}: give a number above 0, and at most 100")
    if not Path(args.folder).is_dir():
        what = "is a file" if Path(args.folder).exists() else "is not there"
        raise ConfigError(f"--folder {args.folder} {what}: give a folder on the disk to measure")
    if args.save is not None and not Path(args.save).parent.is_dir():
        raise ConfigError(f"--save {args.save}: there is no folder {Path(args.save).parent}")
    chosen = {"threads": args.threads} if args.threads else {}
    return Settings(
        folder=args.folder,
        rounds=args.rounds,
        scale=args.scale,
        rivals=not args.no_rivals,
        **chosen,
    )
