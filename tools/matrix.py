"""Runs tests with other versions of Python, torch and the libraries, and writes what passed into
docs/compatibility.md.

    python tools/matrix.py                          # all cells: hours, 10 GB of disk
    python tools/matrix.py torch=2.10 python=3.11   # the cells that have all of these
    python tools/matrix.py trl=1.1 trl=1.16         # or one of several versions
    python tools/matrix.py --short                  # a minute of tests on the two ends of torch
    python tools/matrix.py --table                  # the table alone, from what was kept

**cell**: one version of torch, Python and at most one library, with the tests that are run there.
Each has a new environment under `build/matrix`, gone when its tests are. Other libraries are what
the package index has for it, above the least of pyproject.toml.

Results stay in `bench/results/matrix.json`. A cell that was not run has none, and `--short` keeps
none. Pythons are those on the PATH or in pyenv. Torch is the index's own build for this machine, or
one in the folders of PIP_FIND_LINKS.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from wheels import VERSIONS as PYTHONS
from wheels import interpreter

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "matrix"
RESULTS = ROOT / "bench" / "results" / "matrix.json"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- by tools/matrix.py -->\n", "<!-- end -->\n"
ENDS = ("failure", "error", "skipped")  # of a test that has not passed
SECONDS = 1800  # of one cell's tests, at most

TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
PYTHON = PYTHONS[0]  # of cells that are about another version
USUAL = "2.13"  # torch beside the versions of a library
BUILD = ("setuptools>=77.0.3", "pybind11>=2.12", "ninja")
CORE = ("numpy", "psutil", "safetensors", "pytest", "pytest-timeout", "hypothesis", "scipy")
REST = ("accelerate", "peft", "trl", "datasets", "lightning", "tensorboard")

# Torch's own names first, then what the engine does to parameters, graphs and optimizers
CORE_TESTS = (
    "tests/repository/test_private_names.py",
    "tests/core/test_torch_private.py",
    "tests/core/recipes/test_corner_recipes.py",
    "tests/core/params/test_torch_functions.py",
    "tests/core/params/test_transforms.py",
    "tests/core/params/test_view_nodes.py",
    "tests/core/params/test_lent.py",
    "tests/core/params/test_second_order.py",
    "tests/core/grads/test_backward.py",
    "tests/core/run/test_compile.py",
    "tests/core/run/test_hooks.py",
    "tests/core/run/test_saved_tensor.py",
    "tests/core/training/test_loops.py",
)
SHORT_TESTS = (
    "tests/repository/test_private_names.py",
    "tests/core/params/test_view_nodes.py",
    "tests/core/params/test_torch_functions.py",
    "tests/core/recipes/test_corner_recipes.py",
    "tests/ext/aside",
)
INTEGRATIONS = "tests/ext/integrations"
# library: the versions that are tried, and the tests that it is in
LIBRARIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "transformers": (
        ("4.57", "5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24"),
        (INTEGRATIONS, "tests/core/recipes/test_language_recipes.py"),
    ),
    "trl": (
        ("1.1", "1.4", "1.8", "1.12", "1.16"),
        (f"{INTEGRATIONS}/test_trl.py", f"{INTEGRATIONS}/test_peft.py"),
    ),
    "peft": (
        ("0.15", "0.18", "0.19", "0.20", "0.21"),
        (f"{INTEGRATIONS}/test_peft.py", f"{INTEGRATIONS}/test_packed_adapters.py"),
    ),
    "accelerate": (
        ("1.4", "1.10", "1.12", "1.15"),
        (f"{INTEGRATIONS}/test_accelerate.py", f"{INTEGRATIONS}/test_trainer.py"),
    ),
    "bitsandbytes": (
        ("0.49", "0.50"),
        (f"{INTEGRATIONS}/test_packed_adapters.py", "tests/ext/packed/test_unpacked.py"),
    ),
    "torchao": (
        ("0.17", "0.18"),
        (f"{INTEGRATIONS}/test_packed_adapters.py", "tests/ext/packed/test_unpacked.py"),
    ),
    "lightning": (("2.5", "2.6"), (f"{INTEGRATIONS}/test_lightning.py",)),
    "ray": (
        ("2.44", "2.60"),
        (
            "tests/repository/test_examples.py::test_ray_train_gives_the_bits_of_torchrun",
            "tests/tools/train/test_strikes.py"
            "::test_a_job_of_ray_survives_three_strikes_with_the_bits_of_torchrun",
        ),
    ),
}
SLOW = ("ray",)  # its tests are slow ones: `make test` has none of them
EXTRAS = {"ray": "ray[train]"}  # as they are installed


@dataclasses.dataclass(frozen=True)
class Cell:
    torch: str
    python: str
    library: str = "torch"
    version: str = ""

    def __str__(self) -> str:
        told = f"torch {self.torch}, Python {self.python}"
        return f"{self.library} {self.version}, {told}" if self.version else told

    def has(self, wanted: dict[str, set[str]]) -> bool:
        """Tells whether every name of ``wanted`` is one of this cell's, in one of its versions."""
        own = {"torch": self.torch, "python": self.python, self.library: self.version or self.torch}
        return all(own.get(name) in versions for name, versions in wanted.items())

    def packages(self) -> list[str]:
        """Returns what is installed besides torch."""
        least = requirements()
        named = [*CORE, "transformers", *(REST if self.version else ())]
        if self.library == "accelerate":
            named.remove("trl")  # it asks for a newer one
        if self.library in ("peft", "bitsandbytes", "torchao"):
            named.append("bitsandbytes")
        if self.library in ("bitsandbytes", "torchao"):
            named.append("torchao")  # beside it PEFT before 0.19 adds no LoRA
        asked = [least[name] for name in dict.fromkeys(named) if name != self.library]
        if self.library == "trl":
            asked.append("requests")  # some versions import it and do not ask for it
        name = EXTRAS.get(self.library, self.library)
        return [*asked, *([f"{name}=={self.version}.*"] if self.version else [])]

    @property
    def marked(self) -> str:
        """Returns which of its tests are run, by pytest's marks."""
        return "" if self.library in SLOW else "not slow"

    def tests(self) -> tuple[str, ...]:
        return LIBRARIES[self.library][1] if self.version else CORE_TESTS


def cells() -> list[Cell]:
    """Returns every torch on one Python, every Python on three of them, and every library's
    versions on the oldest torch and on the usual one."""
    found = [Cell(torch, PYTHON) for torch in TORCHES]
    three = (TORCHES[0], USUAL, TORCHES[-1])
    found += [Cell(torch, python) for torch in three for python in PYTHONS[1:]]
    for library, (versions, _) in LIBRARIES.items():
        found += [Cell(t, PYTHON, library, v) for t in (TORCHES[0], USUAL) for v in versions]
    return found


def requirements() -> dict[str, str]:
    """Returns what pyproject.toml asks for, by the package's name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    return {one.partition(">=")[0]: one for one in asked}


def main() -> int:
    about = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(allow_abbrev=False, description=about)
    parser.add_argument("wanted", nargs="*", help="torch=2.10, python=3.14, trl=1.1; all if none")
    parser.add_argument("--short", action="store_true", help="the oldest and the newest torch")
    parser.add_argument("--table", action="store_true", help="run nothing, write the table")
    args = parser.parse_args()
    if args.table:
        write(kept())
        return 0
    try:
        return short() if args.short else fill(args.wanted)
    finally:
        shutil.rmtree(WORK / "cache", ignore_errors=True)


def short() -> int:
    """Runs a few tests on the oldest and the newest torch. One that cannot be installed here is
    skipped, with the reason."""
    ended = []
    for torch in (TORCHES[0], TORCHES[-1]):
        result = run(cell := Cell(torch, HERE), SHORT_TESTS)
        details = result.get("failed") or result.get("reason", "")
        print(f"{cell}: {told(result)} in {result['seconds']} s {details}", flush=True)
        ended.append(result["outcome"])
    return int("failed" in ended)


def fill(asked: list[str]) -> int:
    """Runs the cells that were asked for, and writes the results and the page's table."""
    wanted: dict[str, set[str]] = {}
    for name, _, version in (one.partition("=") for one in asked):
        wanted.setdefault(name, set()).add(version)
    chosen = [cell for cell in cells() if cell.has(wanted)]
    if not chosen:
        raise SystemExit(f"no cell has all of {' '.join(asked)}")
    ended = []
    for torch in TORCHES:  # one after the other: the cache of one has 6 GB
        for cell in [cell for cell in chosen if cell.torch == torch]:
            if interpreter(cell.python) is None:  # what was kept of it stays
                print(f"{cell}: not run, this Python is not here", flush=True)
                continue
            result = run(cell)
            print(f"{cell}: {told(result)} in {result['seconds']} s", flush=True)
            ended.append(result["outcome"])
            write(kept() | {str(cell): result})
        shutil.rmtree(WORK / "cache", ignore_errors=True)
    return int("failed" in ended)


def write(results: dict[str, Any]) -> None:
    """Writes the results, and the page's table."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(
        before + BEGIN + "\n".join(table(results)) + "\n" + END + rest.partition(END)[2]
    )


def kept() -> dict[str, Any]:
    """Returns the results so far, of what is a cell now."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {name: results[name] for name in sorted(map(str, cells())) if name in results}


def run(cell: Cell, tests: tuple[str, ...] = ()) -> dict[str, Any]:
    """Makes the environment of ``cell``, runs its tests in it, and removes it."""
    start, place, log = time.monotonic(), WORK / "environment", WORK / "log.txt"
    result: dict[str, Any] = {"date": f"{date.today()}"}
    try:
        if refused := make(cell, place):
            result |= {"outcome": "not installed", "reason": refused}
        else:
            result |= tested(place, tests or cell.tests(), log, cell.marked)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return result | {"seconds": round(time.monotonic() - start)}


def tested(
    place: Path, tests: tuple[str, ...], log: Path, marked: str = "not slow"
) -> dict[str, Any]:
    """Runs ``tests``, those with the marks, in the environment at ``place``. Returns what passed
    and failed."""
    report = WORK / "report.xml"
    report.unlink(missing_ok=True)
    command = [place / "bin" / "python", "-m", "pytest", "-q", "-m", marked]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", f"--basetemp={WORK / 'pytest'}"]
    with log.open("w") as output:
        child = subprocess.Popen(
            [*command, *tests],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},  # for what the tests start
            stdout=output,
            stderr=output,
        )
        try:
            ended = f"exit code {child.wait(SECONDS)}"
        except subprocess.TimeoutExpired:
            child.kill()
            ended = f"not done after {SECONDS} s"
    last = " ".join(log.read_text(errors="replace")[-400:].split())
    found = counted(report) or {"outcome": "failed", "reason": f"{ended}: {last}"}
    return found | {"versions": installed(place)}


def make(cell: Cell, place: Path) -> str:
    """Makes an environment with torch, the cell's packages and the compiled modules. Returns what
    kept it from being made, if anything did."""
    if (python := interpreter(cell.python)) is None:
        return f"Python {cell.python} is not here"
    WORK.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    uv = WORK / "tools" / "bin" / "uv"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", uv.parent.parent], check=True)
        subprocess.run([uv.parent / "pip", "install", "-q", "uv"], check=True)
    environment = os.environ | {"UV_CACHE_DIR": str(WORK / "cache"), "INFINITY_CUDA": "0"}
    environment["UV_FIND_LINKS"] = ",".join(os.environ.get("PIP_FIND_LINKS", "").split())
    environment["PATH"] = f"{place / 'bin'}{os.pathsep}{environment['PATH']}"
    subprocess.run([uv, "venv", "-q", "-p", python, place], check=True, env=environment)
    command = [uv, "pip", "install", "-q", "-p", place / "bin" / "python"]
    command += [f"torch=={cell.torch}.*", *BUILD, *cell.packages()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return " ".join(done.stderr.split())[-400:]
    if cell.python == HERE:  # `make setup` has built it
        return ""
    build = [place / "bin" / "python", "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    return f"setup.py: {done.stderr[-400:]}" if done.returncode else ""


def counted(report: Path) -> dict[str, Any] | None:
    """Returns how many tests passed and were skipped, and the names of those that failed. None if
    pytest did not come to its end, or to a test."""
    if not report.exists():
        return None
    tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    ended = {kind: [t for t in tests if t.find(kind) is not None] for kind in ENDS}
    failed = [f"{t.get('classname')}::{t.get('name')}" for t in ended["failure"] + ended["error"]]
    passed = len(tests) - len(ended["skipped"]) - len(set(failed))
    if not (passed or failed):
        return None
    counts = {"passed": passed, "skipped": len(ended["skipped"]), "failed": sorted(set(failed))}
    return {"outcome": "failed" if failed else "passed", **counts}


def installed(place: Path) -> dict[str, str]:
    """Returns the versions that the environment has of what the cells are about."""
    query = (
        "import importlib.metadata as m, json, platform, sys\n"
        "have = {d.name.lower(): d.version for d in m.distributions()}\n"
        "told = {n: have[n] for n in sys.argv[1:] if n in have}\n"
        "print(json.dumps({'python': platform.python_version(), **told}))\n"
    )
    command = [place / "bin" / "python", "-c", query, "torch", *LIBRARIES]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def told(result: Mapping[str, Any] | None) -> str:
    """Returns what the table says of a cell."""
    if result is None:
        return "not run"
    if result["outcome"] == "not installed":
        return "not installed"
    if "reason" in result:
        return f"failed, {result['date']}"
    failed = len(result["failed"])
    of = f"{failed} of {failed + result['passed']} failed" if failed else f"{result['passed']}"
    return f"{of}, {result['date']}"


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of the page: torch by Python, then the libraries' versions by torch."""
    yield "| core | " + " | ".join(f"Python {python}" for python in PYTHONS) + " |"
    yield "|---" * (1 + len(PYTHONS)) + "|"
    for torch in TORCHES:
        row = [told(results.get(str(Cell(torch, python)))) for python in PYTHONS]
        yield f"| torch {torch} | " + " | ".join(row) + " |"
    yield ""
    torches = (TORCHES[0], USUAL)
    yield "| library | " + " | ".join(f"torch {torch}" for torch in torches) + " |"
    yield "|---" * (1 + len(torches)) + "|"
    for library, (versions, _) in LIBRARIES.items():
        for version in versions:
            row = [told(results.get(str(Cell(t, PYTHON, library, version)))) for t in torches]
            yield f"| {library} {version} | " + " | ".join(row) + " |"
    failures = [(name, each) for name, each in results.items() if each["outcome"] != "passed"]
    if failures:
        yield "\nWhat failed:\n"
    for name, each in failures:
        tests = Counter(re.sub(r"^.*::|\[.*", "", test) for test in each.get("failed", ()))
        named = ", ".join(f"`{test}`" + f" ({n})" * (n > 1) for test, n in tests.items())
        yield textwrap.fill(f"* {name}: {named or each['reason']}", 100, subsequent_indent="  ")


if __name__ == "__main__":
    sys.exit(main())
