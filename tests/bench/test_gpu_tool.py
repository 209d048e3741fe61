"""`make gpu`: stages are run in order, once for the same sources, and nothing of one that takes too
long is left."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from types import ModuleType

import pytest

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
