"""`make gpu`: builds, tests and measures what needs a GPU, in stages that a second call goes on
from.

stage   a command with its log in build/gpu, and beside it the tests that failed so far; stages that
        these very sources have passed are not run again. The first call answers whether the bits
        are right and how fast an 8 B model is, and why; the second runs the suite, the third
        compute-sanitizer
late    an argument: everything runs against the late device of the tests, which needs no GPU. It
        shows that the stages run from start to end; its figures mean nothing

Needs the repository and a Python with torch, pybind11 or pip's wheel of it, and pytest: no network,
no liburing (the thread engine serves, or LIBURING_ROOT points at a copy). Tests of what is not
installed there (transformers, say) are left out, and a stage whose tests were all left out has not
run. With pytest-xdist the suite takes two minutes instead of ten.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "gpu"
RESULTS = "bench/results"
LATE = "late"
AS_GPU = ROOT / "tests" / "support" / "late_device" / "everywhere"
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp=build/pytest"]
WORKERS = (
    ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "loadfile"]
    if importlib.util.find_spec("xdist")
    else []
)
SANITIZER = shutil.which("compute-sanitizer") or "compute-sanitizer"
STAGES: list[tuple[str, list[str], int]] = [  # name, command, seconds it may take
    ("build", [PYTHON, "setup.py", "build_ext", "--inplace"], 300),
    ("env", [PYTHON, "-m", "infinity", "env"], 60),
    ("kernels", [*PYTEST, *WORKERS, "tests/gpu/test_kernels_on_device.py"], 90),
    ("engine", [*PYTEST, *WORKERS, "tests/gpu/test_engine_on_device.py"], 150),
    ("packed", [*PYTEST, *WORKERS, "tests/gpu/test_packed_on_device.py"], 150),
    ("bench", [PYTHON, "-m", "bench", "gpu", "--save", RESULTS], 60),
    ("train", [PYTHON, "-m", "bench", "gpu_train", "--save", RESULTS], 300),
    (
        "past_host",
        [PYTHON, "-m", "bench", "past_host", "--folder", "build", "--save", RESULTS],
        120,
    ),
    (
        "suite",
        # Verbose: what failed is known when it is cut off, too.
        [*PYTEST, "-vv", *WORKERS, "-m", "not slow", "--continue-on-collection-errors", "tests"],
        300,
    ),
    (
        "sanitizer",
        [
            *(SANITIZER, "--tool", "racecheck", "--error-exitcode", "1"),
            *(*PYTEST, "-k", "int8 or checksums", "tests/gpu/test_kernels_on_device.py"),
        ],
        300,
    ),
]
SECONDS = 530  # of one call; the next goes on from there
TRAIN_SECONDS = 240  # of the stage "train" in one call, for its jobs
BENCHES = ("bench", "past_host", "train")
LATE_SLOWNESS = 4  # of two processors against a machine with a GPU


# What the late device cannot be: it is made by importing torch, and gloo, DataParallel and a saved
# folder's barrier know devices by name; its threads do not survive a fork.
NOT_LATE = (
    "tests/cli/test_cli_train.py::test_help_does_not_wait_for_torch",
    "tests/cli/test_cli_train.py::test_what_is_not_installed_is_one_line",
    "tests/storage/test_failures.py::test_swap_files_are_gone_however_a_script_ends",
    "tests/cli/test_command_line.py::test_the_help_does_not_wait_for_torch",
    "tests/api/test_checks.py::test_models_that_something_else_moves_are_refused[True-DataParallel]",
    "tests/parallel/test_families.py::test_generation_and_a_saved_folder_are_those_of_one_process",
)


def _digest() -> str:
    """Of everything that a stage's result depends on: a copy of the tree may have no history."""
    digest = hashlib.sha256()
    for folder in ("infinity", "bench", "csrc", "tests", "tools"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".cpp", ".cu", ".h"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def _on_late(name: str, command: list[str], folder: Path) -> list[str]:
    """The command of stage ``name`` against the late device."""
    if name == "suite":
        return [*command, *(f"--deselect={test}" for test in NOT_LATE)]
    if name not in BENCHES:
        return command
    small = ["--scale", "0.01", "--rounds", "1", "--no-rivals", "--overwrite"]
    return [str(folder) if word == RESULTS else word for word in command] + small


def _run(
    command: list[str], log: Path, seconds: float, *, suite: bool, paths: Sequence[Path]
) -> str:
    """One stage, and how it ended. Nothing of it is left running."""
    if seconds < 5:
        return "no time left: call again"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "INFINITY_BENCH_SECONDS": str(min(TRAIN_SECONDS, seconds - 5)),
        "INFINITY_CUDA": "1",  # a build without kernels is none
        "INFINITY_FAILURES": str(log.with_suffix(".failures")),
    }
    # whose tensors are small and whose workers are many; the others have the machine to themselves
    if suite:
        environment["OMP_NUM_THREADS"] = "1"
    with open(log, "w") as out:
        stage = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            return _ended(stage.wait(timeout=seconds), log)
        except subprocess.TimeoutExpired:
            return f"cut off after {seconds:.0f} s"
        finally:
            try:
                os.killpg(stage.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            stage.wait()


def _ended(code: int, log: Path) -> str:
    """How a stage with exit status ``code`` ended. Tests that were all left out have not run."""
    if code != 0:
        return f"failed ({code})"
    counts = re.findall(r"(\d+) (passed|skipped)", (log.read_text().splitlines() or [""])[-1])
    found = {kind: int(count) for count, kind in counts}
    if found.get("skipped") and not found.get("passed"):
        return f"not run: all {found['skipped']} tests were left out"
    return "passed"


def main(names: Sequence[str] = ()) -> int:
    """Runs what is left, of the stages ``names`` if there are any. 0 when all of it has passed."""
    late = LATE in names
    names = [name for name in names if name != LATE]
    folder = STATE.with_name("gpu-late") if late else STATE
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + SECONDS * (LATE_SLOWNESS if late else 1)
    sources = _digest()
    path = folder / "state.json"
    state = json.loads(path.read_text()) if path.exists() else {}
    if state.get("sources") != sources:
        state = {"sources": sources, "stages": {}}
    stages = [stage for stage in STAGES if not names or stage[0] in names]
    for name, command, seconds in stages:
        if name != "build" and state["stages"].get(name, {}).get("status") == "passed":
            continue
        start = time.monotonic()
        log = folder / f"{name}.log"
        if late and name == "sanitizer":
            status = "not run: the late device runs nothing of CUDA"
        else:
            status = _run(
                _on_late(name, command, folder) if late else command,
                log,
                min(seconds * (LATE_SLOWNESS if late else 1), deadline - start),
                suite=name == "suite",
                paths=[AS_GPU, ROOT] if late else [ROOT],
            )
        state["stages"][name] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
        path.write_text(json.dumps(state, indent=1))
        if status != "passed":
            print(f"--- {name}: {status}\n{log.read_text()[-3000:] if log.exists() else ''}")
        if name == "build" and status != "passed":
            break
    print(f"{'stage':<10}{'seconds':>9}  status")
    for name, told in state["stages"].items():
        print(f"{name:<10}{told['seconds']:>9}  {told['status']}")
    for name in BENCHES:
        if (log := folder / f"{name}.log").exists():
            print(log.read_text())
    return (
        0
        if all(state["stages"].get(name, {}).get("status") == "passed" for name, *_ in stages)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
