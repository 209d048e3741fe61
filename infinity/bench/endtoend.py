"""end to end: one training job in a process of its own, by one of several systems: tokens per second and peak memory.

``python -m infinity.bench.endtoend <system> ...`` runs one and prints JSON; :func:`measure` runs them all in turns. A
system is timed from one step's end to another's, with its last update at home; the first steps are its warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .results import Measured, row
from .settings import Settings

SIZES = {  # name -> (width, layers): parameters
    "tiny": (64, 2),  # of tests
    "50M": (512, 16),
    "134M": (768, 18),
    "1B": (2048, 19),
}
VOCABULARY = 8192
ROUNDS = 2


def make_model(size: str) -> torch.nn.Module:
    """A GPT-2 style model in bf16, without dropout."""
    import transformers

    width, layers = SIZES[size]
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_layer=layers, n_embd=width, n_head=width // 64, n_positions=512, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None, use_cache=False,
        activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return transformers.GPT2LMHeadModel(config)
    finally:
        torch.set_default_dtype(torch.float32)


class Job:
    """What a system is asked to do: some micro-batches a step, clipped or not."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.tokens = args.batch * args.length
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randint(0, VOCABULARY, (args.batch, args.length), generator=generator) for _ in range(4)]

    def micro_batches(self) -> Iterator[torch.Tensor]:
        for index in range(self.args.micro_batches):
            yield self.batches[index % len(self.batches)]

    def losses(self, model: Callable) -> Iterator[torch.Tensor]:
        for batch in self.micro_batches():
            yield model(input_ids=batch, labels=batch).loss / self.args.micro_batches


@dataclass
class Running:
    """A system at work on a job."""

    step: Callable[[], None]
    settle: Callable[[], None] = lambda: None  # returns when the last update is at home
    told: Callable[[], dict] = dict  # what it knows of itself, for the JSON


def compute(job: Job) -> Running:
    """Forwards and backwards and nothing else: no system can be faster."""
    model = make_model(job.args.size)

    def step() -> None:
        for loss in job.losses(model):
            loss.backward()
        for param in model.parameters():
            param.grad = None

    weights = sum(param.numel() * param.itemsize for param in model.parameters())
    return Running(step, told=lambda: {"held_nbytes": 2 * weights})  # with their gradients


def plain(job: Job) -> Running:
    """torch, AdamW fused over an fp32 master copy."""
    model = make_model(job.args.size)
    masters = [param.detach().float().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step() -> None:
        for loss in job.losses(model):
            loss.backward()
        if job.args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for master, param in zip(masters, model.parameters()):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters()):
                param.copy_(master)

    return Running(step)


def ours(job: Job) -> Running:
    """Infinity at the home that the system's name has."""
    import infinity

    from ..machine import disk_profile
    from ..runtime.registry import wrapped

    home = job.args.system.removeprefix("infinity_")
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    model = make_model(job.args.size)
    config = {"params": home, "optimizer": home}
    if home == "nvme":
        config |= {"nvme_paths": [job.args.folder], "host_memory": job.args.host_memory}
    if job.args.units_at_once:
        config["micro_batch"] = job.args.batch
    config["speculate"] = job.args.speculate
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config)

    def step() -> None:
        if job.args.units_at_once:
            batch = torch.cat(list(job.micro_batches()))
            model(input_ids=batch, labels=batch).loss.backward()
        else:
            for loss in job.losses(model):
                loss.backward()
        if job.args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    moved = [_moved(model)]

    def settle() -> None:
        wrapped(model).engine.wait_idle()
        moved.append(_moved(model))

    def told() -> dict:
        """Bytes of memory that it held at most, and what the disk alone needed for the steps that were timed."""
        tiers = infinity.stats(model).tiers
        held = tiers["device"].peak_nbytes + tiers["host"].peak_nbytes
        read, written = (after - before for before, after in zip(*moved[-2:]))
        return {
            "held_nbytes": held,
            "disk_seconds": disk_profile.seconds([job.args.folder], read, written) if home == "nvme" else 0.0,
        }

    return Running(step, settle, told)


def _moved(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes read from and written to the disk so far."""
    import infinity

    edges = infinity.stats(model).edges
    return edges["nvme->host"].nbytes, edges["host->nvme"].nbytes


def deepspeed(job: Job) -> Running:
    """ZeRO-3 with parameters and optimizer on the CPU, or on NVMe at its defaults or at better settings."""
    import deepspeed as peer

    _one_process()
    kind = job.args.system.removeprefix("deepspeed_")
    device = "cpu" if kind == "cpu" else "nvme"
    offload = {"device": device, "pin_memory": kind == "nvme_tuned"}
    if device == "nvme":
        offload["nvme_path"] = job.args.folder
    zero = {"stage": 3, "offload_param": dict(offload), "offload_optimizer": dict(offload)}
    if kind == "nvme":
        zero["offload_param"]["buffer_size"] = 5e8
    if kind == "nvme_tuned":
        zero |= {"sub_group_size": int(2e7)}
        zero["offload_param"] |= {"buffer_size": int(3e7)}
        zero["offload_optimizer"] |= {"buffer_count": 16, "pipeline_read": True, "pipeline_write": True}
    config = {
        "train_micro_batch_size_per_gpu": job.args.batch, "gradient_accumulation_steps": job.args.micro_batches,
        "bf16": {"enabled": True}, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {"block_size": 1048576, "queue_depth": 32, "intra_op_parallelism": 2 if kind == "nvme_tuned" else 1,
                "single_submit": False, "overlap_events": True},
    }  # fmt: skip
    if job.args.clip:
        config["gradient_clipping"] = 1.0
    model = make_model(job.args.size)
    engine, *_ = peer.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        for batch in job.micro_batches():
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()

    return Running(step)


def fsdp(job: Job) -> Running:
    """FSDP2 with or without CPUOffloadPolicy, fp32 sharded parameters, bf16 compute, AdamW fused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _one_process()
    torch.distributed.init_process_group("gloo")
    model = make_model(job.args.size).float()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if job.args.system == "fsdp2_cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for loss in job.losses(model):
            loss.backward()
        if job.args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Running(step)


def _one_process() -> None:
    """What torchrun would have set, where it has not."""
    if "RANK" in os.environ:
        return
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))


SYSTEMS: dict[str, Callable[[Job], Running]] = {
    "compute": compute, "plain": plain, "infinity_device": ours, "infinity_host": ours, "infinity_nvme": ours, "fsdp2_cpu": fsdp,
    "fsdp2": fsdp,
    "deepspeed_cpu": deepspeed, "deepspeed_nvme": deepspeed, "deepspeed_nvme_tuned": deepspeed,
}  # fmt: skip


def main() -> None:
    """One system's job; JSON on standard output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--size", choices=SIZES, default="134M")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--host-memory", type=int, default=None)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--units-at-once", action="store_true", help="all micro-batches unit by unit (ours only)")
    parser.add_argument("--speculate", action="store_true", help="updates ahead of the clipping (ours only)")
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
        start = time.perf_counter()
        for _ in range(args.steps):
            system.step()
        system.wait_idle()
        seconds = (time.perf_counter() - start) / args.steps
        told = system.told()
    totals = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0, 1.0], dtype=torch.float64)
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
    os._exit(0)  # a peer's threads may not end


def run(system: str, options: list[str], *, ranks: int = 1, timeout: float = 900) -> dict | str:
    """One job of some processes; the reason where the system cannot do it."""
    command = [sys.executable, "-P", "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    try:
        done = subprocess.run(
            [*command, "infinity.bench.endtoend", system, *options], capture_output=True, text=True, timeout=timeout,
            env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if ranks > 1 else {}),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end within {timeout:.0f} s"
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]


def measure(settings: Settings) -> Measured:
    """Rows ``train.<system>`` (tokens/s), ``train.<system>.peak`` and, of some, ``.held`` (GiB)."""
    return turns(settings, [system for system in SYSTEMS if system != "fsdp2"], _size(settings), ROUNDS)


def measure_ways(settings: Settings) -> Measured:
    """The same with clipping (``train.clip``; ``train.clip.ahead`` updates units ahead of it) and with eight micro-batches
    (``train.micro8``; ``train.units8`` runs them unit by unit), and the speed against the host budget."""
    ours = ["infinity_host", "infinity_nvme"]
    size, few = _size(settings), ["compute", "plain", *ours, "deepspeed_cpu", "deepspeed_nvme_tuned"]
    found = turns(settings, few, size, 1, options=["--clip"], name=".clip")
    found.add(turns(settings, ours, size, 1, options=["--clip", "--speculate"], name=".clip.ahead"))
    eight = ["--micro-batches", "8", "--warm-up", "1", "--steps", "2"]
    found.add(turns(settings, few[:4], size, 1, options=eight, name=".micro8"))
    found.add(turns(settings, ours, size, 1, options=[*eight, "--units-at-once"], name=".units8"))
    found.series["train.budget"] = _budgets(settings, "tiny" if size == "tiny" else "50M")
    return found


def measure_large(settings: Settings) -> Measured:
    """A model of 1 B parameters, by the systems that it does not outgrow here."""
    systems = ["compute", "plain", "infinity_host", "infinity_nvme", "deepspeed_nvme_tuned"]
    size = "1B" if settings.scale >= 1 else _size(settings)
    return turns(settings, systems, size, 1, options=["--warm-up", "1", "--steps", "2"], theme="train_1b")


def _size(settings: Settings) -> str:
    return "134M" if settings.scale >= 1 else "50M" if settings.scale >= 0.1 else "tiny"


SHARES = (0.25, 0.4, 0.6, 0.8, 1.1)  # of the training state


def _budgets(settings: Settings, size: str) -> list[dict]:
    """Tokens per second of a model with everything at home on NVMe, against the host budget."""
    state_nbytes = 12 * sum(param.numel() for param in make_model(size).parameters())
    points = []
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        for share in SHARES:
            options = ["--size", size, "--folder", folder, "--host-memory", str(round(share * state_nbytes))]
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
) -> Measured:
    """The rows of ``systems``, which take turns, one process each. Their ceiling is the slower of the compute alone and,
    where the state is on disk, of the disk alone. ``.peak``: memory of the process; ``.held``: what of it the system keeps
    (weights and gradients of the compute alone; everything that the engine's budgets count)."""
    chosen = [system for system in systems if settings.peers or system.startswith(("compute", "plain", "infinity"))]
    found: dict[str, list[dict]] = {system: [] for system in chosen}
    notes = []
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        for _ in range(rounds):
            for system in list(found):
                result = run(system, ["--size", size, "--folder", folder, *options], ranks=ranks)
                if isinstance(result, str):
                    notes.append(f"{theme}{name}: {system} does not run here ({result})")
                    del found[system]
                else:
                    found[system].append(result)
    rows = []
    for system, results in found.items():
        speeds, ratios, ceiling = _speeds(results), {}, None
        if system.startswith("infinity"):
            for peer, theirs in found.items():
                if not peer.startswith(("infinity", "compute")):
                    ratios[peer] = statistics.median(our / their for our, their in zip(speeds, _speeds(theirs)))
            if "compute" in found:
                pairs = zip(results, _speeds(found["compute"]))
                limits = [min(limit, result.get("disk_tokens_per_second", limit)) for result, limit in pairs]
                ceiling = ("compute and disk", limits)
        rows.append(row(f"{theme}{name}.{system}", "tokens/s", speeds, ceiling=ceiling, ratios=ratios))
        rows.append(row(f"{theme}{name}.{system}.peak", "GiB", [result["peak_nbytes"] / 2**30 for result in results]))
        if held := [result["held_nbytes"] / 2**30 for result in results if "held_nbytes" in result]:
            rows.append(row(f"{theme}{name}.{system}.held", "GiB", held))
    return Measured(rows, notes)


def _speeds(results: list[dict]) -> list[float]:
    return [result["tokens_per_second"] for result in results]


if __name__ == "__main__":
    main()
