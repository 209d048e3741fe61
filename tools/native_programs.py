"""Compiles programs of the native core alone, without Python, and runs its benchmarks:

    python tools/native_programs.py --benchmark_filter=crc    # what `make bench-native` does

core      the sources and flags of the extension, as setup.py has them, without its bindings
program   a `main` and other sources beside the core, in a folder of its own below build/; compiled
          again is only what changed
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import ninja

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
BUILD_SECONDS = 1500  # with sanitizers, on a machine that does other work
BENCHMARKS = [ROOT / "bench" / "native_loops.cpp", ROOT / "csrc/tests/portable_crc32c.cpp"]
PACKAGE = "libbenchmark-dev"  # Debian's, of Google Benchmark


def described_by_setup() -> dict:
    """What setup.py knows: the extension's sources and flags. Nothing is built, and standard output
    is the program's."""
    with mock.patch("setuptools.setup"), contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(str(ROOT / "setup.py"))


def build(
    folder: Path,
    target: str,
    sources: Sequence[Path],
    flags: Sequence[str] = (),
    links: Sequence[str] = (),
    level: Sequence[str] = (),
) -> Path:
    """Compiles ``sources``, the core and the doubles of disks with the flags of setup.py and
    ``flags``; again only what changed. ``level`` is in place of the core's optimization."""
    described = described_by_setup()
    with contextlib.redirect_stdout(sys.stderr):
        core = described["extension"]()
    doubles = [each for each in described["DOUBLES"] if Path(each).name != "bindings.cpp"]
    own = [each for each in core.sources if Path(each).parent.name != "python"]
    defines = [f"-D{name}={value}" for name, value in core.define_macros]
    compile_args = [
        flag
        for flag in core.extra_compile_args
        if not flag.startswith(("-O", "-std") if level else "-std")
    ]
    lines = rules(
        COMPILER, [*level, *compile_args, *defines, *flags], [*core.extra_link_args, *links]
    )
    compiled = [*(ROOT / each for each in (*own, *doubles)), *sources]
    lines += edges(compiled, target, described["UNIT_FLAGS"])
    return run_ninja(folder, lines, target)


def rules(compiler: str, flags: Sequence[str], links: Sequence[str]) -> list[str]:
    """Returns ninja's rules for every source and for the program."""
    return [
        "rule compile",
        (
            f"  command = {compiler} -MMD -MF $out.d -std=c++17 -I{ROOT / 'csrc'}"
            f" {shlex.join(flags)} $unit -c $in -o $out"
        ),
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule link",
        f"  command = {compiler} $in -o $out {shlex.join(links)}",
        "  description = $out",
    ]


def edges(sources: Sequence[Path], target: str, unit_flags: dict[str, list[str]]) -> Iterator[str]:
    """Yields ninja's lines for each source and for the program of all of them."""
    objects = []
    for source in sources:
        objects.append(f"{source.parent.name}_{source.stem}.o")
        yield f"build {objects[-1]}: compile {source}"
        yield f"  unit = {shlex.join(unit_flags.get(source.name, []))}"
    yield f"build {target}: link {' '.join(objects)}"


def run_ninja(folder: Path, lines: Sequence[str], target: str) -> Path:
    """Builds the program and returns its path. What ninja says goes to standard error. Raises
    CalledProcessError if a source does not compile."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [Path(ninja.BIN_DIR) / "ninja", "-j2", "-C", folder, target]
    with open(folder / "lock", "w") as lock:  # both workers of `make sanitize` run cases
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "build.ninja").write_text("\n".join([*lines, ""]))
        subprocess.run(command, check=True, stdout=2, timeout=BUILD_SECONDS)
    return folder / target


def benchmark_flags() -> list[str] | None:
    """Returns what links Google Benchmark, or None where it is not installed."""
    try:
        query = ["pkg-config", "--cflags", "--libs", "benchmark"]
        return shlex.split(subprocess.run(query, check=True, capture_output=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return None


def build_benchmarks(benchmark: Sequence[str]) -> Path:
    """Builds the benchmarks with the flags of a release, linked with ``benchmark``."""
    folder = ROOT / "build" / "bench-native"
    return build(folder, "bench_native", BENCHMARKS, ["-fPIC", "-DNDEBUG"], benchmark)


def main() -> None:
    """Installs Google Benchmark if that is allowed, builds the benchmarks and becomes them."""
    if COMPILER is None:
        sys.exit("no C++ compiler (c++, or the one in CXX)")
    if (benchmark := benchmark_flags()) is None:
        install = ["sh", ROOT / "tools" / "system_packages.sh", PACKAGE]
        if subprocess.run(install, stdout=2).returncode != 0:
            sys.exit(2)
        benchmark = benchmark_flags() or ["-lbenchmark"]
    program = build_benchmarks(benchmark)
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
