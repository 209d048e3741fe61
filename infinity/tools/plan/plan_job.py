"""The training that `infinity plan` plans: on this machine, or on one rank of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

from ...core.machine.tiers import Tier
from ...errors import InternalError
from ..cost.cost import FORMAT as PROFILE
from ..train.optimizers import muon_cost, trained_of
from .blocks import CHOSEN, UNCHOSEN, BlocksOnPaper, Choice
from .efficiency import explain_slowest
from .saved import (
    ASSUMED,
    ESTIMATED,
    Passes,
    SavedByForwards,
    is_faster,
    pass_here,
    ways_on_paper,
)

NO_LINKS = ("compute", "optimizer on device", "meetings", "devices' links")
STATE = {"weights": "weight", "optimizer": "exp_avg", "gradients": "grad"}


@dataclass(frozen=True)
class Job:
    """The training to plan."""

    model: Any  # on meta
    model_config: Any
    optimizers: list[Any]
    config: Any
    batch: dict[str, Any]  # of a step, as compute_time takes it
    saved: SavedByForwards | None = None  # a plan of meshes counts by itself
    blocks: BlocksOnPaper | None = None  # that are chosen for, by operation
    adapt: Callable[[Any], Any] = lambda model: model  # what ``model`` has beside its config
    unpacked: Any = None  # ``model``, if it has adapters, as its layers run on meta

    @property
    def tokens(self) -> int:
        """Tokens of a step on one rank."""
        return self.batch["batch"] * self.batch["length"]

    def saves(self, write: float | None, read: float | None) -> dict[str, Any]:
        """Describes a checkpoint on disks of these rates, in bytes per second."""
        from ..train.settings import training_state_nbytes
        from .saves import Saves

        return Saves(training_state_nbytes(self.model, self.config), write, read).described()

    def describe(
        self, plan: Any, units: list[Any], passes: Passes, ranks: int = 1
    ) -> dict[str, Any]:
        """Describes where the state is at home, what ``passes`` save beside it, and what Muon costs
        one of ``ranks``."""
        from ...ext.packed.packed import dense_numel
        from ..train.compute import step_flops

        if muon := muon_cost(self.optimizers, ranks):
            flops = step_flops(self.model, self.model_config, **self.batch)
            muon["share_of_passes"] = muon["flops"] / flops
        return {
            **({"muon": muon} if muon else {}),
            **passes.described(),
            "parameters": sum(map(dense_numel, self.model.parameters())),
            "trained": sum(map(dense_numel, trained_of(self.model))),
            "units": list(_units(plan, units)),
            "tiers": {
                str(tier): {"nbytes": plan.planned_nbytes(tier), "parts": plan.terms[tier]}
                for tier in Tier
            },
        }


def endurance(
    written: float, seconds: float, drives: int, rating: float | None
) -> dict[str, dict[str, Any]]:
    """Describes what a step of ``seconds`` that writes so many bytes does to each of a node's
    ``drives``; empty if it writes none."""
    from .endurance import Endurance

    wear = Endurance.of_step(written, seconds, drives, rating)
    if wear is None:
        return {}
    return {"endurance": asdict(wear) | {"years": wear.years, "line": wear.line}}


def profile(job: Job, gpu: str, tokens: int, step_seconds: float) -> dict[str, Any]:
    """Returns what `infinity cost` reads of a plan: the rate of ``gpu``, as ``NAME:COUNT``, in a
    step of so many tokens, and the bytes of a checkpoint."""
    from ..train.settings import training_state_nbytes

    rates = {
        "gpus": {gpu: tokens / step_seconds},
        "checkpoint_nbytes": training_state_nbytes(job.model, job.config),
        "median_step_seconds": step_seconds,
    }
    return PROFILE.numbered(rates)


def _name_of(device: str | None) -> str:
    import torch

    on_gpu = torch.device(device or "cpu").type == "cuda"
    return torch.cuda.get_device_name(device) if on_gpu else "cpu"


def plan_here(job: Job, dtype: Any, *, unknown: str, rating: float | None = None) -> dict[str, Any]:
    """Plans the training on this machine, and measures its rates. ``unknown``: what of the plan is
    another machine's, for which there is no time. ``rating``: of a drive, in bytes."""
    from ...core.plan.step_traffic import traffic
    from ...core.wrap.lay_out import lay_out
    from ...ext.rates.rates import Rates
    from ..train.compute import compute_time
    from .predict import predict

    if unknown.startswith("--device-memory"):
        passes, plan, units = next(ways_on_paper(job, partial(_lay_out, job, None)))
    else:
        plan, units = lay_out(job.model, job.optimizers, job.config)
        passes = pass_here(job, plan)
    if unknown:
        return (
            dict.fromkeys(("compute", "step_seconds", "tokens_per_second", "bottleneck"))
            | job.describe(plan, units, passes)
            | job.saves(None, None)
            | {"edges": traffic(plan, units), "tokens_per_step": job.tokens}
            | {"seconds": {}, "rates": {}, "unknown": unknown}
        )
    compute = compute_time(
        job.model, job.model_config, dtype=dtype, limits=job.config, adapt=job.adapt, **job.batch
    )
    on_disk = plan.planned_nbytes(Tier.NVME) > 0
    folders = job.config.nvme_paths if on_disk else ()
    rates = Rates.measure(folders, job.config.device, room=job.config.host_memory)
    prediction = predict(plan, units, rates, compute_seconds=compute.seconds)
    written, drives = prediction.edges["host->nvme"], len(job.config.nvme_paths)
    wear = endurance(written, prediction.step_seconds, drives, rating)
    return (
        job.describe(plan, units, passes)
        | wear
        | job.saves(rates.disk_write, rates.disk_read)
        | {
            "edges": prediction.edges,
            "seconds": prediction.seconds,
            "compute": compute.how,
            "compute_line": compute.said,
            "processors_share": compute.share,
            "rates": asdict(rates),
            "step_seconds": prediction.step_seconds,
            "tokens_per_step": job.tokens,
            "tokens_per_second": job.tokens / prediction.step_seconds,
            "bottleneck": prediction.bottleneck,
        }
        | profile(job, _name_of(job.config.device), job.tokens, prediction.step_seconds)
    )


def _lay_out(
    job: Job, ranks: Any, saved: int, explains: bool, room: Any = None
) -> tuple[Any, list[Any]]:
    from ...core.wrap.lay_out import lay_out
    from .cluster import OnPaper

    device = OnPaper(saved, room)
    return lay_out(job.model, job.optimizers, job.config, ranks, device, explains=explains)


def plan_cluster(job: Job, machine: Any, nodes: int) -> dict[str, Any]:
    """Plans one rank of ``nodes`` machines. Measures nothing on this machine. Of the ways to divide
    its step into passes, takes the fastest."""
    seconds, *fastest = _fastest(job, machine, nodes)
    return _plan_passes(job, machine, nodes, seconds, *fastest)


def seconds_on(job: Job, machine: Any, nodes: int) -> float:
    """Computes the seconds of the step that :func:`plan_cluster` plans."""
    return _fastest(job, machine, nodes)[0]


def _fastest(job: Job, machine: Any, nodes: int) -> tuple[float, Passes, Any, list[Any]]:
    """Returns the seconds of the fastest way, its passes, the plan and its units."""
    from ...ranks.parallel_dims import ParallelDims
    from .work import has_sizes

    ranks = ParallelDims(
        size=nodes * machine.devices, local_size=machine.devices, shard=job.config.shard
    )
    best: tuple[Passes, Any, list[Any]] | None = None
    best_seconds = math.inf
    each = machine.host_memory // machine.devices
    room = {Tier.DEVICE: machine.device_memory, Tier.HOST: each}

    def least(passes: Passes) -> float:
        return _compute(job, machine, passes)[0]

    def choices(samples: int) -> Iterable[Choice | None]:
        if job.blocks is None or not has_sizes(machine):
            return (None,)
        return job.blocks.choices(samples, job.batch["length"], machine)

    tries = partial(_lay_out, job, ranks, room=room)
    for passes, plan, units in ways_on_paper(job, tries, least, choices):
        if best is not None and not is_faster(least(passes), best_seconds):
            break  # nothing that is added makes a step shorter
        seconds = _step_seconds(job, machine, nodes, passes, plan, units)
        if best is None or is_faster(seconds, best_seconds):
            best, best_seconds = (passes, plan, units), seconds
    if best is None:
        raise InternalError("no way to divide a step into passes was planned")
    return best_seconds, *best


def _step_seconds(
    job: Job, machine: Any, nodes: int, passes: Passes, plan: Any, units: list[Any]
) -> float:
    from .cluster import timeline_seconds

    ahead, given = _predicted(job, machine, nodes, passes, plan, units)
    seconds = timeline_seconds(plan, units, machine, **given)
    if ahead.ranks == 1:
        return seconds
    return max(ahead.step_seconds, seconds + ahead.seconds["meetings"])


def _predicted(
    job: Job, machine: Any, nodes: int, passes: Passes, plan: Any, units: list[Any]
) -> tuple[Any, dict[str, Any]]:
    """Predicts a step by its resources alone. Also returns what its timeline is given."""
    from .cluster import averaged_passes, embedding_of, predict_cluster
    from .mesh_shape import MeshShape

    lookup, tied = embedding_of(job.model)
    compute, forward = _compute(job, machine, passes)
    averaged = averaged_passes(job.config, passes.count)
    ahead = predict_cluster(
        plan,
        units,
        machine,
        nodes,
        compute=compute,
        passes=passes.count,
        averaged=averaged,
        tied=tied,
    )
    return ahead, {
        "compute": compute,
        "passes": passes.count,
        "forward": forward,
        "clips": job.config.max_grad_norm is not None,
        "lookup": lookup,
        "tied": tied,
        "averaged": averaged,
        "received_seconds": MeshShape(1, ahead.ranks, 1).axis("data", machine).received_seconds,
    }


def _plan_passes(
    job: Job,
    machine: Any,
    nodes: int,
    step_seconds: float,
    passes: Passes,
    plan: Any,
    units: list[Any],
) -> dict[str, Any]:
    from .cluster import timeline_of
    from .work import rate_of

    ahead, given = _predicted(job, machine, nodes, passes, plan, units)
    tokens = job.tokens * ahead.ranks
    described, bound, seconds = (
        job.describe(plan, units, passes, ahead.ranks),
        ahead.bottleneck,
        ahead.seconds,
    )
    if ahead.ranks == 1:
        timeline = timeline_of(plan, units, machine, **given)
        bound, seconds = timeline.bound, timeline.busy
        described["timeline"] = {name: spans for name, spans in timeline.spans()}
    rates = {key: value for key, value in asdict(machine).items() if type(value) in (int, float)}
    written = ahead.edges["host->nvme"] * machine.devices
    described |= endurance(written, step_seconds, machine.disks, machine.drive_rating)
    disks = nodes * machine.disks
    described |= job.saves(disks * machine.disk_write, disks * machine.disk_read)
    estimated = () if job.saved is None or job.saved.is_counted else (ESTIMATED,)
    return described | {
        "explanation": explain_slowest(seconds, NO_LINKS),
        "machine": machine.name,
        "nodes": nodes,
        "ranks": ahead.ranks,
        "edges": ahead.edges,
        "seconds": seconds,
        "compute": "measured" if machine.is_measured else "assumed",
        "rates": rates,
        "step_seconds": step_seconds,
        "tokens_per_step": tokens,
        "samples_per_step": job.batch["batch"] * ahead.ranks,
        "tokens_per_second": tokens / step_seconds,
        "bottleneck": bound,
        **profile(job, f"{machine.name}:{ahead.ranks}", tokens, step_seconds),
        "assumptions": [
            f"{ahead.assumptions[0]}; {rate_of(machine, is_counted=_works_of(job) is not None)}",
            *ahead.assumptions[1:],
            ASSUMED,
            *([CHOSEN if passes.choice else UNCHOSEN] if job.config.recompute else []),
            *estimated,
        ],
        "sources": list(machine.sources),
    }


def _compute(job: Job, machine: Any, passes: Passes) -> tuple[float, float]:
    """Returns the seconds that a rank's step computes, by the rule of plans of meshes, and the part
    of them that is the first forward."""
    from ..train.compute import forward_share, step_flops

    batch, choice = job.batch, passes.choice
    if job.saved is not None and (
        found := job.saved.compute_seconds(
            passes.samples,
            passes.length,
            machine,
            recomputes=passes.recomputes and choice is None,
        )
    ):
        seconds = found[0] + (0.0 if choice is None else choice.again_seconds)
        return passes.count * seconds, found[1] / seconds
    batch = batch | {"checkpointing": passes.recomputes}
    flops = step_flops(job.model, job.model_config, **batch)
    return flops / machine.device_flops, forward_share(job.model, job.model_config, **batch)


def _works_of(job: Job) -> Any:
    return job.saved and job.saved.works


def _units(plan, units) -> Iterator[dict[str, Any]]:
    """Yields an entry per run of units with the same homes and sizes."""

    def entry(index: int) -> tuple:
        unit, tiers, kept = units[index], plan.tiers_of(index), plan.cached_of(index)
        homes = {}
        for what, array in STATE.items():
            held = any(flat.nbytes(array) for flat in unit.flat_params)
            homes[what] = (
                str(tiers[array]) + (" (kept on host)" if array in kept else "") if held else "-"
            )
        return (
            sum(flat.numel for flat in unit.flat_params),
            tuple(homes.items()),
            unit.at_once_nbytes,
        )

    for (count, homes, tile), run_of in groupby(range(len(units)), key=entry):
        indices = list(run_of)
        yield {
            "first": units[indices[0]].name,
            "last": units[indices[-1]].name,
            "units": len(indices),
            "parameters": count,
            "tile_nbytes": tile,
            **dict(homes),
        }
