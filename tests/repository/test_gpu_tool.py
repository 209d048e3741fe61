"""`make gpu`: stages are run in order, once for the same sources, jobs one by one, and nothing of
one that takes too long is left."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from bench import gpu_train

TOOL = Path(__file__).parents[2] / "tools" / "gpu.py"


@pytest.fixture
def tool(tmp_path, monkeypatch) -> ModuleType:
    """The tool, with its state elsewhere."""
    spec = importlib.util.spec_from_file_location("gpu_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STATE", tmp_path / "state")
    return module


def stage(name: str, script: str, seconds: int = 60) -> tuple[str, list[str], int]:
    return name, ["sh", "-c", script], seconds


def statuses(tool: ModuleType) -> dict[str, str]:
    stages = json.loads((tool.STATE / "state.json").read_text())["stages"]
    return {name: told["status"] for name, told in stages.items()}


def test_a_second_call_goes_on_with_what_did_not_pass(tool, tmp_path, monkeypatch):
    """Method: the second of three stages fails at first; a second call runs it again, and neither
    of the others."""
    log = tmp_path / "log"
    stages = [stage(name, f"echo {name} >> {log}") for name in ("one", "three")]
    monkeypatch.setattr(
        tool,
        "STAGES",
        [stages[0], stage("two", f"echo two >> {log}; test -e {tmp_path}/ready"), stages[1]],
    )
    assert tool.main() == 1 and statuses(tool) == {
        "one": "passed",
        "two": "failed (1)",
        "three": "passed",
    }
    (tmp_path / "ready").touch()
    assert tool.main() == 0 and statuses(tool)["two"] == "passed"
    assert log.read_text().split() == ["one", "two", "three", "two"]
    monkeypatch.setattr(tool, "_digest", lambda: "other sources")
    assert tool.main() == 0
    assert log.read_text().split()[4:] == ["one", "two", "three"]


def test_what_a_stage_started_ends_with_it(tool, tmp_path, monkeypatch):
    """Method: a stage starts a process that would outlive it, and is cut off."""
    child = tmp_path / "child"
    monkeypatch.setattr(tool, "STAGES", [stage("long", f"sleep 100 & echo $! > {child}; wait", 6)])
    assert tool.main() == 1 and statuses(tool)["long"].startswith("cut off")
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{int(child.read_text())}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{int(child.read_text())}")


def test_no_time_is_no_start(tool, monkeypatch):
    monkeypatch.setattr(tool, "SECONDS", 0)
    monkeypatch.setattr(tool, "STAGES", [stage("one", "true")])
    assert tool.main() == 1 and statuses(tool) == {"one": "no time left: call again"}


def test_against_the_late_device_every_process_has_it_and_no_result_is_kept(
    tool, tmp_path, monkeypatch
):
    """Twin: without the argument neither; the sanitizer has nothing to look at there."""
    asked = tmp_path / "asked"
    show = f'echo $PYTHONPATH "$@" >> {asked}'
    command = ["sh", "-c", show, "sh", "--save", tool.RESULTS]
    monkeypatch.setattr(tool, "STAGES", [("bench", command, 60), stage("sanitizer", "true")])
    assert tool.main() == 0 and tool.main(["late"]) == 1
    plain, late = asked.read_text().splitlines()
    assert str(tool.AS_GPU) in late and str(tool.AS_GPU) not in plain
    assert tool.RESULTS in plain and tool.RESULTS not in late and "--scale" in late
    told = json.loads((tmp_path / "gpu-late" / "state.json").read_text())["stages"]
    assert told["sanitizer"]["status"].startswith("not run")


# A stage of four jobs, which ends in the middle of the third at its first call
JOBS = """
import json, os, pathlib
journal = pathlib.Path(os.environ["INFINITY_BENCH_JOURNAL"])
ended = json.loads(journal.read_text()) if journal.exists() else {}
calls = pathlib.Path(CALLS)
calls.write_text(calls.read_text() + "call " if calls.exists() else "call ")
for name in ("a", "b", "c", "d"):
    if ended.get(name, {}).get("status") in ("measured", "left out"):
        continue
    calls.write_text(calls.read_text() + name + " ")
    if name == "c" and calls.read_text().count("call") == 1:
        os._exit(9)
    ended[name] = {"status": "left out" if name == "d" else "measured", "why": "no drive"}
    if name == "b" and calls.read_text().count("call") == 2:
        ended[name]["status"] = "failed"
    journal.write_text(json.dumps(ended))
    pathlib.Path(RESULT).write_text(json.dumps(ended))
"""


@pytest.fixture
def with_jobs(tool, tmp_path, monkeypatch) -> ModuleType:
    """The tool with one stage of jobs, whose results are of now and lie beside its state."""
    script = f"CALLS, RESULT = {str(tmp_path / 'calls')!r}, {str(tmp_path / 'gpu_train.json')!r}"
    command = [sys.executable, "-c", script + JOBS]
    monkeypatch.setattr(tool, "STAGES", [("train", command, 60)])
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "RESULTS", ".")
    return tool


def test_a_stage_has_passed_once_each_of_its_jobs_has(with_jobs, tmp_path, monkeypatch):
    """Method: a stage is cut off in its third job of four; the next call goes on with that one, and
    a job that was left out by name is no failure. Twin: other sources begin anew, and a job that
    fails fails the stage, however its process ended."""
    assert with_jobs.main() == 1 and statuses(with_jobs) == {"train": "failed (9)"}
    monkeypatch.setattr(with_jobs, "_digest", with_jobs._digest)
    assert with_jobs.main() == 0 and statuses(with_jobs) == {"train": "passed"}
    assert (tmp_path / "calls").read_text().split() == ["call", *"abc", "call", *"cd"]
    monkeypatch.setattr(with_jobs, "_digest", lambda: "other sources")
    (tmp_path / "calls").write_text("call ")
    assert with_jobs.main() == 1
    assert statuses(with_jobs)["train"] == "1 of 4 jobs failed, 0 not reached: call again"
    assert (tmp_path / "calls").read_text().split() == ["call", "call", *"abcd"]
    assert with_jobs.main() == 0


def test_a_call_that_is_killed_loses_the_running_job_only(with_jobs, tmp_path, monkeypatch):
    """Method: the tool itself ends in its only stage, in the third job; the next call goes on with
    that one. Twin: without a state that names the sources the jobs begin anew."""
    run = with_jobs._run

    def killed(*args, **more) -> None:
        run(*args, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(with_jobs, "_run", killed)
    with pytest.raises(KeyboardInterrupt):
        with_jobs.main()
    monkeypatch.setattr(with_jobs, "_run", run)
    assert with_jobs.main() == 0
    assert (tmp_path / "calls").read_text().split() == ["call", *"abc", "call", *"cd"]
    (with_jobs.STATE / "state.json").unlink()
    with_jobs.main()
    assert (tmp_path / "calls").read_text().split()[-4:] == ["a", "b", "c", "d"]


def test_results_and_logs_are_in_the_out_folder_although_a_call_is_cut_off(
    with_jobs, tmp_path, monkeypatch
):
    """Twins: a result of an earlier day stays here, and without the variable nothing is copied."""
    old = tmp_path / "old.json"
    old.write_text("{}")
    os.utime(old, (0, 0))
    out = tmp_path / "out"
    monkeypatch.delenv("OUT", raising=False)
    with_jobs.main()
    assert not out.exists()
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(with_jobs, "_digest", lambda: "other sources")
    (tmp_path / "calls").unlink()
    assert with_jobs.main() == 1
    names = {"state.json", "train.jobs.json", "gpu_train.json", "logs.txt"}
    assert {path.name for path in out.iterdir()} == names and len(names) <= 8
    assert list(json.loads((out / "gpu_train.json").read_text())) == ["a", "b"]
    assert "--- train.log" in (out / "logs.txt").read_text()


@pytest.mark.parametrize("card", ["sm_90", "sm_120", ""])
def test_kernels_are_compiled_for_the_card_alone(card, tool, tmp_path, monkeypatch):
    """Method: a build that tells what it was asked for. Twins: without a card, and against the late
    device, it makes no kernels."""
    asked = tmp_path / "asked"
    monkeypatch.delenv("INFINITY_CUDA_ARCH", raising=False)
    monkeypatch.setattr(tool, "_card", lambda: card)
    show = f'echo "$INFINITY_CUDA $INFINITY_CUDA_ARCH" >> {asked}'
    monkeypatch.setattr(tool, "STAGES", [stage("build", show)])
    assert tool.main() == tool.main(["late"]) == 0
    assert asked.read_text().splitlines() == [f"1 {card}" if card else "0 ", "0 "]


def test_stages_without_what_they_need_are_left_out_by_name(tool, monkeypatch):
    """Method: a machine without drives and compute-sanitizer. Twin: with them the stages run."""
    drives: list[str] = []
    glob = tool.Path.glob
    monkeypatch.setattr(
        tool.Path,
        "glob",
        lambda path, pattern: drives if str(path) == "/sys/block" else glob(path, pattern),
    )
    found = {"sanitizer": None}
    monkeypatch.setattr(tool.shutil, "which", lambda name: found["sanitizer"])
    monkeypatch.setattr(tool, "STAGES", [stage("past_host", "true"), stage("sanitizer", "true")])
    assert tool.main() == 0
    assert "NVMe" in statuses(tool)["past_host"] and "left out" in statuses(tool)["sanitizer"]
    drives.append("nvme0n1")
    found["sanitizer"] = "/usr/bin/compute-sanitizer"
    monkeypatch.setattr(tool, "_digest", lambda: "other sources")
    assert tool.main() == 0
    assert set(statuses(tool).values()) == {"passed"}


def test_the_suite_is_the_last_stage_and_the_build_the_first(tool):
    names = [name for name, *_ in tool.STAGES]
    assert names[0] == "build" and names[-1] == "suite"
    assert names.index("train") < names.index("bench") < names.index("past_host")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_calls_on_the_late_device_end_with_every_row(tool):
    """Method: the stage of jobs itself, with models of a few thousand parameters. A call of 30 s,
    of which the late device gets four times as many, and a usual one: each job has figures, or is
    left out by name; the last results have a row for each with figures. Twin: the first call leaves
    jobs to the second."""
    jobs = [job.name for job in gpu_train.plan("folder", tiny=True, rivals=False)]

    def ended(seconds: int) -> tuple[int, dict[str, str]]:
        code = tool.main(["late", "train", "--seconds", str(seconds)])
        journal = tool.STATE.with_name("gpu-late") / "train.jobs.json"
        told = json.loads(journal.read_text())
        return code, {name: each["status"] for name, each in told.items()}

    code, first = ended(30)
    assert code == 1 and "not reached" in first.values() and "measured" in first.values()
    code, second = ended(tool.SECONDS)
    assert code == 0 and set(second) == set(jobs)
    assert set(second.values()) == {"measured", "left out"}
    results = max(tool.STATE.with_name("gpu-late").glob("gpu_train_*.json"))
    rows = {row["name"] for row in json.loads(results.read_text())["rows"]}
    assert rows == {f"gpu_train.{name}" for name, how in second.items() if how == "measured"}
    assert {f"gpu_train.ranks.{kind}" for kind in ("sums", "raises", "killed")} <= rows
