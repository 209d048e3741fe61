"""`python -m bench <theme>`, in the root of a checkout: the engine beside ceilings and rivals.

`python -m bench compare` compares two runs, `against` this tree and another commit, `rivals` ours
and each rival in an environment of its own; `age` lists how old the committed results are, and
`report` draws them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .huge_pages import HUGE_PAGES

if __name__ == "__main__":
    for variable, value in HUGE_PAGES.items():
        os.environ.setdefault(variable, value)  # before torch is imported

from infinity.errors import UsageError
from infinity.tools.bench import bench as command
from infinity.tools.cli import answer
from infinity.tools.cli.options import BAD_INPUT_STATUS, FLAG, Parser, either, takes

from .themes import IN_ALL, PARTS, THEMES, listing, module_of, of_file, part_named

# Each has a module with ``OPTIONS`` and ``run(args)``.
COMMANDS = {
    "compare": ("infinity.tools.bench.compare", "compare result files, or one and this machine"),
    "against": ("bench.against", "measure the headline loops beside those of another commit"),
    "rivals": ("bench.rivals.command", "measure each rival in an environment of its own"),
    "age": ("bench.age", "list how old the committed results are"),
    "report": ("bench.report", "draw result files as a page"),
}


OPTIONS = (
    (
        "theme",
        takes("THEME"),
        "what to measure: a theme or theme.part, all, or a Python file of your own",
    ),
    ("more", takes("THEME", nargs="*"), "further themes"),
    *command.MEASURING,
    either(
        ("--no-rivals", FLAG, "measure ours and the ceilings only"),
        (
            "--rivals",
            takes("NAME,NAME", lambda given: given.split(",")),
            "measure these rivals only, of those that `python -m bench rivals --list` names",
        ),
    ),
    (
        "--retune",
        FLAG,
        "of io: look for DeepSpeed's best settings again, instead of those kept for this disk",
    ),
)


def build_parser() -> Parser:
    """Makes the parser: the options of `infinity bench`, and those of a checkout."""
    commands = "\n".join(f"  {name:<16} {what}" for name, (_, what) in COMMANDS.items())
    return Parser(
        "python -m bench",
        OPTIONS,
        description="measure the engine beside its ceilings and its rivals",
        epilog=f"themes, each a quarter of an hour or more if not in all:\n{listing()}\n"
        f"commands, each with its own --help:\n{commands}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs themes or a command, and returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        if given and given[0] in COMMANDS:
            where, what = COMMANDS[given[0]]
            module = importlib.import_module(where)
            parser = Parser(f"python -m bench {given[0]}", module.OPTIONS, description=what)
            found = parser.parse_args(given[1:])
            found.themes = {name: module_of(part.where) for name, part in PARTS.items()}
            return answer(parser.prog, module.run, found)
        args = build_parser().parse_args(given)
    except SystemExit as stop:  # argparse has printed help (0) or its message
        return stop.code if isinstance(stop.code, int) else BAD_INPUT_STATUS
    return answer("python -m bench", run, args)


def run(args: argparse.Namespace) -> int:
    """Measures themes and prints their tables."""
    known = {name: module_of(part.where) for name, part in PARTS.items()}
    chosen: list[str] = []
    for name in map(part_named, (args.theme, *args.more)):
        if name.endswith(".py"):
            name, known[name] = of_file(Path(name))
        chosen += IN_ALL if name == "all" else [name]
    if unknown := [name for name in chosen if name not in known]:
        raise UsageError(command.no_theme(unknown[0], [*THEMES, *PARTS, "all", *COMMANDS]))
    if args.rivals:
        from .rivals import table

        table.read().chosen(args.rivals, "--rivals")
    args.paths = sorted({path for name in chosen if name in PARTS for path in PARTS[name].paths})
    return command.measure(args, known, tuple(dict.fromkeys(chosen)))


if __name__ == "__main__":
    sys.exit(main())
