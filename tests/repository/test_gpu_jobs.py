"""Jobs of a borrowed GPU: a call goes on where the one before it ended, and a job that fails takes
no other along."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench import gpu_jobs
from bench.gpu_jobs import FAILED, LEFT_OUT, MEASURED, NOT_REACHED, Job, Journal

# Tells its process and what it was asked, in a file, and does it.
WORKER = """
import json, os, sys, time
for line in sys.stdin:
    system, (log, name, *rest) = json.loads(line)
    print(name, os.getpid(), file=open(log, "a"), flush=True)
    if system == "fails" and not os.path.exists(log + ".mended"):
        print(json.dumps({"why": "no memory", "refused": True}), flush=True)
    elif system == "dies":
        os._exit(9)
    else:
        time.sleep(100 if system == "sleeps" else 0)
        print(json.dumps({"told": {"name": name}}), flush=True)
"""
COMMAND = [sys.executable, "-c", WORKER]


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(gpu_jobs, "START_SECONDS", 0)
    return tmp_path / "log"


def job(log: Path, name: str, system: str = "works", worker: str = "8B", **more) -> Job:
    return Job(name, system, (str(log), name), more.pop("seconds", 20), worker=(worker,), **more)


def ran(log: Path) -> list[str]:
    return [line.split()[0] for line in log.read_text().splitlines()]


def processes(log: Path) -> dict[str, str]:
    return dict(line.split() for line in log.read_text().splitlines())


def test_one_process_runs_the_jobs_of_one_model(log):
    """Twin: the next model has a process of its own. Nothing of either is left."""
    jobs = [job(log, "one"), job(log, "two"), job(log, "other", worker="1.3B")]
    journal = Journal()
    gpu_jobs.run(jobs, journal, 300, command=COMMAND)
    assert list(journal.measured()) == ["one", "two", "other"]
    found = processes(log)
    assert found["one"] == found["two"] != found["other"]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in found.values())


@pytest.mark.parametrize("system, why", [("fails", "no memory"), ("dies", "its process ended")])
def test_a_job_that_fails_takes_no_other_along(system, why, log):
    """Method: the second of three jobs of one process says that it failed, or ends it."""
    jobs = [job(log, "one"), job(log, "two", system), job(log, "three")]
    journal = Journal()
    gpu_jobs.run(jobs, journal, 300, command=COMMAND)
    assert list(journal.measured()) == ["one", "three"]
    assert journal.status("two") == FAILED and journal.ended["two"]["why"].startswith(why)
    assert processes(log)["one"] != processes(log)["three"]


def test_a_job_without_end_is_ended(log, monkeypatch):
    """Method: a job that sleeps, with hardly a limit; its process is gone, and the next one runs in
    another."""
    started, start = [], gpu_jobs.Worker.__init__

    def noted(worker, command) -> None:
        start(worker, command)
        started.append(worker._process.pid)

    monkeypatch.setattr(gpu_jobs.Worker, "__init__", noted)
    journal = Journal()
    jobs = [job(log, "long", "sleeps", seconds=0.2), job(log, "next")]
    gpu_jobs.run(jobs, journal, 300, command=COMMAND)
    assert journal.ended["long"]["why"].startswith("no end within")
    assert journal.status("next") == MEASURED and len(started) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in started)


def test_a_second_call_goes_on_with_the_first_job_without_figures(log, tmp_path):
    """Method: a call ends in the middle of its third job of five, one failed before; the next call
    runs those that were never reached, then the failed one. Twin: a third call runs none."""
    jobs = [
        job(log, "one"),
        job(log, "two", "fails"),
        job(log, "three"),
        job(log, "four"),
        job(log, "five"),
    ]

    def cut_off(ended: Job) -> None:
        if ended.name == "two":
            raise KeyboardInterrupt

    path = tmp_path / "train.jobs.json"
    with pytest.raises(KeyboardInterrupt):
        gpu_jobs.run(jobs, Journal(path), 300, command=COMMAND, ended=cut_off)
    assert {name: each["status"] for name, each in json.loads(path.read_text()).items()} == {
        "one": MEASURED,
        "two": FAILED,
    }
    Path(f"{log}.mended").touch()
    gpu_jobs.run(jobs, Journal(path), 300, command=COMMAND)
    assert ran(log) == ["one", "two", "three", "four", "five", "two"]
    assert set(Journal(path).measured()) == {"one", "two", "three", "four", "five"}
    gpu_jobs.run(jobs, Journal(path), 300, command=COMMAND)
    assert len(ran(log)) == 6


def test_no_job_begins_without_its_time_and_shorter_ones_do(log):
    """Twin: a call with time runs it."""
    jobs, journal = [job(log, "long", seconds=500), job(log, "short")], Journal()
    gpu_jobs.run(jobs, journal, 100, command=COMMAND)
    assert journal.status("long") == NOT_REACHED and ran(log) == ["short"]
    gpu_jobs.run(jobs, journal, 600, command=COMMAND)
    assert ran(log) == ["short", "long"]


def test_what_a_machine_lacks_is_left_out_by_name(log):
    """Twin: of two jobs without room only the one that looks for the limit has its answer."""
    jobs = [
        job(log, "cards", lacks="there is no second card"),
        job(log, "largest", "fails", finds_limit=True),
        job(log, "chosen", "fails"),
    ]
    journal = Journal()
    gpu_jobs.run(jobs, journal, 300, command=COMMAND)
    assert journal.ended["cards"] == {"status": LEFT_OUT, "why": "there is no second card"}
    assert journal.status("largest") == LEFT_OUT and journal.status("chosen") == FAILED
    assert ran(log) == ["largest", "chosen"]
