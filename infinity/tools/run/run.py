"""`infinity run`: runs a script that knows nothing of Infinity, with its models at home.

The script runs in this process, as `python SCRIPT` would. :mod:`.auto` wraps what it trains.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, InfinityError
from ..cli.answers import print_object
from ..cli.options import FLAG, defaults, takes
from ..train.options import MEMORY
from ..train.settings import engine_config, engine_settings

if TYPE_CHECKING:
    from torch import nn

ABOUT = {
    "usage": "infinity run [options] [-m] SCRIPT ...",
    "description": """\
Runs a training script that knows nothing of Infinity, with the state of its model at home on the
device, the host or NVMe. Options before SCRIPT are this command's, those behind it the script's.
""",
}
REFUSED = 2  # exit status, also of a process that the script has spawned
RUNPY = "<frozen runpy>", runpy.__file__  # the file of its frames


OPTIONS = (
    "where the state lives",
    *MEMORY,
    "the script",
    ("-m", FLAG | {"dest": "is_module"}, "SCRIPT is a module, as for python -m"),
    ("--json", FLAG, "what was wrapped as one JSON object on stdout, all else on stderr"),
    ("script", takes("SCRIPT"), "a Python file"),
    ("words", takes("...", nargs=argparse.REMAINDER), "the script's own options"),
    defaults(max_grad_norm=None),  # which the settings of `infinity train` read
)


def run(args: argparse.Namespace) -> int:
    """Runs the script and returns its exit status."""
    sys.argv = [args.script, *args.words]
    sys.path[0] = os.getcwd() if args.is_module else str(Path(args.script).resolve().parent)
    if not args.is_module:
        _check_script(args.script)
    elif not _is_module(args.script):
        raise ConfigError(f"there is no module {args.script}. Name one that `python -m` runs")
    settings = engine_settings(args, has_loop=False)
    engine_config({"device": "cpu"} | settings)  # raises for wrong values before the script begins
    with contextlib.ExitStack() as until_end:
        auto = until_end.enter_context(begin(settings))
        status: Any = 1  # of a script that an error ends
        try:
            status = _run(args)
            return status
        except SystemExit as stop:
            status = stop.code
            raise
        finally:
            if not (auto.wrapped or auto.spawned or status):
                _tell("no model was trained by a torch.optim.Optimizer, so none is at home")
            if args.json:
                print_object({"wrapped": auto.wrapped})


def begin(settings: dict[str, Any]) -> Any:
    """Begins to wrap what is trained in this process."""
    from .auto import start

    def make_config(model: nn.Module) -> Any:
        where = {"device": None} | settings  # it computes where the script has put it
        return engine_config(where, model)

    in_child = partial(_in_child, settings)
    return start(make_config, _tell, given=settings, in_child=in_child)


def _in_child(settings: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    """Runs ``function`` in a process that the script has spawned."""
    begin(settings)
    try:
        return function(*args)
    except InfinityError as error:
        print(f"infinity run: {error}", file=sys.stderr)
        sys.exit(REFUSED)


def _tell(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"infinity run: {text}", file=sys.stderr)


def _check_script(path: str) -> None:
    """Raises ConfigError if ``path`` is not a file to run."""
    if not os.path.exists(path):
        raise ConfigError(
            f"there is no script {path}. The script comes after the options of `infinity run`, and"
            " its own options come after it: infinity run --params host train.py --lr 0.1"
        )
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "__main__.py")):
        raise ConfigError(f"{path} is a folder without __main__.py: name the script in it")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _run(args: argparse.Namespace) -> int:
    """Runs the script as Python would, and returns 1 after an error of its own, which is printed
    with the script's lines only."""
    try:
        if args.is_module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args.script, run_name="__main__")
    except (InfinityError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001 - the script's own
        if getattr(error, "exit_code", None) == REFUSED:  # of torch.multiprocessing: it was told
            return REFUSED
        if _lacks_deepspeed(error):
            raise _of_deepspeed(error, args.script) from None
        error.__traceback__ = _of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _lacks_deepspeed(error: Exception) -> bool:
    """Tells whether the script asked for DeepSpeed, which is not installed."""
    if isinstance(error, importlib.metadata.PackageNotFoundError):  # by a library
        return "deepspeed" in str(error)
    return isinstance(error, ModuleNotFoundError) and error.name == "deepspeed"


def _of_deepspeed(error: Exception, script: str) -> ConfigError:
    """Returns what to do with a script that asks for DeepSpeed."""
    source: Any = "ds.json"
    trace = error.__traceback__
    while trace is not None:  # transformers' TrainingArguments keep what they were given
        source = getattr(trace.tb_frame.f_locals.get("self"), "deepspeed", None) or source
        trace = trace.tb_next
    path = source if isinstance(source, str) else "ds.json"
    return ConfigError(
        f"{script} asks for DeepSpeed, in whose place infinity run works. Leave deepspeed= out of"
        " its TrainingArguments (docs/migration.md has calls of deepspeed itself), and give its"
        f" JSON here: infinity run --config {path} {script}"
    )


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that begins in the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, *RUNPY):
        trace = trace.tb_next
    return trace
