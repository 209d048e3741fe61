"""`python -m bench against`: what it claims of two trees, and how it builds the other one.

Timings are made up: no test looks at how fast anything is.
"""

from __future__ import annotations

import io
import json
import math
import random
import subprocess
from pathlib import Path

import pytest

import bench.__main__ as checkout
from bench import against, headline
from infinity.core.run.engine import Engine
from infinity.errors import ConfigError, UsageError

NOISE, OF_A_PROCESS = 0.03, 0.01  # of a turn, and of all turns of one process


class Machine:
    """Makes processes whose turns take made-up seconds. The machine is three times slower for
    half of the time."""

    def __init__(self, slowdown: float, seed: int, turn_seconds: float = 1.0):
        self.chance, self.clock, self.slowdown = random.Random(seed), 0.0, slowdown
        self.turn_seconds, self.open = turn_seconds, 0

    def start(self, tree: str, name: str, folder: str) -> Machine.Process:
        speed = self.slowdown if tree == "new" else 1.0
        return Machine.Process(self, speed * math.exp(self.chance.gauss(0, OF_A_PROCESS)))

    def run_pair(self, name: str) -> dict:
        return against.pair(self.start, name, "nowhere", 5, self.chance)

    def find(self, seconds: float = 2000, names=("step",)) -> list[against.Loop]:
        loops = [against.Loop(name) for name in names]
        against.measure(loops, self.run_pair, seconds=seconds, clock=lambda: self.clock)
        return loops

    class Process:
        def __init__(self, machine: Machine, speed: float):
            self.machine, self.speed = machine, speed
            machine.open += 1

        def wait_ready(self) -> None:
            self.machine.clock += 1

        def turn(self) -> dict[str, float]:
            machine = self.machine
            phase = 3.0 if machine.clock // 70 % 2 else 1.0
            machine.clock += machine.turn_seconds
            noise = math.exp(machine.chance.gauss(0, NOISE))
            return {"seconds": phase * self.speed * noise, "cpu": self.speed * noise}

        def close(self) -> None:
            self.machine.open -= 1


@pytest.mark.parametrize(
    "slowdown, verdict, least, most",
    [
        (1.05, "slower", 11, 12),
        (1.005, "no difference can be seen", 12, 12),
        (0.95, "faster", 11, 12),
    ],
)
def test_a_slowdown_of_5_percent_is_found_and_one_of_half_a_percent_not_claimed(
    slowdown, verdict, least, most
):
    """Method: 12 comparisons of made-up timings with noise of 3 % a turn and 1 % a process, on a
    machine that is three times slower for half of the time; the bound is 2 %."""
    found = [Machine(slowdown, seed).find()[0].verdict(0.02) for seed in range(12)]
    assert least <= found.count(verdict) <= most, found


def test_a_loop_ends_when_its_interval_is_narrow_or_the_time_is_used():
    """Method: the interval of a quiet loop is within 2 % before the time ends; a shorter time ends
    it first, and too few pairs are no verdict. Every process is closed."""
    machine = Machine(1.0, 1)
    (loop,) = machine.find()
    assert machine.clock < 2000 and machine.open == 0
    assert against.intervals.width(loop.interval()) < 0.02 and len(loop.samples["cpu"]) >= 5
    (loop,) = (short := Machine(1.5, 1)).find(30)
    assert loop.verdict(0.02) == "too few rounds" and len(loop.samples["seconds"]) < 5
    assert 30 <= short.clock < 60
    one, other = Machine(1.0, 1).find(200, ("import", "step"))
    assert one.samples["seconds"] and other.samples["seconds"], "loops take turns"


def test_a_loop_that_fails_is_told():
    """Method: a process that ends before its first turn; in the other commit the loop is noted, in
    this tree it is an error. The other process is closed."""

    class Broken(Machine.Process):
        def wait_ready(self) -> None:
            raise ChildProcessError("no such name")

    for tree in ("old", "new"):
        machine = Machine(1.0, 1)
        usual = machine.start
        machine.start = lambda which, *a, usual=usual, tree=tree, machine=machine: (
            Broken(machine, 1.0) if which == tree else usual(which, *a)
        )
        if tree == "old":
            (loop,) = machine.find()
            assert "no such name" in loop.verdict(0.02)
        else:
            with pytest.raises(UsageError, match="step fails in this tree: new: no such name"):
                machine.find()
        assert machine.open == 0


@pytest.mark.parametrize("slowdown, status", [(1.05, 1), (1.0, 0), (0.9, 0)])
def test_the_status_is_1_if_a_loop_is_slower(slowdown, status, tmp_path, monkeypatch, capsys):
    """Method: the command with made-up processes; its file has a ratio of each pair,
    also after Ctrl-C."""
    machine = Machine(slowdown, 3)
    monkeypatch.setattr(against, "build", lambda reference: (tmp_path, "0123456789abcdef"))
    monkeypatch.setattr(
        against,
        "Process",
        lambda tree, name, own, scale: machine.start(
            "old" if tree == tmp_path else "new", name, own
        ),
    )
    monkeypatch.setattr(against.time, "monotonic", lambda: machine.clock)
    usual = against.measure
    monkeypatch.setattr(
        against, "measure", lambda *a, **k: usual(*a, **k, clock=lambda: machine.clock)
    )
    save = ["--folder", str(tmp_path), "--save", str(tmp_path / "kept")]
    assert checkout.main(["against", "main", "--only", "wrap", "disk", *save]) == status
    told = capsys.readouterr().out
    assert ("slower by more than 2.0%, with confidence: wrap, disk" in told) == bool(status)
    (path,) = (tmp_path / "kept").iterdir()
    found = json.loads(path.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows["against.wrap.seconds"]["rounds"]) >= 5 and found["notes"][0].startswith(
        "beside"
    )
    assert checkout.main(["against", "main", "--only", "wrp"]) == 2
    if status == 0:
        return
    monkeypatch.setattr(against, "pair", interrupted_after(7, against.pair))
    assert checkout.main(["against", "main", "--only", "wrap", "disk", *save]) == 130
    assert "too few rounds" in capsys.readouterr().out
    (last,) = set((tmp_path / "kept").iterdir()) - {path}
    kept = json.loads(last.read_text())
    assert not kept["complete"] and [len(row["rounds"]) for row in kept["rows"]] == [4, 4, 3, 3]


def interrupted_after(count: int, usual):
    """``usual`` for so many calls, then Ctrl-C."""
    left = iter(range(count))

    def call(*given):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return usual(*given)

    return call


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", folder, *names, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with a package, and a core that its setup.py copies from its source."""
    (tmp_path / "infinity").mkdir()
    (tmp_path / "csrc").mkdir()
    (tmp_path / ".gitignore").write_text("*.so\n/build/\n")
    (tmp_path / "infinity" / "__init__.py").write_text("wrap_model = Config = 1\n")
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "csrc" / "a.cpp").write_text("old")
    (tmp_path / "setup.py").write_text(
        "import shutil; shutil.copy('csrc/a.cpp', 'infinity/_C.built.so')\n"
    )
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "infinity" / "_C.x.so").write_text("this tree's")
    return tmp_path


def test_another_commit_is_built_only_if_its_core_differs(repository):
    """Method: the same native sources, with a change of Python: the compiled core is this tree's.
    With another source, uncommitted, the commit is built. Twins: an unknown commit, and a build
    that fails."""
    (repository / "infinity" / "more.py").write_text("")
    tree, commit = against.build("HEAD", repository)
    assert (
        commit == git(repository, "rev-parse", "HEAD") and not (tree / "infinity/more.py").exists()
    )
    assert [path.name for path in (tree / "infinity").glob("*.so")] == ["_C.x.so"]
    (tree / "infinity" / "_C.x.so").unlink()
    (repository / "csrc" / "a.cpp").write_text("new")
    assert against.build("HEAD", repository)[0] == tree
    assert (tree / "infinity" / "_C.built.so").read_text() == "old"
    with pytest.raises(ConfigError, match="nothing is no commit"):
        against.build("nothing", repository)
    (repository / "setup.py").write_text("raise SystemExit('no compiler')")
    git(repository, "commit", "-qam", "second")
    (repository / "csrc" / "a.cpp").write_text("newer")
    with pytest.raises(ConfigError, match="no compiler"):
        against.build("HEAD", repository)


def test_each_process_has_its_own_tree(repository):
    """Method: real processes of two trees, which import a package that sleeps in one of them. Twin:
    a tree whose package does not import ends with its last word."""
    old, _ = against.build("HEAD", repository)
    (repository / "infinity" / "__init__.py").write_text(
        "import time; time.sleep(0.2); wrap_model = Config = 1\n"
    )
    trees = {"old": old, "new": repository}

    def start(tree: str, name: str, own: str) -> against.Process:
        return against.Process(trees[tree], name, own, 1.0)

    ratios = against.pair(start, "import", str(repository / "build"), 5, random.Random(0))
    assert ratios["seconds"] > 1.5
    (repository / "infinity" / "__init__.py").write_text("raise ImportError('a word')")
    with pytest.raises(ChildProcessError, match="new: ImportError: a word"):
        against.pair(start, "import", str(repository / "build"), 5, random.Random(0))


@pytest.mark.parametrize(
    "name", sorted(name for name in headline.JOBS if name != "zero3" and "134M" not in name)
)
def test_every_loop_runs(name, tmp_path):
    """Method: two turns of each with tiny sizes, in this process; the larger steps differ in their
    width only."""
    with headline.JOBS[name](str(tmp_path), 0.01) as turn:
        for _ in range(2):
            seconds, cpu = turn()
            assert seconds > 0 and cpu >= 0


def test_a_turn_of_steps_ends_when_its_updates_are_at_home(tmp_path, monkeypatch):
    """Method: counts the waits of the engine; a turn has one. Twin: a plain model has none."""
    waits: list[object] = []
    usual = Engine.wait_idle
    monkeypatch.setattr(Engine, "wait_idle", lambda engine: (waits.append(engine), usual(engine)))
    with headline.JOBS["tiny400"](str(tmp_path), 0.01) as turn:
        before = len(waits)
        turn()
        assert len(waits) > before
    before = len(waits)
    headline.settle(headline.make(2, 8))
    assert len(waits) == before


@pytest.mark.slow
def test_the_loop_of_two_ranks_runs(tmp_path):
    """Method: one pair of this tree beside itself, with two processes each."""

    def start(tree: str, name: str, own: str) -> against.Process:
        return against.Process(against.ROOT, name, own, 0.1)

    assert against.pair(start, "zero3", str(tmp_path), 1, random.Random(0))["seconds"] > 0


def test_what_a_library_prints_is_no_answer(tmp_path, monkeypatch, capfd):
    """Method: a loop that prints; its answers are lines of JSON, the rest is on standard error."""

    def job(folder: str, scale: float):
        def turn() -> tuple[float, float]:
            print("hello")
            return 1.0, 2.0

        return headline.contextlib.nullcontext(turn)

    monkeypatch.setitem(headline.JOBS, "loud", job)
    monkeypatch.setattr(headline.sys, "stdin", io.StringIO("\n\n"))
    kept = headline.os.dup(1)
    try:
        headline.main("loud", str(tmp_path), 1.0)
    finally:
        headline.sys.stdout.flush()
        headline.os.dup2(kept, 1)
        headline.os.close(kept)
    said = capfd.readouterr()
    assert said.out.splitlines() == ["ready", *['{"seconds": 1.0, "cpu": 2.0}'] * 2]
