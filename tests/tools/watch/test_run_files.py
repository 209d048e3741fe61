"""Run files: replaced at once, read as data, and removed only where they are provably ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from infinity.core.machine.kernel import process_space
from infinity.tools.watch import run_files


def status(**changes) -> dict:
    process = run_files.this_process()
    return {"pid": process.pid, "started": process.started, "host": os.uname().nodename} | changes


def test_what_ranks_write_is_read_in_their_order(tmp_path):
    for rank in (10, 2, 0):
        run_files.write(tmp_path, run_files.STATUS, rank, status(rank=rank))
    assert [each["rank"] for each in run_files.read(tmp_path, run_files.STATUS)] == [0, 2, 10]


def test_what_is_no_file_of_ours_is_passed_over(tmp_path):
    """Half a file, a link, a list and a pipe are no status."""
    (tmp_path / "status-rank0.json").write_text('{"pid": 1')
    (tmp_path / "status-rank1.json").write_text("[1]")
    (tmp_path / "status-rank2.json").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "status-rank3.json")
    assert not list(run_files.read(tmp_path, run_files.STATUS))


def test_a_run_is_over_when_its_process_is(tmp_path):
    """Method: a child's number and start; also with its number given to another process, told by
    another start."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = run_files.start_of(child.pid)
    run_files.write(tmp_path, run_files.STATUS, 0, status(pid=child.pid, started=started))
    assert run_files.is_running(tmp_path)
    child.communicate(b"\n")
    assert not run_files.is_running(tmp_path)
    run_files.write(
        tmp_path, run_files.STATUS, 0, status(started=run_files.this_process().started + 1)
    )
    assert not run_files.is_running(tmp_path)


@pytest.mark.parametrize(
    ("name", "space", "known"),
    [
        ("own", "own", True),
        ("renamed", "own", True),
        ("own", "another", False),
        ("own", "", True),
        ("renamed", None, False),
    ],
)
def test_processes_of_another_container_are_not_looked_for(
    name, space, known, tmp_path, monkeypatch
):
    """Method: a process that is over. A container with our host's name has numbers of its own, so
    it counts as running; a host that is called otherwise since then has the same ones. Files of
    older versions name the host alone."""
    told = {"own": process_space(), "another": "another-boot pid:[1]"}.get(space, space)
    host = {"host": os.uname().nodename if name == "own" else "as it was called"}
    run_files.write(
        tmp_path,
        run_files.STATUS,
        0,
        status(started=1, **host, **({} if told is None else {"space": told})),
    )
    assert run_files.is_running(tmp_path) is not known
    run_files.write(
        tmp_path, run_files.STATUS, 0, status(**host, **({} if told is None else {"space": told}))
    )
    assert run_files.is_running(tmp_path)
    monkeypatch.setattr(
        run_files, "process_space", lambda: ""
    )  # a system that does not tell is none of those that did
    run_files.write(tmp_path, run_files.STATUS, 0, status(started=1, space="another-boot pid:[1]"))
    assert run_files.is_running(tmp_path)


@pytest.mark.parametrize("moment", ["read", "stat"])
def test_a_run_that_another_job_removes_meanwhile_ends_nothing(moment, tmp_path, monkeypatch):
    """Method: as this job looks for old runs, another one removes the second of three, before or
    after its status was read."""
    for number in range(3):
        run_files.write(tmp_path / f"run{number}", run_files.STATUS, 0, status(started=1))
    read = run_files.read

    def removed(folder, kind):
        gone = folder.name == "run1"
        if gone and moment == "read":
            shutil.rmtree(folder)
        found = list(read(folder, kind))
        if gone and moment == "stat":
            shutil.rmtree(folder)
        return iter(found)

    monkeypatch.setattr(run_files, "read", removed)
    assert sorted(folder.name for folder in run_files.runs(tmp_path)) == ["run0", "run2"]
    run_files.remove_old(tmp_path, keep=0)


def test_old_runs_go_and_nobody_elses(tmp_path):
    """Method: five runs that are over, one that runs, one with a stranger's file, and a stranger's
    folder; two are kept."""
    for number in range(5):
        folder = tmp_path / f"run{number}"
        run_files.write(folder, run_files.STATUS, 0, status(started=1))
        os.utime(folder, (number, number))
    run_files.write(tmp_path / "alive", run_files.STATUS, 0, status())
    run_files.write(tmp_path / "mixed", run_files.STATUS, 0, status(started=1))
    (tmp_path / "mixed" / "diary.txt").write_text("mine")
    (tmp_path / "strange").mkdir()
    for old in ("alive", "mixed"):
        os.utime(tmp_path / old, (0, 0))
    run_files.remove_old(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "alive",
        "mixed",
        "run3",
        "run4",
        "strange",
    ]


def test_processes_of_one_number_have_jobs_of_their_own(monkeypatch):
    """Method: the same number on a host of the same name, as containers have them, started at
    another time; the twin, at the same one."""
    names = []
    for started in (7, 8, 8):
        monkeypatch.setattr(run_files, "start_of", lambda pid, started=started: started)
        names.append(run_files.job_name())
    assert names[0] != names[1] == names[2]
