"""The native core without Python: the cases of csrc/tests, one program, one process per case.

Words used here:

**case**: a `TEST` of csrc/tests; `core_tests --list` names them all, `core_tests NAME` runs one.
**build**: how the program is compiled: "plain" as the core is; "address" with AddressSanitizer and
UBSan, "thread" with ThreadSanitizer (both slow: `make sanitize`). "aarch64" is compiled for that
processor and run by qemu.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from compiled import load

from infinity import native

ROOT = Path(__file__).parents[2]
native_programs = load("native_programs", ROOT / "tools" / "native_programs.py")
TESTS = ROOT / "csrc" / "tests"
SKIPPED = 77  # the program's way to say that this machine cannot show it

# -O1, or less: the program is compiled for every clone, and the cases wait for the disk anyway.
COMMON = ["-O1", "-g1"]  # -g: half as long again, for lines alone
BUILDS = {
    "plain": [],
    "address": [
        "-O0",  # the kernels of all layouts take a third of the time
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-fno-omit-frame-pointer",
    ],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer"],
}
SANITIZED = [name for name in BUILDS if name != "plain"]
ENVIRONMENT = {
    # A sanitizer that found something ends the process with a code that no case uses.
    "ASAN_OPTIONS": "exitcode=66:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66:second_deadlock_stack=1",
}


pytestmark = pytest.mark.timeout(native_programs.BUILD_SECONDS + 300)


def case_names() -> list[str]:
    """Read from the sources: tests are collected before there is a program to ask."""
    found = []
    for path in sorted(TESTS.glob("*.cpp")):
        for macro, group, name in re.findall(
            r"(?m)^(TEST|TEST_OF_BACKENDS)\((\w+),\s+(\w+)\)", path.read_text()
        ):
            backends = ("",) if macro == "TEST" else ("/uring", "/threads")
            found += [f"{group}/{name}{backend}" for backend in backends]
    return found


def at_fixed_addresses(program: Path) -> list[str]:
    """The command that runs a program of ThreadSanitizer.

    Where the kernel randomizes more address bits than the sanitizer's shadow memory knows of
    (vm.mmap_rnd_bits of 32), such a program ends now and then with "unexpected memory mapping"
    before `main`. `setarch -R` switches that off for one process; a container may forbid it, and
    then there is the luck of the draw.
    """
    fixed = ["setarch", "-R"]
    allowed = (
        shutil.which(fixed[0])
        and subprocess.run([*fixed, "true"], capture_output=True).returncode == 0
    )
    return [*(fixed if allowed else []), str(program)]


@pytest.fixture(
    scope="session", params=[pytest.param(b, marks=pytest.mark.slow) for b in ("plain", *SANITIZED)]
)
def program(request) -> list[str]:
    """The command that runs the tests' program, built."""
    if native_programs.COMPILER is None:
        pytest.skip("no C++ compiler (c++, or the one in CXX)")
    flags = BUILDS[request.param]
    built = native_programs.build(
        ROOT / "build" / f"core-{request.param}",
        "core_tests",
        sorted(TESTS.glob("*.cpp")),
        flags,
        flags,
        level=COMMON,
    )
    command = at_fixed_addresses(built) if request.param == "thread" else [str(built)]
    if request.param in SANITIZED:
        tried = subprocess.run([*command, "--list"], capture_output=True, text=True, timeout=280)
        if tried.returncode != 0:  # before any of our code ran
            pytest.skip(
                f"{request.param} sanitizer does not run on this machine:"
                f" {tried.stderr.strip()[-200:]}"
            )
    return command


def complaints_of_clang(sources: list[Path], folder: Path) -> str:
    """What clang's analysis of mutexes says of ``sources`` (csrc/base/thread_safety.h). CLANGXX
    names another clang."""
    command = shlex.split(os.environ.get("CLANGXX", "clang++"))
    if shutil.which(command[0]) is None:
        pytest.skip("no clang++, or another one in CLANGXX")
    command += [
        "-std=c++17",
        f"-I{ROOT / 'csrc'}",
        "-Wthread-safety",
        "-Werror=thread-safety",
        "-c",
        "-o",
        str(folder / "analysed.o"),
    ]
    done = [
        subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=280)
        for source in sources
    ]
    return "".join(each.stderr for each in done if each.returncode != 0)


def run_case(command: list[str], name: str, folder: Path, timeout: float = 120) -> None:
    done = subprocess.run(
        [*command, name],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}"


def test_the_program_has_the_cases_of_its_sources(program):
    """Compares what the program lists with what was collected from the sources: none is missed,
    none is twice."""
    listed = subprocess.run(
        [*program, "--list"], capture_output=True, text=True, timeout=280, check=True
    ).stdout.split()
    assert sorted(listed) == sorted(case_names())
    assert len(set(listed)) == len(listed)


def test_every_case_in_the_sources_is_collected():
    """Counts macros and names apart: a layout that ``case_names`` cannot read fails without a
    build."""
    written = "".join(f"\n{path.read_text()}" for path in TESTS.glob("*.cpp"))
    cases = written.count("\nTEST(") + 2 * written.count("\nTEST_OF_BACKENDS(")
    assert len(case_names()) == cases > 100


def test_a_case_that_does_not_exist_is_not_passed(program, tmp_path):
    """The twin: asks for a case that nobody wrote."""
    with pytest.raises(AssertionError, match="usage"):
        run_case(program, "base/nonsense", tmp_path)


@pytest.mark.parametrize("name", case_names())
def test_case(program, name, tmp_path):
    """Runs one case in a process of its own, in an empty folder."""
    run_case(program, name, tmp_path)
    assert not list(tmp_path.iterdir()), "the case left files behind"


@pytest.mark.slow
def test_every_guarded_member_is_used_under_its_mutex(tmp_path):
    """Compiles what has mutexes with clang, which checks them; the twin reads a guarded member
    without its mutex."""
    folders = ("base", "memory", "io", "update")
    sources = [
        path
        for folder in folders
        for path in sorted((ROOT / "csrc" / folder).glob("*.cpp"))
        if path.name != "uring.cpp"
    ]
    assert not complaints_of_clang([path for path in sources if path.stem != "crc32c"], tmp_path)
    wrong = tmp_path / "wrong.cpp"
    header = '#include "base/thread_safety.h"\n'
    wrong.write_text(
        header
        + "struct A { infinity::Mutex m; int x INFINITY_GUARDED_BY(m) = 0; int f() { return x; }"
        " };\nA a;\n"
    )
    assert "requires holding mutex 'm'" in complaints_of_clang([wrong], tmp_path)


@pytest.mark.slow
def test_the_neon_unit_gives_the_bits_of_the_scalar_one(tmp_path):
    """Compiles base and optim for aarch64, then lets qemu run their cases; without qemu, compiling
    has to do."""
    cross = shutil.which("aarch64-linux-gnu-g++")
    if cross is None:
        pytest.skip("no aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)")
    sources = [
        path
        for folder in ("optim", "base")
        for path in sorted((ROOT / "csrc" / folder).glob("*.cpp"))
    ]
    sources = [path for path in sources if "avx" not in path.name]
    others = ("main", "base", "kernel", "portable_crc32c", "scarce")
    sources += [TESTS / f"{name}.cpp" for name in others]
    flags = [
        "-O1",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
        "-DINFINITY_HAVE_NEON=1",
    ]
    lines = [
        *native_programs.rules(cross, flags, ["-static", "-pthread"]),
        *native_programs.edges(sources, "core_tests", {}),
    ]
    built = native_programs.run_ninja(ROOT / "build" / "core-aarch64", lines, "core_tests")
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("compiled; not run: no qemu-aarch64 (Debian: qemu-user-static)")
    listed = subprocess.run(
        [qemu, built, "--list"], capture_output=True, text=True, timeout=280, check=True
    )
    assert "kernel/units_agree" in listed.stdout
    for name in listed.stdout.split():
        try:
            run_case([qemu, str(built)], name, tmp_path)
        except pytest.skip.Exception as reason:
            print(f"{name}: {reason}")


def streams_in(module: Path) -> set[str]:
    """Symbols of the C++ library's streams and locales that ``module`` has or needs."""
    symbols = subprocess.run(["nm", "-DC", module], capture_output=True, text=True, check=True)
    return set(re.findall(r"\bstd::(?:__cxx11::)?(?:\w*stream|basic_ios|locale)\b", symbols.stdout))


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_no_module_uses_streams():
    """Streams look their parts up in a table that all copies of the C++ library in a process share.
    Linked with a copy of its own, as some compilers do, a module that uses them crashes beside
    torch. Twin: one of torch's libraries has them."""
    built = f"*{sysconfig.get_config_var('EXT_SUFFIX')}"
    modules = sorted(Path(native.__file__).parent.glob(built))
    assert modules and not {module.name for module in modules if streams_in(module)}
    assert streams_in(Path(torch.__file__).parent / "lib" / "libc10.so")
