"""Runs the tests of one file's room in less than a minute.

    make check FILE=infinity/ext/checkpoint/load.py

room      a folder of infinity/ (core/run, ext/tiles, ranks), and the one of that name below tests/
order     first the test files that are named after the module, then those that import it, then the
          rest of the room

Slow tests and those of several ranks are left out. A test whose turn comes too late is skipped and
counted. The exit status is 1 if no test ran.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
SECONDS = 45  # in which a test may begin; imports come before, and the last test comes after
ROOMS = {
    "csrc": "native",
    "bench": "repository",
    "tools": "repository",
    "examples": "repository",
    "docs": "repository",
}
ELSEWHERE = {"ext": "core/wrap", "tools": "tools/cli", "tools/export": "ext/checkpoint"}
MODULES = {  # modules of infinity/ that lie in no folder
    "__init__": "core/wrap",
    "__main__": "tools/cli",
    "_C": "native",
    "amounts": "core/machine",
    "choices": "core",
    "config": "core",
    "data": "ext/data",
    "errors": "core/wrap",
    "integrations": "ext/integrations",
    "native": "native",
    "parallel": "ext/pipeline",
    "progress": "files",
    "torch_private": "core",
    "untrusted": "tools/cli",
    "library_versions": "ext/integrations",
}


def room_of(path: Path) -> str:
    """Returns the folder of tests/ for ``path``. Raises ValueError if there is none."""
    top, *parts = path.parts
    if top in ("infinity", "tests") and len(parts) > 1:
        room = "/".join(parts[:-1])
        room = ELSEWHERE.get(room, room)
    elif top == "infinity" and parts:
        room = MODULES.get(path.stem, "")
    else:
        room = ROOMS.get(top, "")
    if not room or not any((TESTS / room).glob("test_*.py")):
        raise ValueError(
            f"{path} has no tests of its own. Give a file of the package, such as"
            " infinity/ext/checkpoint/load.py"
        )
    return room


def files_for(path: Path) -> list[Path]:
    """Lists the test files of the room of ``path``, the nearest to it first."""
    room, stem = room_of(path), path.stem.removeprefix("test_")
    module = ".".join(path.with_suffix("").parts)
    files = sorted((TESTS / room).glob("test_*.py"))

    def distance(file: Path) -> tuple[int, str]:
        if file == ROOT / path or file.stem == f"test_{stem}":
            return 0, file.name
        if file.stem.startswith(f"test_{stem}_"):
            return 1, file.name
        return 2 if imports(file.read_text(), module) else 3, file.name

    return sorted(files, key=distance)


def imports(source: str, module: str) -> bool:
    """Tells whether ``source`` names ``module`` in an import."""
    package, _, name = module.rpartition(".")
    for line in source.splitlines():
        words = line.replace(",", " ").split()
        if words[:1] in (["from"], ["import"]) and (
            module in words or (words[1] == package and name in words[3:])
        ):
            return True
    return False


def main(arguments: list[str]) -> int:
    """Runs the tests and returns pytest's status."""
    if not arguments or not arguments[0]:
        print("Give a file: make check FILE=infinity/ext/checkpoint/load.py", file=sys.stderr)
        return 2
    path = Path(arguments[0]).resolve()
    if not path.is_file() or not path.is_relative_to(ROOT):
        print(f"{arguments[0]} is no file of this checkout", file=sys.stderr)
        return 2
    try:
        files = files_for(path.relative_to(ROOT))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:benchmark",
        "-q",
        "-m",
        "not slow and not ranks",
    ]
    command += [f"--basetemp={ROOT / 'build' / 'pytest'}", *arguments[1:], *map(str, files)]
    (ROOT / "build").mkdir(exist_ok=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "INFINITY_TEST_SECONDS": os.environ.get("INFINITY_TEST_SECONDS", str(SECONDS)),
    }
    report = ROOT / "build" / "check.xml"
    report.unlink(missing_ok=True)
    command.append(f"--junitxml={report}")
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    return status or none_ran(report)


def none_ran(report: Path) -> int:
    """Returns 1 if pytest's ``report`` has no test that ran, and says what to do; else 0."""
    tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    if any(test.find("skipped") is None for test in tests):
        return 0
    reasons = Counter(
        test.find("skipped").get("message", "")
        for test in tests
        if test.find("skipped") is not None
    )
    told = "; ".join(f"{count} skipped: {reason}" for reason, count in reasons.most_common(3))
    print(
        f"No test ran ({told or 'none was chosen'}). Raise INFINITY_TEST_SECONDS, leave out other"
        " options, or run `make test`.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
