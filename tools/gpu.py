"""`make gpu`: builds, tests and measures what needs a GPU, in stages that a second call goes on from.

stage   a command with its log in build/gpu; done stages of this commit are not run again. Shortest and most telling first.

Needs the repository and a Python with torch, pybind11 or pip's wheel of it, and pytest: no network, no liburing (the
thread engine serves, or LIBURING_ROOT points at a copy).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "gpu"
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp=build/pytest"]
STAGES: list[tuple[str, list[str], int]] = [  # name, command, seconds it may take
    ("build", [PYTHON, "setup.py", "build_ext", "--inplace"], 300),
    ("env", [PYTHON, "-m", "infinity", "env"], 60),
    ("kernels", [*PYTEST, "tests/gpu"], 120),
    ("bench", [PYTHON, "-m", "infinity", "bench", "gpu", "--json", "bench/results"], 120),
    ("suite", [*PYTEST, "-x", "-m", "not slow", "tests/test_gpu_kernels.py", "tests/test_kernel.py", "tests/test_io.py",
               "tests/test_update.py", "tests/test_training.py"], 400),
]  # fmt: skip


def main() -> int:
    """Runs what is left. 0 when every stage has passed."""
    STATE.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    path = STATE / "state.json"
    state = json.loads(path.read_text()) if path.exists() else {}
    if state.get("commit") != commit:
        state = {"commit": commit, "stages": {}}
    for name, command, seconds in STAGES:
        if state["stages"].get(name, {}).get("status") == "passed":
            continue
        start = time.monotonic()
        log = STATE / f"{name}.log"
        with open(log, "w") as out:
            try:
                environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
                code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=seconds, env=environment).returncode
                status = "passed" if code == 0 else f"failed ({code})"
            except subprocess.TimeoutExpired:
                status = f"cut off after {seconds} s"
        state["stages"][name] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
        path.write_text(json.dumps(state, indent=1))
        if status != "passed":
            print(f"--- {name}: {status}\n{log.read_text()[-3000:]}")
        if name == "build" and status != "passed":
            break
    print(f"{'stage':<10}{'seconds':>9}  status")
    for name, told in state["stages"].items():
        print(f"{name:<10}{told['seconds']:>9}  {told['status']}")
    bench = STATE / "bench.log"
    if bench.exists():
        print(bench.read_text())
    return 0 if all(state["stages"].get(name, {}).get("status") == "passed" for name, *_ in STAGES) else 1


if __name__ == "__main__":
    sys.exit(main())
