"""Two ranks, of which rank 1 dies in their first start, and rank 0 is late in the next.

``mine``: they come together as `infinity train` does; ``plain``: as torch does by itself;
``script``: by the function for scripts. ``early`` ranks die before they have come together. Each
that has met tells its start and the mean of 0 and 1.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

import infinity
from infinity.tools.train.ranks import Ranks

rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
how = sys.argv[1]


def die() -> None:
    if rank == 1 and start == 0:
        os.kill(os.getpid(), signal.SIGKILL)


if rank == 0 and start == 1:
    time.sleep(4)  # so that rank 1 looks for it before it is there
if how == "early":
    die()
if how == "plain":
    dist.init_process_group("gloo")
if how == "script":
    infinity.parallel.init_process_group("gloo", "env://", timedelta(seconds=60))
ranks = Ranks(60)
print(f"start {start}: {ranks.mean(float(rank))}", flush=True)
die()
if start == 0:
    ranks.mean(0.0)
ranks.end()
if dist.is_initialized():
    dist.destroy_process_group()
