"""A spot machine that is lost, as `infinity cost` plans it.

Words used here:

**warning**: SIGTERM. **end**: SIGKILL, the notice later.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from infinity.tools.cli import main

TINY = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 32, "n_embd": 16}
TINY |= {"n_layer": 2, "n_head": 2}
JOB = (
    "train --model model.json --data text.txt --batch-size 2 --sequence-length 16 --dtype fp32"
    " --eval-batches 1 --device cpu --checkpoint-every 40 --json"
).split()
NOTICE = 2.0  # seconds


def killed(place, folder: str, *, notice: bool) -> int:
    """Starts a job, ends it after 100 steps, and returns the steps that it had told of."""
    words = [sys.executable, "-m", "infinity", *JOB, "--steps", "2000", "--checkpoint", folder]
    with subprocess.Popen(
        words, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as job:
        steps = 0
        for line in job.stderr:
            if found := re.match(r"step (\d+)/", line):
                steps = int(found[1])
            if steps >= 100:
                break
        if notice:
            os.kill(job.pid, signal.SIGTERM)
            try:
                _, rest = job.communicate(timeout=NOTICE)
                steps = int(re.search(r"Interrupted after step (\d+)", rest)[1])
            except subprocess.TimeoutExpired:
                pass
        job.kill()
    return steps


@pytest.mark.slow
def test_a_warned_job_loses_no_step_and_another_at_most_an_interval(tmp_path, monkeypatch, capsys):
    """Method: a job's own report is the profile; the plan says that a notice of 2 s suffices. A job
    that is warned and ended goes on in another folder after its last step. Twin: one that is ended
    without a warning goes on at its last save, less than 40 steps before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    (tmp_path / "prices.csv").write_text(
        "cloud,zone,instance,gpu,count,market,time,dollars_per_hour\nbox,a,m,cpu,1,spot,,1\n"
    )
    assert main([*JOB, "--steps", "50", "--checkpoint", "own"]) == 0
    (tmp_path / "run.json").write_text(capsys.readouterr().out)
    cost = "cost --profile run.json --prices prices.csv --tokens 1M --between-failures 6h --json"
    assert main([*cost.split(), "--notice", f"{NOTICE}s"]) == 0
    assert json.loads(capsys.readouterr().out)["notice_suffices"]
    for notice in (True, False):
        here, there = tmp_path / f"here{notice}", tmp_path / f"there{notice}"
        steps = killed(tmp_path, here.name, notice=notice)
        here.rename(there)
        end = ["--steps", str(steps + 200), "--resume", "--checkpoint", there.name]
        assert main([*JOB, *end]) == 0
        first = json.loads(capsys.readouterr().out)["first_step"]
        assert first == steps if notice else first > steps - 40 and first % 40 == 0
