"""Which cases run in `make test`, in `make test-all` only, and in a contributor's shorter runs.

**ranks**: the mark of tests in files that start several ranks. `make check` leaves them out.
**processes**: the mark of tests in files that start processes. `make test-fast` leaves them out.
**long**: the mark of tests in files that are long by `order`. `make test-fast` leaves them out
too. **slow**: the mark of cases that `make test` can do without (see `mark_slow`).
"""

from __future__ import annotations

import collections
import functools
import json
import os
import re
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from order import is_long, name_of

RANKS = re.compile(r"^(from|import) (ranks|rank_campaign)\b", re.MULTILINE)
PROCESSES = re.compile(
    r"^(from|import) (campaign|multiprocessing|prepared|sim_apart|subprocess)\b|\bos\.fork\(",
    re.MULTILINE,
)
STARTED: list[float] = []  # when the first test began: imports and collection do not count

# Files whose cases are dear: so many cases of one test run in `make test`, one where a case took
# 0.6 s or more of a worker, two from 0.12 s, and one if they differ in homes alone.
MOST_CASES: dict[str, int] = json.loads(Path(__file__).with_name("most_cases.json").read_text())

HOMES = {"device", "host", "nvme"}
NO_CASE = SimpleNamespace(params={}, _idlist=())


def refuse_kept_errors(items: Iterable[pytest.Item]) -> None:
    """Raises pytest.UsageError for an exception among a test's parameters: once raised it keeps all
    that its frames had, engines with their rings too, until the session ends."""
    for item in items:
        if any(
            isinstance(value, BaseException)
            for value in getattr(item, "callspec", NO_CASE).params.values()
        ):
            raise pytest.UsageError(
                f"{item.nodeid}: give the class of an exception, and what it says, not the"
                " exception"
            )


@functools.cache
def marks_of(path: Path) -> tuple[str, ...]:
    """Which of ``ranks`` and ``processes`` the tests of a file have, by what it imports."""
    source = path.read_text()
    if RANKS.search(source):
        return "ranks", "processes"
    return ("processes",) if PROCESSES.search(source) else ()


def mark_files(items: Iterable[pytest.Item]) -> None:
    """Marks the tests of files that start ranks or other processes, and of those that take long."""
    for item in items:
        for name in marks_of(item.path):
            item.add_marker(name)
        if is_long(name_of(item.nodeid)):
            item.add_marker("long")


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Marks as slow what `make test` can do without: of a test with several parameters it runs
    so many cases that each value of each parameter is in one, and of a test in a file whose cases
    are dear it runs few; `make test-all` runs every case."""
    tests: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        kept = of_each_value(cases)
        most = MOST_CASES.get(name_of(name), len(kept))
        if len(kept) > 1 and (most == 1 or (most <= len(kept) and are_homes(kept))):
            kept = [one_of(kept, name)]
        elif most < len(kept):
            kept = spread(kept, most)
        for item in set(cases) - set(kept):
            item.add_marker(pytest.mark.slow)


def of_each_value(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Those of ``cases`` that have each value of each parameter: all, of one parameter.

    Those with the most values that no case has had come first: three homes and three modes make
    three cases, not five.
    """
    values = {
        item: set(enumerate(getattr(item, "callspec", NO_CASE)._idlist)) for item in cases
    }  # one of each `parametrize`
    most = max(map(len, values.values()))
    if most < 2:
        return cases
    kept: dict[pytest.Item, None] = {}
    had: set[tuple[int, str]] = set()
    for new in range(most, 0, -1):
        for item in cases:
            if len(values[item] - had) >= new:
                had |= values[item]
                kept[item] = None
    return list(kept)


def spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """The first of ``cases``, the last one and those at equal distances between: ``count``, two or
    more."""
    return [cases[round(place * (len(cases) - 1) / (count - 1))] for place in range(count)]


def one_of(cases: list[pytest.Item], name: str) -> pytest.Item:
    """The first of ``cases`` of the test ``name``; of cases that are homes one by its name, so that
    some tests of a file run at each home."""
    return cases[zlib.crc32(name.encode()) % len(cases) if are_homes(cases) else 0]


def are_homes(cases: list[pytest.Item]) -> bool:
    """Whether ``cases`` differ in homes alone."""
    return all(set(getattr(item, "callspec", NO_CASE)._idlist) <= HOMES for item in cases)


def skip_after_time() -> None:
    """Skips a test that would begin after INFINITY_TEST_SECONDS, which `make check` gives."""
    seconds = float(os.environ.get("INFINITY_TEST_SECONDS") or "inf")
    if not STARTED:
        STARTED.append(time.monotonic())
    if time.monotonic() - STARTED[0] > seconds or not seconds:
        pytest.skip(f"the {seconds:g} seconds of INFINITY_TEST_SECONDS are over")


def few(values: Iterable[Any], quick: int) -> list:
    """The first ``quick`` of ``values`` run always; the others, in which the code branches no other
    way, are slow."""
    return [
        value if i < quick else pytest.param(*as_arguments(value), marks=pytest.mark.slow)
        for i, value in enumerate(values)
    ]


def every(values: Iterable[Any], step: int) -> list:
    """Of ``values`` every ``step``-th runs always; the others are slow."""
    return [
        value if i % step == 0 else pytest.param(*as_arguments(value), marks=pytest.mark.slow)
        for i, value in enumerate(values)
    ]


def as_arguments(value: Any) -> tuple:
    """``value`` as the arguments of one case."""
    return (value,)
