"""Mesh candidate: one way to train on a mesh, with the seconds and bytes of its ranks.

The schedule's own order runs on a clock. The chunks of a rank of each kind are laid out by the
planner that runs, in the room that the activations leave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from ...config import Config
from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import Tier
from ...core.plan.memory_plan import MemoryPlan
from ...core.plan.unit_sizes import UnitSize
from ...core.wrap.lay_out import lay_out
from ...core.wrap.parts import Parts
from ...errors import CapacityError
from ...ext.pipeline.choice import Choice
from ...ext.pipeline.pipelines import give_back, keep_own
from ...ranks.parallel_dims import ExpertGroup, ParallelDims
from .cluster import (
    OnPaper,
    averaged_passes,
    edges_of,
    embedding_of,
    gathers_of,
    timeline_seconds,
)
from .machine_file import Machine
from .mesh_bytes import all_gather_nbytes, boundary_nbytes
from .mesh_choice import Batch, MeshPlan, RankPlan, count_gathers, seconds_of
from .mesh_shape import UNFLUSHED, MeshShape
from .on_paper import PaperModel
from .orders import orders_of, step_of
from .pipeline_clock import (
    FORWARD,
    ChunkSeconds,
    Op,
    PipelineRun,
    extrapolated,
    in_flight,
    run_long,
)
from .work import has_sizes

IN_FLIGHT = 2  # layers whose saved bytes are on their way home, or back
ARRAYS = {"weights": "weight", "moments": "exp_avg", "gradients": "grad"}


# The edges that bytes pass which have their home there, each way once.
AWAY = {
    "host": ("device->host", "host->device"),
    "nvme": ("device->host", "host->nvme", "nvme->host", "host->device"),
}


class Saved(NamedTuple):
    """Bytes of a rank's forwards: on the device, in torch's buffers between stages, at a home off
    the device, and those that a step sends there."""

    on_device: int
    buffers: int
    away: int
    sent: int


@dataclasses.dataclass(frozen=True)
class Job:
    """What is planned. ``optimizers`` are over the whole model of ``paper``; ``config`` has the
    budgets of one rank."""

    paper: PaperModel
    optimizers: Sequence[torch.optim.Optimizer]
    config: Config
    machine: Machine
    batch: Batch
    schedule: str | None = None  # None: the fastest of those that are tried
    whole: nn.Module | None = None  # what data ranks alone train: ``paper`` may lack its packing
    known: dict[tuple, list[list[Op]]] = dataclasses.field(default_factory=dict)

    @cached_property
    def shares(self) -> list[float]:
        """The part of a step's operations in each layer."""
        costs = self.paper.costs
        return [cost / (sum(costs) or 1.0) for cost in costs]

    def orders(self, choice: Choice, micro_batches: int) -> list[list[Op]]:
        """Returns the orders of a choice's ranks, which do not depend on its cuts."""
        key = choice.name, choice.ranks, choice.chunks, micro_batches
        if key not in self.known:
            self.known[key] = orders_of(choice, micro_batches)
        return self.known[key]


class Candidate:
    """One way to train on a mesh. ``flushes``: a step ends with an empty pipeline."""

    def __init__(
        self, job: Job, mesh: MeshShape, choice: Choice, samples: int, *, flushes: bool = True
    ):
        self._flushes = flushes
        self._job, self._mesh, self._choice, self.samples = job, mesh, choice, samples
        self._tokens = samples * job.batch.length
        self._trials = [job.paper.trial_of(choice.layers_of(n)) for n in range(choice.chunks)]
        again = job.batch.recomputes
        self._sending = [  # seconds of a chunk's forward and backward
            tuple(
                self._sends(nbytes * self._tokens, messages)
                for nbytes, messages in (
                    (each.forward_nbytes, each.forward_messages),
                    (
                        each.backward_nbytes + again * each.forward_nbytes,
                        each.backward_messages + again * each.forward_messages,
                    ),
                )
            )
            for each in self._trials
        ]
        self._seconds = self._chunk_seconds()

    def _sends(self, nbytes: float, messages: int) -> float:
        """Computes the seconds of collectives over tp, or of exchanges over ep."""
        if self._mesh.ep > 1:
            return self._mesh.axis("ep", self._job.machine).exchange_seconds(nbytes, messages)
        return self._mesh.axis("tp", self._job.machine).collective_seconds(nbytes, messages)

    def _orders(self, micro_batches: int) -> list[list[Op]]:
        return self._job.orders(self._choice, micro_batches)

    def _extrapolated(self, at: Callable[[list[list[Op]]], Sequence[float]]) -> list[float]:
        count, step = self._choice.micro_batches, step_of(self._choice)
        return extrapolated(lambda few: at(self._orders(few)), count, step)

    def _chunk_seconds(self) -> list[ChunkSeconds]:
        machine, seconds = self._job.machine, []
        for number, (ahead, back) in enumerate(self._sending):
            forward, backward = self._compute_seconds(number)
            back += self._job.batch.recomputes * forward
            # What runs again, and what is summed over tp, is of the inputs' half. The first chunk's
            # inputs have no gradient, and torch computes all with the weights.
            whole, halves = backward + back, (0.0, 1.0)
            if number and whole:
                inputs, weights = machine.of_inputs * backward, machine.of_weights * backward
                halves = (inputs + back) / whole, weights / whole
            seconds.append(ChunkSeconds(forward + ahead, whole, *halves))
        return seconds

    def _compute_seconds(self, number: int) -> tuple[float, float]:
        """Computes the seconds of a chunk's forward and of its gradients: by the sizes of its
        products, or by its share of all operations if these or their rate are not known."""
        job, batch, trial = self._job, self._job.batch, self._trials[number]
        machine = job.machine
        if trial.is_counted and has_sizes(machine):
            forward, backward = (
                work.seconds(self.samples, batch.length, machine)
                for work in (trial.forward_work, trial.backward_work)
            )
            return forward, backward
        share = sum(job.shares[n] for n in self._choice.layers_of(number))
        rate = self._mesh.tp * machine.device_flops
        compute = batch.flops * share * self.samples / batch.samples / rate
        forward = compute * batch.forward
        return forward, compute - (1 + batch.recomputes) * forward

    @property
    def least_seconds(self) -> float:
        """The seconds that the busiest rank computes: a step takes no less."""
        choice, each = self._choice, [one.forward + one.backward for one in self._seconds]
        return choice.micro_batches * max(
            sum(each[number] for number in choice.chunks_of(rank)) for rank in range(choice.ranks)
        )

    @cached_property
    def run(self) -> PipelineRun:
        """The run of the schedule on a clock."""
        job, choice = self._job, self._choice
        pp, tp = (self._mesh.axis(name, job.machine) for name in ("pp", "tp"))
        nbytes, parts = self._boundary_nbytes, job.paper.parts
        joined = tp.collective_seconds(all_gather_nbytes(nbytes * parts, parts), parts - 1)
        hops = []
        for number in range(choice.chunks - 1):
            a, b = choice.rank_of(number), choice.rank_of(number + 1)
            hops.append(pp.hop_seconds(nbytes, a, b) + joined * (a != b))
        count, step = choice.micro_batches, step_of(choice)
        if self._flushes:
            return run_long(self._orders, count, step, self._seconds, hops)
        # A batch of many: what one more takes.
        few, more = (
            run_long(self._orders, batches * count, step, self._seconds, hops) for batches in (2, 3)
        )
        return dataclasses.replace(
            more,
            seconds=more.seconds - few.seconds,
            busy=tuple(b - a for a, b in zip(few.busy, more.busy)),
            messages=more.messages - few.messages,
        )

    @property
    def _boundary_nbytes(self) -> float:
        batch = self._job.batch
        return boundary_nbytes(self._tokens, batch.width, batch.itemsize, self._job.paper.parts)

    @property
    def _kinds(self) -> list[int]:
        """A rank of each kind: of equal ranks the first keeps most."""
        choice, kinds = self._choice, {}
        for rank in range(choice.ranks):
            mine = choice.chunks_of(rank)
            ends = 0 in mine, choice.chunks - 1 in mine
            kinds.setdefault((tuple(choice.lengths[n] for n in mine), ends), rank)
        return list(kinds.values())

    def check_room(self) -> None:
        """Raises CapacityError if what forwards save leaves no room on a device."""
        for rank in self._kinds:
            self._room(rank)

    def _room(self, rank: int) -> int:
        saved, budget = self._activations(rank), int(self._job.config.device_memory or 0)
        needed = saved.on_device + saved.buffers
        if needed < budget:
            return budget - needed
        remedies = ["more tp", "fewer tokens a step"]
        remedies += ["--gradient-checkpointing"] * (not self._job.batch.recomputes)
        remedies += ["--activations host"] * (not self._is_away)
        raise CapacityError(
            f"{self._mesh}: with {self.samples} samples a micro-batch, what forwards save and pass"
            f" on is {format_nbytes(needed)}, and a device has {format_nbytes(budget)}: use"
            f" {' or '.join(remedies)}"
        )

    @property
    def _is_away(self) -> bool:
        """Whether what forwards save has its home off the device."""
        return self._job.config.activations in ("host", "nvme")

    def plan(self, rival: float = math.inf) -> MeshPlan:
        """Plans a rank of each kind. Raises CapacityError if one does not fit. ``rival``: seconds
        of a step; one that takes as long or longer is planned no further than shows that."""
        choice, ranks = self._choice, list[RankPlan]()
        for rank in self._kinds:
            ranks.append(self._plan_rank(rank, rival))
            if ranks[-1].step_seconds >= rival:
                break
        return MeshPlan(
            mesh=self._mesh,
            schedule=choice.name if self._flushes else UNFLUSHED,
            lengths=choice.lengths,
            micro_batch=self.samples,
            micro_batches=choice.micro_batches,
            in_flight=round(max(self.run.in_flight)),
            ranks=tuple(ranks),
            is_counted=self._job.paper.layer.is_counted,
            recomputes=self._job.batch.recomputes,
        )

    def _activations(self, rank: int) -> Saved:
        """Counts the bytes that the forwards of a rank save at most, and those of torch's buffers
        between stages, one for each micro-batch. At a home off the device what a backward computes
        again stays there, and a few layers' bytes are on their way."""
        job, choice = self._job, self._choice
        numbers = choice.chunks_of(rank)
        kept, again, each = {}, 0.0, 0.0
        for number in numbers:
            layers = choice.layers_of(number)
            a_token, again = job.paper.saved_of(layers, recomputes=job.batch.recomputes)
            kept[number] = a_token * self._tokens
            each = max(each, kept[number] / len(layers))
        weights = [kept.get(number, 0.0) for number in range(choice.chunks)]
        (most,) = self._extrapolated(lambda orders: [in_flight(orders[rank], weights)])
        sides = sum((n > 0) + (n < choice.chunks - 1) for n in numbers)
        buffers = sides * choice.micro_batches * self._boundary_nbytes
        there = min(most, IN_FLIGHT * each) if self._is_away else most
        sent = choice.micro_batches * sum(weights) if self._is_away else 0
        there += again * self._tokens
        return Saved(int(there), int(buffers), int(most) * self._is_away, int(sent))

    def _plan_rank(self, rank: int, rival: float) -> RankPlan:
        job, mesh = self._job, self._mesh
        saved = self._activations(rank)
        chunks = [
            job.paper.chain.make_chunk(self._choice.layers_of(number))
            for number in self._choice.chunks_of(rank)
        ]
        if mesh.is_data_alone and job.whole is not None:
            chunks = [job.whole]
        away = {tier: saved.away * (tier == job.config.activations) for tier in BUDGETS}
        config = _less(dataclasses.replace(job.config, device_memory=self._room(rank)), away)

        def laid_out(config: Config) -> tuple[MemoryPlan, list[UnitSize]]:
            ranks = _ranks_on_paper(mesh, job)
            return _lay_out(chunks, job.optimizers, config, ranks, reuses=mesh.pp > 1)

        plan, units = laid_out(config)
        versions: dict[Tier, int] = {}
        if not self._flushes:
            versions = _versions(plan, units)
            if not _has_room(plan, versions, config):
                plan, units = laid_out(_less(config, versions))
                versions = _versions(plan, units)
            if not _has_room(plan, versions, config):
                raise CapacityError(
                    f"{mesh}: {UNFLUSHED} keeps a second version of the weights,"
                    f" {format_nbytes(sum(versions.values()))} on a rank, for which there is no"
                    " room: choose a schedule with a flush, or more ranks"
                )
        gathers = self._gathers(rank, plan, units, chunks)
        count = self._choice.micro_batches
        # A pipeline's gradients wait for the last micro-batch, and it is one pass of all ranks.
        passes = 1 if mesh.pp > 1 else averaged_passes(config, count)
        edges = edges_of(plan, units, gathers, passes)
        for edge in AWAY.get(job.config.activations, ()):
            edges[edge] += saved.sent
        sent = self._sent(rank)
        seconds = self._chain_seconds(rank) | seconds_of(
            plan,
            units,
            edges,
            job.machine,
            mesh,
            gathers=gathers,
            sent=sent,
            passes=passes,
            meetings=1 if mesh.pp > 1 else count,
        )
        sent |= {"dp": edges["all-gather"] + edges["reduce-scatter"]}
        planned = RankPlan(
            stage=rank,
            activations=saved.on_device,
            buffers=saved.buffers,
            tiers={
                str(tier): plan.planned_nbytes(tier) + versions.get(tier, 0) + away[tier]
                for tier in Tier
            },
            homes=_homes(plan, units)
            | ({"activations": [str(job.config.activations)]} if self._is_away else {}),
            edges=edges,
            sent=sent,
            seconds=seconds,
        )
        if mesh.pp > 1 or mesh.ep > 1 or job.config.activations == "nvme":
            return planned
        # One rank alone steps state at home on the device beside the backward.
        least = planned.step_seconds if mesh.ranks > 1 else 0.0
        if least >= rival:
            return planned
        simulated = self._simulated(plan, units, passes, saved.sent / count) + seconds["meetings"]
        return dataclasses.replace(planned, timeline_seconds=max(least, simulated))

    def _simulated(
        self, plan: MemoryPlan, units: Sequence[UnitSize], averaged: int, activations: float
    ) -> float:
        """Computes the seconds of a step without stages on a clock. ``averaged``: the passes in
        which gradients leave; ``activations``: bytes that a forward sends home."""
        job = self._job
        lookup, tied = embedding_of(job.paper.chain.model if job.whole is None else job.whole)
        each = self._seconds[0]
        forward = each.forward / ((each.forward + each.backward) or 1.0)
        return timeline_seconds(
            plan,
            units,
            job.machine,
            compute=self.least_seconds,
            passes=self._choice.micro_batches,
            forward=forward,
            clips=job.config.max_grad_norm is not None,
            lookup=lookup,
            tied=tied,
            averaged=averaged,
            received_seconds=self._mesh.axis("data", job.machine).received_seconds,
            activations=activations,
        )

    def _sent(self, rank: int) -> dict[str, int]:
        """Counts the bytes that a rank sends to other stages and parts in a step."""
        choice, again = self._choice, self._job.batch.recomputes
        numbers, count = choice.chunks_of(rank), choice.micro_batches
        crossings = sum(
            choice.rank_of(other) != rank
            for number in numbers
            for other in (number - 1, number + 1)
            if 0 <= other < choice.chunks
        )
        inside = sum(
            (1 + again) * self._trials[number].forward_nbytes + self._trials[number].backward_nbytes
            for number in numbers
        )
        parts = self._job.paper.parts
        joined = all_gather_nbytes(self._boundary_nbytes * parts, parts)
        inner = "ep" if self._mesh.ep > 1 else "tp"
        return {
            "pp": int(crossings * count * self._boundary_nbytes),
            inner: int(count * (inside * self._tokens + crossings * joined)),
        }

    def _chain_seconds(self, rank: int) -> dict[str, float]:
        numbers, count = self._choice.chunks_of(rank), self._choice.micro_batches
        sending = count * sum(sum(self._sending[number]) for number in numbers)
        busy, has_experts = self.run.busy[rank], self._mesh.ep > 1
        return {
            "compute": max(0.0, busy - sending),
            "tensor parallel": 0.0 if has_experts else sending,
            "expert parallel": sending if has_experts else 0.0,
            "idle": max(0.0, self.run.seconds - busy),
        }

    def _gathers(
        self, rank: int, plan: MemoryPlan, units: Sequence[UnitSize], chunks: list[nn.Module]
    ) -> list[int]:
        """Counts how often each unit is gathered in a step of the rank's order."""
        sizes = [
            0
            if plan.tiers_of(index)["weight"] is Tier.DEVICE and not unit.is_sharded
            else unit.weight_nbytes
            for index, unit in enumerate(units)
        ]
        count = self._choice.micro_batches
        if self._mesh.is_data_alone:
            whole = self._job.paper.chain.model if self._job.whole is None else self._job.whole
            return [count * each for each in gathers_of(plan, units, embedding_of(whole)[1])]
        if sum(sizes) <= plan.device_window_nbytes:
            return [int(size > 0) * (count if self._mesh.pp == 1 else 1) for size in sizes]
        numbers = self._choice.chunks_of(rank)
        of_chunk = dict(zip(numbers, _units_of(units, chunks)))

        def at(orders: list[list[Op]]) -> list[int]:
            uses: list[int] = []
            for op in orders[rank]:
                used = of_chunk[op.chunk]
                uses += used if op.kind == FORWARD else used[::-1]
            return count_gathers(uses, sizes, plan.device_window_nbytes)

        counts = self._extrapolated(at)
        return [round(count) if size else 0 for count, size in zip(counts, sizes)]


def _ranks_on_paper(mesh: MeshShape, job: Job) -> ParallelDims:
    """Returns the data ranks of a mesh, as the first of them sees them."""
    same = tuple(range(0, mesh.data, mesh.ep))  # ranks with the same experts
    over = tuple(range(mesh.ep))
    group = ExpertGroup(rank=0, size=mesh.dp, places=same, over=over, channel=None)
    return ParallelDims(
        size=mesh.data,
        local_size=job.machine.devices,
        shard=job.config.shard,
        expert_group=group if mesh.ep > 1 else None,
    )


def _lay_out(
    chunks: list[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    config: Config,
    ranks: ParallelDims,
    *,
    reuses: bool,
) -> tuple[MemoryPlan, list[UnitSize]]:
    """Lays the chunks of one rank out, with the optimizers' parameters that are theirs."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(give_back, optimizer, keep_own(optimizer, chunks))
        model = Parts(chunks) if len(chunks) > 1 else chunks[0]
        return lay_out(model, optimizers, config, ranks, OnPaper(), reuses=reuses, explains=False)


BUDGETS = {
    Tier.DEVICE: "device_memory",
    Tier.HOST: "host_memory",
    Tier.NVME: "nvme_capacity",
}


def _versions(plan: MemoryPlan, units: Sequence[UnitSize]) -> dict[Tier, int]:
    """Counts the bytes of a second version of the weights, at the home of each (Narayanan et al.,
    PipeDream-2BW, 2021, section 3.1)."""
    nbytes_of = dict.fromkeys(BUDGETS, 0)
    for index, unit in enumerate(units):
        nbytes = sum(flat.nbytes("weight") for flat in unit.flat_params)
        if nbytes:
            nbytes_of[plan.tiers_of(index)["weight"]] += nbytes
    return nbytes_of


def _has_room(plan: MemoryPlan, versions: dict[Tier, int], config: Config) -> bool:
    return all(
        budget is None or plan.planned_nbytes(tier) + versions[tier] <= budget
        for tier, name in BUDGETS.items()
        if (budget := getattr(config, name)) is None or versions[tier]
    )


def _less(config: Config, versions: dict[Tier, int]) -> Config:
    """Returns ``config`` with budgets that leave room for ``versions``."""
    left = {
        name: max(0, int(budget) - versions[tier])
        for tier, name in BUDGETS.items()
        if (budget := getattr(config, name)) is not None
    }
    return dataclasses.replace(config, **left)


def _units_of(units: Sequence[UnitSize], chunks: list[nn.Module]) -> list[list[int]]:
    """Lists the units of each chunk, in order of use. One without a parameter of its name is at the
    end of the last chunk."""
    names = [[name for name, _ in chunk.named_parameters()] for chunk in chunks]
    by_chunk: list[list[int]] = [[] for _ in chunks]
    for index in sorted(range(len(units)), key=lambda index: units[index].position):
        prefix = f"{units[index].name}."
        owner = next(
            (at for at, own in enumerate(names) if any(n.startswith(prefix) for n in own)), -1
        )
        by_chunk[owner].append(index)
    return by_chunk


def _homes(plan: MemoryPlan, units: Sequence[UnitSize]) -> dict[str, list[str]]:
    """Lists the tiers on which weights, moments and gradients are at home, fastest first."""
    homes: dict[str, list[str]] = {}
    for what, array in ARRAYS.items():
        there = {
            plan.tiers_of(index)[array]
            for index, unit in enumerate(units)
            if any(flat.nbytes(array) for flat in unit.flat_params)
        }
        if there:
            homes[what] = [str(tier) for tier in Tier if tier in there]
    return homes
