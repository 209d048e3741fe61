"""`infinity bench`: every loop of the engine beside its ceiling and beside the rivals that are installed.

`infinity bench report` turns result files into a page with plots.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..machine.outputs import PICTURE, Output, check_outputs

MODULES = {
    "io": "infinity.bench.io",
    "adam": "infinity.bench.adam",
    "update": "infinity.bench.update",
    "pool": "infinity.bench.pool",
    "copy": "infinity.bench.copies",
    "step": "infinity.bench.step",
}
APART = {  # not in "all": a quarter of an hour or more each, or a GPU
    "train": "infinity.bench.endtoend",
    "train_ways": "infinity.bench.endtoend:measure_ways",
    "train_1b": "infinity.bench.endtoend:measure_large",
    "tiling": "infinity.bench.tiling",
    "startup": "infinity.bench.startup",
    "disks": "infinity.bench.disks",
    "cluster": "infinity.bench.cluster",
    "checkpoint": "infinity.bench.checkpoint",
    "ranks": "infinity.bench.ranks",
    "meetings": "infinity.bench.meetings",
    "tensor_parallel": "infinity.bench.tensor_parallel",
    "pipeline": "infinity.bench.pipeline",
    "integrations": "infinity.bench.integrations",
    "gpu": "infinity.bench.gpu",
    "gpu_train": "infinity.bench.gpu_train",
    "past_host": "infinity.bench.past_host",
}


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Registers the command."""
    parser = subparsers.add_parser("bench", help="measure the engine beside its ceilings and its rivals")
    parser.add_argument("theme", choices=(*MODULES, *APART, "all", "report"), help="what to measure, or a page of what was")
    parser.add_argument("--json", metavar="PATH", help="the result as one JSON object: a file, a folder, or - for stdout")
    parser.add_argument("--folder", default=".", metavar="DIR", help="on the disk to measure (default: here)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of which the median is given (default 5)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="times the usual sizes (default 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="for the optimizer's kernels (default: all processors)")
    parser.add_argument("--no-rivals", action="store_true", help="measure ours and the ceilings only")
    parser.add_argument("--results", type=Path, default=Path("bench/results"), metavar="DIR", help="for report: the files")
    parser.add_argument("--out", type=Path, default=Path("bench-report.html"), metavar="FILE", help="for report: the page")
    parser.add_argument("--svg", type=Path, metavar="DIR", help="for report: every plot as a file of its own, too")
    parser.add_argument("--overwrite", action="store_true", help="replace files of --json and --out that are none of ours")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table, and writes what `--json` asks for."""
    from infinity.bench import results

    _check_outputs(args)
    if args.theme == "report":
        from infinity.bench import report

        print(report.write(args.results, args.out))
        if args.svg:
            print(*report.write_plots(args.results, args.svg), sep="\n")
        return 0
    settings = _settings(args)
    measured = results.Measured([])
    with _stdout_for(args.json):
        for theme in MODULES if args.theme == "all" else (args.theme,):
            name, _, function = (MODULES | APART)[theme].partition(":")
            module = importlib.import_module(name)
            print(f"{theme}: measuring", file=sys.stderr, flush=True)
            found = getattr(module, function or "measure")(settings)
            print(results.table(found.rows), flush=True)
            measured.add(found)
        for note in measured.notes:
            print(f"({note})")
    found = results.result(args.theme, measured)
    if args.json == "-":
        print(json.dumps(found))
    elif args.json and Path(args.json).is_dir():
        print(results.save(found, Path(args.json)))
    elif args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    if args.theme == "report":
        from infinity.bench.report import HEAD, PLOTS

        outputs = [Output("--out", args.out, made=HEAD.encode())]
        if args.svg is not None:
            outputs += [Output("--svg", args.svg / f"{name}.svg", made=PICTURE) for name in PLOTS]
        read = [("--results", path) for path in args.results.glob("*.json")]
        check_outputs(outputs, read, overwrite=args.overwrite)
    elif args.json not in (None, "-") and not Path(args.json).is_dir():
        from infinity.bench.results import BEGIN

        check_outputs([Output("--json", Path(args.json), made=BEGIN)], [], overwrite=args.overwrite)


@contextlib.contextmanager
def _stdout_for(target: str | None) -> Iterator[None]:
    """With `--json -` standard output is the object's alone: our table, and whatever a rival prints from any language,
    goes to standard error."""
    if target != "-":
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
    from infinity.bench.settings import Settings
    from infinity.errors import ConfigError

    for name, value, least in (("--rounds", args.rounds, 1), ("--threads", args.threads, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name} {value}: give at least {least}")
    if not 0 < args.scale <= 100:
        raise ConfigError(f"--scale {args.scale}: give a number above 0, and at most 100")
    if not Path(args.folder).is_dir():
        raise ConfigError(f"--folder {args.folder}: there is no such folder")
    if args.json not in (None, "-") and not Path(args.json).parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {Path(args.json).parent}")
    chosen = {"threads": args.threads} if args.threads else {}
    return Settings(folder=args.folder, rounds=args.rounds, scale=args.scale, rivals=not args.no_rivals, **chosen)
