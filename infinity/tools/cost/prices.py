"""Prices: reads offers of machines with GPUs, how their prices changed, and how long machines of a
spot market were kept.

offer   one kind of machine in one zone, at the prices of one market: ``spot`` or ``on-demand``
price   dollars per hour of the whole machine; it holds until the next one that was seen
"""

from __future__ import annotations

import csv
import io
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ...errors import ConfigError
from ...untrusted import read_text

MARKETS = ("spot", "on-demand")
PRICE_COLUMNS = ("cloud", "zone", "instance", "gpu", "count", "market", "time", "dollars_per_hour")
LIFETIME_COLUMNS = ("cloud", "gpu", "started", "seen_last", "end")
ENDS = ("lost", "still running")
MOST_DOLLARS, MOST_GPUS = 1e6, 1_000_000
LATEST = 1e10  # seconds since 1970: the year 2286


@dataclass(frozen=True, order=True)
class Offer:
    """A machine to rent. ``times``: when its price changed, ascending, in seconds since 1970;
    ``dollars``: per hour of the machine from then on."""

    cloud: str
    zone: str
    instance: str
    gpu: str
    count: int
    market: str
    times: tuple[float, ...] = ()
    dollars: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Cloud, zone, machine, its GPUs and the market, in one line."""
        return f"{self.cloud} {self.zone} {self.instance} {self.gpu}:{self.count} {self.market}"

    def price_at(self, time: float) -> float:
        """Returns dollars per hour at a time; infinite before the first price that was seen."""
        place = bisect_right(self.times, time)
        return self.dollars[place - 1] if place else math.inf


def read_prices(path: Path) -> list[Offer]:
    """Reads offers from a CSV file with the columns of :data:`PRICE_COLUMNS`, in any order.

    An empty ``time`` is a price that always held. Raises ConfigError, with the line, for a price or
    a count that is missing or no number, and for columns that are missing.
    """
    seen: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for where, row in _rows(path, PRICE_COLUMNS):
        market = row["market"].lower()
        if market not in MARKETS:
            raise ConfigError(f"{where}: market {market!r} is not one of {', '.join(MARKETS)}")
        if not row["gpu"]:
            raise ConfigError(f"{where}: gpu is missing")
        count = _number(row["count"], f"{where}: count", 1, MOST_GPUS)
        if not count.is_integer():
            raise ConfigError(f"{where}: count {row['count']!r} is not a whole number")
        dollars = _number(row["dollars_per_hour"], f"{where}: dollars_per_hour", 0, MOST_DOLLARS)
        time = parse_time(row["time"], f"{where}: time") if row["time"] else -math.inf
        of = (row["cloud"], row["zone"], row["instance"], row["gpu"], int(count), market)
        seen[of].append((time, dollars))
    offers = []
    for of, prices in seen.items():
        prices.sort(key=lambda each: each[0])  # of the same time the last line holds
        offers.append(Offer(*of, *(tuple(each) for each in zip(*prices))))
    return sorted(offers)


@dataclass(frozen=True)
class Losses:
    """How often machines of a spot market were lost. ``counts``, ``seconds``: of losses, and of
    machines' time, by cloud and GPU."""

    counts: dict[tuple[str, str], int]
    seconds: dict[tuple[str, str], float]

    def per_second(self, offer: Offer) -> float:
        """Returns losses per second of a machine: of those of its cloud and GPU, else of all."""
        of = (offer.cloud, offer.gpu)
        if self.seconds.get(of):
            return self.counts.get(of, 0) / self.seconds[of]
        return sum(self.counts.values()) / sum(self.seconds.values())


def read_lifetimes(path: Path) -> Losses:
    """Reads lives of machines from a CSV file with the columns of :data:`LIFETIME_COLUMNS`.

    ``end`` is "lost" or "still running". A machine that still ran counts for its time alone. Raises
    ConfigError, with the line, for a life that ends before it begins.
    """
    counts: dict[tuple[str, str], int] = defaultdict(int)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for where, row in _rows(path, LIFETIME_COLUMNS):
        began, ended = (parse_time(row[name], f"{where}: {name}") for name in LIFETIME_COLUMNS[2:4])
        if ended < began or row["end"] not in ENDS:
            raise ConfigError(
                f"{where}: a life from {row['started']} to {row['seen_last']} that ended as"
                f" {row['end']!r}: give times in order, and one of {', '.join(ENDS)}"
            )
        of = (row["cloud"], row["gpu"])
        seconds[of] += ended - began
        counts[of] += row["end"] == "lost"
    if not sum(seconds.values()):
        raise ConfigError(f"{path} has no life of a machine that lasted: its rate is not known")
    return Losses(dict(counts), dict(seconds))


def parse_time(text: str, name: str) -> float:
    """Parses an ISO time, in UTC if it names no zone, to seconds since 1970. Raises ConfigError
    that names ``name``."""
    try:
        time = datetime.fromisoformat(text)
        seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        seconds = math.nan
    if 0 <= seconds <= LATEST:
        return seconds
    raise ConfigError(f"{name} {text[:40]!r} is no time from 1970 on, as 2026-03-23T18:00Z")


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (file and line, row) of a CSV file. Raises ConfigError if ``columns`` are missing."""
    try:
        text = read_text(path).removeprefix("\ufeff")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
    rows = 0
    try:
        if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
            raise ConfigError(
                f"{path}: its first line has no column {missing[0]}: columns are"
                f" {','.join(columns)}"
            )
        for row in reader:
            rows += 1
            yield f"{path}, line {reader.line_num}", {name: _cell(row[name]) for name in columns}
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: no CSV: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has a header and no rows")


def _cell(value: str | None) -> str:
    return (value or "").strip()


def _number(text: str, name: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if least <= value <= most:
        return value
    raise ConfigError(f"{name} {text[:40]!r} is not a number from {least:g} to {most:g}")
