"""tools/matrix.py: which cells there are, and what the page says of them. No cell is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from infinity import library_versions, torch_private

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        import matrix

        yield matrix
        del sys.modules["matrix"], sys.modules["wheels"]


def test_the_cells_reach_from_the_least_to_the_newest(tool):
    """Method: versions of cells, compared with those of the code; each names tests that are
    there. Twin: a version that is not tried is in no cell."""
    cells = tool.cells()
    assert len(set(map(str, cells))) == len(cells)
    assert {cell.torch for cell in cells} == set(tool.TORCHES)
    assert (tool.TORCHES[0], tool.TORCHES[-1]) == (
        library_versions.LEAST["torch"],
        torch_private.NEWEST,
    )
    for library, (tried, _) in tool.LIBRARIES.items():
        assert tried[0].startswith(library_versions.LEAST[library])
        assert tried[-1] == library_versions.TESTED.get(library, tried[-1])
    for cell in cells:
        for test in cell.tests():
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), cell
            assert not name or f"def {name}(" in (ROOT / path).read_text(), cell
        assert cell.packages()
    assert not any(cell.has({"torch": {"2.9"}}) for cell in cells)


def test_ray_has_cells_that_run_its_slow_tests(tool):
    """Method: what is installed, and the marks. Twin: other cells run no slow test."""
    cells = {cell.library: cell for cell in tool.cells()}
    assert "ray[train]==2.60.*" in cells["ray"].packages() and cells["ray"].marked == ""
    for test in cells["ray"].tests():
        path, _, name = test.partition("::")
        before = (ROOT / path).read_text().partition(f"def {name}(")[0]
        assert "mark.slow" in before.rpartition("\n\n\n")[2]
    assert cells["peft"].marked == "not slow"


def test_the_page_has_the_results_that_were_kept(tool):
    """Twin: a cell without a result, and one with another number, change the table."""
    results = json.loads(tool.RESULTS.read_text())
    own = "\n".join(tool.table(results)) + "\n"
    assert own == tool.PAGE.read_text().partition(tool.BEGIN)[2].partition(tool.END)[0]
    assert set(results) <= set(map(str, tool.cells()))
    first = next(iter(results))
    less = {name: each for name, each in results.items() if name != first}
    assert "\n".join(tool.table(less)) + "\n" != own
    failed = results | {first: {"outcome": "failed", "failed": ["a"], "passed": 3, "date": "today"}}
    assert "1 of 4 failed, today" in "\n".join(tool.table(failed))


REPORTS = {
    '<t><testcase classname="a" name="b"/></t>': ("passed", 1, []),
    '<t><testcase classname="a" name="b"/><testcase><skipped/></testcase></t>': ("passed", 1, []),
    '<t><testcase classname="a" name="b"><failure/></testcase></t>': ("failed", 0, ["a::b"]),
    '<t><testcase classname="a" name="b"><error/></testcase></t>': ("failed", 0, ["a::b"]),
    "<t><testcase><skipped/></testcase></t>": None,
    None: None,
}


@pytest.mark.parametrize("report", REPORTS)
def test_a_run_passes_only_if_tests_have(tool, report, tmp_path):
    """Twins: none ran, a report is missing, one failed."""
    if report is not None:
        (tmp_path / "report.xml").write_text(report)
    found = tool.counted(tmp_path / "report.xml")
    expected = REPORTS[report]
    assert (found and (found["outcome"], found["passed"], found["failed"])) == expected
