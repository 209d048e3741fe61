"""`infinity plan --mesh`: the fastest meshes of tensor, expert, data and pipeline ranks, on
paper."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from ...core.machine.sizes import format_nbytes
from ...errors import CapacityError, ConfigError
from ..cli.amounts import format_count, format_seconds
from .budgets import fits_line
from .cluster import UNCHECKED
from .efficiency import explain_slowest
from .machine_file import Machine
from .mesh_choice import CHAIN, Batch, MeshPlan, best_of
from .mesh_shape import UNFLUSHED, MeshShape, meshes_of, parse_mesh
from .plan_job import Job, endurance, profile
from .saved import ASSUMED, ESTIMATED
from .work import rate_of

EVERY = 5.0  # seconds between two lines of progress
REFUSED, LONGEST = 6, 150  # reasons that are printed, and their characters
NO_LINKS = (*CHAIN, "meetings", "devices' links")

Tried = list[tuple[MeshShape, MeshPlan | None, Exception | None]]


def plan_meshes(
    job: Job,
    machine: Machine,
    nodes: int,
    wanted: str,
    make_optimizers: Callable[[Any], list],
    schedule: str | None = None,
) -> dict[str, Any]:
    """Plans the mesh ``wanted``, or with "auto" all of them, with and without checkpointing, as
    plain data. The batch of ``job`` is that of all ranks. ``schedule``: of the pipelines; None: the
    fastest. Raises ConfigError or CapacityError if no mesh fits."""
    from ...ext.experts_parallel.experts import experts_of
    from ...ext.packed.packed import dense_numel
    from ..train.model import can_recompute
    from . import mesh_plans  # noqa: F401 - each child would import it by itself
    from .on_paper import in_children

    ranks = nodes * machine.devices
    experts = experts_of(job.model)
    meshes = [*meshes_of(ranks, experts)] if wanted == "auto" else [parse_mesh(wanted, ranks)]
    if job.unpacked is not None:
        meshes = [mesh for mesh in meshes if mesh.is_data_alone]
    if not meshes:
        raise ConfigError(
            f"--mesh {wanted}: --lora has data ranks alone, for adapters are small: --mesh"
            f" dp={ranks}"
        )
    batches = [_batch_of(job)]
    batch = batches[0]
    if wanted == "auto" and not batch.recomputes and can_recompute(job.model):
        batches.append(_batch_of(replace(job, batch=job.batch | {"checkpointing": True})))
    parts: dict[tuple[int, int], list[MeshShape]] = {}
    for mesh in meshes:
        parts.setdefault((mesh.tp, mesh.ep), []).append(mesh)
    works = [
        _work(job, machine, batches, parts[each], make_optimizers, schedule)
        for each in sorted(parts)
    ]
    progress = _Progress(len(meshes))
    tried: Tried = [each for found in in_children(works, ranks, progress.note) for each in found]
    progress.end()
    best = best_of(plan for _, plan, _ in tried if plan is not None)
    if not best:
        raise _none_fits(tried, machine, ranks)
    rates = {key: value for key, value in asdict(machine).items() if type(value) in (int, float)}
    return {
        "machine": machine.name,
        "nodes": nodes,
        "ranks": ranks,
        "parameters": sum(map(dense_numel, job.model.parameters())),
        "tokens_per_step": batch.tokens,
        "samples_per_step": batch.samples,
        "meshes": [
            _described(plan, machine, batch)
            | {"device_memory": min(each.room(job.config) for each in plan.ranks)}
            for plan in best
        ],
        **profile(job, f"{machine.name}:{ranks}", batch.tokens, best[0].step_seconds),
        **job.saves(
            *(nodes * machine.disks * rate for rate in (machine.disk_write, machine.disk_read))
        ),
        "slower": {
            str(plan.mesh): plan.step_seconds
            for _, plan, _ in tried
            if plan is not None and plan not in best
        },
        "refused": {str(mesh): str(error) for mesh, plan, error in tried if plan is None},
        "rates": rates,
        "assumptions": _assumptions(machine, best),
        "sources": list(machine.sources),
    }


class _Progress:
    """Shows on stderr how many of several meshes are planned, and the best so far: on a terminal in
    one line, else every few seconds."""

    def __init__(self, count: int):
        self._count, self._done, self._shown = count, 0, time.monotonic()
        self._best: tuple[str, float] | None = None
        self._in_place = sys.stderr.isatty() and count > 1

    def note(self, told: tuple[str, float | None]) -> None:
        """Notes a mesh, and the seconds of its step if it fits."""
        (name, seconds), now = told, time.monotonic()
        self._done += 1
        if seconds is not None and (self._best is None or seconds < self._best[1]):
            self._best = name, seconds
        if not self._in_place and (now - self._shown < EVERY or self._count == 1):
            return
        self._shown, text = now, f"{self._done} of {_count(self._count, 'mesh')} planned"
        if self._best is not None:
            text += f"; best so far: {self._best[0]}, {format_seconds(self._best[1])} a step"
        text = f"\r\x1b[K{text}" if self._in_place else f"{text}\n"
        print(text, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Removes the line."""
        if self._in_place:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _batch_of(job: Job) -> Batch:
    import torch

    from ..train.compute import forward_share, step_flops

    checkpointing = job.batch["checkpointing"]
    width = getattr(job.model_config.get_text_config(), "hidden_size", 0) or 0
    dtype = next(job.model.parameters()).dtype
    return Batch(
        samples=job.batch["batch"],
        length=job.batch["length"],
        flops=step_flops(job.model, job.model_config, **job.batch),
        recomputes=checkpointing,
        width=width,
        itemsize=torch.empty(0, dtype=dtype).itemsize,
        forward=forward_share(job.model, job.model_config, **job.batch),
    )


def _work(
    job: Job,
    machine: Machine,
    batches: list[Batch],
    meshes: list[MeshShape],
    make_optimizers: Callable[[Any], list],
    schedule: str | None,
) -> Callable[[], Tried]:
    """Returns what a child does: shards the model once, and plans all meshes with these parts."""

    def work() -> Tried:
        from .mesh_candidate import Job as MeshJob
        from .mesh_plans import plan_meshes
        from .on_paper import shard_on_paper

        model = job.model if job.unpacked is None else job.unpacked
        try:
            paper = shard_on_paper(
                model, meshes[0].tp, meshes[0].ep, fused_loss=job.config.fused_loss
            )
        except ConfigError as error:
            return [(mesh, None, error) for mesh in meshes]
        optimizers = make_optimizers(job.model)
        planned = (
            MeshJob(paper, optimizers, job.config, machine, batch, schedule, job.model)
            for batch in batches
        )
        return plan_meshes(planned, meshes)

    return work


def _none_fits(tried: Tried, machine: Machine, ranks: int) -> Exception:
    errors = [error for _, _, error in tried if error is not None]
    if len(errors) == 1:
        return errors[0]
    nearest = next((each for each in errors if isinstance(each, CapacityError)), errors[0])
    kind = CapacityError if isinstance(nearest, CapacityError) else ConfigError
    return kind(
        f"none of the {len(tried)} meshes of {ranks} ranks of {machine.name} fits. The nearest:"
        f" {nearest}"
    )


def _described(plan: MeshPlan, machine: Machine, batch: Batch) -> dict[str, Any]:
    slowest, mesh = plan.slowest, plan.mesh
    written = max(rank.edges["host->nvme"] for rank in plan.ranks) * machine.devices
    wear = endurance(written, plan.step_seconds, machine.disks, machine.drive_rating)
    network = [
        name
        for name in mesh.sizes
        if getattr(mesh, name) > 1 and not mesh.axis(name, machine).is_inside
    ]
    return {
        "mesh": mesh.sizes,
        "paste": mesh.paste(machine.device),
        "schedule": plan.schedule if mesh.pp > 1 else None,
        "layers": list(plan.lengths),
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "in_flight": plan.in_flight,
        "gradient_checkpointing": plan.recomputes,
        "step_seconds": plan.step_seconds,
        "tokens_per_second": batch.tokens / plan.step_seconds,
        "bottleneck": slowest.bottleneck,
        "idle_share": slowest.share_of("idle"),
        "times_resident": plan.slower,
        "why": plan.why,
        "network_axes": network,
        "ranks": [
            asdict(rank) | {"step_seconds": rank.step_seconds, "bottleneck": rank.bottleneck}
            for rank in plan.ranks
        ],
        "explanation": explain_slowest(slowest.seconds, NO_LINKS),
        **wear,
    }


def _assumptions(machine: Machine, plans: list[MeshPlan]) -> list[str]:
    lines = [
        f"{machine.name}: rates of the machine file, which names its sources; {rate_of(machine)}",
        "each schedule's own order runs on a clock; collectives of tp and what passes between"
        " stages are waited for. Without stages the data ranks' collectives and the homes' traffic"
        " run on the clock, too; with stages beside it",
        "ranks are numbered node by node, with tp inside and pp outside; only messages between"
        f" nodes have a latency, {machine.latency * 1e6:g} us; rings",
        ASSUMED,
    ]
    if any(plan.mesh.ranks > 1 for plan in plans):
        lines.append(UNCHECKED)
    if any(plan.mesh.ep > 1 for plan in plans):
        lines.append(
            "ranks of ep send tokens to their experts and back, by expert_parallel(...,"
            ' exchange="tokens"), and wait for it; all experts are chosen as often'
        )
    if not all(plan.is_counted for plan in plans):
        lines.append(ESTIMATED)
    return lines


def text(found: dict[str, Any]) -> Iterator[str]:
    """Yields the lines for a terminal: the best mesh in full, the others in short."""
    held = dict.fromkeys(found["budgets"], 0)
    for rank in found["meshes"][0]["ranks"]:
        there = {"device": rank["activations"] + rank["buffers"]}
        for tier in held:
            held[tier] = max(held[tier], rank["tiers"][tier] + there.get(tier, 0))
    whose = {True: "It", False: "Each rank of the best mesh"}[found["ranks"] == 1]
    yield fits_line(held, found["budgets"], whose)
    yield (
        f"{found['parameters']:,} parameters on {found['nodes']} x {found['machine']},"
        f" {format_count(found['ranks'], 'rank')}; a step is {found['tokens_per_step']:,} tokens"
        f" in {format_count(found['samples_per_step'], 'sample')}"
    )
    for number, plan in enumerate(found["meshes"], 1):
        name = ", ".join(f"{axis}={size}" for axis, size in plan["mesh"].items())
        yield (
            f"{number}. {name}: {format_seconds(plan['step_seconds'])} a step,"
            f" {plan['tokens_per_second']:,.0f} tokens/s; {plan['why']}"
        )
        yield f"   {plan['paste']}"
        yield f"   {_batches(plan)}"
        if found["ranks"] > 1:
            yield f"   {UNCHECKED}"
        for axis in ("tp", "ep"):
            if axis in plan["network_axes"]:
                yield f"   warning: a group of {axis} leaves its node, and waits for the network"
        if number == 1:
            yield from (f"   {line}" for line in _details(plan))
    yield from _left_out(found)
    yield found["checkpoint"]["line"]
    for name in ("assumptions", "sources"):
        yield from [f"{name}:", *(f"  {line}" for line in found[name])]


def _left_out(found: dict[str, Any]) -> Iterator[str]:
    """Yields why other meshes are not among the best."""
    slower = {
        name: f"{format_seconds(seconds)} a step" for name, seconds in found["slower"].items()
    }
    others = list((slower | found["refused"]).items())
    if others:
        yield f"{_count(len(others), 'mesh')} left out:"
    for name, why in others[:REFUSED]:
        why = why.removeprefix(f"{name}: ")
        yield f"  {name}: {why if len(why) < LONGEST else why[: LONGEST - 3] + '...'}"
    if len(others) > REFUSED:
        yield f"  ... {len(others) - REFUSED} more (--json has all)"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}es"


def _batches(plan: dict[str, Any]) -> str:
    said = (
        f"{_count(plan['micro_batches'], 'micro-batch')} of"
        f" {format_count(plan['micro_batch'], 'sample')}"
    )
    if plan["gradient_checkpointing"]:
        said += ", every block recomputed (--gradient-checkpointing)"
    if plan["schedule"] is None:
        return said
    lengths = plan["layers"]
    chunks = len(lengths) // plan["mesh"]["pp"]
    layers = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
    late = plan["schedule"] == UNFLUSHED
    schedule = "1F1B" if late else plan["schedule"]
    said += " without flush, by pipe.run(batches, optimizer): gradients are one update old" * late
    return (
        f'{said}; pipeline(..., schedule="{schedule}",'
        f" micro_batches={plan['micro_batches']}, chunks={chunks}), layers a chunk:"
        f" {layers}, idle {plan['idle_share']:.1%}, at most"
        f" {format_count(plan['in_flight'], 'chunk')} in flight"
    )


def _details(plan: dict[str, Any]) -> Iterator[str]:
    """Yields bytes and seconds of a rank of each kind."""
    for rank in plan["ranks"]:
        tiers = ", ".join(f"{tier} {format_nbytes(n)}" for tier, n in rank["tiers"].items() if n)
        homes = ", ".join(f"{what} on {' + '.join(on)}" for what, on in rank["homes"].items())
        yield f"rank of stage {rank['stage']}: {homes}"
        yield (
            f"  holds {tiers or 'nothing'}; saved for the backward"
            f" {format_nbytes(rank['activations'])}, between stages"
            f" {format_nbytes(rank['buffers'])}"
        )
        sent = ", ".join(f"{axis} {format_nbytes(n)}" for axis, n in rank["sent"].items() if n)
        moved = ", ".join(f"{edge} {format_nbytes(n)}" for edge, n in rank["edges"].items() if n)
        yield f"  sends {sent or 'nothing'}; moves {moved or 'nothing'}"
        needs = ", ".join(
            f"{what} {format_seconds(seconds)}"
            for what, seconds in rank["seconds"].items()
            if seconds
        )
        yield f"  needs {needs}"
    if plan["explanation"]:
        yield plan["explanation"]
    if "endurance" in plan:
        yield plan["endurance"]["line"]
