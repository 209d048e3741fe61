"""`make bench-native`: the native core's loops under Google Benchmark. No figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import load

from infinity import native

TOOL = Path(__file__).parents[2] / "tools" / "native_programs.py"
native_programs = load("native_programs", TOOL)
SIZES = ("cache", "memory")


@pytest.fixture(scope="module")
def program() -> Path:
    """The benchmarks, built."""
    benchmark = native_programs.benchmark_flags()
    if native_programs.COMPILER is None or benchmark is None:
        pytest.skip("needs a C++ compiler and Google Benchmark (Debian: libbenchmark-dev)")
    return native_programs.build_benchmarks(benchmark)


def output_of(program: Path, *flags: str) -> str:
    """What the program writes to standard output."""
    done = subprocess.run(
        [program, *flags], capture_output=True, text=True, timeout=280, check=True
    )
    return done.stdout


def one_turn(program: Path, name: str, *flags: str) -> list[dict]:
    """Runs the benchmarks whose names begin with ``name`` for a moment."""
    told = output_of(
        program,
        f"--benchmark_filter=^{name}",
        "--benchmark_min_time=0.01",
        "--benchmark_format=json",
        *flags,
    )
    return json.loads(told)["benchmarks"]


def rules_without_one(rules: list[str], names: list[str]) -> set[str]:
    """The rules that no benchmark steps in a cache and in memory."""
    stepped = {(name.split("/")[0], name.split("/")[-1]) for name in names if name.count("/") == 3}
    return {rule for rule in rules if not {(rule.lower(), size) for size in SIZES} <= stepped}


@pytest.mark.slow
@pytest.mark.timeout(native_programs.BUILD_SECONDS + 300)
def test_every_rule_has_its_benchmarks(program):
    """Lists the benchmarks, beside the rules that Python knows. Twin: a rule that was just added
    has none."""
    names = output_of(program, "--benchmark_list_tests").split()
    rules = list(native.Rule.__members__)
    assert len(rules) > 10 and len(set(names)) == len(names)
    assert rules_without_one([*rules, "NEW"], names) == {"NEW"}
    for name in ("adamw/split/int8/memory/ceiling", "crc/portable/1MiB", "pool/lease/held:0"):
        assert name in names


@pytest.mark.slow
@pytest.mark.timeout(native_programs.BUILD_SECONDS + 300)
@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("sgd/split/int8/cache", 12), ("crc/hardware/4KiB", 4096), ("ticket/submit_wait/i", 4096)],
)
def test_a_benchmark_counts_what_it_moves(name, nbytes, program, tmp_path):
    """Runs one benchmark: bytes over items are those of an element, a checksum and a block. SGD
    reads and writes a weight, its low half and a code, and reads a gradient."""
    (found,) = one_turn(program, name, f"--folder={tmp_path}")
    assert found["bytes_per_second"] / found["items_per_second"] == pytest.approx(nbytes)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(native_programs.BUILD_SECONDS + 300)
def test_a_folder_that_is_not_there_fails_its_benchmarks_alone(program, tmp_path):
    """Names a folder that does not exist: transfers say so, and a checksum is measured."""
    absent = tmp_path / "absent"
    found = one_turn(program, "(ticket/submit_wait/threads|crc/combine/64)", f"--folder={absent}")
    by_name = {each["name"].split("/")[0]: each for each in found}
    assert str(absent) in by_name["ticket"]["error_message"]
    assert by_name["crc"]["items_per_second"] > 0


def test_without_the_library_the_package_is_named(tmp_path, monkeypatch):
    """Runs the command where pkg-config knows of no library and no package may be installed. Twin:
    pkg-config has flags."""
    commands = {"pkg-config": "exit 1", "id": "echo 1000", "c++": "exit 1"}
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    command = [sys.executable, TOOL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "apt install libbenchmark-dev" in line
    (tmp_path / "pkg-config").write_text("#!/bin/sh\necho -I/x -lbenchmark\n")
    assert native_programs.benchmark_flags() == ["-I/x", "-lbenchmark"]
