"""Launch: runs one rank function of a theme in several processes of this machine, over gloo."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .results import Measured
from .settings import Settings

RUN_SECONDS = 1800


def launch_each(found: Measured, theme: str, module: str, counts: Sequence[int], settings: Settings) -> Iterator[tuple[int, dict]]:
    """Runs ``module`` in as many processes as ``counts`` says, one count after the other. Yields each count, and what the first process
    told; notes in ``found`` why one told nothing."""
    for ranks in counts:
        with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
            told = _launch(module, ranks, folder, settings)
        if isinstance(told, str):
            found.notes.append(f"{theme}.{ranks}: {told}")
        else:
            yield ranks, told


def _launch(module: str, ranks: int, folder: str, settings: Settings) -> dict | str:
    """Runs ``module`` as a script in ``ranks`` processes. Returns what the first one told, or why it told nothing."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", module, folder, str(settings.rounds), str(settings.scale)]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, env=environment)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no end within {RUN_SECONDS} s"
    except (IndexError, ValueError):
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]


def run_as_rank(measure: Callable[[str, int, float], dict[str, Any]]) -> None:
    """Runs one rank of a launch with its folder, rounds and scale; the first one prints JSON."""
    import torch.distributed as dist

    folder, rounds, scale = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    with contextlib.redirect_stdout(sys.stderr):
        dist.init_process_group("gloo")
        told = measure(folder, rounds, scale)
    if dist.get_rank() == 0:
        print(json.dumps(told))
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
