"""The report of `infinity train`: the job's results, the same numbers as tables and as JSON.

edge      from one tier to the next, as nvme->host
counts    of every edge over the training: bytes, busy seconds, and seconds the loop waited for it
measured  a disk's rates in a short probe, before the training
achieved  its rates in the training, while transfers were in flight
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import infinity

from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import Tier
from ...ext.audit.told import line_of
from ..cli.amounts import format_seconds
from ..cli.values import columns
from ..cost.cost import FORMAT as PROFILE
from ..watch.time_shares import shares_text
from .counts import EdgeCounts
from .job import Job, Measured

if TYPE_CHECKING:
    from rich.console import Console


LEAST_PREDICTED = 0.2  # seconds of a step that are worth a line
LEAST_SHOWN = 0.05  # seconds that a table does not show as zero


def measure_disks(job: Measured) -> dict[str, float] | None:
    """Returns the disks' rates in bytes per second, summed over the striped folders; None if no
    state is at home there. May probe the disks."""
    from ...ext.rates.rates import disk_rates

    folders = _folders(job)
    return dict(zip(("read", "write"), disk_rates(folders))) if folders else None


def _folders(job: Measured) -> Sequence[str]:
    """Returns the folders that state is at home in."""
    from ...core.run.registry import wrapped

    engine = wrapped(job.model).engine
    on_disk = engine.job.planned.plan.planned_nbytes(Tier.NVME)
    return engine.job.config.nvme_paths if on_disk else ()


def predict_step(job: Job, compute_seconds: float) -> float:
    """Predicts the seconds of a step from the plan and the machine's rates. ``compute_seconds``: of
    the step's whole batch."""
    from ...core.run.registry import wrapped
    from ...ext.rates.rates import Rates
    from ..plan.predict import predict

    engine = wrapped(job.model).engine
    config = engine.job.config
    rates = Rates.measure(_folders(job), config.device, room=config.host_memory)
    prediction = predict(
        engine.job.planned.plan,
        engine.job.planned.sizes,
        rates,
        compute_seconds=compute_seconds,
        passes=job.args.accumulate,
    )
    return prediction.step_seconds


def make_report(
    job: Job,
    *,
    counts: EdgeCounts,
    config: infinity.Config,
    measured_disk: dict[str, float] | None,
    predicted_step_seconds: float,
    loss_after: float,
) -> dict[str, Any]:
    corpus = job.batches.corpus
    in_bits = (lambda nats: nats / math.log(2)) if corpus.byte_level else (lambda nats: None)
    return {
        "parameters": job.fixed_values["parameters"],
        "data": {
            "source": corpus.source,
            "byte_level": corpus.byte_level,
            "train_tokens": corpus.train_ntokens,
            "held_out_source": job.batches.held_out_corpus.source,
            "held_out_tokens": job.batches.held_out_corpus.held_out_ntokens,
        },
        "held_out_loss_after": loss_after,
        "bits_per_byte_before": in_bits(job.loss_before),
        "bits_per_byte_after": in_bits(loss_after),
        "predicted_step_seconds": predicted_step_seconds,
        **measurements(job, counts, config, measured_disk),
    }


def measurements(
    job: Measured,
    counts: EdgeCounts,
    config: infinity.Config,
    measured_disk: dict[str, float] | None,
) -> dict[str, Any]:
    """Returns the numbers of a report that a job of any loop has."""
    stats = infinity.stats(job.model)
    steps_count = len(job.step_seconds)
    return {
        "interrupted": False,
        "options": job.fixed_values,
        "homes": {"params": config.params, "optimizer": config.optimizer},
        "first_step": job.first_step,
        "steps": job.next_step,
        "losses": job.losses,
        "held_out_loss_before": job.loss_before,
        "held_out_losses": job.held_out_losses,
        "train_seconds": counts.at_seconds,
        "step_seconds": sum(job.step_seconds) / steps_count if steps_count else None,
        "median_step_seconds": statistics.median(job.step_seconds) if job.step_seconds else None,
        "tokens_per_second": job.tokens_per_second,
        "stall_share": counts.stall_share,
        "shares": counts.shares(job.stalls),
        "edges": counts.edges,
        "tiers": {name: dataclasses.asdict(tier) for name, tier in stats.tiers.items()},
        "process_peak_nbytes": _process_peak(),
        "bound_seconds": stats.bound_seconds,
        "bottleneck": stats.bottleneck,
        "audited": stats.audited,
        "disk": _disk_report(measured_disk, counts),
        **PROFILE.numbered(_profile(job, config.device)),
    }


def _profile(job: Measured, device: str | None) -> dict[str, Any]:
    """Returns what `infinity cost` reads: tokens a second by GPU, and what a checkpoint takes."""
    import torch

    on_gpu = torch.device(device or "cpu").type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    files = [] if job.checkpoint is None else job.checkpoint.rglob("*")
    return {
        "gpus": {f"{name}:{job.ranks.count}": job.tokens_per_second},
        "save_seconds": job.total_save_seconds,
        "load_seconds": job.load_seconds,
        "checkpoint_nbytes": sum(each.stat().st_size for each in files if each.is_file()) or None,
    }


def _disk_report(measured: dict[str, float] | None, counts: EdgeCounts) -> dict[str, Any] | None:
    """Compares the achieved rates with the measured ones.

    `share`: the time the disk needs for the same bytes at its measured rates, divided by the
    training time. It is 1 if only the disk limits the speed, and less if compute does.
    """
    if measured is None:
        return None
    report, needed_seconds = {}, 0.0
    for direction, edge in (("read", "nvme->host"), ("write", "host->nvme")):
        moved = counts.edges[edge]
        achieved = moved["nbytes"] / moved["busy_seconds"] if moved["busy_seconds"] else 0.0
        report[direction] = {
            "measured_bytes_per_second": measured[direction],
            "achieved_bytes_per_second": achieved,
            "share": achieved / measured[direction],
        }
        needed_seconds += moved["nbytes"] / measured[direction]
    return {**report, "share": needed_seconds / max(counts.at_seconds, 1e-9)}


def _process_peak() -> int:
    """Returns the most memory that this process has had; 0 if the kernel does not tell. getrusage
    would count what its parent had before it started this program."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def print_report(console: Console, report: dict[str, Any]) -> None:
    for line in columns(list(_summary_rows(report))):
        console.print(line)
    steps_count = max(1, report["steps"] - report["first_step"])
    edges = [("edge", "moved", "a step", "rate", "waited for it")]
    for edge, counts in report["edges"].items():
        if not counts["nbytes"] and counts["stall_seconds"] < LEAST_SHOWN:
            continue
        busy = counts["busy_seconds"]
        moved = [
            _size(counts["nbytes"]) if counts["nbytes"] else "-",
            _size(counts["nbytes"] / steps_count) if counts["nbytes"] else "-",
            f"{counts['nbytes'] / busy / 1e9:.2f} GB/s" if busy else "-",
        ]
        edges.append((edge, *moved, f"{counts['stall_seconds']:.1f} s"))
    tiers = [("tier", "peak", "planned", "budget")]
    for tier, counts in report["tiers"].items():
        if not any(counts.values()):
            continue
        names = ("peak_nbytes", "planned_nbytes", "budget_nbytes")
        tiers.append((tier, *(_size(counts[name]) for name in names)))
    for table in (edges, tiers):
        for line in columns(table) if len(table) > 1 else ():
            console.print(line)
    if process := report.get("process_peak_nbytes"):
        console.print(f"process: {_size(process)} at most, with torch, activations and Python")


def print_stalls(console: Console, stalls: Any) -> None:
    """Prints what a step waits for its data."""
    rows = [
        ("data", "a pass", ""),
        ("made up", format_seconds(stalls.made_up), "one batch, over and over"),
        ("cached", format_seconds(stalls.cached), "and prepared"),
        ("cold", format_seconds(stalls.cold), "and fetched, from a disk if it is not in memory"),
    ]
    for line in columns(rows):
        console.print(line)
    console.print(f"A cold pass: {shares_text(stalls.shares)}")
    if stalls.remedy is not None:
        console.print(f"A loader beside the loop: {stalls.remedy}")


def _summary_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    before, after = report["held_out_loss_before"], report["held_out_loss_after"]
    if "method" not in report:
        yield "held-out loss", f"{before:.4f} -> {after:.4f} nats per token"
    elif after is not None:
        yield "held-out loss", f"{before or math.nan:.4f} -> {after:.4f}"
        if (share := report["held_out"].get("eval_rewards/accuracies")) is not None:
            pairs, even = report["data"]["held_out_rows"], report["data"]["held_out_evenly"]
            apart = f"{share * pairs:,.0f} of" if even else f"{share:.0%} of its"
            yield "", f"{apart} {pairs:,} pairs told apart"
    if report.get("bits_per_byte_after") is not None:
        yield (
            "",
            (
                f"{report['bits_per_byte_before']:.3f} -> {report['bits_per_byte_after']:.3f} bits"
                " per byte"
            ),
        )
    if report["step_seconds"] is not None:
        speed = (
            f"{report['tokens_per_second']:,.0f} tokens/s, {format_seconds(report['step_seconds'])}"
            " per step"
        )
        yield "speed", f"{speed}, stalled {report['stall_share']:.0%}"
        yield "time", shares_text(report["shares"])
        measured, predicted = report["median_step_seconds"], report.get("predicted_step_seconds", 0)
        if predicted >= LEAST_PREDICTED:
            yield (
                "prediction",
                (
                    f"{format_seconds(predicted)} per step; the median of the steps is"
                    f" {format_seconds(measured)}"
                ),
            )
    if report["bound_seconds"]:
        yield "bound", report["bottleneck"]
    if (line := line_of(report["audited"])) is not None:
        yield "audit", line.removeprefix("audited ")
    if report["disk"] is not None:
        yield "disk", _disk_text(report["disk"])


def _disk_text(disk: dict[str, Any]) -> str:
    rates = [
        f"{name} {disk[name]['achieved_bytes_per_second'] / 1e9:.2f} of "
        f"{disk[name]['measured_bytes_per_second'] / 1e9:.2f} GB/s ({disk[name]['share']:.0%})"
        for name in ("read", "write")
    ]
    return f"{', '.join(rates)}; {disk['share']:.0%} over the whole training"


def _size(nbytes: float | None) -> str:
    return "-" if nbytes is None else format_nbytes(nbytes)
