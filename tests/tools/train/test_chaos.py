"""Chaos: `infinity train` killed at random moments, resumed each time, to the bits of a run that
was left alone.

Every launch is a fork of one process that has imported everything, so that most moments fall into
training, saving and resuming. ``INFINITY_CHAOS_KILLS`` sets how many kills the long test makes
(200).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import prepared
import pytest
from strikes import MODEL

pytest.importorskip("transformers")
pytest.importorskip("rich")

LONGEST = 1.6  # seconds until a launch is killed

# Argument: folder, kills, seed. Prints one JSON object.
PROGRAM = """
import json, os, random, signal, sys, time
import torch, transformers, rich.progress
import infinity, infinity.tools.cli, infinity.tools.train.train
folder, kills, longest, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
os.chdir(folder)
for name in infinity.__all__:
    getattr(infinity, name)
OPTIONS = ["--model", "model.json", "--data", "text", "--params", "nvme", "--optimizer", "nvme", "--nvme-path", "nvme", "--steps", sys.argv[5],
           "--batch-size", "2", "--sequence-length", "16", "--lr", "0.01", "--eval-batches", "1", "--sample-bytes", "1", "--threads", "1"]

def launch(*more):
    pid = os.fork()
    if pid == 0:
        with open("log", "a") as log:
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        status = 70
        try:
            status = infinity.tools.cli.main(["train", *OPTIONS, *more])
        except KeyboardInterrupt:
            status = 130
        finally:
            sys.stdout.flush()
            os._exit(status or 0)
    return pid

def end(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

assert end(launch("--out", "whole")) == 0, open("log").read()[-3000:]
rng, made, launches, statuses = random.Random(seed), 0, 0, {}
while True:
    launches += 1
    pid, moment = launch("--checkpoint", "saved", "--checkpoint-every", "3", "--resume", "--out", "resumed"), time.monotonic()
    if made < kills:
        time.sleep(rng.uniform(0.0, longest))
        try:
            os.kill(pid, chosen := rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            made += 1
        except ProcessLookupError:
            pass
    status = end(pid)
    statuses[status] = statuses.get(status, 0) + 1
    assert status in (0, 130, 143, -2, -9, -15), (status, open("log").read()[-3000:])
    if status == 0 and made < kills:  # done before its time: once more from nothing
        import shutil
        shutil.rmtree("saved"), shutil.rmtree("resumed")
    elif status == 0:
        break
print(json.dumps({"kills": made, "launches": launches, "statuses": statuses, "left": os.listdir("nvme")}))
"""  # noqa: E501


def chaos(folder: Path, kills: int, steps: int, seed: int) -> dict:
    (folder / "text").mkdir(parents=True)
    (folder / "nvme").mkdir()
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "text" / "0.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    command = ["-c", PROGRAM, folder, kills, LONGEST, seed, steps]
    done = prepared.run(*command, seconds=3600, imports=prepared.LANGUAGE_MODELS)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    whole, resumed = (folder / name / "model.safetensors" for name in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()
    assert found["left"] == [], "swap files of killed jobs are left"
    return found


def test_a_few_kills(tmp_path):
    """Method: two kills at random moments; the same file of weights in the end, and nothing left on
    the disk."""
    assert chaos(tmp_path, 2, 40, seed=1)["kills"] == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills(tmp_path):
    """Method: the same with 200 kills (``INFINITY_CHAOS_KILLS``): SIGKILL, SIGTERM and SIGINT."""
    kills = int(os.environ.get("INFINITY_CHAOS_KILLS", "200"))
    assert chaos(tmp_path, kills, 400, seed=7)["kills"] == kills
