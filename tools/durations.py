"""Stores how long each file of tests takes, for the order in which workers take them.

    make test ARGS=--junitxml=build/junit.xml    # make test-tools: the other half
    python tools/durations.py build/junit.xml

A file's seconds are those of the last report that has it. Files that no report has keep theirs, and
files that are gone are dropped, without any report too; also those of most_cases.json.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parent.parent / "tests"
STORED = TESTS / "support" / "session" / "seconds.json"
MOST_CASES = STORED.with_name("most_cases.json")


def seconds_of(report: Path) -> dict[str, float]:
    """Adds up the seconds of each test file, named below tests/, in a JUnit ``report``."""
    found: dict[str, float] = collections.defaultdict(float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        parts = (case.get("classname") or "").split(".")
        names = [place for place, part in enumerate(parts) if part.startswith("test_")]
        if parts[0] == "tests" and names:  # a class may follow the file
            found["/".join(parts[1 : names[0] + 1]) + ".py"] += float(case.get("time") or 0.0)
    return found


def merged(stored: dict[str, int], reports: list[Path], tests: Path) -> dict[str, int]:
    """Brings ``stored`` up to date. Files that take less than a second are left out."""
    found: dict[str, float] = dict(stored)
    for report in reports:
        found |= seconds_of(report)
    return {
        name: round(seconds)
        for name, seconds in sorted(found.items())
        if round(seconds) > 0 and (tests / name).is_file()
    }


def main(arguments: list[str]) -> int:
    """Writes the file, and returns the status."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    found = merged(stored, [Path(each) for each in arguments], TESTS)
    STORED.write_text(json.dumps(found, indent=0) + "\n")
    most = json.loads(MOST_CASES.read_text())
    most = {name: count for name, count in most.items() if (TESTS / name).is_file()}
    MOST_CASES.write_text(json.dumps(most, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
