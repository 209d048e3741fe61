"""age: how old the results in bench/results are, by the commits that touched what they measure.

since      commits after the result's own; of a commit that this repository does not have, those
           after its day
touching   of these, the commits that changed a path of the theme (`themes.py`)

`--write` puts the table into bench/results/README.md, and the headline figures of the newest
careful run of each theme into docs/measurements.md, as of the commit that they are written at.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity.errors import ConfigError
from infinity.tools.bench.results import Row, ends, is_quick, row_of
from infinity.tools.cli.options import FLAG

from .report import read_results
from .themes import ENGINE, OLD, PARTS, full_name

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = RESULTS / "README.md"
MEASUREMENTS = ROOT / "docs" / "measurements.md"
BEGIN, END = "<!-- written by `python -m bench age --write` -->", "<!-- end of what is written -->"
HEAD = (
    *("theme", "machine", "date", "commit", "commits since", "of them touching it"),
    *("times as fast as", ""),
)
FIGURES = {  # of docs/measurements.md: row -> what it is
    "io.read": "reading a file",
    "io.write": "writing it",
    "io.mixed": "both at once",
    "io.read.cpu": "processor time of reading",
    "adam.split": "AdamW, bf16 with split master",
    "adam.fp32": "AdamW, fp32",
    "pool.lease": "leasing a buffer",
    "step.device": "GPT-2 of 50 M, all state on the device",
    "step.host": "on the host",
    "step.nvme": "on NVMe, a quarter of it in host memory",
}
FIGURES_HEAD = ("", "ours", "from, to", "of the ceiling", "against", "measured", "commits since")
OTHERS = {  # no themes: files of theirs are made by tests
    "recovery": ("infinity/core/run", "infinity/ext/checkpoint"),
    "against": (*ENGINE, "bench/headline.py"),
}


@dataclass(frozen=True)
class Age:
    """One result file. ``since`` and ``touching``: None where there is no history to ask."""

    theme: str
    machine: str
    date: str
    commit: str
    since: int | None
    touching: int | None
    beside: str = ""  # the least and the largest ratio to each rival

    @property
    def state(self) -> str:
        """What is to be done about it."""
        if self.touching is None or self.touching <= OLD:
            return ""
        return f"**old**: {command(self.theme)}" if self.theme in PARTS else "**old**"


def command(theme: str) -> str:
    """Returns what measures a theme anew."""
    return f"`python -m bench {full_name(theme)} --save bench/results`"


@dataclass(frozen=True)
class Commit:
    """One commit of the history. ``changes``: status of git, then the path, after its older one if
    it was renamed."""

    name: str
    date: str
    changes: tuple[tuple[str, ...], ...]


def history(root: Path) -> list[Commit]:
    """Returns the commits of HEAD with what they changed, the newest first. Empty without a
    repository."""
    command = ["log", "--name-status", "-M", "--format=%x00%H %cs", "HEAD"]
    done = subprocess.run(["git", "-C", root, *command], capture_output=True, text=True)
    found = []
    for part in done.stdout.split("\0")[1:]:
        head, *lines = part.splitlines()
        name, date = head.split()
        found.append(Commit(name, date, tuple(tuple(each.split("\t")) for each in lines if each)))
    return found


def touching(commits: Sequence[Commit], paths: Sequence[str]) -> int:
    """Counts the ``commits``, the newest first, that changed a file below ``paths``, also by the
    names that it had before. A file that only moved has not changed."""
    older: set[str] = set()
    below = tuple(f"{path}/" for path in paths)
    count = 0
    for commit in commits:
        changed = False
        for status, *names in commit.changes:
            if names[-1] in paths or names[-1] in older or names[-1].startswith(below):
                older.add(names[0])
                changed = changed or status != "R100"
        count += changed
    return count


def ages(folder: Path = RESULTS, root: Path = ROOT) -> list[Age]:
    """Returns the age of every result file in ``folder``, the newest of each theme first."""
    found, commits = [], history(root)
    for _, run in read_results(folder)[0]:
        theme, commit = run["theme"], run["commit"].removesuffix("-dirty")
        paths = run.get("paths") or [
            path
            for part in theme.split("+")
            for path in (PARTS[part].paths if part in PARTS else OTHERS.get(part, ()))
        ]
        places = [
            place for place, each in enumerate(commits) if commit and each.name.startswith(commit)
        ]
        if places:
            after = commits[: places[0]]
        else:
            after = [each for each in commits if each.date > run["date"]]
        since, changes = (len(after), touching(after, paths)) if commits else (None, None)
        beside = ratios([row_of(each) for each in run["rows"]])
        where = (theme, run["hardware"], run["date"], run["commit"])
        found.append(Age(*where, since, changes, beside))
    order = {name: place for place, name in enumerate(PARTS)}
    newest_first = sorted(found, key=lambda each: each.date, reverse=True)
    return sorted(newest_first, key=lambda each: order.get(each.theme, len(order)))


def ratios(rows: Sequence[Row]) -> str:
    """Returns the least and the largest ratio of ``rows`` to each rival."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for rival, ratio in row.ratios.items():
            found.setdefault(rival, []).append(ratio)
    ends = {rival: sorted({f"{min(its):.2f}", f"{max(its):.2f}"}) for rival, its in found.items()}
    return ", ".join(f"{rival} {' to '.join(each)}" for rival, each in ends.items())


def awaiting(found: Sequence[Age]) -> list[str]:
    """Returns the themes that have no result at all."""
    have = {part for each in found for part in each.theme.split("+")}
    return [name for name in PARTS if name not in have]


def table(found: Sequence[Age]) -> str:
    """Formats the ages as a table of Markdown, with a row for each theme without a result."""
    rows: list[tuple] = [
        (
            *(each.theme, each.machine, each.date, each.commit, each.since, each.touching),
            *(each.beside, each.state),
        )
        for each in found
    ]
    rows += [
        (name, *[""] * 6, f"**awaits {PARTS[name].needs or 'a run'}**: {command(name)}")
        for name in awaiting(found)
    ]
    lines = [HEAD, ("---",) * len(HEAD), *rows]
    cells = (
        [" ".join(str("?" if cell is None else cell).split()) for cell in row] for row in lines
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def figures(folder: Path = RESULTS, found: Sequence[Age] = ()) -> str:
    """Formats the headline figures as a table of Markdown: each of the newest careful run that has
    it, with its interval, or the lowest and highest round where the file keeps no rounds."""
    runs = sorted(read_results(folder)[0], key=lambda each: str(each[1]["date"]), reverse=True)
    careful = [run for _, run in runs if not is_quick(run.get("settings", {}))]
    lines = [FIGURES_HEAD, ("---",) * len(FIGURES_HEAD)]
    for name, what in FIGURES.items():
        theme = name.partition(".")[0]
        for run in careful:
            kept = next((each for each in run["rows"] if each["name"] == name), None)
            if kept is None or theme not in run["theme"].split("+") + ["all"]:
                continue
            row = row_of(kept)
            low, high = ends(row)
            share = f"{100 * row.share_of_ceiling:.0f} %" if row.share_of_ceiling else ""
            against = ", ".join(f"{each:.2f} x {rival}" for rival, each in row.ratios.items())
            since = [
                f"**{each.touching}, old**" if each.state else str(each.touching)
                for each in found
                if each.touching is not None
                and (each.theme, each.date) == (run["theme"], run["date"])
            ]
            less = " (less is better)" if row.better == "less" else ""
            lines.append(
                (
                    what,
                    f"{_number(row.median)} {row.unit}{less}",
                    f"{_number(low)}, {_number(high)}",
                    share,
                    against,
                    str(run["date"]),
                    since[0] if since else "?",
                )
            )
            break
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


OPTIONS = (
    ("--json", FLAG, "one JSON object on stdout"),
    ("--write", FLAG, "put them into bench/results/README.md and docs"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the table, or writes it."""
    found = ages()
    if args.json:
        print(json.dumps({"ages": [asdict(each) for each in found], "await": awaiting(found)}))
    elif args.write:
        write(PAGE, table(found))
        write(MEASUREMENTS, figures(found=found))
        print(PAGE, MEASUREMENTS, sep="\n")
    else:
        print(table(found))
    return 0


def write(page: Path, made: str) -> None:
    """Replaces the table in ``page``. Raises ConfigError if its place is not marked there."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{page} has no place for the table, from {BEGIN!r} to {END!r}")
    page.write_text(f"{before}{begin}\n\n{made}\n\n{end}{after}")
