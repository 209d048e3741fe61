"""end to end: training jobs in processes of their own (:mod:`bench.job`), by several systems that
take turns: tokens per second and peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import paired
from infinity.tools.bench.settings import Settings

from .launch import environment
from .rivals.environments import variables
from .rivals.table import rival_of
from .systems import make_model

ROUNDS = 2
TRAIN_SYSTEMS = ["compute", "plain", "infinity_device", "infinity_host", "infinity_nvme"]
TRAIN_SYSTEMS += ["fsdp2_cpu", "deepspeed_cpu", "deepspeed_nvme", "deepspeed_nvme_tuned"]


def run(
    system: str,
    options: list[str],
    *,
    ranks: int = 1,
    timeout: float = 900,
    python: str = sys.executable,
) -> dict | str:
    """Runs one job of ``ranks`` processes by ``python``, of the environment of a rival perhaps.
    Returns what it printed, or the reason where the system cannot do it."""
    command = [python, "-P", "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    own = variables(python)
    if ranks > 1:
        own["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    try:
        done = subprocess.run(
            [*command, "bench.job", system, *options],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment(**own),
        )
    except subprocess.TimeoutExpired:
        return f"no end within {timeout:.0f} s"
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]


def measure(settings: Settings) -> Measured:
    """Measures rows ``train.<system>`` (tokens/s), ``train.<system>.peak`` and, of some, ``.held``
    (GiB)."""
    return turns(settings, TRAIN_SYSTEMS, _size(settings), ROUNDS)


def measure_ways(settings: Settings) -> Measured:
    """Measures training with clipping (``train.clip``) and with eight micro-batches
    (``train.micro8``; ``train.units8`` runs them unit by unit), and the speed against the host
    budget.
    """
    ours = ["infinity_host", "infinity_nvme"]
    size, few = (
        _size(settings),
        ["compute", "plain", *ours, "deepspeed_cpu", "deepspeed_nvme_tuned"],
    )
    found = turns(settings, few, size, 1, options=["--clip"], name=".clip")
    eight = ["--micro-batches", "8", "--warm-up", "1", "--steps", "2"]
    found.add(turns(settings, few[:4], size, 1, options=eight, name=".micro8"))
    found.add(turns(settings, ours, size, 1, options=[*eight, "--units-at-once"], name=".units8"))
    found.series["train.budget"] = _budgets(settings, "tiny" if size == "tiny" else "50M")
    return found


def measure_large(settings: Settings) -> Measured:
    """Measures a model of 1 B parameters, by the systems that it does not outgrow here."""
    systems = ["compute", "plain", "infinity_host", "infinity_nvme", "deepspeed_nvme_tuned"]
    size = "1B" if settings.scale >= 1 else _size(settings)
    return turns(
        settings, systems, size, 1, options=["--warm-up", "1", "--steps", "2"], theme="train_1b"
    )


RANK_SYSTEMS = [
    "infinity_device",
    "infinity_host",
    "infinity_host_sent",
    "fsdp2",
    "fsdp2_cpu",
    "deepspeed_cpu",
]


def measure_ranks(settings: Settings) -> Measured:
    """Measures rows ``ranks.<processes>.<system>`` (tokens/s) and their peaks (GiB), for 1, 2 and 4
    processes of this machine, over gloo. Both are of all ranks together; the processes share the
    machine's cores. ``infinity_host_sent`` is ours with weights sent between the ranks, which read
    each other's in shared memory else."""
    found = Measured([])
    for ranks in (1, 2, 4):
        options = ["--batch", "2", "--steps", "4"]
        found.add(
            turns(
                settings,
                RANK_SYSTEMS,
                "50M",
                ROUNDS,
                options=options,
                name=f".{ranks}",
                ranks=ranks,
                theme="ranks",
            )
        )
    return found


def _size(settings: Settings) -> str:
    return "134M" if settings.scale >= 1 else "50M" if settings.scale >= 0.1 else "tiny"


SHARES = (0.25, 0.4, 0.6, 0.8, 1.1)  # of the training state


def _budgets(settings: Settings, size: str) -> list[dict]:
    """Tokens per second of a model with everything at home on NVMe, against the host budget."""
    state_nbytes = 12 * sum(param.numel() for param in make_model(size).parameters())
    points = []
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        for share in SHARES:
            options = [
                "--size",
                size,
                "--folder",
                folder,
                "--host-memory",
                str(round(share * state_nbytes)),
            ]
            result = run("infinity_nvme", options)
            if isinstance(result, dict):
                points.append({"share": share, "tokens/s": result["tokens_per_second"]})
    return points


def turns(
    settings: Settings,
    systems: list[str],
    size: str,
    rounds: int,
    *,
    options: Sequence[str] = (),
    name: str = "",
    ranks: int = 1,
    theme: str = "train",
    pythons: Mapping[str, str] = MappingProxyType({}),
) -> Measured:
    """Measures the rows of ``systems``, which take turns, one job each. ``pythons``: those of
    systems in environments of their own. Their ceiling is the slower
    of the compute alone and, where the state is on disk, of the disk alone. ``.peak``: memory of
    the process; ``.held``: what of it the system keeps (weights and gradients of the compute alone;
    everything that the engine's budgets count)."""
    chosen = [
        system
        for system in systems
        if system.startswith(("compute", "plain", "infinity"))
        or settings.measures(rival_of(system))
    ]
    found: dict[str, list[dict]] = {system: [] for system in chosen}
    notes = []
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        for _ in range(rounds):
            for system in list(found):
                result = run(
                    system,
                    ["--size", size, "--folder", folder, *options],
                    ranks=ranks,
                    python=pythons.get(system, sys.executable),
                )
                if isinstance(result, str):
                    notes.append(f"{theme}{name}: {system} does not run here ({result})")
                    del found[system]
                else:
                    found[system].append(result)
    measured = Measured([], notes)
    for system in found:
        _add_rows(measured, f"{theme}{name}.{system}", system, found)
    return measured


def _add_rows(measured: Measured, name: str, system: str, found: dict[str, list[dict]]) -> None:
    results, speeds = found[system], _speeds(found[system])
    ratios, ceiling = {}, None
    if system.startswith("infinity"):
        for rival, theirs in found.items():
            if not rival.startswith(("infinity", "compute")):
                ratios[rival] = paired(_speeds(theirs), speeds)  # of rates, not of times
        if "compute" in found:
            limits = [
                min(limit, result.get("disk_tokens_per_second", limit))
                for result, limit in zip(results, _speeds(found["compute"]))
            ]
            ceiling = ("compute and disk", limits)
    measured.rows.append(row(name, "tokens/s", speeds, ceiling=ceiling, ratios=ratios))
    for what in ("peak", "held", "device"):
        if nbytes := [result[f"{what}_nbytes"] for result in results if f"{what}_nbytes" in result]:
            measured.rows.append(row(f"{name}.{what}", "GiB", [each / 2**30 for each in nbytes]))


def _speeds(results: list[dict]) -> list[float]:
    return [result["tokens_per_second"] for result in results]
