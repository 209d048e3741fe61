"""Writes what this version writes, tiny, for the tests of all later versions: fixtures.py [FOLDER].

Checkpoints of every form and home with the bits of their next two steps, and files of runs,
benchmarks and jobs. Run once for a version, and kept in git. A version's fixtures are never
written anew: later versions must read these.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *map(str, (ROOT / "tests/support").glob("*/"))]

import ranks  # noqa: E402
import torch  # noqa: E402
import written_jobs  # noqa: E402

import infinity  # noqa: E402
from infinity.tools.bench import results  # noqa: E402
from infinity.tools.cost.cost import FORMAT as PROFILE  # noqa: E402
from infinity.tools.plan.machine_file import FORMAT as MACHINE  # noqa: E402
from infinity.tools.plan.machine_file import MACHINES  # noqa: E402


def write(folder: Path) -> None:
    """Writes everything below ``folder``, which must be new."""
    folder.mkdir(parents=True)
    expected: dict = {case: written_jobs.write(folder, case) for case in written_jobs.ONE}
    jobs = {
        f"two_ranks:{number}": {"folder": str(folder), "case": case, "writes": True}
        for number, case in enumerate(written_jobs.TWO)
    }
    with tempfile.TemporaryDirectory() as scratch:
        found = ranks.run_all(Path(scratch), 2, jobs, script="written_jobs.py")
    expected |= {case: found[name] for case, name in zip(written_jobs.TWO, jobs)}
    expected |= written_jobs.write_loops(folder)
    for name in ("model.json", "text.txt"):
        (folder / name).unlink()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    _write_run(folder)
    _write_files(folder)
    model, optimizer = written_jobs.ONE[written_jobs.ADAPTERS]()
    infinity.save_pretrained(model, folder / "adapter")
    infinity.unwrap_model(model, optimizer)


def _write_run(folder: Path) -> None:
    """A run: status, plan and history, and its timeline."""
    torch.manual_seed(5)
    model = written_jobs.Net()
    trace = folder / "timeline.json"
    model, optimizer = infinity.wrap_model(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        {"params": "host", "optimizer": "host", "trace": str(trace)},
    )
    with infinity.Watch(model, steps=2, folder=folder / "run") as watch:
        for _ in range(2):
            written_jobs.step(model, optimizer)
            watch.update(loss=1.5, tokens=32)
            time.sleep(0.01)
    infinity.unwrap_model(model, optimizer)
    for path in (folder / "run").glob("*.json"):  # without this machine's names
        told = json.loads(path.read_text())
        told |= {key: "here" for key in ("host", "space") if key in told}
        told |= {"trace": trace.name} if "trace" in told else {}
        path.write_text(json.dumps(told) + "\n")


def _write_files(folder: Path) -> None:
    """Files of one kind each."""
    row = results.row("io.read", "GB/s", [1.0, 2.0], ceiling=("fio", [2.0, 2.0]), ratios={"a": 2.0})
    told = results.result("io", results.Measured([row], ["a note"]))
    (folder / "result.json").write_text(json.dumps(told, indent=1) + "\n")
    machine = (MACHINES / "h100.toml").read_text()
    (folder / "machine.toml").write_text(f"format = {MACHINE.number}\n{machine}")
    profile = {"gpus": {"cpu:1": 100.0}, "save_seconds": 1.0, "checkpoint_nbytes": 10}
    (folder / "profile.json").write_text(json.dumps(PROFILE.numbered(profile)) + "\n")


if __name__ == "__main__":
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else written_jobs.WRITTEN
    write(into / infinity.__version__)
