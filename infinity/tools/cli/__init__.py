"""The command line: `infinity <subcommand>`, also `python -m infinity <subcommand>`.

Each subcommand is one module of infinity/tools with two functions:

  add_parser(subparsers)  registers the subcommand and its options
  run(args) -> int        runs it and returns the exit status

A module imports torch and transformers inside `run` only, so that `--help` is fast.

Exit status: 0 done; 1 a defect; 2 bad input, or an error of the system (one message on stderr, no
traceback); 130 and 143 interrupted by SIGINT and SIGTERM. INFINITY_TRACEBACK=1 shows the traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

from ... import __version__
from ...errors import ConfigError, InfinityError, UsageError
from ...library_versions import LEAST
from ...ranks import failure_report
from ..train import wording
from . import presets

# The module of each, below infinity/tools.
SUBCOMMANDS = {
    "attention": "attention.attention",
    "bench": "bench.bench",
    "clean": "cli.clean",
    "completion": "cli.completion",
    "cost": "cost.command",
    "env": "cli.env",
    "eval": "eval.evaluate",
    "export": "export.export",
    "fleet": "fleet.command",
    "generate": "generate.generate",
    "plan": "plan.plan",
    "report": "watch.report",
    "run": "run.run",
    "top": "watch.top",
    "trace": "watch.trace",
    "train": "train.train",
    "verify": "verify.command",
}
BAD_INPUT_STATUS = 2
INTERRUPTED_STATUS = 128 + signal.SIGINT
BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
REFUSALS = (ConfigError, UsageError)  # what is started again fails so again; memory may be free
# They warn of what users of a command cannot change: kernels for other machines, renamed functions.
NOISY = ("bitsandbytes", "torchao", "torch.utils._pytree")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"infinity.tools.{SUBCOMMANDS[name]}")


NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


class Parser(argparse.ArgumentParser):
    """Accepts options by their full names only: the meaning of an abbreviation changes when an
    option is added."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **(kwargs | {"allow_abbrev": False}))
        self._negative_number_matcher = NEGATIVE  # argparse's own takes -1e-4 for an option

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
            command = command_of(self, parsed.subcommand) if hasattr(parsed, "subcommand") else self
            names = option_names(command)
            without = [each.metavar or each.dest for each in command._get_positional_actions()]
            command.error(
                f"unrecognized arguments: {' '.join(left)}{wording.meant(left[0], names, without)}"
            )
        return parsed


class Subcommands(argparse.HelpFormatter):
    """Lists the subcommands without a line above them, so that one screen has room for all."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text if action.metavar != "<subcommand>" else text.partition("\n")[2]


def command_of(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """Returns the parser of a subcommand."""
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return commands.choices[name]


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the names of a command's options."""
    return [name for action in parser._actions for name in action.option_strings]


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="infinity",
        usage="infinity [-h] [--version] <subcommand> ...",  # one screen has no room for more
        add_help=False,
        description="Train PyTorch models with all the memory a machine has: GPU, CPU and NVMe.",
        epilog=(
            "Exit status: 0 done; 1 a defect; 2 bad input, or a system error; 130, 143 interrupted"
        ),
        formatter_class=lambda prog: Subcommands(prog, max_help_position=16, width=100),
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    version = f"infinity {__version__}"
    parser.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(
        prog="infinity", dest="subcommand", metavar="<subcommand>", required=True
    )
    for name in SUBCOMMANDS:
        _module(name).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status. Never raises errors that users can fix."""
    try:
        parser = build_parser()
        args = parser.parse_args(presets.expanded(sys.argv[1:] if argv is None else argv))
    except SystemExit as stop:  # argparse has printed help (0) or its message (2)
        if stop.code:
            _note_refusal("wrong words: see the message on standard error")
        return stop.code
    except InfinityError as error:
        print(f"infinity train: {error}", file=sys.stderr)
        _note_refusal(str(error))
        return BAD_INPUT_STATUS
    options = option_names(command_of(parser, args.subcommand))
    return answer(f"infinity {args.subcommand}", _module(args.subcommand).run, args, options)


def answer(
    command: str,
    run: Callable[[argparse.Namespace], int],
    args: argparse.Namespace,
    options: Collection[str] = (),
) -> int:
    """Runs ``command`` and returns its exit status. Prints errors that users can fix as one
    message, in words of its ``options``, and reports them to the other ranks."""
    for library in NOISY:
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        tell_start(command)
        _check_variables()
        with wording.logging_in_options(options):
            status = run(args)
        sys.stdout.flush()  # at the end of the process Python would tell of a closed pipe itself
        return status
    except BrokenPipeError as error:  # as of `infinity plan | head`: nobody reads on
        failure_report.leave(error)
        _write_nowhere()
        return BROKEN_PIPE_STATUS
    except (InfinityError, OSError, ImportError) as error:
        if os.environ.get("INFINITY_TRACEBACK") == "1":
            raise
        failure_report.leave(error)
        message = _missing(error) if isinstance(error, ImportError) else _told(error)
        message = wording.in_options(message, options)
        print(f"{command}: {message}", file=sys.stderr)
        if isinstance(error, REFUSALS):
            _note_refusal(message)
        return BAD_INPUT_STATUS
    except KeyboardInterrupt as error:
        failure_report.leave(error)
        print(f"{command}: {str(error) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED_STATUS


def _note_refusal(message: str) -> None:
    """Writes to the file of INFINITY_REFUSED, if there is one, why the command would be refused
    again. A launcher that finds the file does not restart the job."""
    if path := os.environ.get("INFINITY_REFUSED"):
        with contextlib.suppress(OSError):  # the message was printed
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "w") as file:
                file.write(f"{message}\n")


def _check_variables() -> None:
    """Raises ConfigError for a variable of Infinity's that cannot be used."""
    if (cache := os.environ.get("INFINITY_CACHE")) and os.path.isfile(cache):
        raise ConfigError(f"INFINITY_CACHE={cache} is a file: name a folder, existing or new")
    if (direct := os.environ.get("INFINITY_DIRECT", "auto")) not in ("auto", "off"):
        raise ConfigError(f"INFINITY_DIRECT={direct} is not one of auto, off")


def _told(error: Exception) -> str:
    """Returns an error's message, without the number of a system's error."""
    if isinstance(error, OSError) and error.strerror:
        where = "" if isinstance(error, InfinityError) else f": {error.filename}"
        return f"{error.strerror}{where}"
    return str(error)


def _write_nowhere() -> None:
    """Makes nothing of what is still to be written to stdout and stderr at the exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def tell_start(command: str) -> None:
    """Tells a person that the command has started: its libraries take seconds to load."""
    if sys.stderr.isatty() and "torch" not in sys.modules:
        print(f"{command}: loading ...", end="\r", file=sys.stderr, flush=True)


def _missing(error: ImportError) -> str:
    """Returns the message for a missing package, with the command that installs it."""
    name = (error.name or "").partition(".")[0]
    if name in ("transformers", "rich"):
        return f"{name} is needed for this and is not installed: pip install transformers rich"
    if name == "torch":
        return f"torch is not installed: pip install 'torch>={LEAST['torch']}'"
    return f"{error}" + (f": pip install {name}" if name not in ("", "infinity") else "")
