"""Results: rows, their table, and result files, one per run.

row       one figure: its value in every round, the median with an interval, a ceiling, and ratios
          to rivals
ceiling   the hardware's limit, measured in the same run
quick     a run at a smaller scale, or of few rounds: a look, not a figure to keep
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...untrusted import Format, parse_json, read_text
from ..cli.amounts import format_seconds
from . import facts, intervals
from .settings import Settings

BUSY = 0.5  # load for each processor
# Units of which less is better
LESS: tuple[str, ...] = ("s", "ms", "us", "CPU s/GiB", "ms/step", "ratio", "times", "nats", "%")
LESS += ("GiB", "MiB", "KiB", "of the step", "lines changed", "options set", "of what is hit")
LESS += ("meetings",)
WIDE = 0.3  # of the median, between the ends of its interval
PASSED = 1.03  # share of a ceiling above which it is none
# Of a parameter and step with split masters and fp32 moments, all on disk: weights for forward and
# backward, and all state for the update; then state and weights
READ_NBYTES, WRITTEN_NBYTES = 16, 12
FORMAT = Format("result of a benchmark", number=2, unnumbered=1)
BEGIN = b'{\n "theme":'  # of every result file


@dataclass
class Row:
    """One figure. A ratio above 1 means ours is better.

    ceiling
        {"name", "value", "low", "high", "shares"}, the shares one for each round.
    rounds, ratio_rounds
        The value in each round, and the ratios that were taken in pairs.
    interval
        Of the median, 95 %; None for too few rounds.
    """

    name: str
    unit: str
    median: float
    low: float
    high: float
    ceiling: dict | None = None
    share_of_ceiling: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    rounds: list[float] = field(default_factory=list)
    interval: list[float] | None = None
    better: str = "more"
    ratio_rounds: dict[str, list[float]] = field(default_factory=dict)

    def limited_by(
        self, name: str, limits: Sequence[float], ours: Sequence[float] | None = None
    ) -> None:
        """Sets the ceiling, of which there is a value for every round. The share is the median over
        rounds; ``ours``: the values beside it, if it was measured in rounds of its own."""
        shares = [value / limit for value, limit in zip(ours or self.rounds, limits)]
        self.ceiling = {
            "name": name,
            "value": statistics.median(limits),
            "low": min(limits),
            "high": max(limits),
            "shares": shares,
        }
        self.share_of_ceiling = statistics.median(shares)

    def passes_its_ceiling(self) -> bool:
        """Tells whether the figure is above what was taken for its limit."""
        return self.better == "more" and (self.share_of_ceiling or 0) > PASSED


def row(
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    ceiling: tuple[str, Sequence[float]] | None = None,
    ratios: dict[str, float] | None = None,
) -> Row:
    """Makes a row from the rounds' values. ``ceiling``: its name, and a value for every round."""
    made = Row(name, unit, statistics.median(values), min(values), max(values), ratios=ratios or {})
    made.rounds = [float(value) for value in values]
    made.interval = list(interval) if (interval := intervals.of_median(made.rounds)) else None
    made.better = "less" if unit in LESS else "more"
    if ceiling is not None:
        made.limited_by(*ceiling)
    return made


def row_of(kept: dict[str, Any]) -> Row:
    """Makes a row of what a result file holds of it, in any format."""
    known = {each.name for each in fields(Row)}
    made = Row(**{name: value for name, value in kept.items() if name in known})
    made.better = kept.get("better", "less" if made.unit in LESS else "more")
    return made


@dataclass
class Measured:
    """The results of a theme. ``notes``: absent rivals, with the reason. ``series``: points for the
    report's plots. ``rivals``: of each its version, its options and its trials."""

    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    series: dict[str, list[dict]] = field(default_factory=dict)
    rivals: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Measured) -> None:
        """Adds the results of another theme; a row that is there already is replaced."""
        new = {row.name for row in other.rows}
        self.rows = [row for row in self.rows if row.name not in new] + other.rows
        self.notes += [note for note in other.notes if note not in self.notes]
        self.series |= other.series
        self.rivals |= other.rivals


class Run:
    """One run: what was set, where and when; it makes the content of its result file. ``paths``:
    those of a checkout that decide the figures."""

    def __init__(
        self, theme: str, settings: Settings | None = None, paths: Sequence[str] | None = None
    ):
        self._paths = paths
        self.settings = settings or Settings()
        self.theme = theme
        self.done: list[str] = []
        self._begun = datetime.datetime.now()
        self._load = facts.load()
        self._machine = facts.machine(self.settings.folder)
        self._commit = facts.commit()

    def content(self, measured: Measured, *, complete: bool = True) -> dict:
        """Returns the content of the result file: results, and all that they depend on."""
        for entry in measured.rows:
            for name, ratio in entry.ratios.items():
                if (rounds := getattr(ratio, "rounds", None)) is not None:
                    entry.ratio_rounds[name] = rounds
        return {
            "theme": self.theme,
            "hardware": facts.name_of(self._machine),
            "date": self._begun.date().isoformat(),
            "commit": self._commit,
            **asdict(measured),
            "complete": complete,
            "done": self.done,
            "paths": self._paths,
            "settings": self.settings.kept(),
            "begun": self._begun.isoformat(timespec="seconds"),
            "seconds": round((datetime.datetime.now() - self._begun).total_seconds(), 1),
            "load": {"before": self._load, "after": facts.load()},
            "machine": self._machine,
            "versions": facts.versions(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "format": FORMAT.number,
        }


def result(theme: str, measured: Measured, settings: Settings | None = None) -> dict:
    """Returns the content of a result file that begins and ends now."""
    return Run(theme, settings).content(measured)


def save(found: dict, folder: Path) -> Path:
    """Writes ``<theme>_<hardware>_<date>-<time>.json`` into ``folder``. A file that is there keeps
    its name. Returns the path."""
    path = new_path(found, folder)
    write(found, path)
    return path


def new_path(found: dict, folder: Path) -> Path:
    """Returns a name in ``folder`` that no file has, for the run that ``found`` is the content
    of."""
    time = str(found.get("begun", "")).partition("T")[2].replace(":", "")
    stem = "-".join(filter(None, (f"{found['theme']}_{found['hardware']}_{found['date']}", time)))
    number, path = 1, folder / f"{stem}.json"
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.json"
    return path


def write(found: dict, path: Path) -> None:
    """Writes a result file."""
    write_whole(path, json.dumps(found, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file; one that is there is whole until the new one is."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    """Reads a result file. Raises ConfigError for what is none, UsageError for a later format."""
    try:
        content = parse_json(read_text(path))
        FORMAT.check(path, content)
        _check(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a result of a benchmark: {error!r:.200}") from error
    return content


def _check(found: Any) -> None:
    """Raises ValueError, TypeError or LookupError for the content of a file that no run wrote."""
    if not all(isinstance(found[name], str) for name in ("theme", "hardware", "date", "commit")):
        raise TypeError("its theme, hardware, date and commit")
    for name in ("settings", "load", "machine", "versions"):
        if not isinstance(found.get(name, {}), dict):
            raise TypeError(f"its {name}")
    numbers = [*found.get("load", {}).values(), found.get("machine", {}).get("cores") or 1]
    numbers += [found.get("settings", {}).get(name, 1) for name in ("scale", "rounds")]
    for row in map(row_of, found["rows"]):
        if not isinstance(row.name, str) or not isinstance(row.unit, str):
            raise TypeError("names of its rows")
        numbers += [row.median, row.low, row.high, *row.rounds, *(row.interval or ())]
        numbers += row.ratios.values()
        if row.ceiling is not None:
            numbers += [row.ceiling["value"], row.share_of_ceiling, *row.ceiling.get("shares", ())]
            if not row.ceiling["value"] > 0 or not isinstance(row.ceiling["name"], str):
                raise ValueError(f"the ceiling of {row.name}")
    if not all(type(number) in (int, float) for number in numbers):
        raise TypeError("its numbers")


def is_quick(settings: dict[str, Any]) -> bool:
    """Tells whether the settings of a result file are of a quick look."""
    return settings.get("scale", 1) != 1 or settings.get("rounds", 5) < 5


HEADER = f"{'':<24}{'median':>10}  {'95 % of medians':^19}  n  unit"


def table(rows: Sequence[Row], *, header: bool = True) -> str:
    """Formats the rows as text: median with its interval, rounds, share of the ceiling with its
    value, ratio to each rival. Of too few rounds there is the lowest and the highest instead."""
    lines = [HEADER] if header else []
    for entry in rows:
        share = ""
        if entry.ceiling:
            value = f"{entry.ceiling['value']:.3f}"
            if "low" in entry.ceiling:
                value += f", {entry.ceiling['low']:.3f} to {entry.ceiling['high']:.3f}"
            percent = f"{100 * (entry.share_of_ceiling or 0):.0f}"
            share = f"   {percent} % of {entry.ceiling['name']} ({value})"
        if entry.passes_its_ceiling():
            share += ": passed, so it is not a ceiling here"
        ratios = "".join(f"   {_times(entry, name)}" for name in entry.ratios)
        low, high = ends(entry)
        spread = f"{low:.3f} - {high:.3f}" + ("" if entry.interval else " *")
        unit = entry.unit + (" (less is better)" if entry.better == "less" else "")
        lines.append(
            f"{entry.name:<24}{entry.median:>10.3f}  {spread:^19} {len(entry.rounds):>2}"
            f"  {unit}{share}{ratios}"
        )
    return "\n".join(lines)


def _times(entry: Row, name: str) -> str:
    """A ratio to a rival, with its interval where its pairs are known and enough."""
    ratio = entry.ratios[name]
    interval = intervals.of_median(getattr(ratio, "rounds", entry.ratio_rounds.get(name, [])))
    spread = f" ({interval[0]:.2f} - {interval[1]:.2f})" if interval else ""
    return f"{ratio:.2f} x {name}{spread}"


def busy() -> str:
    """Returns a warning if other processes use this machine; "" if they do not."""
    load, count = os.getloadavg()[0], os.cpu_count() or 1
    if load < BUSY * count:
        return ""
    return (
        f"other processes use this machine (load {load:.1f} on {count} processors): figures will be"
        " low"
    )


def remarks(rows: Sequence[Row], settings: Settings) -> list[str]:
    """Returns notes for rows whose rounds differ much or are few, for ceilings that are passed, and
    for a quick look."""
    notes = []
    if wide := [row.name for row in rows if row.interval and is_wide(row)]:
        notes.append(f"intervals wider than {WIDE:.0%}: {', '.join(wide)}")
    if any(row.interval is None for row in rows):
        notes.append(f"*: the lowest and the highest; an interval needs {intervals.FEWEST} rounds")
    if passed := [row.name for row in rows if row.passes_its_ceiling()]:
        notes.append(f"above their ceilings, which are none here: {', '.join(passed)}")
    if is_quick(settings.kept()):
        notes.append(
            f"a quick look (scale {settings.scale:g}, rounds {settings.rounds}): no figure to keep"
        )
    return notes


def ends(row: Row) -> tuple[float, float]:
    """Returns the interval of a row's median; of too few rounds the lowest and the highest."""
    low, high = row.interval or (row.low, row.high)
    return low, high


def is_wide(row: Row) -> bool:
    """Tells whether the rounds of a row differ so much, or are so few, that nothing follows."""
    return bool(why_wide(row))


def why_wide(row: Row) -> str:
    """Returns why nothing follows from a row; "" if something does."""
    if row.interval is None:
        return f"{row.name} has {len(row.rounds)} rounds of {intervals.FEWEST}"
    width = intervals.width((row.interval[0], row.interval[1]))
    return f"the interval of {row.name} is {width:.0%} wide" if width > WIDE else ""


def bound_of(rows: Sequence[Row], parameters: float = 7e9) -> str:
    """Returns about what a full fine-tuning step of a model of so many ``parameters`` needs on this
    machine, as far as it was measured, by the ends of each row's interval. Of rows whose rounds
    differ much nothing is said."""
    by_name = {row.name: row for row in rows}
    bounds, disk = [], ("io.read", "io.write", "io.mixed")
    if all(name in by_name and not is_wide(by_name[name]) for name in disk):
        times = []
        for end in (1, 0):
            read, write, mixed = (ends(by_name[name])[end] for name in disk)
            both = (READ_NBYTES + WRITTEN_NBYTES) / mixed
            times.append(max(READ_NBYTES / read, WRITTEN_NBYTES / write, both))
        bounds.append(f"{span(times, parameters / 1e9)} of this disk, with all state on it")
    step = by_name.get("adam.split")
    if step is not None and not is_wide(step):
        times = [1 / each for each in reversed(ends(step))]
        bounds.append(f"{span(times, parameters / 1e9)} of these processors for its update")
    if not bounds:
        return ""
    return (
        f"A step of a {parameters / 1e9:g} B model (AdamW, bf16 with split masters, fp32 moments,"
        f" nothing kept in host memory) needs about {', and '.join(bounds)}."
    )


def span(seconds: Sequence[float], times: float) -> str:
    """Formats the least and the most ``seconds``, so many ``times``."""
    least, most = (format_seconds(each * times) for each in seconds)
    return least if least == most else f"{least} to {most}"
