"""`infinity train` that notes each step in a file: when it ended, in which process, and its loss.

A process ends, with a save, after the step that ENDS_AFTER names.

Started as the command line is, after the file's name: `noted_train.py NOTES train --model ...`; or
on Ray Train as the example is: `noted_train.py NOTES ray 2 --model ...`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from infinity.tools.cli import main
from infinity.tools.train import job as of_train

STEP_SECONDS = 0.1  # at least, so that most strikes come between two saves


def note_steps(path: str) -> None:
    """Has every step of this process noted in ``path``, a line of JSON each."""
    plain = of_train.train_step

    def noted(job: Any, step: int) -> float:
        loss = plain(job, step)
        time.sleep(STEP_SECONDS)
        row = {"time": time.time(), "pid": os.getpid(), "rank": job.ranks.rank}
        with open(path, "a") as file:  # one write, which others' do not split
            file.write(json.dumps(row | {"step": step, "loss": loss.hex()}) + "\n")
        if str(step) == os.environ.get("ENDS_AFTER"):
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    of_train.train_step = noted


def run_on_ray(notes: str, words: list[str]) -> None:
    """Runs the example, whose workers note their steps."""
    import ray_train

    plain = ray_train.train

    def noted(job: dict[str, Any]) -> None:
        import noted_train

        noted_train.note_steps(notes)
        plain(job)

    ray_train.train, sys.argv[1:] = noted, words
    ray_train.main()


if __name__ == "__main__":
    if sys.argv[2] == "ray":
        run_on_ray(sys.argv[1], sys.argv[3:])
    else:
        note_steps(sys.argv[1])
        sys.exit(main(sys.argv[2:]))
