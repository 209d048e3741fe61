"""Launch: runs one rank function of a theme in several processes of this machine, over gloo."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from infinity.errors import UsageError
from infinity.tools.bench.results import Measured
from infinity.tools.bench.rounds import tell
from infinity.tools.bench.settings import Settings

ROOT = Path(__file__).resolve().parent.parent  # of the checkout
RUN_SECONDS = 1800
PORT = 29411  # in a namespace of its own


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a new process that can import `bench`, with ``variables``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | variables


def doubles(name: str = "doubles") -> ModuleType:
    """Imports the doubles of disks, or of networks, that a checkout has for its tests. Raises
    UsageError where there is none."""
    support = str(ROOT / "tests" / "support" / "disks")
    if support not in sys.path:
        sys.path.append(support)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            "modelled disks and networks need a checkout of the repository, built in place:"
            f" {error}"
        ) from error


def launch_each(
    found: Measured, theme: str, module: str, counts: Sequence[int], settings: Settings
) -> Iterator[tuple[int, dict]]:
    """Runs ``module`` in as many processes as ``counts`` says, one count after the other. Yields
    each count, and what the first process told; notes in ``found`` why one told nothing."""
    for ranks in counts:
        tell(f"{theme}: {ranks} processes, {settings.rounds} rounds")
        with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
            told = _launch(module, ranks, folder, settings)
        if isinstance(told, str):
            found.notes.append(f"{theme}.{ranks}: {told}")
        else:
            yield ranks, told


def _launch(module: str, ranks: int, folder: str, settings: Settings) -> dict | str:
    """Runs ``module`` as a script in ``ranks`` processes. Returns what the first one told, or why
    it told nothing."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    command += [*_program(module)[-2:], folder, str(settings.rounds), str(settings.scale)]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    variables = environment(OMP_NUM_THREADS=str(threads))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_SECONDS, env=variables
        )
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no end within {RUN_SECONDS} s"
    except (IndexError, ValueError):
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]


def _program(module: str) -> list[str]:
    """Returns Python's arguments for a module, or for the file of one that no package has."""
    return [module] if module.endswith(".py") else ["-P", "-m", module]


def launch_delayed(
    theme: str,
    module: str,
    ranks: int,
    seconds: float,
    settings: Settings,
    *,
    rate: float = math.inf,
    **variables: str,
) -> dict | str:
    """Runs ``module`` as a script in ``ranks`` processes whose messages to each other take
    ``seconds``, at ``rate`` bytes per second from each. ``variables``: of their environment.
    Returns what the first one told, or why it told nothing."""
    network_of = doubles("doubles.delayed_network")
    if (missing := network_of.why_not()) is not None:
        return missing
    tell(f"{theme}: {ranks} processes, messages of {1e3 * seconds:g} ms, {settings.rounds} rounds")
    with (
        network_of.DelayedNetwork(ranks, seconds, rate) as network,
        tempfile.TemporaryDirectory(dir=settings.folder) as folder,
    ):
        shared = _variables_of_nodes(network.addresses[0], ranks) | variables
        command = [sys.executable, *_program(module), folder]
        command += [str(settings.rounds), str(settings.scale)]
        started = [
            network.start(place, command, environment(**shared, RANK=str(place)))
            for place in range(ranks)
        ]
        try:
            out, err = started[0].communicate(timeout=RUN_SECONDS)
            return json.loads(out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return (err.strip().splitlines() or ["no word"])[-1][:200]
        finally:
            for rank in started:
                with contextlib.ExitStack() as last:
                    last.callback(rank.communicate)
                    if rank.poll() is None:
                        os.killpg(rank.pid, signal.SIGKILL)


def _variables_of_nodes(first: str, ranks: int) -> dict[str, str]:
    """Returns what torchrun would set on nodes of one rank each, but for the rank."""
    meeting = {"MASTER_ADDR": first, "MASTER_PORT": str(PORT), "WORLD_SIZE": str(ranks)}
    return meeting | {"OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


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
