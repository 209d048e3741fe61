"""gpu_train: whole training jobs on a GPU, by one of several systems, one process each.

``python -m bench.gpu_train <system> ...`` runs one and prints JSON; :func:`measure` runs, most
telling first:

a  a model that fits, with nothing offloaded, beside ours with all, half and none of its state on
   the device, and on disk; then an 8 B model
b  the largest model that trains, exact and with 8-bit moments
budget  the first model against the device's budget
d  a step that the next forward overlaps, beside one that is waited for, both clipped
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
from collections.abc import Callable

import torch

from infinity.bench.results import Measured, row
from infinity.bench.settings import Settings

from .launch import environment
from .llama import SHAPES, Llama

LENGTH = 2048
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
}  # bf16, dense, by the maker's data sheets
WARM_UP = 2

Step = Callable[[], torch.Tensor]


def plain(args: argparse.Namespace) -> tuple[Step, dict]:
    """Makes the step of torch alone, nothing offloaded: bf16 weights, an fp32 master copy, AdamW
    fused."""
    model = _real_model(args)
    masters = [param.detach().float().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=args.device != "cpu")

    def step() -> torch.Tensor:
        loss = _backward(model, args)
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for master, param in zip(masters, model.parameters()):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        return loss

    return step, {}


def ours(args: argparse.Namespace) -> tuple[Step, dict]:
    """Makes the step of Infinity, from a model on meta, with the configuration that is given."""
    import infinity
    from infinity.runtime.registry import wrapped

    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(SHAPES[args.size]).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = infinity.wrap_model(
        model, optimizer, {"device": args.device, **json.loads(args.config)}
    )
    told = {"model": model}

    def step() -> torch.Tensor:
        loss = _usual_step(model, optimizer, args)
        if args.wait:
            wrapped(model).engine.wait_idle()
        return loss

    return step, told


def deepspeed(args: argparse.Namespace) -> tuple[Step, dict]:
    """Makes the step of ZeRO-3 with weights and optimizer on the host."""
    import deepspeed as rival

    _one_process()
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": dict(offload),
            "offload_optimizer": dict(offload),
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **({"gradient_clipping": 1.0} if args.clip else {}),
    }
    model = _real_model(args, device="cpu")
    engine, *_ = rival.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> torch.Tensor:
        loss = engine(_batch(args))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, {}


def fsdp(args: argparse.Namespace) -> tuple[Step, dict]:
    """Makes the step of FSDP2 with CPUOffloadPolicy: fp32 shards, bf16 compute."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _one_process()
    kind = torch.device(args.device).type
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    model = _real_model(args, device="cpu").float()
    options = {
        "mesh": init_device_mesh(kind, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=kind == "cuda"),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    return lambda: _usual_step(model, optimizer, args), {}


SYSTEMS = {"plain": plain, "infinity": ours, "deepspeed": deepspeed, "fsdp2": fsdp}


def _real_model(args: argparse.Namespace, device: str | None = None) -> Llama:
    torch.manual_seed(0)
    with torch.device(device or args.device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Llama(SHAPES[args.size])
        finally:
            torch.set_default_dtype(torch.float32)


_batches: dict[int, torch.Tensor] = {}


def _batch(args: argparse.Namespace) -> torch.Tensor:
    """Always the same one: what is in it costs nothing and changes nothing."""
    if args.batch not in _batches:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(
            0, SHAPES[args.size].vocabulary, (args.batch, args.length), generator=generator
        )
        _batches[args.batch] = ids.to(args.device)
    return _batches[args.batch]


def _backward(model: Llama, args: argparse.Namespace) -> torch.Tensor:
    loss = model(_batch(args))
    loss.backward()
    return loss.detach()


def _usual_step(
    model: Llama, optimizer: torch.optim.Optimizer, args: argparse.Namespace
) -> torch.Tensor:
    loss = _backward(model, args)
    if args.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _one_process() -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))


def main() -> None:
    """Runs one system's job, and prints JSON on standard output."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--size", choices=SHAPES, default="1.3B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", default="{}", help="ours: JSON")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--wait", action="store_true", help="ours: for every step's end")
    args = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        told = _run(args)
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # a rival's threads may not end


def _run(args: argparse.Namespace) -> dict:
    on_gpu = torch.device(args.device).type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    step, more = SYSTEMS[args.system](args)
    losses = [step() for _ in range(WARM_UP)]
    wait()
    allocated = torch.cuda.memory_stats().get("num_device_alloc", 0) if on_gpu else 0
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
            (flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()),
            None,
        )
        told["mfu"] = shape.flops(args.length) * tokens / seconds / peak if peak else None
        told["peak_device"] = torch.cuda.max_memory_allocated()
        told["allocations"] = torch.cuda.memory_stats().get("num_device_alloc", 0) - allocated
        told["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
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


HOST = {"params": "host", "optimizer": "host"}
SHARES = (0.3, 0.6, 0.9, 1.2)  # of a model's state and gradients: the device's budget


def _jobs(folder: str, tiny: bool) -> list[tuple[str, str, list[str]]]:
    """Name, system and options of every job, most telling first."""
    small, large = ("tiny", "tiny") if tiny else ("1.3B", "8B")
    state = 14 * SHAPES[small].parameters

    def ours_with(config: dict, *more: str) -> list[str]:
        return ["--config", json.dumps(config), *more]

    disk = {"params": "host", "optimizer": "nvme", "nvme_paths": [folder]}
    few, many = (
        (["--batch", "1"], ["--batch", "2"]) if tiny else (["--batch", "4"], ["--batch", "16"])
    )
    jobs = []
    for tokens, batch in (("8k", few), ("32k", many)):
        jobs += [
            (f"a.{small}.{tokens}.plain", "plain", ["--size", small, *batch]),
            (f"a.{small}.{tokens}.host", "infinity", ["--size", small, *batch, *ours_with(HOST)]),
            (f"a.{small}.{tokens}.device", "infinity", ["--size", small, *batch, *ours_with({})]),
            (
                f"a.{small}.{tokens}.half",
                "infinity",
                ["--size", small, *batch, *ours_with({"device_memory": state // 2})],
            ),
            (f"a.{small}.{tokens}.deepspeed", "deepspeed", ["--size", small, *batch]),
            (f"a.{small}.{tokens}.fsdp2", "fsdp2", ["--size", small, *batch]),
        ]
    if not tiny:  # behind what tells most of the small one
        jobs[3:3] = [
            (f"a.{large}.32k.host", "infinity", ["--size", large, *many, *ours_with(HOST)]),
            (f"a.{large}.32k.auto", "infinity", ["--size", large, *many, *ours_with({})]),
        ]
    jobs += [
        (f"d.{small}.overlapped", "infinity", ["--size", small, *few, "--clip", *ours_with(HOST)]),
        (
            f"d.{small}.waited",
            "infinity",
            ["--size", small, *few, "--clip", "--wait", *ours_with(HOST)],
        ),
        (f"a.{small}.8k.nvme", "infinity", ["--size", small, *few, *ours_with(disk)]),
    ]
    for share in SHARES:
        config = {"device_memory": round(share * state)}
        jobs.append(
            (f"budget.{small}.{share}", "infinity", ["--size", small, *few, *ours_with(config)])
        )
    for size in [] if tiny else ["20B", "13B", "27B", "34B"]:
        for moments in ("fp32", "int8"):
            config = {"moments": moments, "nvme_paths": [folder]}
            jobs.append(
                (
                    f"b.{size}.{moments}",
                    "infinity",
                    ["--size", size, "--batch", "1", "--steps", "1", *ours_with(config)],
                )
            )
    return jobs


def measure(settings: Settings) -> Measured:
    """Measures rows ``gpu_train.<a|b|d>.<model>...`` (tokens/s), with MFU, peaks and the bound in
    notes. The losses of ours at every home must be the same numbers; a note tells where not."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
            rows.append(
                row(
                    f"gpu_train.{name}",
                    "tokens/s",
                    [told["tokens_per_second"]],
                    ratios=_ratios(name, told, found),
                )
            )
            notes.append(_note(name, told))
            print(
                f"{rows[-1].name}: {told['tokens_per_second']:.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )  # if it is cut off
    notes += _differing_losses(found)
    measured = Measured(rows, notes)
    budgets = [
        (float(name.rpartition(".")[2]), told)
        for name, told in found.items()
        if name.startswith("budget.")
    ]
    measured.series["gpu_train.budget"] = [
        {"share": share, "tokens/s": told["tokens_per_second"]} for share, told in budgets
    ]
    sizes = [
        told
        for name, told in found.items()
        if name.startswith(("a.", "b.")) and name.endswith((".auto", ".device", ".fp32"))
    ]
    measured.series["gpu_train.size"] = [
        {
            "parameters": told["parameters"],
            "tokens/s": told["tokens_per_second"],
            "mfu": told.get("mfu"),
        }
        for told in sizes
    ]
    return measured


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
    """Homes of one model and batch whose losses are not the same numbers."""
    notes, by_job = [], {}
    for name, told in found.items():
        stem, _, own = name.rpartition(".")
        if own in ("host", "device", "half", "auto", "nvme"):
            first, losses = by_job.setdefault(stem, (own, told["losses"]))
            if losses != told["losses"]:
                notes.append(
                    f"gpu_train.{stem}: {own} has other losses than {first}: {told['losses']}"
                    f" against {losses}"
                )
    return notes


if __name__ == "__main__":
    main()
