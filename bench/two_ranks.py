"""two_ranks: collectives of one unit over two gloo ranks, which are processes of their own.

A rank prints "ready" once it has met the other. For each line on standard input, the name of a job
and a number of elements, it does that job a few times and prints the line; it ends with its input.

gather, reduce              by the engine: of a weight (ZeRO-3), of its gradient (ZeRO-2)
all_gather, reduce_scatter  of the same bytes, by torch.distributed
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO

from .launch import environment

RANKS = 2
SECONDS = 60  # until a rank gives the other up
TIMES = 4  # of a collective in a turn
CEILINGS = {"gather": "all_gather", "reduce": "reduce_scatter"}
SHARD = {"gather": "parameters", "reduce": "gradients"}


class TwoRanks(contextlib.AbstractContextManager["TwoRanks"]):
    """Two processes that do collectives as they are told. Raises RuntimeError with what a rank
    printed, if one fails."""

    def __init__(self, folder: str):
        self._log = Path(folder) / "log"
        command = [sys.executable, "-P", "-m", __name__, folder]
        with self._log.open("w") as log:
            self.processes = [
                subprocess.Popen(
                    command,
                    env=environment(RANK=str(rank), OMP_NUM_THREADS="1"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
                for rank in range(RANKS)
            ]
        try:
            self._hear("ready")
        except BaseException:
            self.__exit__()
            raise

    def turn(self, name: str, count: int) -> None:
        """Does ``name`` of ``count`` bf16 elements a few times on both ranks."""
        line = f"{name} {count}"
        for rank in self.processes:
            print(line, file=_pipe(rank.stdin), flush=True)
        self._hear(line)

    def _hear(self, word: str) -> None:
        for rank in self.processes:
            if (told := _pipe(rank.stdout).readline().strip()) != word:
                raise RuntimeError(f"a rank said {told!r}: {self._log.read_text()[-2000:]}")

    def __exit__(self, *error: object) -> None:
        for rank in self.processes:
            with contextlib.suppress(OSError):
                _pipe(rank.stdin).close()
        for rank in self.processes:
            try:
                rank.wait(SECONDS)
            except subprocess.TimeoutExpired:
                rank.kill()
            _pipe(rank.stdout).close()
            rank.wait()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def main(folder: str) -> None:
    """Runs one rank."""
    import torch.distributed as dist

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=int(os.environ["RANK"]),
        world_size=RANKS,
        timeout=timedelta(seconds=SECONDS),
    )
    print("ready", file=answers, flush=True)
    with contextlib.ExitStack() as last:
        last.callback(dist.destroy_process_group)
        jobs: dict[str, Callable[[], object]] = {}
        for line in map(str.strip, sys.stdin):
            if line not in jobs:
                name, count = line.split()
                jobs[line] = _job(name, int(count), folder, last)
            for _ in range(TIMES):
                jobs[line]()
            print(line, file=answers, flush=True)


def _job(name: str, count: int, folder: str, last: contextlib.ExitStack) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    from .one_unit import OneUnit

    if name in SHARD:
        # Weights are sent, as between machines.
        unit = OneUnit(count, "host", folder, shard=SHARD[name], share_homes=False)
        last.callback(unit.close)
        return {"gather": unit.gather, "reduce": unit.set}[name]
    whole = torch.zeros(count, dtype=torch.bfloat16)
    mine = torch.zeros(count // RANKS, dtype=torch.bfloat16)
    jobs = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, mine),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(mine, whole),
    }
    return jobs[name]


if __name__ == "__main__":
    main(sys.argv[1])
