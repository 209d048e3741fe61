"""`python -m bench rivals`: each rival in an environment of its own, in turns with ours.

The model, the data, the tokens and the counting are the same for all: :mod:`bench.job` is one
process of a training, by ours and by theirs. Rows ``rivals.<size>.<tokens>.<processes>.<system>``
(tokens/s) have the ratios to all that ran in the same turns. Themes that have a rival, as io has
fio, run in the rival's environment: rows ``rivals.<rival>.<theme>...``. A note tells of each rival
that is absent why it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from infinity.tools.bench import results
from infinity.tools.bench.bench import check_folder
from infinity.tools.bench.results import Measured
from infinity.tools.bench.rounds import PROGRESS, tell
from infinity.tools.bench.settings import Settings
from infinity.tools.cli.options import DIR, FILE, FLAG, NUMBER, takes
from infinity.tools.cli.values import positive_real

from ..endtoend import turns
from ..launch import environment
from ..themes import PARTS
from . import table
from .environments import is_made, lacks, python_of, variables

THEME_SECONDS = 3600


OPTIONS = (
    ("--only", takes("NAME", nargs="+"), "these rivals (default: all)"),
    ("--list", FLAG, "the rivals, and what each needs"),
    ("--table", FILE | {"default": table.FILE}, "of rivals and the sweep"),
    ("--rounds", NUMBER | {"default": 5}, "(default 5)"),
    ("--scale", takes("X", positive_real, default=1.0), "of the themes' sizes"),
    ("--folder", takes("DIR", default="."), "on the disk to measure (default: here)"),
    ("--save", DIR, "a result file in this folder"),
)


def run(args: argparse.Namespace) -> int:
    """Makes the environments that are missing, measures, and prints rows and notes. Raises
    ConfigError for a table that is none, UsageError for a rival that it does not have."""
    found = table.read(args.table)
    rivals = found.chosen(args.only or [*found.rivals], "--only")
    if args.list:
        for name, rival in rivals.items():
            print(f"{name:<14}{_state(name, rival):<36}{' '.join(rival.packages)}")
        return 0
    check_folder(args.folder)
    settings = Settings(
        folder=args.folder, rounds=args.rounds, scale=args.scale, rivals=list(rivals)
    )
    begun = results.Run("rivals", settings, [*PARTS["train"].paths, "bench/systems.py"])
    path, measured = None, Measured([])
    if args.save is not None:
        args.save.mkdir(parents=True, exist_ok=True)
        path = results.new_path(begun.content(measured), args.save)

    def keep(*, complete: bool = False) -> None:
        """Writes what has been measured: what is cut off later stays."""
        if path is not None:
            results.write(begun.content(measured, complete=complete), path)

    pythons = _environments(rivals, measured)
    keep()
    for part in _parts(found.sweep, rivals, pythons, settings):
        PROGRESS.clear()
        print(results.table(part.rows), flush=True)
        measured.add(part)
        keep()
    PROGRESS.clear()
    for note in [*measured.notes, *results.remarks(measured.rows, settings)]:
        print(f"({note})")
    keep(complete=True)
    if path is not None:
        print(path)
    return 0


def _state(name: str, rival: table.Rival) -> str:
    if why := lacks(rival):
        return why
    return "ready" if is_made(name, rival) else "environment not made yet"


def _environments(rivals: dict[str, table.Rival], measured: Measured) -> dict[str, str]:
    """Returns the Python of each rival that can run; the others have a note with the reason."""
    pythons = {}
    for name, rival in rivals.items():
        python = python_of(name, rival)
        told = measured.rivals[name] = {"packages": list(rival.packages)}
        if isinstance(python, str):
            told["absent"] = python
            measured.notes.append(f"rivals.{name}: {python}")
        else:
            pythons[name] = str(python)
    return pythons


def _parts(
    sweep: table.Sweep,
    rivals: dict[str, table.Rival],
    pythons: dict[str, str],
    settings: Settings,
) -> Iterator[Measured]:
    """Measures every model, count of tokens and count of processes of the sweep, then the themes;
    yields the rows of each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for size, tokens, ranks in itertools.product(sweep.sizes, sweep.tokens, sweep.ranks):
        theirs = {
            system: (home, pythons[name])
            for name, rival in rivals.items()
            for system, home in rival.systems.items()
            if name in pythons
            and home in sweep.homes
            and (ranks == 1 or (system in rival.ranks and device == "cpu"))
        }
        if not theirs:
            continue
        homes = sorted({home for home, _ in theirs.values()})
        options = ["--batch", str(tokens // table.ROW), "--length", str(table.ROW)]
        tell(f"rivals: {size}, {tokens} tokens, {ranks} processes: {', '.join(theirs)}")
        yield turns(
            replace(settings, rivals=True),  # those of this table are chosen already
            [*(f"infinity_{home}" for home in homes), *theirs],
            size,
            settings.rounds,
            options=[*options, "--device", device],
            name=f".{size}.{tokens}.{ranks}",
            ranks=ranks,
            theme="rivals",
            pythons={system: python for system, (_, python) in theirs.items()},
        )
    for name, python in pythons.items():
        for theme in rivals[name].themes:
            yield _theme(name, theme, python, settings)


def _theme(name: str, theme: str, python: str, settings: Settings) -> Measured:
    """Runs a theme beside one rival, by the Python of its environment. Returns the rows that have a
    ratio to it, or a note with the reason why there are none."""
    tell(f"rivals: {theme} beside {name}")
    command = [python, "-P", "-m", "bench", theme, "--rivals", name, "--json"]
    command += ["--rounds", str(settings.rounds), "--scale", str(settings.scale)]
    command += ["--folder", str(Path(settings.folder).resolve())]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=THEME_SECONDS,
            env=environment(**variables(python)),
        )
        told = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Measured([], [f"rivals.{name}.{theme}: no end within {THEME_SECONDS} s"])
    except (IndexError, ValueError):
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]
        return Measured([], [f"rivals.{name}.{theme}: does not run here ({why})"])
    rows = [results.row_of(each) for each in told["rows"] if name in each["ratios"]]
    rows = [replace(each, name=f"rivals.{name}.{each.name}") for each in rows]
    notes = [f"rivals.{name}.{theme}: {note}" for note in told["notes"] if note.startswith(name)]
    more = {f"{name}.{theme}": told["rivals"].get(name, {})} if rows else {}
    return Measured(rows, notes, {}, more)
