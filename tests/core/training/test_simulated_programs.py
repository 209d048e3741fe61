"""Simulated programs: what users do, on disks that fail, beside plain torch.

Words used here: see `sim_program`, `sim_world` and `sim_play`. **plant**: a fault of the engine
that the simulator has to find. Programs run in children of a prepared process.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import prepared
import pytest
import sim
import sim_apart
from sim_actions import ACTIONS
from sim_late import draw_late
from sim_plants import PLANTS
from sim_program import Program, draw
from sim_ranks import KEPT_ACTIONS, OF_RANKS, draw_ranks
from sim_shrink import shrink

FEW = 25  # programs in `make test`: some eight seconds of a processor
MANY = 1500
FEW_OF_RANKS, MANY_OF_RANKS = 4, 100
MANY_LATE = 100
MOST_ACTIONS = 6  # of a shrunk program
KEPT = json.loads(Path(sim.__file__).with_name("kept.json").read_text())


def simulated(folder: Path, *options: object, seconds: int = 500, **variables: str) -> Any:
    """What the command counted, and the failures that it found."""
    out = folder / "out.json"
    done = prepared.run(sim.__file__, *options, "--json", out, seconds=seconds, variables=variables)
    assert out.exists(), done.stdout + done.stderr
    found = json.loads(out.read_text())
    return found["counts"], found["failed"], done.stdout


@pytest.mark.timeout(600)
def test_programs_of_some_seeds_break_no_promise(tmp_path):
    """Bits of plain torch, typed errors, no wait without end, nothing left, nothing lost."""
    counts, failed, said = simulated(tmp_path, "--seed", 1, "--programs", FEW)
    assert not failed, said
    assert counts["programs"] == FEW and counts["bits"] > 1e6
    assert any(name.startswith("fault ") for name in counts)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_programs_break_no_promise(tmp_path):
    _, failed, said = simulated(tmp_path, "--seed", 10_000, "--programs", MANY, seconds=7000)
    assert not failed, said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_programs_on_the_late_device_break_no_promise(tmp_path):
    """Streams come late, and memory runs out."""
    options = ("--late", "--seed", 1, "--programs", MANY_LATE)
    counts, failed, said = simulated(tmp_path, *options, seconds=1700)
    assert not failed, said
    assert counts["OutOfMemoryError in scarce"]


@pytest.mark.timeout(400)
def test_programs_of_two_ranks_break_no_promise(tmp_path):
    """One comes late, fails alone, has a disk that fails, or is lost."""
    counts, failed, said = simulated(tmp_path, "--ranks", "--seed", 1, "--programs", FEW_OF_RANKS)
    assert not failed, said
    assert counts["programs"] == FEW_OF_RANKS and counts["PeerError in lost"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_programs_of_two_ranks_break_no_promise(tmp_path):
    options = ("--ranks", "--seed", 500, "--programs", MANY_OF_RANKS)
    _, failed, said = simulated(tmp_path, *options, seconds=1700)
    assert not failed, said


@pytest.mark.timeout(400)
def test_programs_that_failed_once_do_not_fail_again(tmp_path):
    counts, failed, said = simulated(
        tmp_path, "--tries", 0, PROGRAM="\n".join(map(json.dumps, KEPT.values()))
    )
    assert not failed and counts["programs"] == len(KEPT), said


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_found_and_shrunk(plant, tmp_path):
    """Twins of the programs above."""
    tries = 40 if "wait" in plant else 120  # of which each waits
    options = ("--seed", 1, "--programs", 400, "--tries", tries, "--plant", plant)
    _, failed, said = simulated(tmp_path, *options, seconds=1100, INFINITY_SIM_SECONDS="15")
    assert failed and len(failed[0]["actions"]) <= MOST_ACTIONS, said
    assert "replay: make sim SEED=" in said and "short:  make sim PROGRAM=" in said


def test_one_planted_fault_is_found(tmp_path):
    """A twin that is quick: of one program, which its line then replays."""
    options = ("--seed", 1, "--plant", "a landing is dropped", "--tries", 0)
    _, failed, said = simulated(tmp_path, *options)
    assert [each["kind"] for each in failed] == ["bits"], said
    line = next(each for each in said.splitlines() if each.startswith("whole:"))
    given = line.partition("PROGRAM='")[2].removesuffix("'")
    _, again, _ = simulated(tmp_path, *options[2:], PROGRAM=given)
    assert [each["kind"] for each in again] == ["bits"]


@pytest.mark.parametrize("make", [draw, draw_ranks, draw_late])
def test_a_seed_draws_one_program(make):
    """Whatever was drawn before it. A program is its own text."""
    random.seed(1)
    programs = [make(seed) for seed in range(50)]
    random.seed(2)
    assert programs == [make(seed) for seed in range(50)]
    assert all(Program.read(program.text()) == program for program in programs)
    assert len({program.text() for program in programs}) == 50


def test_every_action_is_drawn():
    names = {name for seed in range(300) for name, _ in draw(seed).actions}
    assert names == set(ACTIONS) - {"scarce"}  # of the late device's memory
    assert "scarce" in {name for seed in range(20) for name, _ in draw_late(seed).actions}
    drawn = [draw_ranks(seed) for seed in range(300)]
    names = {name for program in drawn for name, _ in program.actions}
    assert names == {*KEPT_ACTIONS, *OF_RANKS, "lost"}


def test_shrinking_keeps_what_fails():
    """Method: programs that fail if they load after a save on disk. Twin: with no tries left
    nothing is shrunk."""

    def fails(program: Program) -> bool:
        names = [name for name, _ in program.actions]
        return "nvme" in program.config.values() and names[-2:] == ["save", "load"]

    program = draw(5)
    actions = (*program.actions, ("save", {"wait": False}), ("load", {}))
    config = {"params": "nvme", "optimizer": "host", "recompute": True}
    given = Program(program.model, "SGD", config, actions, room=2.0)
    short = shrink(given, fails)
    assert short.actions == (("save", {"wait": True}), ("load", {}))
    assert short.room is None and "recompute" not in short.config
    assert shrink(given, fails, 0) == given


def test_two_lines_that_come_at_once_are_read_one_by_one():
    """Twin: a line that has no end yet is none."""
    reader, writer = os.pipe()
    os.write(writer, b"first\nsecond\nthi")
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        assert [sim_apart.read_line(pipe, 1.0) for _ in "123"] == [b"first\n", b"second\n", None]


def test_a_child_that_ends_or_waits_is_a_failure(monkeypatch):
    """What it said is told. Twin: the programs after it are played."""
    sim_apart.prepare()
    monkeypatch.setattr(sim_apart, "SECONDS", 20.0)
    plain = Program(sim_apart.WARM.model, "AdamW", {"params": "host", "optimizer": "host"}, ())
    crash = Program(plain.model, "AdamW", plain.config, (("fork", {"of": "nobody"}),))
    kinds = [each.kind for each in sim_apart.outcomes([plain, crash, plain])]
    assert kinds == ["", "untyped", ""]
