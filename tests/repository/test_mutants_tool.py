"""tools/mutants.py: what it draws. No mutant is run."""

from __future__ import annotations

import importlib.util
import random
import sqlite3
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "mutants.py"
COLUMNS = (
    "module_path TEXT, operator_name TEXT, operator_args TEXT, occurrence INT, start_pos_row INT,"
    " start_pos_col INT, end_pos_row INT, end_pos_col INT, definition_name TEXT, job_id TEXT"
    " PRIMARY KEY"
)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("mutants", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def session_of(path: Path, numbers: random.Random) -> Path:
    """A session as `cosmic-ray init` leaves one: of the same file the same mutants, under new
    numbers, in the order of these."""
    mutants = [
        ("a.py", operator, "{}", occurrence, row, row % 7, row, 9, "f")
        for row in range(20)
        for operator in ("core/NumberReplacer", "core/ReplaceBinaryOperator_BitOr_Add")
        for occurrence in range(2)
    ]
    rows = sorted((*mutant, f"{numbers.getrandbits(128):032x}") for mutant in mutants)
    numbers.shuffle(rows)
    with sqlite3.connect(path) as database:
        database.execute(f"CREATE TABLE mutation_specs ({COLUMNS})")
        database.execute("CREATE TABLE work_items (job_id TEXT PRIMARY KEY)")
        database.executemany(
            "INSERT INTO mutation_specs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
        )
        database.executemany("INSERT INTO work_items VALUES (?)", [(row[-1],) for row in rows])
    return path


def left_in(path: Path) -> set[tuple]:
    with sqlite3.connect(path) as database:
        places = set(
            database.execute("SELECT start_pos_row, operator_name, occurrence FROM mutation_specs")
        )
        assert database.execute("SELECT count(*) FROM work_items").fetchone() == (len(places),)
    return places


def test_a_seed_draws_the_same_mutants_of_every_session(tool, tmp_path):
    """Claim: a draw can be repeated, though cosmic-ray numbers the mutants anew in each session.
    Failing twin: another seed draws others."""
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        path = session_of(tmp_path / f"{number}.sqlite", random.Random(100 + number))
        assert tool.draw(path, 12, seed) == 80
        drawn.append(left_in(path))
    assert drawn[0] == drawn[1] != drawn[2] and {len(each) for each in drawn} == {12}
    assert not any("BitOr_" in operator for _, operator, _ in drawn[0])


def test_a_session_with_fewer_mutants_keeps_all(tool, tmp_path):
    path = session_of(tmp_path / "session.sqlite", random.Random(1))
    tool.draw(path, 1000, 1)
    assert len(left_in(path)) == 40
