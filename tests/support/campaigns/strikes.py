"""Strikes a job of `infinity train` on two ranks, and compares what it saves in the end with a job
that was left alone.

    python tests/support/campaigns/strikes.py [--launcher torchrun|slurm|ray] [--strikes 10]
        [--only "the time is over"]

strike      a signal to a process of the job, its disk filled up, or the loss of its machine
return      the first step that a process started after the strike has ended
compared    the bytes of each file in --out, and the loss of each step, also of those taken twice

A job that ended with a failure is started again with the same command: by this program as by a
supervisor, or by Slurm's queue.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "support" / "ranks")]
import local_slurm

EXAMPLES = TESTS.parent / "examples"
PROGRAM = TESTS / "support" / "jobs" / "noted_train.py"
MODEL = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
OPTIONS = (
    "--model model.json --data text.txt --params host --optimizer host --batch-size 2"
    " --sequence-length 16 --lr 0.01 --eval-batches 1 --sample-bytes 0 --threads 1 --timeout 60"
    " --checkpoint disk/saved --checkpoint-every 7 --resume --out out"
).split()
RETURN_SECONDS = 400  # at most
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1",  # so that it also cuts saves off
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join(
        [str(EXAMPLES), str(PROGRAM.parent), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    ),
}


class Job:
    """A job in a folder of its own. ``start`` begins or continues it."""

    def __init__(self, folder: Path, steps: int):
        self.folder, self.notes = folder, folder / "notes"
        (folder / "disk").mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps(MODEL))
        text = "the quick brown fox jumps over the lazy dog\n" * 300
        (folder / "text.txt").write_text(text)
        self.options = [*OPTIONS, "--steps", str(steps)]
        self.command = [str(PROGRAM), str(self.notes), "train", *self.options]

    def steps(self) -> list[dict[str, Any]]:
        """The steps that were noted, by every rank."""
        text = self.notes.read_text() if self.notes.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def losses(self) -> dict[tuple[int, int], set[str]]:
        """The losses of each step on each rank."""
        found: dict[tuple[int, int], set[str]] = {}
        for row in self.steps():
            found.setdefault((row["step"], row["rank"]), set()).add(row["loss"])
        return found

    def saved(self) -> dict[str, bytes]:
        """What the job has saved in the end."""
        return {path.name: path.read_bytes() for path in sorted((self.folder / "out").iterdir())}

    def processes(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """The launchers and the ranks that run now."""
        launchers, ranks = [], []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or [""]
            if str(self.notes) in words and "python" in words[0]:
                is_rank = "train" in words and words.index(str(PROGRAM)) <= 2
                (ranks if is_rank else launchers).append(process)
            elif words[0].startswith("ray::") and "TrainWorker" in words[0]:
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("STRUCK") == str(self.notes):
                        ranks.append(process)
        return launchers, ranks


class Torchrun:
    """Runs jobs by a torchrun each, and starts those again that end with a failure."""

    def __init__(self, folder: Path):
        self.running: dict[Job, subprocess.Popen] = {}

    def start(self, job: Job) -> None:
        with open(job.folder / "log", "a") as log:
            self.running[job] = subprocess.Popen(
                [sys.executable, *self.words(job)],
                cwd=job.folder,
                env=os.environ | VARIABLES | {"STRUCK": str(job.notes)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def words(self, job: Job) -> list[str]:
        """What Python is started with."""
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [*words, "--max-restarts", "3", *job.command]

    def is_done(self, job: Job) -> bool:
        """Whether the job ended well. Starts it again if it ended otherwise."""
        status = self.running[job].poll()
        if status not in (None, 0):
            self.start(job)
        return status == 0

    def lose_machine(self, job: Job) -> None:
        """Kills the launcher and its ranks at once, as a machine that loses its power."""
        for each in [*job.processes()[0], *job.processes()[1]]:
            _send(each, signal.SIGKILL)

    def close(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Ray(Torchrun):
    """Runs jobs by the example for Ray Train, each on a cluster of its own."""

    def words(self, job: Job) -> list[str]:
        return [str(PROGRAM), str(job.notes), "ray", "2", *job.options]


class Slurm:
    """Runs jobs by `slurm.sh` on a local cluster of two machines, with one rank on each."""

    def __init__(self, folder: Path):
        self._stack = contextlib.ExitStack()
        self.cluster = self._stack.enter_context(local_slurm.slurm(folder / "slurm"))
        # A rank that dies within seconds of its start is a strike here, not a wrong option.
        self.cluster.variables |= VARIABLES
        self.cluster.variables |= {"GPUS": "1", "SAVE_SECONDS": "3", "LEAST_SECONDS": "0"}
        self.running: dict[Job, str] = {}

    def start(self, job: Job) -> None:
        port = str(local_slurm.free_ports(1)[0])
        self.cluster.variables["PORT"] = port
        options = ("--parsable", "--gpus-per-node=0", "--cpus-per-task=4")
        places = ("--chdir", job.folder, "--output", job.folder / "log")
        self.running[job] = self.cluster.run(
            "sbatch", *options, *places, EXAMPLES / "slurm.sh", *job.command
        )

    def is_done(self, job: Job) -> bool:
        """Whether the job ended well."""
        state = self.cluster.state(self.running[job])["JobState"]
        assert state not in ("FAILED", "CANCELLED", "TIMEOUT"), (job.folder / "log").read_text()[
            -3000:
        ]
        return state == "COMPLETED"

    def lose_machine(self, job: Job) -> None:
        """Tells the controller that a machine of the job is down."""
        node = f"nodename={self.cluster.nodes[1]}"
        self.cluster.run("scontrol", "update", node, "state=down", "reason=struck")
        time.sleep(1)
        with contextlib.suppress(AssertionError):  # it has come back by itself
            self.cluster.run("scontrol", "update", node, "state=resume")

    def ask_for_a_save(self, job: Job) -> None:
        """Sends the signal that comes before the end of the job's time."""
        self.cluster.run("scancel", "--signal=USR1", "--batch", self.running[job])

    def close(self) -> None:
        self._stack.close()


LAUNCHERS = {"torchrun": Torchrun, "slurm": Slurm, "ray": Ray}


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def strikes_of(launcher: Any, rng: random.Random) -> dict[str, Callable[[Job], Any]]:
    """Returns the strikes by their names."""

    def one(which: int, number: int) -> Callable[[Job], Any]:
        def strike(job: Job) -> None:
            if found := job.processes()[which]:
                _send(rng.choice(found), number)

        return strike

    found = {
        "SIGKILL to a rank": one(1, signal.SIGKILL),
        "SIGTERM to the launcher": one(0, signal.SIGTERM),
        "SIGKILL to the launcher": one(0, signal.SIGKILL),
        "SIGTERM to a rank": one(1, signal.SIGTERM),
        "a machine is lost": launcher.lose_machine,
    }
    if hasattr(launcher, "ask_for_a_save"):
        found["the time is over"] = launcher.ask_for_a_save
    return found


@contextlib.contextmanager
def small_disk(job: Job) -> Iterator[Callable[[Job], Any] | None]:
    """Mounts a small disk for the job's checkpoints. Gives a strike that fills it until a save has
    failed; None where nothing can be mounted."""
    disk = job.folder / "disk"
    if os.system(f"mount -t tmpfs -o size=16m none {disk} 2> /dev/null") != 0:
        yield None
        return

    def fill(job: Job) -> None:
        before = {each.pid for each in job.processes()[1]}
        with open(disk / "others", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        end = time.monotonic() + 60
        while time.monotonic() < end and before & {each.pid for each in job.processes()[1]}:
            time.sleep(0.1)
        (disk / "others").unlink()

    try:
        yield fill
    finally:
        os.system(f"umount --lazy {disk}")


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    """Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.2)


def strike(
    folder: Path,
    *,
    launcher: str,
    strikes: int,
    seed: int,
    jobs: int = 1,
    steps: int = 240,
    only: str | None = None,
) -> dict[str, Any]:
    """Strikes ``jobs`` jobs at once, ``strikes`` times in all. Returns the seconds of each return,
    by the kind of its strike. ``only``: the one kind; None: all in turns. Raises AssertionError for
    a bit that differs."""
    rng = random.Random(seed)
    runs = LAUNCHERS[launcher](folder)
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(runs.close)
        alone = Job(folder / "alone", steps)
        by_torchrun = Torchrun(folder)  # whose bits are those of every launcher
        stack.callback(by_torchrun.close)
        by_torchrun.start(alone)
        wait_until(lambda: by_torchrun.is_done(alone), 600)
        struck = [Job(folder / f"struck-{number}", steps) for number in range(jobs)]
        fills = [stack.enter_context(small_disk(job)) for job in struck]
        for job in struck:
            runs.start(job)
        kinds = strikes_of(runs, rng)
        names = [*kinds, *(["the disk is full"] if all(fills) else [])]
        if only is not None:
            assert only in names, f"{only!r} is none of {names}"
            names = [only]
        for job in struck:
            wait_until(lambda job=job: runs.is_done(job) or bool(job.steps()), RETURN_SECONDS)
        for number in range(strikes // jobs):
            name = names[number % len(names)]
            time.sleep(rng.uniform(0.0, 1.5))  # some steps, or a part of one
            began = {}
            for job, fill in zip(struck, fills):
                began[job] = time.time()
                (fill if name not in kinds else kinds[name])(job)
            for job in struck:
                took = _wait_for_return(runs, job, began[job]) - began[job]
                seconds.setdefault(name, []).append(round(took, 1))
                at = max(row["step"] for row in job.steps())
                print(f"{number + 1}: {name}, {took:.1f} s, step {at}", flush=True)
        for job in struck:
            wait_until(lambda job=job: runs.is_done(job), 600)
            compare(alone, job)
    every = [each for found in seconds.values() for each in found]
    return {"seconds": seconds, "median": statistics.median(every), "most": max(every)}


def _wait_for_return(runs: Any, job: Job, began: float) -> float:
    """Returns when a process that was started after ``began`` has ended its first step."""
    before = {row["pid"] for row in job.steps() if row["time"] <= began}
    found: list[float] = []

    def has_returned() -> bool:
        assert not runs.is_done(job), "the job was done before its strike: give more steps"
        found[:] = [row["time"] for row in job.steps() if row["pid"] not in before]
        return bool(found)

    wait_until(has_returned, RETURN_SECONDS)
    return found[0]


def compare(alone: Job, struck: Job) -> None:
    assert struck.saved() == alone.saved(), f"{struck.folder}: other bytes"
    assert struck.losses() == alone.losses(), f"{struck.folder}: other losses, or other data"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n\n")[0])
    parser.add_argument("--launcher", choices=LAUNCHERS, default="torchrun")
    parser.add_argument("--strikes", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="KIND", help="of a strike, as in the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(strike(Path(folder), **vars(args)), indent=1))


if __name__ == "__main__":
    main()
