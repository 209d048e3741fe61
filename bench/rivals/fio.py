"""fio: io_uring, fixed buffers, O_DIRECT, at the best of a few block sizes and depths."""

from __future__ import annotations

import json
import shutil
import subprocess

from infinity.tools.bench.rounds import Times

NAME = "fio"
SETTINGS = [("1m", 16), ("1m", 64), ("4m", 16), ("4m", 64)]
WAYS = {"read": "read", "write": "write", "mixed": "rw"}


class Fio:
    """One process per run; what it says itself is its time, without its start."""

    def __init__(self, path: str, nbytes: int):
        self.path, self.nbytes = path, nbytes
        self.best: dict[str, tuple[str, int]] = {}

    def run(self, direction: str) -> Times:
        if direction not in self.best:
            self.best[direction] = min(
                SETTINGS, key=lambda setting: self._run(direction, *setting).wall[0]
            )
        return self._run(direction, *self.best[direction])

    def close(self) -> None:
        """Does nothing: nothing is kept."""

    def _run(self, direction: str, block: str, depth: int) -> Times:
        command = [
            "fio",
            "--name=rival",
            f"--filename={self.path}",
            f"--rw={WAYS[direction]}",
            f"--bs={block}",
            f"--iodepth={depth}",
            f"--size={self.nbytes}",
            "--ioengine=io_uring",
            "--fixedbufs=1",
            "--direct=1",
            "--output-format=json",
        ]
        job = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )["jobs"][0]
        seconds = max(job["read"]["runtime"], job["write"]["runtime"], 1) / 1e3
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        seconds *= self.nbytes / moved
        return Times([seconds], [seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100])


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
