"""In which order, and by which worker, `make test` runs the files of tests.

A file goes to one worker, which takes the next one when it is done: what takes long comes first, so
that no worker is left with it when the others have finished.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

# The seconds that files took (see tools/durations.py); a file that is not there comes last, by its
# number of tests.
SECONDS: dict[str, int] = json.loads(Path(__file__).with_name("seconds.json").read_text())
LONG = 10  # seconds from which a file is long


def name_of(nodeid: str) -> str:
    """The file of a test, below the folder of all tests."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def is_long(name: str) -> bool:
    return SECONDS.get(name, 0) >= LONG


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts files, and leaves each one's tests as they are."""
    counts = collections.Counter(name_of(item.nodeid) for item in items)

    def place(item: pytest.Item) -> tuple[int, int, str]:
        name = name_of(item.nodeid)
        return -SECONDS.get(name, 0), -counts[name], name

    items.sort(key=place)


def unknown(names: Iterable[str]) -> set[str]:
    """What the order names and is not among ``names``."""
    return set(SECONDS) - set(names)
