"""The order in which workers take files of tests names files that are there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import marks
import order

TESTS = Path(__file__).parents[1]


def test_what_comes_first_is_there():
    """The twin: without one file its name is unknown. `python tools/durations.py` drops files that
    are gone."""
    names = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    longest = max(order.SECONDS, key=order.SECONDS.get)
    assert order.unknown(names) == set() and order.unknown(names - {longest}) == {longest}
    assert set(marks.MOST_CASES) <= names and min(marks.MOST_CASES.values()) == 1


def test_long_files_come_first_and_tests_stay_in_their_order():
    first, last = (take(order.SECONDS, key=order.SECONDS.get) for take in (max, min))
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


class Case:
    """A case as pytest has it."""

    def __init__(self, test: str, *values: str, slow: bool = False):
        self.nodeid, self.slow = f"tests/{test}[{'-'.join(values)}]", slow
        self.callspec = SimpleNamespace(_idlist=values)

    def get_closest_marker(self, name: str) -> object:
        return True if self.slow else None

    def add_marker(self, mark: object) -> None:
        self.slow = True


def kept_by(cases: list[Case]) -> list[str]:
    marks.mark_slow(cases)
    return [case.nodeid.partition("[")[2][:-1] for case in cases if not case.slow]


def test_of_dear_cases_few_run_and_of_each_test_some():
    """Method: ten values in a file of dear cases, beside one that is slow already. Twins: in
    another file all run, and a product has each value."""
    dear, dearest = (
        next(name for name, most in marks.MOST_CASES.items() if most == count) for count in (2, 1)
    )
    ten = [str(value) for value in range(10)]
    assert kept_by([Case(f"{dear}::x", value) for value in ten]) == ["0", "9"]
    assert kept_by([Case(f"{dearest}::x", value) for value in ten]) == ["0"]
    cases = [Case(f"{dear}::x", "0"), Case(f"{dear}::y", "0"), Case(f"{dear}::x", "1", slow=True)]
    assert kept_by(cases) == ["0", "0"]
    homes = [Case(f"{dearest}::{test}", home) for test in ten for home in sorted(marks.HOMES)]
    assert len(kept := kept_by(homes)) == len(ten) and set(kept) == marks.HOMES
    assert kept_by([Case("cheap.py::x", value) for value in ten]) == ten
    product = [Case("cheap.py::x", home, mode) for home in "abc" for mode in "de"]
    assert kept_by(product) == ["a-d", "b-e", "c-d"]


REPORT = """<testsuites><testsuite>
<testcase classname="tests.core.run.test_a" name="x" time="1.4"/>
<testcase classname="tests.core.run.test_a.TestB" name="x[1]" time="{more}"/>
<testcase classname="tests.ranks.test_gone" name="x" time="30"/>
<testcase classname="tests.ranks.test_short" name="x" time="0.2"/>
<testcase classname="bench.test_c" name="x" time="9"/>
</testsuite></testsuites>
"""


def test_durations_are_those_of_the_last_report(tmp_path):
    """Method: two reports over stored seconds. A file that they lack keeps its own; one that is
    gone, one below a second and one outside the tests are left out. Twin: the first report
    alone."""
    spec = importlib.util.spec_from_file_location(
        "durations_tool", TESTS.parent / "tools" / "durations.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    reports = [tmp_path / "first.xml", tmp_path / "last.xml"]
    for path, more in zip(reports, ("40", "3.3")):
        path.write_text(REPORT.format(more=more))
    for name in ("core/run/test_a.py", "ranks/test_short.py", "ext/test_kept.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    stored = {"ext/test_kept.py": 7, "ranks/test_gone.py": 8}
    assert tool.merged(stored, reports, tmp_path) == {
        "core/run/test_a.py": 5,
        "ext/test_kept.py": 7,
    }
    assert tool.merged(stored, reports[:1], tmp_path)["core/run/test_a.py"] == 41
