"""Cluster: predicts bytes and seconds of a step on other machines, from the plan that runs there.

gathers     how often each unit's weights are gathered in a step, from a simulation of the forward
            and the backward within the plan's window
ring        the collective algorithm assumed: each rank receives all but its own part from its
            neighbour, in one message per other rank

A rank's step is simulated (:mod:`.timeline`). No step is shorter than what the slowest resource of
a node needs. The result lists the assumptions that the machine file does not cover.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...config import Config
from ...core.machine.device import Device
from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import Tier
from ...core.machine.traffic import Traffic
from ...core.plan.memory_plan import MemoryPlan
from ...core.plan.step_traffic import (
    grad_traffic,
    optimizer_traffic,
    state_traffic,
    traffic,
    update_traffic,
    weight_traffic,
)
from ...core.plan.unit_sizes import FlatParamSize, UnitSize
from .machine_file import Machine
from .predict import passing_traffic
from .timeline import Timeline, UnitSeconds, plan_gathers, simulate, step_seconds

MEETINGS = 2  # barriers in a pass: at the end of its backward and at its beginning
CHILDREN = 32  # of a rank in the tree of a barrier
UNCHECKED = "no run on several GPUs has checked this"  # as long as bench/results has none


class OnPaper(Device):
    """A GPU of a machine that is not here, with the optimizer's kernels: what plans ask of one.
    ``saved_nbytes``: that forwards save there. ``room``: bytes of the tiers of its machine, as far
    as they are known, which no remedy exceeds."""

    is_host, overlaps = False, True

    def __init__(self, saved_nbytes: int = 0, room: Mapping[Tier, int] | None = None) -> None:
        super().__init__(torch.device("cuda"), Traffic())
        self.saved_nbytes, self.on_paper = saved_nbytes, room or {}
        self.kernels, self.kernels_refusal = "on paper", ""


@dataclass(frozen=True)
class ClusterPrediction:
    """One step. ``edges``: bytes of one rank; ``seconds``: the time of each resource alone."""

    ranks: int
    gathers: int
    edges: dict[str, int]
    seconds: dict[str, float]
    assumptions: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """The slowest resource's time, plus the barriers, which nothing overlaps. A device first
        computes and then steps the state at home on it."""
        device = self.seconds["compute"] + self.seconds["optimizer on device"]
        return (
            max(device, *(seconds for what, seconds in self.seconds.items() if what != "meetings"))
            + self.seconds["meetings"]
        )

    @property
    def bottleneck(self) -> str:
        """The resource that needs most time."""
        return max(self.seconds, key=self.seconds.__getitem__)


def predict_cluster(
    plan: MemoryPlan,
    units: Sequence[UnitSize],
    machine: Machine,
    nodes: int,
    *,
    compute: float,
    passes: int = 1,
    averaged: int = 1,
    tied: str = "",
) -> ClusterPrediction:
    """Predicts a step of ``nodes`` machines with one rank per device, sharded over all ranks.

    ``units``: one rank's sizes, sharded. ``compute``: seconds of one rank's step, of ``passes``
    forwards and backwards, after ``averaged`` of which gradients leave. ``tied``: the unit of an
    embedding whose weight is also the head's.
    """
    ranks = nodes * machine.devices
    gathers = [passes * count for count in gathers_of(plan, units, tied)]
    edges = edges_of(plan, units, gathers, averaged)
    received = edges["all-gather"] + edges["reduce-scatter"]
    steps = optimizer_traffic(plan, units)
    messages = (sum(gathers) + averaged * len(units)) * (ranks - 1)
    seconds = {
        "compute": compute,
        "devices' links": received / machine.device_link,
        # A node receives each byte once for all its devices. A single node uses no network.
        "network": (
            received * ranks / max(1, ranks - 1) * (nodes - 1) / nodes / machine.network
            + messages * machine.latency * (nodes > 1)
        ),
        **home_seconds(edges, steps[Tier.HOST], machine),
        "optimizer on device": steps[Tier.DEVICE] / (machine.device_bandwidth or math.inf),
        "meetings": passes * MEETINGS * barrier_seconds(ranks, machine),
    }
    passing = passes * sum(bool(count) for count in gathers)
    assumptions = _assumptions(machine, ranks, sum(gathers) / max(1, passing), plan)
    if steps[Tier.DEVICE] and machine.device_bandwidth is None:
        assumptions += (
            "the optimizer's time on the device is not counted: the machine file has no bandwidth"
            " in [devices]",
        )
    return ClusterPrediction(ranks, sum(gathers), edges, seconds, assumptions)


def averaged_passes(config: Config, passes: int) -> int:
    """Counts after how many of a step's ``passes`` the gradients of data ranks leave: of all of
    them, or the last one if ranks keep them whole."""
    return 1 if config.shard == "optimizer" else passes


def embedding_of(model: Any) -> tuple[str, str]:
    """Returns the name of the module that looks tokens up, and the same if its weight is also the
    head's: ("name", "") or ("", "name")."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is inputs), "")
    is_tied = outputs is not None and getattr(outputs, "weight", None) is inputs.weight
    return ("", name) if is_tied else (name, "")


def home_seconds(edges: Mapping[str, int], stepped: int, machine: Machine) -> dict[str, float]:
    """Computes the seconds that the homes of state need of a node with as much to do on every
    device. ``edges``: bytes of one rank; ``stepped``: of those that its host's optimizer passes."""
    read, written = edges["nvme->host"], edges["host->nvme"]
    return {
        "host's links": max(edges["host->device"], edges["device->host"]) / machine.host_link,
        "optimizer": machine.devices * stepped / machine.host_bandwidth,
        "checksums": machine.devices * (read + written) / machine.checksum_rate,
        "disks": (
            machine.devices
            * (read / machine.disk_read + written / machine.disk_write)
            / machine.disks
        ),
    }


def barrier_seconds(ranks: int, machine: Machine) -> float:
    """Computes the seconds of a barrier of so many ranks."""
    if ranks == 1:
        return 0.0
    return 2 * max(1, math.ceil(math.log(ranks, CHILDREN))) * machine.latency


def _assumptions(machine: Machine, ranks: int, gathers: float, plan: MemoryPlan) -> tuple[str, ...]:
    """Lists what every prediction assumes. ``gathers``: of a unit in a pass, on average."""
    lines = [f"{machine.name}: rates of the machine file, which names its sources"]
    if ranks == 1:
        lines += [
            "one rank; every disk has an equal part of the state",
            "the compute, both directions of the link, the disks (with their checksums) and the"
            " optimizer each run one job after the other; the processor launches ahead of the"
            " device; an embedding's lookup takes no time",
        ]
    else:
        lines += [
            "one rank for each device, all of them data ranks (ZeRO-3); every disk has an equal"
            " part of the state",
            f"rings: each rank receives all but its own part, in {ranks - 1} messages a collective,"
            f" {machine.latency * 1e6:g} us each between nodes",
            "the compute, the links of each kind, the disks and the optimizer each run one job"
            " after the other; a device computes before it steps what is at home on it; meetings"
            " are waited for",
            UNCHECKED,
        ]
    if plan.device_window_nbytes:
        lines.append(
            f"a unit is gathered {gathers:.2g} times a pass on average, in a window of"
            f" {format_nbytes(plan.device_window_nbytes)}"
        )
    return tuple(lines)


def edges_of(
    plan: MemoryPlan, units: Sequence[UnitSize], gathers: Sequence[int], passes: int = 1
) -> dict[str, int]:
    """Counts the bytes of one rank's step over every edge, and those it receives in collectives.
    ``gathers``: of each unit in all ``passes`` of the step."""
    edges = traffic(plan, units, passes=passes)
    edges |= {"all-gather": 0, "reduce-scatter": 0}
    for index, (unit, count) in enumerate(zip(units, gathers)):
        tiers = plan.tiers_of(index)
        from_disk = tiers["weight"] is Tier.NVME and "weight" not in plan.cached_of(index)
        if tiers["weight"] is Tier.DEVICE:  # gathered there, and averaged there
            edges["host->device"] -= (
                2
                * passes
                * sum(flat.nbytes("weight") for flat in unit.flat_params if flat.shards > 1)
            )
        else:
            edges["host->device"] -= (2 * passes - count) * unit.shard_nbytes
        if tiers["grad"] is Tier.DEVICE:
            edges["device->host"] -= passes * sum(
                flat.nbytes("grad") for flat in unit.flat_params if flat.spec.stepped
            )
        edges["nvme->host"] -= (2 * passes - count) * unit.shard_nbytes * from_disk
        for edge, nbytes in passing_traffic(plan, index, unit).items():
            edges[edge] += nbytes
        for flat_param in unit.flat_params:
            gathered, reduced = _collective_nbytes(flat_param, count)
            edges["all-gather"] += gathered
            edges["reduce-scatter"] += passes * reduced
    return edges


def received_nbytes(flat_param: FlatParamSize, gathers: int) -> int:
    """Counts the bytes of a flat param that a rank receives from its shard group in a step."""
    return sum(_collective_nbytes(flat_param, gathers))


def _collective_nbytes(flat_param: FlatParamSize, gathers: int) -> tuple[int, int]:
    others, spec = flat_param.numel - flat_param.numel // flat_param.shards, flat_param.spec
    return (
        gathers * others * spec.dtype.itemsize,
        others * spec.grad_dtype.itemsize * spec.stepped,
    )


def gathers_of(plan: MemoryPlan, units: Sequence[UnitSize], tied: str = "") -> list[int]:
    """Counts how often each unit is gathered in a forward through all units and its backward, in
    the model's order. ``tied``: see :func:`timeline_of`."""
    order = _in_order(units)
    sizes = [_passing_nbytes(plan, units, index) for index in order]
    again = _place_of(units, order, tied)
    counts = Counter(
        order[gather.unit]
        for gather in plan_gathers(sizes, plan.device_window_nbytes, again=again)
        if sizes[gather.unit]
    )
    return [counts[index] for index in range(len(units))]


def _in_order(units: Sequence[UnitSize]) -> list[int]:
    return sorted(range(len(units)), key=lambda index: units[index].position)


def _place_of(units: Sequence[UnitSize], order: Sequence[int], name: str) -> int | None:
    return next((at for at, index in enumerate(order) if units[index].name == name), None)


def _passing_nbytes(plan: MemoryPlan, units: Sequence[UnitSize], index: int) -> int:
    """Counts the bytes of a unit's weights that come to the device for each use."""
    is_there = plan.tiers_of(index)["weight"] is Tier.DEVICE and not units[index].is_sharded
    return 0 if is_there else units[index].weight_nbytes


def timeline_of(
    plan: MemoryPlan, units: Sequence[UnitSize], machine: Machine, **given: Any
) -> Timeline:
    """Simulates the steps of one rank on ``machine``. ``given``: see :func:`_timed`."""
    return simulate(**_timed(plan, units, machine, **given))


def timeline_seconds(
    plan: MemoryPlan, units: Sequence[UnitSize], machine: Machine, **given: Any
) -> float:
    """Computes the seconds of the step of :func:`timeline_of`, without its jobs."""
    return step_seconds(**_timed(plan, units, machine, **given))


def _timed(
    plan: MemoryPlan,
    units: Sequence[UnitSize],
    machine: Machine,
    *,
    compute: float,
    passes: int = 1,
    forward: float = 1 / 3,
    clips: bool = False,
    lookup: str = "",
    tied: str = "",
    averaged: int | None = None,
    received_seconds: Callable[[float], float] = lambda nbytes: 0.0,
    activations: float = 0.0,
) -> dict[str, Any]:
    """Returns what the clock of one rank on ``machine`` takes. Units are used in the model's order.

    ``compute``: seconds of the step's ``passes``, each a forward, which is the part ``forward`` of
    them, and what follows.
    ``clips``: the optimizer needs the norm of all gradients. ``lookup``: the unit that is an
    embedding, which computes nothing; ``tied``: the same, if its weight is also the head's.
    ``averaged``: in so many passes gradients leave. ``received_seconds``: of so many bytes from
    other data ranks. ``activations``: bytes that a forward sends to their home.
    """
    order = _in_order(units)
    counts = {index: sum(flat.numel for flat in units[index].flat_params) for index in order}
    computes = {index: count * (units[index].name != lookup) for index, count in counts.items()}
    total = sum(computes.values()) or 1
    steps = []
    for index in order:
        each = compute / passes * computes[index] / total
        own, head = (0.0, each) if units[index].name == tied else (each, 0.0)
        steps.append(
            replace(
                _transfers_of(plan, units, index, machine, received_seconds),
                activations=activations * computes[index] / total / machine.host_link,
                forward=own * forward,
                backward=own * (1 - forward),
                head_forward=head * forward,
                head_backward=head * (1 - forward),
            )
        )
    return {
        "units": steps,
        "window_nbytes": plan.device_window_nbytes,
        "passes": passes,
        "after_backward": clips,
        "again": _place_of(units, order, tied),
        "averaged": averaged,
    }


def _transfers_of(
    plan: MemoryPlan,
    units: Sequence[UnitSize],
    index: int,
    machine: Machine,
    received_seconds: Callable[[float], float],
) -> UnitSeconds:
    """Returns the seconds of a unit's copies and updates; it computes nothing."""
    unit = units[index]
    copied, landed = weight_traffic(plan, index, unit), grad_traffic(plan, index, unit)
    state, steps = state_traffic(plan, index, unit), update_traffic(plan, index, unit)
    # Bytes pass the disks and their checksums in turns, in pieces: the slower one decides. The
    # ranks of a machine share both.
    read, write = (
        min(rate * machine.disks, machine.checksum_rate) / machine.devices
        for rate in (machine.disk_read, machine.disk_write)
    )
    each = [_collective_nbytes(flat, 1) for flat in unit.flat_params]
    gathered, reduced = (sum(nbytes) for nbytes in zip(*each))
    is_copied = plan.tiers_of(index)["weight"] is not Tier.DEVICE
    away = plan.tiers_of(index)["grad"] is not Tier.DEVICE
    return UnitSeconds(
        unit.name,
        _passing_nbytes(plan, units, index),
        forward=0.0,
        backward=0.0,
        copy=is_copied * copied["host->device"] / machine.host_link,
        read=copied["nvme->host"] / read,
        landing=away * landed["device->host"] / machine.host_link,
        load=(state["nvme->host"] + landed["nvme->host"]) / read,
        step=steps[Tier.HOST] * machine.devices / machine.host_bandwidth,
        save=(state["host->nvme"] + landed["host->nvme"]) / write,
        add=landed["nvme->host"] / read + landed["host->nvme"] / write,
        step_on_device=max(
            steps[Tier.DEVICE] / (machine.device_bandwidth or math.inf),
            max(passing_traffic(plan, index, unit).values()) / machine.host_link,
        ),
        gather=received_seconds(gathered),
        reduce=received_seconds(reduced),
    )
