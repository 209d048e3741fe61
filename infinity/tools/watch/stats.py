"""Stats: the bytes moved, their cost, the tiers' fill, and the last step compared with its bound.

bound   the time of a step's slowest resource: the compute, the link to the device, the disk's
        reads and writes at their measured rates, or the optimizer's bytes at the measured memory
        bandwidth (all can overlap)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from ... import native
from ...core.machine.tiers import Tier
from ...core.machine.traffic import DATA, PAST_HOST, CollectiveTraffic, EdgeTraffic
from ...core.run.job import Job
from ...core.run.registry import wrapped
from ...ext.audit.audit import audited
from ...ext.card.launches import launch_seconds
from ...ext.rates.rates import disk_seconds, memory_rate
from ..cli.amounts import format_seconds
from .time_shares import shares_of


@dataclass(frozen=True)
class TierStats:
    """Bytes of one tier: the peak of its charges, the planned bytes, and the budget (None: no
    budget)."""

    peak_nbytes: int
    planned_nbytes: int
    budget_nbytes: int | None


@dataclass(frozen=True)
class Stats:
    """The engine's counters. See the module.

    edges
        "nvme->host", "host->nvme", "host->device", "device->host", and "nvme->device" if reads
        bypass host memory.
    collectives
        Operations, and the bytes that this rank sent: as many as it received. Weights:
        "all-gather", "all-gather in node", and "shared memory", where they are read and not sent.
        Gradients: "reduce-scatter", by ranks that add up what others send them, "all-gather over
        replicas" (also sums), "flags" (who has which). "sync points": all meetings of ranks.
        "slow axis": of :class:`infinity.LocalSteps`. Not counted: what is sent outside of steps
        (at the wrap, by saves), and what the model itself sends (tensor parallelism, pipelines).
        Empty without other ranks.
    tiers
        "device", "host", "nvme".
    blocks
        How many blocks have their saved tensors "kept" on the device, "sent" home and "recomputed";
        of how many, that are recomputed but for their matrix products and attention, those are
        "products_kept" and "products_sent"; and "kept_nbytes", "sent_nbytes", "recomputed_nbytes".
        Empty if the engine does not choose that.
    buffers_nbytes
        Bytes that stay with the model's modules: buffers, and weights that the engine does not
        move. They count in "device", or in "host" if the processor computes.
    steps
        Rounds of the loop so far: in a step each optimizer steps once, at most.
    step_seconds, bound_seconds
        Of the last step, until its last ``step()``. ``bottleneck`` is one sentence.
    shares
        What the steps so far waited for: "copies", "disk", "optimizer", "other ranks" and "data"
        (of a loader that is watched); with a GPU "launches", the time in which it was ahead of the
        training thread. The rest is "compute", with Python. They sum to 1.
    audited
        With ``Config(audit=...)``: its "share"; "pieces" and "nbytes" that were compared, by kind
        of audit; "found", what was wrong; "left_out", what is not audited. Else empty.
    """

    edges: dict[str, EdgeTraffic]
    collectives: dict[str, CollectiveTraffic]
    tiers: dict[str, TierStats]
    steps: int
    step_seconds: float
    bound_seconds: float
    bottleneck: str
    blocks: dict[str, int]
    buffers_nbytes: int
    shares: dict[str, float]
    audited: dict[str, Any]

    def as_dict(self) -> dict:
        """Returns plain dicts and numbers, ready for JSON."""
        return dataclasses.asdict(self)


LEAST_SHARE = 0.5  # of a step, for a bottleneck


def stats(model: nn.Module) -> Stats:
    """Reports the counters of the engine of a wrapped ``model``. Local to this rank.

    The bound uses the disk's measured rates (:mod:`infinity.core.machine.disk_profile`).
    """
    engine = wrapped(model).engine
    job = engine.job
    edges = edges_of(job)
    tiers = {
        str(tier): TierStats(account.peak_nbytes, account.planned_nbytes, account.budget_nbytes)
        for tier, account in job.ledger.accounts.items()
    }
    bounds = _bounds(job, edges)
    clock = job.updates.clock
    step_seconds = clock.step_seconds
    slowest = max(bounds, key=lambda name: bounds[name])
    bound = bounds[slowest]
    if not clock.steps:
        sentence = "No step has been taken yet."
    else:
        share = bound / step_seconds if step_seconds else 0.0
        sentence = (
            f"The last step took {format_seconds(step_seconds)}; {slowest} alone needs"
            f" {format_seconds(bound)} ({share:.0%} of it)"
        )
        sentence += (
            " and is the bottleneck."
            if share >= LEAST_SHARE
            else ": the rest goes to Python, to launches, or to other processes."
        )
    if job.running.stands_aside:
        sentence += " The engine stands aside: the model runs as plain torch."
    planner = job.activations.planner if job.activations is not None else None
    blocks = planner.counts() if planner is not None else {}
    return Stats(
        edges,
        _collectives(job),
        tiers,
        clock.steps,
        step_seconds,
        bound,
        sentence,
        blocks,
        job.planned.plan.buffers_nbytes,
        shares_of(clock.total_seconds, (clock.waits or job.traffic.waits()) | launch_seconds(job)),
        audited(job),
    )


def _collectives(job: Job) -> dict[str, CollectiveTraffic]:
    counted = {
        name: dataclasses.replace(traffic)
        for name, traffic in job.traffic.collectives.items()
        if traffic.nbytes or not job.ranks.alone
    }
    if trees := [place.tree for place in job.ranks.sync_channels]:
        counted["sync points"] = CollectiveTraffic(
            sum(tree.sent_nbytes for tree in trees), operations=sum(tree.begun for tree in trees)
        )
    return counted


def edges_of(job: Job) -> dict[str, EdgeTraffic]:
    """Counts the bytes moved over every edge so far."""
    edges = {name: dataclasses.replace(edge) for name, edge in job.traffic.edges.items()}
    for name, op in (("nvme->host", native.Op.READ), ("host->nvme", native.Op.WRITE)):
        edges[name].nbytes = job.store.io.nbytes(op)
        edges[name].busy_seconds = job.store.io.busy_seconds(op)
    if job.traffic.data != EdgeTraffic():
        edges[DATA] = dataclasses.replace(job.traffic.data)
    if (backend := job.store.staging.backend) is not None and backend.passes_host:
        edges[PAST_HOST] = EdgeTraffic(backend.nbytes)
        edges["host->device"].nbytes -= backend.copied_nbytes
    return edges


def _bounds(job: Job, edges: dict[str, EdgeTraffic]) -> dict[str, float]:
    """Returns the seconds that each resource alone needs for one step, for the average traffic of
    the steps so far."""
    steps = max(1, job.updates.clock.steps)
    waited = [*edges.values(), *job.traffic.collectives.values(), job.traffic.updates]
    stalls = sum(edge.stall_seconds for edge in waited) / steps
    launches = sum(launch_seconds(job).values()) / steps
    bounds = {"compute": max(0.0, job.updates.clock.step_seconds - stalls - launches)}
    if launches:
        bounds["launching the GPU's work, in Python,"] = launches
    if DATA in edges:
        bounds["the data"] = edges[DATA].stall_seconds / steps
    if not job.device.is_host:
        busy = (edges[name].busy_seconds for name in ("host->device", "device->host"))
        bounds["the link to the device"] = max(busy) / steps
    if job.planned.plan.planned_nbytes(Tier.NVME):
        read = edges["nvme->host"].nbytes + edges.get(PAST_HOST, EdgeTraffic()).nbytes
        bounds["the disk"] = disk_seconds(
            job.config.nvme_paths, read / steps, edges["host->nvme"].nbytes / steps
        )
    moved = sum(
        2 * sum(spec.nbytes_per_element.values()) - spec.nbytes_per_element["grad"]
        for spec in (flat.spec for unit in job.units for flat in unit.flat_params)
        if spec.stepped
    )
    updater = job.updates.updater
    if moved and updater is not None and updater.elements:
        flat_params = sum(flat.spec.stepped for unit in job.units for flat in unit.flat_params)
        rate = memory_rate(room=job.config.host_memory)
        # A rate that was measured beside other work is too low. The updates themselves tell.
        bounds["memory traffic of the optimizer"] = min(
            updater.elements / steps * moved / flat_params / rate,
            updater.step_seconds / steps,
        )
    return bounds
