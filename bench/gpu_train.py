"""gpu_train: whole training jobs on a GPU, by one of several systems, one process each.

``python -m bench.gpu_train <system> ...`` runs one and prints JSON; :func:`measure` runs, most
telling first:

a  an 8 B model; then one that fits, with nothing offloaded, beside ours with all, half and none of
   its state on the device, and on disk
b  the largest model that trains, exact and with 8-bit moments
budget  the first model against the device's budget
d  a step that the next forward overlaps, beside one that is waited for, both clipped
e  losses at several homes by deterministic kernels: the same numbers. By the fast ones attention's
   backward differs from run to run
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import torch

from infinity.bench.results import Measured, row
from infinity.bench.settings import Settings

from .gpu_systems import SYSTEMS
from .launch import environment
from .llama import SHAPES

LENGTH = 2048
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
}  # bf16, dense, by the maker's data sheets
WARM_UP = 4  # until the device's share of the update has settled


def main() -> None:
    """Runs one system's job, and prints JSON on standard output."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--size", choices=SHAPES, default="1.3B")
    parser.add_argument("--device", default=_here())
    parser.add_argument("--config", default="{}", help="ours: JSON")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="kernels, and so losses")
    parser.add_argument("--wait", action="store_true", help="ours: for every step's end")
    args = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        told = _run(args)
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # a rival's threads may not end


def _here() -> str:
    """Names the type of this machine's accelerator."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator().type
    return "cpu"


def _run(args: argparse.Namespace) -> dict:
    on_gpu = torch.device(args.device).type != "cpu"
    gpu = torch.get_device_module(args.device)
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # asked for by torch
        torch.use_deterministic_algorithms(True)
    wait = gpu.synchronize if on_gpu else lambda: None
    step, more = SYSTEMS[args.system](args)
    losses = [step() for _ in range(WARM_UP)]
    wait()
    allocated = gpu.memory_stats().get("num_device_alloc", 0) if on_gpu else 0
    start = time.perf_counter()
    losses += [step() for _ in range(args.steps)]
    wait()
    seconds = (time.perf_counter() - start) / args.steps
    shape, tokens = SHAPES[args.size], args.batch * args.length
    told = {
        "tokens_per_second": tokens / seconds,
        "parameters": shape.parameters,
        "losses": [loss.item() for loss in losses],
    }
    if on_gpu:
        peak = next(
            (flops for name, flops in PEAK_FLOPS.items() if name in gpu.get_device_name()),
            None,
        )
        told["mfu"] = shape.flops(args.length) * tokens / seconds / peak if peak else None
        told["peak_device"] = gpu.max_memory_allocated()
        told["allocations"] = gpu.memory_stats().get("num_device_alloc", 0) - allocated
        told["retries"] = gpu.memory_stats()["num_alloc_retries"]
    if "model" in more:
        import infinity

        told["stats"] = infinity.stats(more["model"]).as_dict()
    return told


def run(system: str, options: list[str], *, timeout: float = 240) -> dict | str:
    """Runs one job in a process of its own. Returns what it printed, or the reason where the system
    cannot do it."""
    command = [sys.executable, "-P", "-m", "bench.gpu_train", system, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, text=True, start_new_session=True, env=environment(), **pipes
    ) as job:
        try:
            out, err = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            return f"no end within {timeout:.0f} s"
    try:
        return json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return (err.strip().splitlines() or [f"exit status {job.returncode}"])[-1][:300]


HOST = {
    "params": "host",
    "optimizer": "host",
    # What is free now may be less: a virtual machine's memory can come as it is used
    "host_memory": int(0.9 * psutil.virtual_memory().total),
}
SHARES = (0.3, 0.6, 0.9, 1.2)  # of a model's state and gradients: the device's budget


def _job(
    name: str,
    size: str,
    options: list[str],
    config: dict | None = None,
    system: str = "infinity",
) -> tuple[str, str, list[str]]:
    given = [] if config is None else ["--config", json.dumps(config)]
    return name, system, ["--size", size, *options, *given]


def _jobs(folder: str, tiny: bool) -> list[tuple[str, str, list[str]]]:
    """Name, system and options of every job, most telling first."""
    small, large = ("tiny", "tiny") if tiny else ("1.3B", "8B")
    state = 14 * SHAPES[small].parameters
    few, many, one = (["--batch", str(n)] for n in ((1, 2, 1) if tiny else (4, 16, 1)))

    trace = {"trace": os.path.join("build", "gpu", "trace.json")} if not tiny else {}
    jobs = [
        _job(f"a.{large}.32k.auto", large, many, trace),
        _job(f"a.{large}.32k.chosen", large, many, {"recompute": True}),
        _job(f"a.{large}.32k.int8", large, many, {**HOST, "moments": "int8"}),
    ]
    for tokens, batch in (("8k", few), ("32k", many)):
        stem = f"a.{small}.{tokens}"
        jobs += [
            _job(f"{stem}.plain", small, batch, system="plain"),
            _job(f"{stem}.host", small, batch, HOST),
            _job(f"{stem}.device", small, batch, {}),
            _job(f"{stem}.half", small, batch, {"device_memory": state // 2}),
            _job(f"{stem}.deepspeed", small, batch, system="deepspeed"),
            _job(f"{stem}.fsdp2", small, batch, system="fsdp2"),
        ]
    jobs.append(_job(f"a.{large}.32k.host", large, many, HOST))  # 105 GiB of host memory
    disk = {"params": "host", "optimizer": "nvme", "nvme_paths": [folder]}
    jobs += [
        _job(f"d.{small}.overlapped", small, [*few, "--clip"], HOST),
        _job(f"d.{small}.waited", small, [*few, "--clip", "--wait"], HOST),
        _job(f"a.{small}.8k.nvme", small, few, disk),
        *(
            _job(f"e.{small}.{home}", small, [*few, "--deterministic"], config)
            for home, config in (("host", HOST), ("device", {}), ("nvme", disk))
        ),
    ]
    for share in SHARES:
        config = {"device_memory": round(share * state)}
        jobs.append(_job(f"budget.{small}.{share}", small, few, config))
    for size in [] if tiny else ["20B", "13B", "27B", "34B"]:
        for moments in ("fp32", "int8"):
            config = {"moments": moments, "nvme_paths": [folder]}
            jobs.append(_job(f"b.{size}.{moments}", size, [*one, "--steps", "1"], config))
    return jobs


def measure(settings: Settings) -> Measured:
    """Measures rows ``gpu_train.<a|b|d|e>.<model>...`` (tokens/s), with MFU, peaks and the bound in
    notes. The losses of the jobs e must be the same numbers; a note tells where not."""
    device = _here()
    tiny = settings.scale < 1 or device == "cpu"
    rows, notes, found = [], [], {}
    deadline = time.monotonic() + float(os.environ.get("INFINITY_BENCH_SECONDS", 1e9))
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        for name, system, options in _jobs(folder, tiny):
            if system in ("deepspeed", "fsdp2") and not settings.rivals:
                continue
            if time.monotonic() > deadline:
                notes.append(f"gpu_train.{name}: no time left")
                continue
            options = [*options, "--device", device, *(["--length", "64"] if tiny else [])]
            told = run(system, options, timeout=min(240.0, deadline - time.monotonic()))
            if isinstance(told, str):
                notes.append(f"gpu_train.{name} does not run here ({told})")
                continue
            found[name] = told
            speed, ratios = told["tokens_per_second"], _ratios(name, told, found)
            rows.append(row(f"gpu_train.{name}", "tokens/s", [speed], ratios=ratios))
            notes.append(_note(name, told))
            # If it is cut off.
            print(f"{rows[-1].name}: {speed:.0f} tokens/s", file=sys.stderr, flush=True)
    return Measured(rows, [*notes, *_differing_losses(found)], _series(found))


def _series(found: dict) -> dict[str, list[dict]]:
    budgets = [
        (float(name.rpartition(".")[2]), told)
        for name, told in found.items()
        if name.startswith("budget.")
    ]
    sizes = [
        told
        for name, told in found.items()
        if name.startswith(("a.", "b.")) and name.endswith((".auto", ".device", ".fp32"))
    ]
    return {
        "gpu_train.budget": [
            {"share": share, "tokens/s": told["tokens_per_second"]} for share, told in budgets
        ],
        "gpu_train.size": [
            {
                "parameters": told["parameters"],
                "tokens/s": told["tokens_per_second"],
                "mfu": told.get("mfu"),
            }
            for told in sizes
        ],
    }


def _ratios(name: str, told: dict, found: dict) -> dict[str, float]:
    """Against what else ran of the same model and batch."""
    stem, _, own = name.rpartition(".")
    if own in ("plain", "deepspeed", "fsdp2", "waited"):
        return {}
    others = {
        rival: found.get(f"{stem}.{rival}") for rival in ("plain", "deepspeed", "fsdp2", "waited")
    }
    return {
        rival: told["tokens_per_second"] / other["tokens_per_second"]
        for rival, other in others.items()
        if other
    }


def _note(name: str, told: dict) -> str:
    parts = [f"{told['parameters'] / 1e9:.2f} B parameters, loss {told['losses'][-1]:.4f}"]
    if told.get("mfu"):
        parts.append(f"MFU {100 * told['mfu']:.1f} %")
    if "peak_device" in told:
        parts.append(
            f"peak {told['peak_device'] / 2**30:.1f} GiB, {told['allocations']} allocations,"
            f" {told['retries']} retries"
        )
    if stats := told.get("stats"):
        stalls = ", ".join(
            f"{edge} {values['stall_seconds']:.2f} s" for edge, values in stats["edges"].items()
        )
        tiers = ", ".join(
            f"{tier} {values['peak_nbytes'] / 2**30:.1f}" for tier, values in stats["tiers"].items()
        )
        parts.append(f"GiB {tiers}; stalls {stalls}. {stats['bottleneck']}")
    return f"gpu_train.{name}: " + "; ".join(parts)


def _differing_losses(found: dict) -> list[str]:
    """Tells homes of the deterministic jobs whose losses are not the same numbers."""
    notes, by_job = [], {}
    for name, told in found.items():
        stem, _, own = name.rpartition(".")
        if stem.startswith("e."):
            first, losses = by_job.setdefault(stem, (own, told["losses"]))
            if losses != told["losses"]:
                notes.append(
                    f"gpu_train.{stem}: {own} has other losses than {first}: {told['losses']}"
                    f" against {losses}"
                )
    return notes


if __name__ == "__main__":
    main()
