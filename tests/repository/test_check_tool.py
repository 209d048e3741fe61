"""`make check`: the tests of one file's room, nearest first, and no more than fit the time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import marks
import prepared
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check.py"


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "path, room, first",
    [
        ("infinity/ext/checkpoint/file_writer.py", "ext/checkpoint", "test_file_writer.py"),
        ("infinity/ext/checkpoint/read_once.py", "ext/checkpoint", "test_read_once.py"),
        ("infinity/tools/watch/svg.py", "tools/watch", "test_svg.py"),
        ("infinity/core/plan/placement.py", "core/plan", "test_placement.py"),
        ("infinity/native.py", "native", None),
        ("csrc/io/engine.cpp", "native", None),
        ("tests/core/machine/test_memory.py", "core/machine", "test_memory.py"),
        ("tools/check.py", "repository", None),
        ("bench/report.py", "repository", None),
    ],
)
def test_a_file_has_the_tests_of_its_room_and_its_namesake_first(tool, path, room, first):
    """Compares the list with the folder: every test file of the room is in it once."""
    found = tool.files_for(Path(path))
    assert sorted(found) == sorted((tool.TESTS / room).glob("test_*.py"))
    assert first is None or found[0].name == first


def test_every_module_of_the_package_has_a_room(tool):
    for path in (tool.ROOT / "infinity").rglob("*.py"):
        assert tool.files_for(path.relative_to(tool.ROOT)), path


@pytest.mark.parametrize(
    "line, found",
    [
        ("from infinity.core.units.flat_param import FlatParam", True),
        ("from infinity.core.units import handle, flat_param", True),
        ("import infinity.core.units.flat_param", True),
        ("from infinity.core.units import handle", False),
        ("from infinity.core.units.flat_param_spec import a", False),
    ],
)
def test_an_import_of_the_module_brings_a_file_forward(tool, line, found):
    assert tool.imports(f"import torch\n{line}\n", "infinity.core.units.flat_param") == found


@pytest.mark.parametrize(
    "given, tells",
    [
        ("", "Give a file"),
        ("infinity/none.py", "no file of this checkout"),
        ("/etc/hostname", "no file of this checkout"),
        ("README.md", "has no tests of its own"),
        ("tests/support/models/models.py", "has no tests of its own"),
    ],
)
def test_a_file_without_a_room_is_refused(tool, given, tells, capsys):
    assert tool.main([str(tool.ROOT / given) if given else given]) == 2
    assert tells in capsys.readouterr().err


def test_a_test_that_would_begin_too_late_is_skipped():
    """Method: one file under pytest without any time, and the twin with enough of it."""
    for seconds, ended in (("0", "skipped"), ("600", "passed")):
        command = "-m pytest -q -p no:cacheprovider tests/repository/test_order.py".split()
        done = prepared.run(
            *command, folder=TOOL.parents[1], variables={"INFINITY_TEST_SECONDS": seconds}
        )
        assert done.returncode == 0 and f"4 {ended}" in done.stdout, done.stdout


def test_files_that_start_processes_have_their_marks():
    """Method: one file of ranks, one of a process, and one that starts nothing."""
    tests = TOOL.parents[1] / "tests"
    assert marks.marks_of(tests / "ranks" / "test_ranks.py") == ("ranks", "processes")
    assert marks.marks_of(tests / "core" / "homes" / "test_failures.py") == ("processes",)
    assert marks.marks_of(tests / "core" / "params" / "test_mistakes.py") == ()


@pytest.mark.parametrize(
    "cases, status, told",
    [
        (["skipped", "skipped"], 1, "2 skipped: too late"),
        ([], 1, "none was chosen"),
        (["skipped", "passed"], 0, ""),
        (["failed"], 0, ""),  # pytest's own status says so
    ],
)
def test_a_run_without_a_test_fails_and_says_what_to_do(
    tool, tmp_path, capsys, cases, status, told
):
    """Method: reports as pytest writes them."""
    inside = {"skipped": "<skipped message='too late'/>", "failed": "<failure/>", "passed": ""}
    found = "".join(f"<testcase name='a'>{inside[each]}</testcase>" for each in cases)
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{found}</testsuite></testsuites>")
    assert tool.none_ran(tmp_path / "report.xml") == status
    said = capsys.readouterr().err
    assert told in said and ("INFINITY_TEST_SECONDS" in said) == bool(status)


def test_time_counts_from_the_first_test(monkeypatch):
    """Method: a clock of the test's: an hour passes before the first test, then more than there is.
    Twin: without the variable nothing is skipped."""
    now = [3600.0]
    monkeypatch.setattr(marks, "STARTED", [])
    monkeypatch.setattr(marks.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("INFINITY_TEST_SECONDS", "45")
    marks.skip_after_time()
    now[0] += 44
    marks.skip_after_time()
    now[0] += 2
    with pytest.raises(pytest.skip.Exception, match="the 45 seconds"):
        marks.skip_after_time()
    monkeypatch.delenv("INFINITY_TEST_SECONDS")
    marks.skip_after_time()
