"""The order in which workers take files of tests names files that are there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import order

TESTS = Path(__file__).parents[1]


def test_what_comes_first_is_there():
    """And the files that share the standing ranks are those that ask for them. The twin: without
    one file its name is unknown."""
    names = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert order.unknown(names) == set() and order.unknown(names - {order.LONGEST[0]}) == {
        order.LONGEST[0]
    }
    asking = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        if "standing_ranks(" in path.read_text()
    }
    assert asking - {Path(__file__).relative_to(TESTS).as_posix()} == set(order.OF_STANDING_RANKS)


def test_long_files_come_first_and_tests_stay_in_their_order():
    first, last = order.OF_STANDING_RANKS[0], order.LONGEST[-1]
    ids = [
        "tests/a.py::x",
        "tests/b.py::x",
        f"tests/{last}::x",
        "tests/b.py::a",
        f"tests/{first}::z",
        f"tests/{first}::a",
    ]
    items = [SimpleNamespace(nodeid=each) for each in ids]
    order.longest_first(items)
    assert [item.nodeid for item in items] == [ids[4], ids[5], ids[2], ids[1], ids[3], ids[0]]
