"""fio: io_uring, fixed buffers, O_DIRECT, huge pages, at the best of six block sizes and depths."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from infinity.tools.bench.rounds import Times

from .tuning import Tuned

NAME = "fio"
SETTINGS = [(block, depth) for block in ("256k", "1m", "4m") for depth in (16, 64)]
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # ours asks for them as well
OPTIONS = ["--ioengine=io_uring", "--fixedbufs=1", "--direct=1", "--output-format=json"]


class Fio:
    """One process per run; what it says itself is its time, without its start."""

    def __init__(self, path: str, nbytes: int):
        self.path, self.nbytes = path, nbytes
        self.tuned, self.commands = Tuned(NAME, SETTINGS), {}

    def run(self, direction: str) -> Times:
        best = self.tuned.of(direction, lambda setting: self._run(direction, *setting).wall[0])
        return self._run(direction, *best)

    def close(self) -> None:
        """Does nothing: nothing is kept."""

    def told(self) -> dict[str, Any]:
        """Returns its version, its chosen command lines, and the seconds of all trials."""
        version = subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout
        commands = {
            way: " ".join(self._command(way, *setting)) for way, setting in self.tuned.best.items()
        }
        told = {"version": version.strip(), "commands": commands, "environment": HUGE_PAGES}
        return told | self.tuned.told()

    def _command(self, direction: str, block: str, depth: int, path: str = "FILE") -> list[str]:
        common = [f"--filename={path}", f"--bs={block}", f"--iodepth={depth}", *OPTIONS]
        half = self.nbytes // 2
        jobs = {
            "read": [("read", 0, self.nbytes)],
            "write": [("write", 0, self.nbytes)],
            "mixed": [("read", 0, half), ("write", half, half)],  # as ours and the raw disk
        }[direction]
        parts = [
            [f"--name={way}", f"--rw={way}", f"--offset={offset}", f"--size={nbytes}"]
            for way, offset, nbytes in jobs
        ]
        return ["fio", *common, *(option for part in parts for option in part)]

    def _run(self, direction: str, block: str, depth: int) -> Times:
        command = self._command(direction, block, depth, self.path)
        said = subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | HUGE_PAGES
        ).stdout
        jobs = json.loads(said)["jobs"]
        ways = [job[way] for job in jobs for way in ("read", "write")]
        seconds = max(1, *(way["runtime"] for way in ways)) / 1e3
        seconds *= self.nbytes / sum(way["io_bytes"] for way in ways)
        share = sum(job["usr_cpu"] + job["sys_cpu"] for job in jobs) / 100
        return Times([seconds], [seconds * share])


def find(path: str, nbytes: int) -> Fio | str:
    """Returns a runner, or why there is none."""
    if shutil.which("fio") is None:
        return "not installed (apt install fio)"
    rival = Fio(path, nbytes)
    try:
        rival._run("read", *SETTINGS[0])
    except (subprocess.CalledProcessError, KeyError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"does not run io_uring here ({said.strip()[:100]!r})"
    return rival
