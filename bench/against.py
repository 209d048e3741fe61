"""against: the headline loops of this tree beside those of another commit, in turns.

pair      one process of each tree, at the same time, whose turns alternate: this tree and the
          other, then the other and this one
sample    the median ratio of a pair's turns, seconds of this tree over those of the other
interval  95 % of the median of the samples, drawn anew: a process has a speed of its own, so its
          turns are no samples

A loop gets pairs until its interval is narrow, or the time ends. The other commit is built in a
worktree below `build/against`, which is kept. Where its native sources are those of this tree, this
tree's compiled modules are used for both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError, UsageError
from infinity.tools.bench import intervals, results
from infinity.tools.bench.bench import check_folder
from infinity.tools.bench.rounds import PROGRESS, tell
from infinity.tools.bench.settings import Settings
from infinity.tools.cli.options import DIR, NUMBER, takes
from infinity.tools.cli.values import positive_real, real_from_zero

from .headline import JOBS, ONCE

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ("csrc", "setup.py", "pyproject.toml")
QUANTITIES = ("seconds", "cpu")
FAILED = "fails in the other commit"


@dataclass
class Loop:
    """What was found of one loop. ``samples``: quantity -> a ratio of each pair."""

    name: str
    samples: dict[str, list[float]] = field(
        default_factory=lambda: {each: [] for each in QUANTITIES}
    )
    note: str = ""

    def interval(self, quantity: str = "seconds") -> intervals.Interval | None:
        """Returns the interval of a quantity's ratio."""
        return intervals.of_median(self.samples[quantity])

    def verdict(self, bound: float) -> str:
        """Says whether this tree is slower than the bound allows, with confidence."""
        return self.note or intervals.verdict(self.interval(), bound=bound)


class Process:
    """A process that prepares a loop with one tree's package and takes turns."""

    def __init__(self, tree: Path, name: str, folder: str, scale: float):
        path = os.pathsep.join((str(tree), *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        command = [sys.executable, "-P", str(ROOT / "bench" / "headline.py")]
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [*command, name, folder, str(scale)],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Waits until the loop is prepared. Raises ChildProcessError if it fails."""
        self._answer()

    def turn(self) -> dict[str, float]:
        """Takes a turn. Returns its quantities."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            told = self._errors.read().strip().splitlines() or ["no word"]
            raise ChildProcessError(told[-1][:200])
        return line

    def close(self) -> None:
        """Ends the process and those that it started."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # those that it started, too
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


Start = Callable[[str, str, str], Any]  # tree ("old" or "new"), loop, folder -> a process


def pair(start: Start, name: str, folder: str, turns: int, chance: random.Random) -> dict:
    """Runs one pair. Returns each quantity's ratio, this tree over the other. Raises
    ChildProcessError, with "old" or "new" before the reason, if a process fails."""
    order = ["old", "new"]
    chance.shuffle(order)
    ratios: dict[str, list[float]] = {each: [] for each in QUANTITIES}
    with contextlib.ExitStack() as stack:
        processes, tree = {}, ""
        try:
            for tree in order:
                own = os.path.join(folder, tree)
                shutil.rmtree(own, ignore_errors=True)
                processes[tree] = start(tree, name, own)
                stack.callback(processes[tree].close)
            for tree in order:  # both prepare at the same time: nothing of it is measured
                processes[tree].wait_ready()
            for tree in order if name not in ONCE else ():
                processes[tree].turn()  # a warm-up
            for _ in range(1 if name in ONCE else turns):
                order.reverse()
                times = {}
                for tree in order:
                    times[tree] = processes[tree].turn()
                for each, found in ratios.items():
                    if times["old"][each] > 0:
                        found.append(times["new"][each] / times["old"][each])
        except ChildProcessError as error:
            raise ChildProcessError(f"{tree}: {error}") from error
    return {each: statistics.median(found) for each, found in ratios.items() if found}


def measure(
    loops: Sequence[Loop],
    run_pair: Callable[[str], dict],
    *,
    seconds: float,
    within: float = 0.02,
    clock: Callable[[], float] = time.monotonic,
    show: Callable[[Loop], None] = lambda loop: None,
) -> None:
    """Measures pairs of the loops that are still open, one after the other, until each interval is
    narrower than ``within`` or ``seconds`` are used. ``show`` gets each as it is finished, or
    interrupted. A loop that fails in the other commit is noted, and left. Raises
    UsageError if one fails in this tree."""
    left, deadline = list(loops), clock() + seconds
    try:
        for loop in loops:
            if loop.name in ONCE and seconds > 0:
                run_pair(loop.name)  # compiles what is imported
        while left and clock() < deadline:
            for loop in list(left):
                if clock() >= deadline:
                    break
                tell(f"{loop.name}, pair {len(loop.samples['seconds']) + 1}")
                try:
                    for each, ratio in run_pair(loop.name).items():
                        loop.samples[each].append(ratio)
                except ChildProcessError as error:
                    if not str(error).startswith("old"):
                        raise UsageError(f"{loop.name} fails in this tree: {error}") from error
                    loop.note = f"{FAILED} ({error})"
                if loop.note or intervals.width(loop.interval()) < within:
                    left.remove(loop)
                    show(loop)
    finally:
        for loop in left:
            show(loop)


HEADER = f"{'':<18}{'time':>7}  {'95 %':^15}{'processor':>10}  {'95 %':^15} pairs"


def line(loop: Loop, bound: float) -> str:
    """Formats a loop: both ratios with their intervals, the pairs and the verdict."""
    cells = []
    for each in QUANTITIES:
        found, interval = loop.samples[each], loop.interval(each)
        median = f"{statistics.median(found):.3f}" if found else ""
        spread = f"{interval[0]:.3f} - {interval[1]:.3f}" if interval else ""
        cells.append(f"{median:>{7 if each == 'seconds' else 10}}  {spread:^15}")
    count = len(loop.samples["seconds"])
    return f"{loop.name:<18}{''.join(cells)} {count:>5}  {loop.verdict(bound)}"


def build(reference: str, root: Path = ROOT) -> tuple[Path, str]:
    """Makes a worktree of a commit, built in place. Returns its folder and the commit. Raises
    ConfigError for an unknown commit, or if it cannot be built."""
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}")
    except subprocess.CalledProcessError:
        raise ConfigError(f"{reference} is no commit of this repository: give one") from None
    tree = root / "build" / "against" / commit[:12]
    if not (tree / "infinity").is_dir():
        _git(root, "worktree", "prune")
        tree.parent.mkdir(parents=True, exist_ok=True)
        _git(root, "worktree", "add", "--detach", "--force", str(tree), commit)
    compiled = [root / each for each in ("infinity", "tests/support/disks/doubles")]
    same = subprocess.run(["git", "-C", root, "diff", "--quiet", commit, "--", *NATIVE])
    if same.returncode == 0:
        for module in (path for folder in compiled for path in folder.glob("*.so")):
            place = tree / module.relative_to(root)
            if place.parent.is_dir():
                shutil.copy2(module, place)
    elif not list((tree / "infinity").glob("_C*.so")):
        tell(f"building {commit[:7]}: its native sources differ from this tree's")
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            cwd=tree,
            capture_output=True,
            text=True,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        )
        if done.returncode:
            raise ConfigError(f"{reference} cannot be built:\n{done.stderr[-2000:]}")
    return tree, commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", root, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


OPTIONS = (
    ("reference", takes("REF"), "the commit to compare with, as main~3"),
    ("--only", takes("LOOP", nargs="+"), f"of {', '.join(JOBS)} (default: all)"),
    ("--minutes", takes("M", positive_real, default=30.0), "at most (default 30)"),
    (
        "--within",
        takes("X", positive_real),
        "the width of an interval that needs no further pair",
        0.02,
    ),
    ("--bound", takes("X", real_from_zero), "how much slower fails, with confidence", 0.02),
    ("--turns", NUMBER | {"default": 5}, "of a pair"),
    ("--scale", takes("X", positive_real, default=1.0), "of sizes"),
    ("--folder", takes("DIR", default="."), "on the disk to measure (default: here)"),
    ("--save", DIR, "a result file in this folder"),
)


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line for each loop. Returns 1 if one is slower than the bound."""
    check_folder(args.folder)
    names = args.only or list(JOBS)
    if unknown := [name for name in names if name not in JOBS]:
        raise UsageError(f"--only {unknown[0]}: choose from {', '.join(JOBS)}")
    if busy := results.busy():
        print(f"{busy}; turns share that, and intervals get wider", file=sys.stderr)
    old, commit = build(args.reference)
    trees = {"old": old, "new": ROOT}
    settings = Settings(folder=args.folder, scale=args.scale, threads=1, rivals=False)
    run_of_all = results.Run("against", settings)
    chance, found, complete = random.Random(0), [Loop(name) for name in names], False
    print(f"time and processor time of this tree over {commit[:12]}'s; above 1 it is slower")
    print(HEADER, flush=True)

    def show(loop: Loop) -> None:
        PROGRESS.clear()
        print(line(loop, args.bound), flush=True)

    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=args.folder) as folder:

        def start(tree: str, name: str, own: str) -> Process:
            return Process(trees[tree], name, os.path.abspath(own), args.scale)

        def run_pair(name: str) -> dict:
            return pair(start, name, folder, args.turns, chance)

        try:
            measure(found, run_pair, seconds=60 * args.minutes, within=args.within, show=show)
            complete = True
        finally:
            if args.save is not None:
                args.save.mkdir(parents=True, exist_ok=True)
                content = run_of_all.content(_measured(found, commit), complete=complete)
                print(results.save(content, args.save))
    slower = [loop.name for loop in found if loop.verdict(args.bound) == "slower"]
    if slower:
        print(f"slower by more than {args.bound:.1%}, with confidence: {', '.join(slower)}")
    return 1 if slower else 0


def _measured(found: Sequence[Loop], commit: str) -> results.Measured:
    rows = [
        results.row(f"against.{loop.name}.{each}", "ratio", loop.samples[each])
        for loop in found
        for each in QUANTITIES
        if loop.samples[each]
    ]
    notes = [f"{loop.name}: {loop.note}" for loop in found if loop.note]
    return results.Measured(rows, [f"beside {commit}", *notes])
