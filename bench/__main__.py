"""`python -m bench <theme>`, in the root of a checkout: the engine beside ceilings and rivals.

`python -m bench report` turns result files into a page with plots.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from infinity.files.outputs import PICTURE, Output, check_outputs
from infinity.tools.bench import bench as command
from infinity.tools.cli import BAD_INPUT_STATUS, Parser, answer

from .themes import APART, THEMES


def build_parser() -> argparse.ArgumentParser:
    """Makes the parser: the options of `infinity bench`, and those of the report."""
    parser = Parser(
        prog="python -m bench", description="measure the engine beside its ceilings and its rivals"
    )
    parser.add_argument(
        "theme",
        choices=(*THEMES, *APART, "all", "report"),
        help="what to measure, or a page of results",
    )
    command.add_options(parser)
    parser.add_argument(
        "--no-rivals", action="store_true", help="measure ours and the ceilings only"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("bench/results"),
        metavar="DIR",
        help="for report: the files",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-report.html"),
        metavar="FILE",
        help="for report: the page",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="DIR", help="for report: every plot as a file of its own, too"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one theme, or writes the report, and returns the exit status."""
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed help (0) or its message
        return stop.code if isinstance(stop.code, int) else BAD_INPUT_STATUS
    return answer("python -m bench", run, args)


def run(args: argparse.Namespace) -> int:
    """Measures a theme and prints its table, or writes the report and prints its path."""
    if args.theme == "report":
        return _report(args)
    return command.measure(
        args, THEMES | APART, tuple(THEMES) if args.theme == "all" else (args.theme,)
    )


def _report(args: argparse.Namespace) -> int:
    from . import report

    outputs = [Output("--out", args.out, made=report.HEAD.encode())]
    if args.svg is not None:
        outputs += [
            Output("--svg", args.svg / f"{name}.svg", made=PICTURE) for name in report.PLOTS
        ]
    read = [("--results", path) for path in args.results.glob("*.json")]
    check_outputs(outputs, read, overwrite=args.overwrite)
    for each in report.write(args.results, args.out):
        print(f"left out: {each}", file=sys.stderr)
    print(args.out)
    if args.svg:
        print(*report.write_plots(args.results, args.svg), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
