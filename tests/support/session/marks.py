"""Which cases run in `make test`, in `make test-all` only, and in a contributor's shorter runs.

**ranks**: the mark of tests in files that start several ranks. `make check` leaves them out.
**processes**: the mark of tests in files that start processes. `make test-fast` leaves them out.
**long**: the mark of tests in files that are long by `order`. `make test-fast` leaves them out
too.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from order import is_long, name_of

RANKS = re.compile(r"^(from|import) (ranks|rank_campaign)\b", re.MULTILINE)
PROCESSES = re.compile(
    r"^(from|import) (campaign|multiprocessing|prepared|subprocess)\b|\bos\.fork\(", re.MULTILINE
)
STARTED = time.monotonic()

NO_CASE = SimpleNamespace(params={})


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


def skip_after_time() -> None:
    """Skips a test that would begin after INFINITY_TEST_SECONDS, which `make check` gives."""
    seconds = float(os.environ.get("INFINITY_TEST_SECONDS") or "inf")
    if time.monotonic() - STARTED > seconds:
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
