"""`make gpu`: builds, tests and measures what needs a GPU, in stages that a second call goes on
from.

stage       a command with its log in build/gpu, and beside it the tests that failed so far; stages
            that these very sources have passed are not run again
train       a stage of many jobs, the most telling first, which are kept one by one: a second call
            goes on with the first job that has no figures yet. The stage has passed once each job
            was measured, or left out with what the machine lacks. Results are written after each
late        an argument: everything runs against the late device of the tests, which needs no GPU.
            It shows that the stages run from start to end; its figures mean nothing
--seconds   of this call (520); the order of the jobs is made for a second one of 250
OUT         a variable of the environment: the folder to which results and logs are copied as they
            change (state.json, train.jobs.json, logs.txt, the files of results)

Needs the repository and a Python with torch, pybind11 or pip's wheel of it, and pytest: no network
(without one, stage `rivals` notes that none can be installed), no liburing (the thread engine
serves, or LIBURING_ROOT points at a copy). Tests of what is not installed there (transformers, say)
are left out, and a stage whose tests were all left out has not run. Kernels are compiled for the
card of this machine only, or not at all without one. With pytest-xdist the suite takes two minutes
instead of ten.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Sequence
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
SECONDS = 520  # of one call; the next goes on from there
STAGES: list[tuple[str, list[str], int]] = [  # name, command, seconds it may take
    ("build", [PYTHON, "setup.py", "build_ext", "--inplace"], 300),
    ("env", [PYTHON, "-m", "infinity", "env"], 60),
    ("kernels", [*PYTEST, *WORKERS, "tests/gpu/test_kernels_on_device.py"], 90),
    ("engine", [*PYTEST, *WORKERS, "tests/gpu/test_engine_on_device.py"], 150),
    ("train", [PYTHON, "-m", "bench", "gpu_train", "--folder", "build", "--save", RESULTS], 600),
    ("bench", [PYTHON, "-m", "bench", "gpu", "--save", RESULTS], 60),
    ("packed", [*PYTEST, *WORKERS, "tests/gpu/test_packed_on_device.py"], 150),
    (
        "past_host",
        [PYTHON, "-m", "bench", "past_host", "--folder", "build", "--save", RESULTS],
        120,
    ),
    ("rivals", [PYTHON, "-m", "bench", "rivals", "--folder", "build", "--save", RESULTS], 400),
    (
        "sanitizer",
        [
            *(SANITIZER, "--tool", "racecheck", "--error-exitcode", "1"),
            *(*PYTEST, "-k", "int8 or checksums", "tests/gpu/test_kernels_on_device.py"),
        ],
        300,
    ),
    (
        "suite",
        # Verbose: what failed is known when it is cut off, too.
        [*PYTEST, "-vv", *WORKERS, "-m", "not slow", "--continue-on-collection-errors", "tests"],
        500,
    ),
]
BENCHES = ("bench", "past_host", "rivals", "train")
JOBS = ".jobs.json"  # behind the name of a stage: its jobs, and how each ended
LATE_SLOWNESS = 4  # of two processors against a machine with a GPU
POLL_SECONDS = 1.0  # between looks at what can be copied to OUT
MOST_COPIED = 4 << 20  # bytes of a file


# What the late device cannot be: it is made by importing torch, and gloo, DataParallel and a saved
# folder's barrier know devices by name; its threads do not survive a fork.
NOT_LATE = (
    "tests/tools/train/test_cli_train.py::test_help_does_not_wait_for_torch",
    "tests/tools/train/test_cli_train.py::test_what_is_not_installed_is_one_line",
    "tests/core/homes/test_failures.py::test_swap_files_are_gone_however_a_script_ends",
    "tests/tools/cli/test_command_line.py::test_the_help_does_not_wait_for_torch",
    "tests/core/wrap/test_checks.py::test_models_that_something_else_moves_are_refused[True-DataParallel]",
    "tests/ext/dtensor/test_families.py::test_generation_and_a_saved_folder_are_those_of_one_process",
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


def _card() -> str:
    """The architecture of this machine's GPU, as nvcc names it; "" if torch sees none."""
    query = "import torch; print('sm_%d%d' % torch.cuda.get_device_capability())"
    told = subprocess.run([PYTHON, "-c", query], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip()


def _lacks(name: str, *, late: bool) -> str:
    """Says what this machine has not, that stage ``name`` needs; "" if nothing."""
    if name == "past_host" and not late and not list(Path("/sys/block").glob("nvme*")):
        return "there is no NVMe drive (/sys/block/nvme*)"
    if name == "rivals" and late:
        return "the environments of the rivals do not have the late device"
    if name == "sanitizer" and not late and shutil.which(SANITIZER) is None:
        return "compute-sanitizer is not installed"
    return ""


def _environment(name: str, log: Path, until: float, *, late: bool) -> dict[str, str]:
    """What stage ``name`` is told, beside its command."""
    told = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [AS_GPU, ROOT] if late else [ROOT])),
        "INFINITY_BENCH_UNTIL": str(until),
        "INFINITY_BENCH_JOURNAL": str(log.with_name(name + JOBS)),
        "INFINITY_FAILURES": str(log.with_suffix(".failures")),
    }
    if name == "build":
        card = "" if late else _card()
        # With a card, a build without kernels is none
        told["INFINITY_CUDA"] = "1" if card else "0"
        if card:
            told.setdefault("INFINITY_CUDA_ARCH", card)
    # whose tensors are small and whose workers are many; the others have the machine to themselves
    if name == "suite":
        told["OMP_NUM_THREADS"] = "1"
    return told


def _run(
    name: str,
    command: list[str],
    log: Path,
    seconds: float,
    *,
    late: bool,
    copy: Callable[[], None],
) -> str:
    """One stage, and how it ended. Nothing of it is left running."""
    if seconds < 5:
        return "no time left: call again"
    environment = _environment(name, log, time.time() + seconds - 5, late=late)
    end = time.monotonic() + seconds
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
            while (left := end - time.monotonic()) > 0:
                try:
                    return _ended(stage.wait(timeout=min(POLL_SECONDS, left)), log)
                except subprocess.TimeoutExpired:
                    copy()
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
    if (journal := log.with_name(log.stem + JOBS)).exists():
        return _ended_jobs([each["status"] for each in json.loads(journal.read_text()).values()])
    counts = re.findall(r"(\d+) (passed|skipped)", (log.read_text().splitlines() or [""])[-1])
    found = {kind: int(count) for count, kind in counts}
    if found.get("skipped") and not found.get("passed"):
        return f"not run: all {found['skipped']} tests were left out"
    return "passed"


def _ended_jobs(statuses: Sequence[str]) -> str:
    """How a stage ended whose jobs have ``statuses``. It has passed without those left out."""
    failed, not_reached = statuses.count("failed"), statuses.count("not reached")
    if not failed + not_reached:
        return "passed"
    return f"{failed} of {len(statuses)} jobs failed, {not_reached} not reached: call again"


def _copy_out(folder: Path, since: float) -> None:
    """Copies results since the first call and the ends of logs to OUT, if there is one."""
    if not (named := os.environ.get("OUT")):
        return
    out, results = Path(named), (ROOT / RESULTS).glob("*.json")
    out.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("*.json"), *(p for p in results if p.stat().st_mtime >= since)]:
        there = out / path.name
        if path.stat().st_size > MOST_COPIED:
            continue
        if not there.exists() or there.stat().st_mtime < path.stat().st_mtime:
            shutil.copy2(path, there)
    ends = [f"--- {log.name}\n{_end_of(log)}" for log in sorted(folder.glob("*.log"))]
    (out / "logs.txt").write_text("\n".join(ends))


def _end_of(log: Path) -> str:
    with open(log, "rb") as found:
        found.seek(max(0, log.stat().st_size - MOST_COPIED // 8))
        return found.read().decode(errors="replace")


def main(argv: Sequence[str] = ()) -> int:
    """Runs what is left, of the stages that are named if there are any. 0 when each of them has
    passed, or was left out."""
    parser = argparse.ArgumentParser(prog="make gpu", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="STAGE")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    args = parser.parse_intermixed_args(argv)
    late = LATE in args.names
    names = [name for name in args.names if name != LATE]
    folder = STATE.with_name("gpu-late") if late else STATE
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds * (LATE_SLOWNESS if late else 1)
    sources = _digest()
    path = folder / "state.json"
    state = json.loads(path.read_text()) if path.exists() else {}
    if state.get("sources") != sources:
        state = {"sources": sources, "since": time.time(), "stages": {}}
        for journal in folder.glob(f"*{JOBS}"):
            journal.unlink()
        # Before any stage: a call that is killed in the first one leaves its jobs to the next
        path.write_text(json.dumps(state, indent=1))

    def copy() -> None:
        _copy_out(folder, state["since"])

    def is_done(name: str) -> bool:
        status = state["stages"].get(name, {}).get("status", "")
        return status == "passed" or status.startswith("left out")

    stages = [stage for stage in STAGES if not names or stage[0] in names]
    for name, command, seconds in stages:
        if name != "build" and is_done(name):
            continue
        start = time.monotonic()
        log = folder / f"{name}.log"
        if late and name == "sanitizer":
            status = "not run: the late device runs nothing of CUDA"
        elif lacks := _lacks(name, late=late):
            status = f"left out: {lacks}"
        else:
            status = _run(
                name,
                _on_late(name, command, folder) if late else command,
                log,
                min(seconds * (LATE_SLOWNESS if late else 1), deadline - start),
                late=late,
                copy=copy,
            )
        state["stages"][name] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
        path.write_text(json.dumps(state, indent=1))
        copy()
        if not is_done(name):
            print(f"--- {name}: {status}\n{log.read_text()[-3000:] if log.exists() else ''}")
        if name == "build" and status != "passed":
            break
    for name in BENCHES:
        if (log := folder / f"{name}.log").exists():
            print(log.read_text())
    for journal in sorted(folder.glob(f"*{JOBS}")):
        for name, told in json.loads(journal.read_text()).items():
            print(f"{name:<32}{told['status']:<14}{told.get('why', '')}")
    print(f"{'stage':<10}{'seconds':>9}  status")
    for name, told in state["stages"].items():
        print(f"{name:<10}{told['seconds']:>9}  {told['status']}")
    return 0 if all(is_done(name) for name, *_ in stages) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
