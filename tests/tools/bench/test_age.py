"""`python -m bench age`: how old results are, and the table in bench/results/README.md."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict

import pytest

import bench.__main__ as checkout
from bench import age
from bench.themes import OLD, PARTS
from infinity.errors import ConfigError
from infinity.tools.bench import results


def a_repository(folder):
    """A repository of six commits after the first, of which every second changes csrc/io; the last
    but one only moves its file there from another folder. Returns the first one's name."""

    def git(*arguments: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", "-C", folder, *names, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    (folder / "csrc" / "before").mkdir(parents=True)
    git("init", "-q")
    file = folder / "csrc" / "before" / "a"
    for number in range(7):
        if number == 5:
            (folder / "csrc" / "io").mkdir()
            file = file.rename(folder / "csrc" / "io" / "a")
        elif number % 2 == 0:
            file.write_text("the same text\n" * 20 + str(number))
        (folder / "b").write_text(str(number))
        git("add", ".")
        git("commit", "-qm", "x")
    return git("rev-parse", "--short", "HEAD~6")


def a_file(folder, **changed):
    content = {"theme": "io", "hardware": "a", "date": "2020-01-01", "commit": "", "rows": []}
    (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(content | changed))


def test_commits_are_counted_since_a_result(tmp_path, monkeypatch):
    """Method: six commits after a result, three of which change its theme's path, two of them by an
    earlier name; a move is no change. A dirty tree, paths of its own, and a commit that is not
    there, whose day counts. Twin: no repository."""
    (tmp_path / "results").mkdir()
    root = tmp_path / "root"
    first = a_repository(root)
    for changed in (
        {"commit": first},
        {"commit": f"{first}-dirty", "theme": "pool"},
        {"commit": first, "paths": ["b"]},
        {"commit": "0000000"},
        {"commit": "0000000", "date": "2999-01-01"},
    ):
        a_file(tmp_path / "results", **changed)
    found = age.ages(tmp_path / "results", root)
    told = {(each.theme, each.date, each.since, each.touching) for each in found}
    assert told == {
        ("io", "2020-01-01", 6, 3),
        ("pool", "2020-01-01", 6, 0),
        ("io", "2020-01-01", 6, 6),
        ("io", "2020-01-01", 7, 4),
        ("io", "2999-01-01", 0, 0),
    }
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # it may be in a clone
    assert all(each.since is None for each in age.ages(tmp_path / "results", tmp_path))


@pytest.mark.parametrize(
    "touching, is_old", [(OLD + 1, True), (OLD, False), (0, False), (None, False)]
)
def test_an_old_result_is_marked_with_what_measures_it_anew(touching, is_old):
    """Method: one commit above the limit, at it, below, and unknown. A theme without a result has
    its command too, and what it needs."""
    found = [age.Age("io", "a", "2026-01-01", "0", touching, touching)]
    told = age.table(found)
    row = next(line for line in told.splitlines() if line.startswith("| io |"))
    assert ("**old**: `python -m bench io --save" in row) == is_old
    assert "awaits a GPU**: `python -m bench gpu --save" in told
    assert age.awaiting(found) == [name for name in PARTS if name != "io"]


def test_the_table_of_the_page_has_every_result(monkeypatch):
    """Compares the table with the files: theme, machine, date, commit; and each theme without a
    result awaits one. Counts grow with each commit: `age --write` counts anew."""
    text = age.PAGE.read_text()
    written = text.partition(age.BEGIN)[2].partition(age.END)[0].strip()

    def facts(table: str) -> list[list[str]]:
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        ]
        return [row[:4] for row in rows]

    assert facts(written) == facts(age.table(age.ages())), "run `python -m bench age --write`"


def test_the_quoted_figures_are_those_of_the_files():
    """Compares the headline table with what the files have now, but for the counts of commits.
    Twin: of a figure that was changed by hand."""
    text = age.MEASUREMENTS.read_text()
    written = text.partition(age.BEGIN)[2].partition(age.END)[0].strip()

    def facts(table: str) -> list[list[str]]:
        return [line.split("|")[1:7] for line in table.splitlines()]

    assert facts(written) == facts(age.figures()), "run `python -m bench age --write`"
    assert written.count("\n") == len(age.FIGURES) + 1
    figure = facts(written)[2][1].split()[0]
    assert facts(written.replace(figure, f"9{figure}")) != facts(age.figures())


def test_a_quick_look_is_not_quoted(tmp_path):
    """Method: a careful run, a later quick one, and one of another theme with a row of that name;
    the careful one is quoted, with its interval. Twin: a later careful run."""
    row = json.loads(json.dumps(asdict(results.row("io.read", "GB/s", [2.0] * 4 + [2.5]))))
    a_file(tmp_path, rows=[row], settings={"scale": 1, "rounds": 5})
    a_file(tmp_path, rows=[row | {"median": 3.0}], date="2021-01-01", settings={"scale": 0.1})
    a_file(tmp_path, rows=[row | {"median": 4.0}], date="2022-01-01", theme="step")
    assert "| 2 GB/s | 2, 2.5 |" in age.figures(tmp_path)
    a_file(tmp_path, rows=[row | {"median": 5.0}], date="2023-01-01", settings={"scale": 1})
    assert "| 5 GB/s |" in (told := age.figures(tmp_path)) and "2023-01-01" in told


def test_what_awaits_a_machine_says_its_command():
    """Reads every row of the page's tables that awaits something. Twin: a row without a command."""
    rows = [line for line in age.PAGE.read_text().splitlines() if re.match(r"\|.*awaits", line)]
    command = re.compile(r"`(make |python -m bench )[a-z_]")
    assert len(rows) > 8 and [row for row in rows if not command.search(row)] == []
    assert not command.search("| NCCL | | | **awaits a device** |")


def test_the_table_is_written_where_it_is_marked(tmp_path, monkeypatch, capsys):
    """Method: a page of its own, written twice. Twin: a page without the marks is left alone."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{age.BEGIN}\nold\n{age.END}\nafter\n")
    monkeypatch.setattr(age, "PAGE", page)
    monkeypatch.setattr(age, "MEASUREMENTS", page)
    monkeypatch.setattr(age, "figures", lambda found: age.table(found))
    monkeypatch.setattr(age, "ages", lambda: [age.Age("io", "a", "2026-01-01", "0", 1, 1)])
    for _ in range(2):
        assert checkout.main(["age", "--write"]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and text.count("| io |") == 1
    page.write_text("nothing")
    assert checkout.main(["age", "--write"]) == 2 and page.read_text() == "nothing"
    with pytest.raises(ConfigError, match="no place"):
        age.write(page, "x")
