"""The command line: `infinity <subcommand>`, also `python -m infinity <subcommand>`.

Each subcommand is one module of infinity/tools, which is imported when it is asked for:

  OPTIONS           its options, as rows (:mod:`.options`)
  ABOUT             keywords of its parser, if it has any: description, usage
  run(args) -> int  runs it and returns the exit status

A module imports torch and transformers inside `run` only, so that `--help` is fast.

Exit status: 0 done; 1 a defect; 2 bad input, or an error of the system (one message on stderr, no
traceback); 130 and 143 interrupted by SIGINT and SIGTERM. INFINITY_TRACEBACK=1 shows the traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType

from ... import __version__
from ...errors import ConfigError, InfinityError, UsageError
from ...library_versions import LEAST
from ...ranks import failure_report
from ..train import wording
from . import presets
from .answers import others_aside
from .options import BAD_INPUT_STATUS, HIDDEN, Parser

SUBCOMMANDS = {  # name -> its module below infinity/tools, and what it does
    "attention": (
        "attention.attention",
        "strides of neighborhood attention that are worth it, by tiles read",
    ),
    "bench": (
        "bench.bench",
        "measure this machine: what limits training, its disk, Adam and copies",
    ),
    "clean": (
        "cli.clean",
        "list, or remove, what jobs have left: cut-short saves, records of ended runs",
    ),
    "completion": ("cli.completion", "a script for the shell's tab key"),
    "cost": ("cost.command", "what a job costs on rented GPUs, and when to move"),
    "env": ("cli.env", "what was found and chosen on this machine, and what would be better"),
    "eval": ("eval.evaluate", "scores of lm-eval's tasks, or loss and perplexity"),
    "export": ("export.export", "write a checkpoint's weights as safetensors"),
    "fleet": ("fleet.command", "who of several jobs gets which GPUs, and when"),
    "generate": ("generate.generate", "continue a prompt, or chat"),
    "plan": ("plan.plan", "where a model's state would live, and how long a step would take"),
    "report": ("watch.report", "a run as one HTML page: memory map, loss, edges, timeline"),
    "run": ("run.run", "runs a training script as it is, its model's state at home"),
    "top": ("watch.top", "watch the jobs of this machine"),
    "trace": ("watch.trace", "summarise a timeline, or draw it"),
    "train": ("train.train", "train or fine-tune a causal language model"),
    "verify": (
        "verify.command",
        "repeat a stretch of a job from its receipt, and compare the bits",
    ),
}
ABOUT = "Train PyTorch models with all the memory a machine has: GPU, CPU and NVMe."
INTERRUPTED_STATUS = 128 + signal.SIGINT
BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
REFUSALS = (ConfigError, UsageError)  # what is started again fails so again; memory may be free
# They warn of what users of a command cannot change: kernels for other machines, renamed functions.
NOISY = ("bitsandbytes", "torchao", "torch.utils._pytree")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"infinity.tools.{SUBCOMMANDS[name][0]}")


def parser_of(name: str) -> Parser:
    """Makes the parser of a subcommand."""
    module = _module(name)
    about = {"description": SUBCOMMANDS[name][1]} | getattr(module, "ABOUT", {})
    return Parser(f"infinity {name}", module.OPTIONS, **about)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the words of a command line. Exits for its help, and for wrong words."""
    if words and words[0] in SUBCOMMANDS:
        return parser_of(words[0]).parse_args(words[1:], argparse.Namespace(subcommand=words[0]))
    lines = "\n".join(f"  {name:<14}{what}" for name, (_, what) in SUBCOMMANDS.items())
    parser = Parser(
        "infinity",
        [
            ("subcommand", {"metavar": "<subcommand>", "choices": SUBCOMMANDS}, HIDDEN),
            ("--help", {"action": "help"}, HIDDEN),
            ("-h", {"action": "help"}, HIDDEN),
            ("--version", {"action": "version", "version": f"infinity {__version__}"}, HIDDEN),
        ],
        usage="infinity [-h] [--version] <subcommand> ...",
        add_help=False,
        description=f"{ABOUT}\n\n{lines}",
        epilog=(
            "Exit status: 0 done; 1 a defect; 2 bad input, or a system error; 130, 143 interrupted"
        ),
    )
    return parser.parse_args(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status. Never raises errors that users can fix."""
    try:
        args = parse(presets.expanded(sys.argv[1:] if argv is None else argv))
    except SystemExit as stop:  # argparse has printed help (0) or its message (2)
        if stop.code:
            _note_refusal("wrong words: see the message on standard error")
        return stop.code
    except InfinityError as error:
        print(f"infinity train: {error}", file=sys.stderr)
        _note_refusal(str(error))
        return BAD_INPUT_STATUS
    name = args.subcommand
    return answer(f"infinity {name}", _module(name).run, args, parser_of(name).known)


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
        aside = others_aside() if getattr(args, "json", False) else contextlib.nullcontext()
        with aside, wording.logging_in_options(options):
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
