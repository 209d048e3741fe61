"""Results: rows, their table, and result files, one per theme, machine and day.

row       one figure: median of several rounds, lowest, highest, ceiling, and ratios to rivals
ceiling   the hardware's limit, measured in the same run
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...core.machine.sizes import format_seconds
from ...untrusted import Format

BUSY = 0.5  # load for each processor
# Units of which less is better
TIMES = ("s", "ms", "us", "CPU s/GiB", "ms/step")
WIDE = 0.3  # of the median, between the lowest and the highest round
# Of a parameter and step with split masters and fp32 moments, all on disk: weights for forward and
# backward, and all state for the update; then state and weights
READ_NBYTES, WRITTEN_NBYTES = 16, 12
FORMAT = Format("result of a benchmark", number=1, unnumbered=1)
BEGIN = b'{\n "theme":'  # of every result file


@dataclass
class Row:
    """One figure. ``ceiling`` is {"name", "value"}; a ratio above 1 means ours is better."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    ceiling: dict | None = None
    share_of_ceiling: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)


def row(
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    ceiling: tuple[str, Sequence[float]] | None = None,
    ratios: dict[str, float] | None = None,
) -> Row:
    """Makes a row from the rounds' values. ``ceiling``: its name, and a value for every round. The
    share of the ceiling is the median over rounds."""
    made = Row(name, unit, statistics.median(values), min(values), max(values), ratios=ratios or {})
    if ceiling is not None:
        what, limits = ceiling
        made.ceiling = {"name": what, "value": statistics.median(limits)}
        made.share_of_ceiling = statistics.median(
            value / limit for value, limit in zip(values, limits)
        )
    return made


@dataclass
class Measured:
    """The results of a theme. ``notes``: absent rivals, with the reason. ``series``: points for the
    report's plots."""

    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    series: dict[str, list[dict]] = field(default_factory=dict)

    def add(self, other: Measured) -> None:
        """Adds the results of another theme."""
        self.rows += other.rows
        self.notes += [note for note in other.notes if note not in self.notes]
        self.series |= other.series


def hardware() -> str:
    """Returns a name of this machine for file names: its CPU model and number of logical CPUs."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())):
        model = match.group(1)
    import psutil

    return re.sub(r"[^a-z0-9]+", "-", f"{model} {psutil.cpu_count()} cores".lower()).strip("-")


def result(theme: str, measured: Measured) -> dict:
    """Returns the content of a result file: results, hardware, date and commit."""
    query = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=7",
    ]
    try:
        commit = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return {
        "theme": theme,
        "hardware": hardware(),
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
        **asdict(measured),
        "format": FORMAT.number,
    }


def save(found: dict, folder: Path) -> Path:
    """Writes ``<theme>_<hardware>_<date>.json`` into ``folder``, and replaces an existing one.
    Returns its path."""
    path = folder / f"{found['theme']}_{found['hardware']}_{found['date']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


HEADER = f"{'':<24}{'median':>10}  {'low - high':^19}  unit"


def table(rows: Sequence[Row], *, header: bool = True) -> str:
    """Formats the rows as text: median, spread, share of the ceiling, ratio to each rival."""
    lines = [HEADER] if header else []
    for entry in rows:
        share = (
            f"   {100 * entry.share_of_ceiling:.0f} % of {entry.ceiling['name']}"
            if entry.ceiling
            else ""
        )
        ratios = "".join(f"   {value:.2f} x {name}" for name, value in entry.ratios.items())
        spread = f"{entry.low:.3f} - {entry.high:.3f}"
        unit = entry.unit + (" (less is better)" if entry.unit in TIMES else "")
        lines.append(f"{entry.name:<24}{entry.median:>10.3f}  {spread:^19}  {unit}{share}{ratios}")
    return "\n".join(lines)


def busy() -> str:
    """Returns a warning if other processes use this machine; "" if they do not."""
    load, count = os.getloadavg()[0], os.cpu_count() or 1
    if load < BUSY * count:
        return ""
    return (
        f"other processes use this machine (load {load:.1f} on {count} processors): figures will be"
        " low"
    )


def spread(rows: Sequence[Row]) -> list[str]:
    """Returns a note for the rows whose rounds differ much."""
    wide = [row.name for row in rows if row.high - row.low > WIDE * row.median > 0]
    return [f"rounds differ by more than {WIDE:.0%}: {', '.join(wide)}"] if wide else []


def bound_of(rows: Sequence[Row], parameters: float = 7e9) -> str:
    """Returns what a full fine-tuning step of a model of so many ``parameters`` needs at least on
    this machine, as far as it was measured."""
    found = {row.name: row.median for row in rows}
    told = []
    if {"io.read", "io.write"} <= found.keys():
        seconds = parameters * (READ_NBYTES / found["io.read"] + WRITTEN_NBYTES / found["io.write"])
        told.append(f"{format_seconds(seconds / 1e9)} of this disk, with all state on it")
    if "adam.split" in found:
        seconds = parameters / found["adam.split"] / 1e9
        told.append(f"{format_seconds(seconds)} of these processors for its update")
    if not told:
        return ""
    return f"A step of a {parameters / 1e9:.0f} B model needs at least {', and '.join(told)}."
