"""The options of commands as rows of tables, and the parser that is made of them.

row      (name, what it takes, help[, default]). The help ends with the default.
title    a text between rows, which begins a group of the help
takes    keywords of argparse, which several options share: FLAG, PATH, ...
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from ...core.machine.tiers import home_of
from ..train import wording
from .values import a_count, a_path, a_seed, at_least_two, zero_or_more

Row = tuple[Any, ...] | str | Callable[[Any], object]
HIDDEN = argparse.SUPPRESS
BAD_INPUT_STATUS = 2
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


def takes(metavar: str, parse: Callable[[str], Any] | None = None, **more: Any) -> dict[str, Any]:
    """Describes an option that takes a value."""
    return {"metavar": metavar, "type": parse, **more}


def one_of(*choices: str, **more: Any) -> dict[str, Any]:
    """Describes an option that takes one of ``choices``."""
    return {"choices": choices, **more}


FLAG: dict[str, Any] = {"action": "store_true"}
REPEATED: dict[str, Any] = {"action": "append"}
PATH, FILE, FOLDER, DIR = (takes(name, a_path) for name in ("PATH", "FILE", "FOLDER", "DIR"))
BYTES, AXES, SHARE, TEXT = map(takes, ("BYTES", "AXES", "SHARE", "TEXT"))
NUMBER, COUNT = takes("N", a_count), takes("N", zero_or_more)
LENGTH, SEED = takes("N", at_least_two), takes("N", a_seed)
HOME = one_of("auto", "device", "host", "nvme", type=home_of)
QUANTIZE = one_of("nf4", "int8", "fp8")


def rating(default: str) -> Row:
    """Makes the option of :func:`.values.rating_of`."""
    return "--drive-rating", BYTES, f'what a drive may be written in all, as "1200TB" ({default})'


def either(*rows: Row, required: bool = False) -> Row:
    """Makes options of which one at most may be given, and one must if it is ``required``."""
    return lambda into: add_rows(into.add_mutually_exclusive_group(required=required), rows)


def defaults(**values: Any) -> Row:
    """Gives values to names for which there is no option."""
    return lambda into: into.set_defaults(**values)


def add_rows(parser: Any, rows: Iterable[Row]) -> None:
    """Adds options to a parser, or to a group of one."""
    into = parser
    for row in rows:
        if isinstance(row, str):
            into = parser.add_argument_group(row)
        elif isinstance(row, tuple):
            name, keywords, text, *default = row
            if default:
                keywords = keywords | {"default": default[0]}
                text += f" (default {default[0]})"
            into.add_argument(name, **keywords, help=text)
        else:
            row(into)


class Parser(argparse.ArgumentParser):
    """Accepts options by their full names only: the meaning of an abbreviation changes when an
    option is added."""

    def __init__(self, prog: str, rows: Iterable[Row], **more: Any):
        super().__init__(
            prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more
        )
        self._negative_number_matcher = NEGATIVE  # argparse's own takes -1e-4 for an option
        add_rows(self, rows)

    @property
    def known(self) -> dict[str, argparse.Action]:
        """The options by their names."""
        return {name: action for action in self._actions for name in action.option_strings}

    def error(self, message: str):
        """Prints the message, then where the options are listed, and exits."""
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            known = [name.strip(" '") for name in choice[2].split(",")]
            if near := difflib.get_close_matches(choice[1], known, n=1):
                message += f": did you mean {near[0]}?"
            elif "train" in known:
                message += ": the subcommand comes first"
        message = message.replace("ignored explicit argument", "is a switch: leave out")
        self.exit(
            BAD_INPUT_STATUS, f"{self.prog}: {message}\n`{self.prog} --help` lists all options.\n"
        )

    def parse_args(self, args=None, namespace=None):
        """Parses all of ``args``. Exits with a message that names the nearest option if one is
        unknown."""
        parsed, left = self.parse_known_args(args, namespace)
        if left:
            without = [each.metavar or each.dest for each in self._get_positional_actions()]
            self.error(
                f"unrecognized arguments: {' '.join(left)}"
                f"{wording.meant(left[0], self.known, without)}"
            )
        return parsed
