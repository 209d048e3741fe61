"""gpu jobs: a list of jobs in the order of their worth, which a later call goes on with.

job        one configuration of one system, whose figures are a row
journal    a file that tells how each job ended: measured, left out, failed, or not reached
worker     a process that runs the jobs of one model in turn. After one that failed, a new one goes
           on with the next

A call runs what was never tried first, then what failed. A job begins only if there is time for it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .launch import environment

MEASURED, LEFT_OUT, FAILED, NOT_REACHED = "measured", "left out", "failed", "not reached"
START_SECONDS = 10  # of a worker: imports, a context on the card
LIMIT = 2.5  # times the time that a job is expected to take: then it has no end
NO_TIME = "no time left: call again"


@dataclass(frozen=True)
class Job:
    """``seconds``: that it is expected to take, without its worker's start. ``lacks``: what this
    machine has not, so that the job is left out. ``worker``: jobs of equal ones share a process.
    ``finds_limit``: a model without room here is an answer, and no failure."""

    name: str
    system: str
    options: tuple[str, ...] = ()
    seconds: float = 30
    lacks: str = ""
    worker: tuple[str, ...] = ()
    finds_limit: bool = False


class Journal:
    """How each job ended, by name: ``status`` with ``told`` or ``why``. In a file, if there is a
    ``path``: a call that is cut off loses the running job only."""

    def __init__(self, path: Path | None = None):
        self._path = path
        self.ended: dict[str, dict] = {}
        if path is not None and path.exists():
            self.ended = json.loads(path.read_text())

    def note(self, name: str, status: str, **what: object) -> None:
        """Notes how job ``name`` ended."""
        self.ended[name] = {"status": status, **what}
        if self._path is not None:
            written = self._path.with_suffix(".new")
            written.write_text(json.dumps(self.ended, indent=1))
            os.replace(written, self._path)

    def status(self, name: str) -> str:
        """Returns how job ``name`` ended, NOT_REACHED if it never began."""
        return self.ended.get(name, {}).get("status", NOT_REACHED)

    def measured(self) -> dict[str, dict]:
        """Returns what the measured jobs told, by name."""
        return {
            name: each["told"] for name, each in self.ended.items() if each["status"] == MEASURED
        }


class Worker:
    """A process that takes a job as a line of JSON, and answers with one: ``told``, or ``why`` it
    told nothing. It ends with its standard input, and with this process's group."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def run(self, job: Job, seconds: float) -> dict:
        """Runs ``job`` and returns its answer. ``over`` in it: no answer came within
        ``seconds``."""
        try:
            print(json.dumps([job.system, job.options]), file=self._process.stdin, flush=True)
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return {"why": f"no end within {seconds:.0f} s", "over": True}
        except BrokenPipeError:
            line = ""
        if not line:
            return {"why": f"its process ended with status {self._process.wait()}"}
        return json.loads(line)

    def close(self) -> None:
        """Ends the process and all that it started."""
        try:
            started = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        self._process.kill()
        for each in started:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                pass
        self._process.wait()
        self._process.stdin.close()


def run(
    jobs: Sequence[Job],
    journal: Journal,
    seconds: float,
    *,
    command: Sequence[str] = (sys.executable, "-P", "-m", "bench.gpu_train"),
    ended: Callable[[Job], None] = lambda job: None,
) -> None:
    """Runs what is left of ``jobs`` within ``seconds``, and notes in ``journal`` how each ended.
    ``ended`` is called after each one that ran."""
    deadline = time.monotonic() + seconds
    for job in jobs:
        if job.lacks:
            journal.note(job.name, LEFT_OUT, why=job.lacks)
    left = [job for job in jobs if not job.lacks and journal.status(job.name) != MEASURED]
    left.sort(key=lambda job: journal.status(job.name) == FAILED)
    worker: Worker | None = None
    running: tuple[str, ...] = ()
    try:
        for job in left:
            is_new = worker is None or job.worker != running
            start = START_SECONDS if is_new else 0
            if deadline - time.monotonic() < start + job.seconds:
                if journal.status(job.name) != FAILED:
                    journal.note(job.name, NOT_REACHED, why=NO_TIME)
                continue
            if is_new:
                if worker is not None:
                    worker.close()
                worker, running = Worker(command), job.worker
            limit = LIMIT * (start + job.seconds)
            left_seconds = deadline - time.monotonic()
            answer = worker.run(job, min(limit, left_seconds))
            if "told" in answer:
                journal.note(job.name, MEASURED, told=answer["told"])
            else:
                worker.close()
                worker = None
                if answer.get("over") and left_seconds < limit:
                    journal.note(job.name, NOT_REACHED, why=NO_TIME)
                elif answer.get("refused") and job.finds_limit:
                    journal.note(job.name, LEFT_OUT, why=answer["why"])
                else:
                    journal.note(job.name, FAILED, why=answer["why"])
            ended(job)
    finally:
        if worker is not None:
            worker.close()
