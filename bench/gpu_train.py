"""gpu_train: whole training jobs on a GPU, by one of several systems, and ranks that share a card.

:func:`measure` runs the jobs in the order of their worth, as :mod:`bench.gpu_jobs` says:

a       an 8 B model; one that fits, with nothing offloaded, beside ours with all, half and none of
        its state on the device, and on disk
e       losses by deterministic kernels: of plain torch, FSDP2 and several homes. By the fast ones
        attention's backward differs from run to run
ranks   what :mod:`bench.gpu_ranks` tries
d       a step that the next forward overlaps, beside one that is waited for, both clipped
budget  the model that fits against the device's budget
b       the largest model that trains, exact and with 8-bit moments

``python -m bench.gpu_train`` is a worker: it reads jobs as lines of JSON,
``["infinity", ["--size", "8B"]]``, and answers each with one.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psutil
import torch

from infinity.errors import CapacityError
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.settings import Settings

from . import gpu_jobs, gpu_ranks
from .gpu_jobs import FAILED, LEFT_OUT, NOT_REACHED, Job, Journal
from .gpu_systems import SYSTEMS
from .llama import FLOPS, SHAPES
from .rivals.table import rival_of

LENGTH = 2048
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
}  # bf16, dense, by the maker's data sheets
WARM_UP = 4  # until the device's share of the update has settled
RANKS = "ranks"  # a system beside those of gpu_systems
RANKS_SECONDS = 40  # that its processes may take
RIVALS = ("plain", "deepspeed", "fsdp2", "waited")  # what a row's ratios are to


def main() -> None:
    """Runs the jobs that standard input names, one after the other."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is none
    for line in sys.stdin:
        system, options = json.loads(line)
        try:
            answer = {"told": _run(system, options)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the answer tells it
            traceback.print_exc()
            words = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            answer = {"why": words, "refused": isinstance(error, CapacityError)}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # a rival's threads may not end


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--size", choices=SHAPES, default="1.3B")
    parser.add_argument("--device", default=_here())
    parser.add_argument("--config", default="{}", help="ours: JSON")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a batch")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="kernels, and so losses")
    parser.add_argument("--wait", action="store_true", help="ours: for every step's end")
    parser.add_argument("--products", type=int, default=0, help="ours: blocks that keep theirs")
    parser.add_argument("--compile", help="ours: the backend that compiles each block")
    parser.add_argument("--profile", action="store_true", help="one more step, on stderr")
    return parser


def _here() -> str:
    """Names the type of this machine's accelerator."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator().type
    return "cpu"


def _run(system: str, options: list[str]) -> dict:
    if system == RANKS:
        kind, device, cards, *limit = options
        return gpu_ranks.run(kind, device, cards=int(cards), seconds=int(*limit or [RANKS_SECONDS]))
    args = _parser().parse_args(options)
    on_gpu = torch.device(args.device).type != "cpu"
    gpu = torch.get_device_module(args.device)
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # asked for by torch
        torch.use_deterministic_algorithms(True)
    wait = gpu.synchronize if on_gpu else lambda: None
    gc.collect()  # the model of the job before
    if torch.device(args.device).type == "cuda":
        gpu.empty_cache()
        gpu.reset_peak_memory_stats()
    step, more = SYSTEMS[system](args)
    losses = [step() for _ in range(args.warm_up)]
    wait()
    before = _counts(gpu) if on_gpu else {}
    start = time.perf_counter()
    losses += [step() for _ in range(args.steps)]
    wait()
    seconds = (time.perf_counter() - start) / args.steps
    shape, tokens = SHAPES[args.size], args.batch * args.length
    told = {
        "tokens_per_second": tokens / seconds,
        "parameters": shape.parameters,
        "losses": [loss.item() for loss in losses],
        "flops": shape.flops(args.length) * tokens / seconds,
    }
    if on_gpu:
        peak = next(
            (flops for name, flops in PEAK_FLOPS.items() if name in gpu.get_device_name()),
            None,
        )
        told["mfu"] = told["flops"] / peak if peak else None
        told["peak_device"] = gpu.max_memory_allocated()
        told |= {name: count - before[name] for name, count in _counts(gpu).items()}
    if "model" in more:
        import infinity

        told["stats"] = infinity.stats(more["model"]).as_dict()
    if args.profile:
        with torch.profiler.profile() as profile:
            step()
            wait()
        table = profile.key_averages().table(sort_by="self_device_time_total", row_limit=30)
        print(table, file=sys.stderr)
    return told


def _counts(gpu: object) -> dict[str, int]:
    stats = gpu.memory_stats()
    return {
        "allocations": stats.get("num_device_alloc", 0),
        "retries": stats.get("num_alloc_retries", 0),
    }


HOST = {
    "params": "host",
    "optimizer": "host",
    # What is free now may be less: a virtual machine's memory can come as it is used
    "host_memory": int(0.9 * psutil.virtual_memory().total),
}
SHARES = (0.3, 0.6, 0.9, 1.2)  # of a model's state and gradients: the device's budget
# Of the card for 8 B with its state on the host: the embedding, the window, and what lands. That
# leaves 56 GiB of an H100; a block keeps 3.1 of its products, or 0.25 of its input
WINDOW = {"device_memory": "14GiB"}


def _job(
    name: str,
    size: str,
    options: list[str],
    config: dict | None = None,
    *,
    seconds: float,
    system: str = "infinity",
) -> Job:
    given = [] if config is None else ["--config", json.dumps(config)]
    worker = [size, *(each for each in options if each == "--deterministic")]
    if system != "infinity":
        worker.append(name)  # a process of its own
    return Job(name, system, ("--size", size, *options, *given), seconds, worker=tuple(worker))


def plan(folder: str, *, tiny: bool, rivals: bool | list[str] = True) -> list[Job]:
    """Returns every job, in the order of their worth. The first ones, to our losses of e, belong
    into the first call on an H100, of 520 s; the next, to the card of 24 GiB, into one of 250 s
    behind it. ``tiny``: with a model of a few thousand parameters."""
    small, large = ("tiny", "tiny") if tiny else ("1.3B", "8B")
    largest = "tiny-8B" if tiny else large  # its name
    state = 14 * SHAPES[small].parameters
    few, many, one = (["--batch", str(n)] for n in ((1, 2, 1) if tiny else (4, 16, 1)))
    window = {} if tiny else WINDOW
    trace = {"trace": os.path.join("build", "gpu", "trace.json")} if not tiny else {}
    profile = [] if tiny else ["--profile"]
    half = {"device_memory": state // 2}
    disk = {"params": "host", "optimizer": "nvme", "nvme_paths": [folder]}

    def of_large(name: str, options: list[str], config: dict, seconds: float = 45) -> Job:
        return _job(f"a.{largest}.{name}", large, [*many, *options], config, seconds=seconds)

    def of_small(tokens: str, own: str, config: dict | None, seconds: float, system: str) -> Job:
        batch = few if tokens == "8k" else many
        name = f"a.{small}.{tokens}.{own}"
        return _job(name, small, batch, config, seconds=seconds, system=system)

    def losses(own: str, config: dict | None, seconds: float, system: str = "infinity") -> Job:
        options = [*few, "--deterministic"]
        name = f"e.{small}.{own}"
        return _job(name, small, options, config, seconds=seconds, system=system)

    halves, all_kept = ["--micro-batches", "2"], ["--products", "32"]
    backend = "aot_eager" if tiny else "inductor"
    jobs = [
        of_large("32k.auto", ["--steps", "4", *profile], trace, 55),
        of_large("32k.products16", ["--products", "1" if tiny else "16"], window),
        of_large("32k.products.halves", ["--warm-up", "3", *all_kept, *halves], window, 42),
        of_large("32k.compiled", ["--warm-up", "3", "--compile", backend], {}, 55),
        of_small("8k", "plain", None, 10, "plain"),
        of_small("8k", "device", {}, 10, "infinity"),
        of_small("8k", "host", HOST, 8, "infinity"),
        of_small("32k", "device", {}, 10, "infinity"),
        of_small("32k", "host", HOST, 10, "infinity"),
        of_small("8k", "fsdp2", None, 15, "fsdp2"),
        of_small("32k", "plain", None, 10, "plain"),
        of_small("32k", "fsdp2", None, 20, "fsdp2"),
        losses("plain", None, 10, "plain"),
        losses("device", {}, 8),
        losses("host", HOST, 8),
        losses("half", half, 8),
        # The second call
        losses("fsdp2", None, 15, "fsdp2"),
        *(
            Job(f"ranks.{kind}", RANKS, (kind, _here(), "1"), seconds, worker=(RANKS,))
            for kind, seconds in zip(gpu_ranks.KINDS, (30, 18, 18))
        ),
        of_large("32k.chosen", [], {"recompute": True}),
        of_large("4x4096.products", ["--batch", "4", "--length", "4096", *all_kept], window, 35),
        of_large("8k.card24", ["--batch", "4"], {**HOST, "device_memory": "16GiB"}, 35),
        # Later
        _job(f"a.{small}.8k.deepspeed", small, few, system="deepspeed", seconds=75),
        _job(f"a.{small}.32k.deepspeed", small, many, system="deepspeed", seconds=35),
        _job(f"a.{largest}.32k.deepspeed", large, many, system="deepspeed", seconds=120),
        of_large("32k.int8", [], {**HOST, "moments": "int8"}),
        of_large("32k.host", [], HOST),  # 105 GiB of host memory
        of_small("8k", "half", half, 10, "infinity"),
        of_small("32k", "half", half, 12, "infinity"),
        _job(f"d.{small}.overlapped", small, [*few, "--clip"], HOST, seconds=10),
        _job(f"d.{small}.waited", small, [*few, "--clip", "--wait"], HOST, seconds=10),
        of_small("8k", "nvme", disk, 30, "infinity"),
        losses("nvme", disk, 30),
    ]
    budgets = [
        _job(
            f"budget.{small}.{share}",
            small,
            few,
            {"device_memory": round(share * state)},
            seconds=12,
        )
        for share in SHARES
    ]
    limits = []
    for size in [] if tiny else ["20B", "13B", "27B", "34B"]:
        for moments in ("fp32", "int8"):
            config = {"moments": moments, "nvme_paths": [folder]}
            options = [*one, "--warm-up", "2", "--steps", "1"]
            limits.append(_job(f"b.{size}.{moments}", size, options, config, seconds=90))
    jobs += [dataclasses.replace(job, finds_limit=True) for job in [*budgets, *limits]]
    jobs += [
        Job(f"ranks.cards.{kind}", RANKS, (kind, _here(), "2"), 30, worker=(RANKS,))
        for kind in gpu_ranks.KINDS
    ]
    return [dataclasses.replace(job, lacks=_lacks(job, tiny, rivals)) for job in jobs]


def _lacks(job: Job, tiny: bool, rivals: bool | list[str]) -> str:
    """Says what this machine has not, that ``job`` needs; "" if nothing."""
    rival = "" if job.system == "plain" else rival_of(job.system)
    if rival and not Settings(rivals=rivals).measures(rival):
        return "not of --rivals" if rivals else "--no-rivals"
    if job.system == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    if ".cards." in job.name and torch.accelerator.device_count() < 2:
        return "there is no second card"
    on_disk = job.name.endswith(".nvme") or job.name.startswith(("b.27B", "b.34B"))
    if on_disk and not tiny and not list(Path("/sys/block").glob("nvme*")):
        return "there is no NVMe drive (/sys/block/nvme*)"
    return ""


def measure(settings: Settings) -> Measured:
    """Measures rows ``gpu_train.<a|b|d|e|budget>.<model>...`` (tokens/s) and ``gpu_train.ranks...``
    (s), with MFU, peaks, the bound and outcomes in notes. A note tells whether the losses of the
    jobs e are the same numbers.

    INFINITY_BENCH_JOURNAL names the file of the jobs that a call before this one ran,
    INFINITY_BENCH_UNTIL the time (of ``time.time()``) at which this one ends.
    """
    device = _here()
    tiny = settings.scale < 1 or device == "cpu"
    kept = os.environ.get("INFINITY_BENCH_JOURNAL")
    journal = Journal(Path(kept) if kept else None)
    until = float(os.environ.get("INFINITY_BENCH_UNTIL", "inf"))
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        jobs = [_on(job, device, tiny) for job in plan(folder, tiny=tiny, rivals=settings.rivals)]

        def ended(job: Job) -> None:
            print(f"gpu_train.{job.name}: {journal.status(job.name)}", file=sys.stderr, flush=True)
            settings.keep(_measured(jobs, journal))

        gpu_jobs.run(jobs, journal, until - time.time(), ended=ended)
    return _measured(jobs, journal)


def _on(job: Job, device: str, tiny: bool) -> Job:
    if job.system == RANKS:
        slow = dataclasses.replace(job, seconds=80, options=(*job.options, "100"))
        return slow if tiny else job
    options = [*job.options, "--device", device]
    if not tiny:
        return dataclasses.replace(job, options=tuple(options))
    # A machine that only tries them may be a slow one
    return dataclasses.replace(job, options=(*options, "--length", "64"), seconds=50)


def _measured(jobs: list[Job], journal: Journal) -> Measured:
    found, rows, notes = journal.measured(), [], []
    for job in jobs:
        name, ended = f"gpu_train.{job.name}", journal.ended.get(job.name, {})
        if (told := found.get(job.name)) is None:
            words = {FAILED: "does not run here", LEFT_OUT: LEFT_OUT, NOT_REACHED: NOT_REACHED}
            why = f" ({ended['why']})" if ended.get("why") else ""
            notes.append(f"{name}: {words[journal.status(job.name)]}{why}")
        elif job.system == RANKS:
            rows.append(row(name, "s", [told["seconds"]]))
            notes.append(f"{name}: {told['outcome']}")
        else:
            ratios = _ratios(job.name, told, found)
            rows.append(row(name, "tokens/s", [told["tokens_per_second"]], ratios=ratios))
            notes.append(_note(job.name, told))
    return Measured(rows, [*notes, *_compared_losses(found)], _series(found))


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
    if own in RIVALS:
        return {}
    others = {rival: found.get(f"{stem}.{rival}") for rival in RIVALS}
    return {
        rival: told["tokens_per_second"] / other["tokens_per_second"]
        for rival, other in others.items()
        if other
    }


def _note(name: str, told: dict) -> str:
    parts = [f"{told['parameters'] / 1e9:.2f} B parameters, loss {told['losses'][-1]:.4f}"]
    parts.append(f"{told['flops'] / 1e12:.1f} TFLOPS ({FLOPS})")
    if told.get("mfu"):
        parts[-1] += f", MFU {100 * told['mfu']:.1f} %"
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


def _compared_losses(found: dict) -> list[str]:
    """Tells of each of the deterministic jobs whether its losses are the first one's numbers, or
    from which step on they differ, and by how much."""
    notes, first = [], {}
    for name, told in found.items():
        stem, _, own = name.rpartition(".")
        if not stem.startswith("e."):
            continue
        against, losses = first.setdefault(stem, (own, told["losses"]))
        if own == against:
            continue
        apart = [abs(a - b) for a, b in zip(told["losses"], losses)]
        note = f"gpu_train.{stem}: {own} has the losses of {against}, the same numbers"
        if any(apart):
            step = next(step for step, each in enumerate(apart) if each)
            note = (
                f"gpu_train.{stem}: {own} has other losses than {against} from step {step} on, by"
                f" at most {max(apart):.3g}, {max(apart) / max(losses):.2g} of the loss"
            )
        notes.append(note)
    return notes


if __name__ == "__main__":
    main()
