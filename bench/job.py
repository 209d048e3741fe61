"""job: one training job in a process of its own, by one of several systems: tokens per second and
peak memory.

``python -m bench.job <system> ...`` prints JSON. A system is timed from one step's end to
another's, with its last update at home; the first steps are its warm-up. Only torch and
:mod:`bench.systems` are imported: it runs in the environments of the rivals, which have nothing of
ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import sys
import time
from pathlib import Path

import torch

from .systems import SIZES, SYSTEMS, Job


def main() -> None:
    """Runs one system's job, and prints JSON on standard output."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--size", choices=SIZES, default="134M")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--host-memory", type=int, default=None)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument(
        "--units-at-once", action="store_true", help="all micro-batches unit by unit (ours only)"
    )
    parser.add_argument("--warm-up", type=int, default=2, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--clip", action="store_true")
    args = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        job = Job(args)
        system = SYSTEMS[args.system](job)
        for _ in range(args.warm_up):
            system.step()
        system.wait_idle()
        job.wait()
        start = time.perf_counter()
        for _ in range(args.steps):
            system.step()
        system.wait_idle()
        job.wait()
        seconds = (time.perf_counter() - start) / args.steps
        told = system.told()
        if job.on_gpu:
            told["device_nbytes"] = torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 - _counted_twice()
    totals = torch.tensor([peak, 1.0], dtype=torch.float64)
    first = True
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(totals)
        first = torch.distributed.get_rank() == 0
    peak, ranks = totals.tolist()
    tokens = ranks * args.micro_batches * job.tokens
    if (disk_seconds := told.pop("disk_seconds", 0.0)) > 0:
        told["disk_tokens_per_second"] = tokens * args.steps / disk_seconds
    if first:
        print(json.dumps({"tokens_per_second": tokens / seconds, "peak_nbytes": peak} | told))
    sys.stdout.flush()
    os._exit(0)  # a rival's threads may not end


def _counted_twice() -> float:
    """Counts the bytes of shared memory here that are other ranks' part: of pages that several map,
    each has its share."""
    resident = re.search(r"RssShmem:\s+(\d+)", Path("/proc/self/status").read_text())
    own = re.search(r"Pss_Shmem:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())
    return 1024.0 * (int(resident[1]) - int(own[1])) if resident and own else 0.0


if __name__ == "__main__":
    main()
