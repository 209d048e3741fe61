"""Mesh choice: the seconds of a step on a mesh, from its ranks' plans, and the fastest of many.

chain      what follows each other on a device: compute, collectives of tp or exchanges of ep,
           waiting for stages, and the step of state at home there
resident   the step if all state were at home on the devices: what homes cost is the rest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...config import Config
from ...core.machine.tiers import Tier
from ...core.plan.memory_plan import MemoryPlan
from ...core.plan.step_traffic import optimizer_traffic
from ...core.plan.unit_sizes import UnitSize
from .cluster import MEETINGS, barrier_seconds, home_seconds, received_nbytes
from .machine_file import Machine
from .mesh_shape import MeshShape

CHAIN = ("compute", "tensor parallel", "expert parallel", "idle", "optimizer on device")
OF_HOMES = ("host's links", "optimizer", "checksums", "disks", "optimizer on device")
SHARES = {
    "idle": "idle",
    "tensor parallel": "tensor traffic",
    "expert parallel": "tokens to experts and back",
}
PLACES = {Tier.DEVICE: "on the GPU", Tier.HOST: "in RAM", Tier.NVME: "on disk"}
SHOWN = 5  # meshes


@dataclass(frozen=True)
class Batch:
    """A step of all ranks. ``flops``: operations of forward and backward, with the second forward
    if it ``recomputes``. ``width`` and ``itemsize``: of what passes between layers."""

    samples: int
    length: int
    flops: float
    recomputes: bool
    width: int
    itemsize: int
    forward: float = 1 / 3  # the part of ``flops`` that is the first forward

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.samples * self.length


@dataclass(frozen=True)
class RankPlan:
    """One rank of each set of equally loaded ranks. ``stage``: its coordinate of pp. ``sent``:
    bytes by axis. ``edges``: bytes by edge. ``activations``: bytes that wait on the device."""

    stage: int
    activations: int
    buffers: int
    tiers: dict[str, int]
    homes: dict[str, list[str]]
    edges: dict[str, int]
    sent: dict[str, int]
    seconds: dict[str, float]
    timeline_seconds: float | None = None  # of a step without stages, by a clock

    def room(self, config: Config) -> int:
        """Returns the bytes of a device's budget that what waits there leaves to the state."""
        return int(config.device_memory or 0) - self.activations - self.buffers

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the chain or the slowest resource beside it, then the barriers."""
        if self.timeline_seconds is not None:
            return self.timeline_seconds
        chain = sum(self.seconds[name] for name in CHAIN)
        rest = [self.seconds[name] for name in self.seconds if name not in (*CHAIN, "meetings")]
        return max(chain, *rest) + self.seconds["meetings"]

    def share_of(self, name: str) -> float:
        """Computes the part of the chain's seconds that ``name`` takes."""
        return self.seconds[name] / (sum(self.seconds[each] for each in CHAIN) or 1.0)

    @property
    def resident_seconds(self) -> float:
        """Seconds of a step if its state cost nothing."""
        seconds = {name: 0.0 if name in OF_HOMES else each for name, each in self.seconds.items()}
        return RankPlan(0, 0, 0, {}, {}, {}, {}, seconds).step_seconds

    @property
    def bottleneck(self) -> str:
        """What decides: the longest resource, or what most of the chain is."""
        chain = sum(self.seconds[name] for name in CHAIN)
        rest = {name: each for name, each in self.seconds.items() if name not in CHAIN}
        longest = max(rest, key=rest.__getitem__)
        if rest[longest] > chain:
            return longest
        return max(CHAIN, key=self.seconds.__getitem__)


@dataclass(frozen=True)
class MeshPlan:
    """The fastest way found to train on a mesh. ``lengths``: layers of each chunk. ``micro_batch``:
    samples; ``in_flight``: chunks' activations that a rank keeps at most. ``recomputes``: every
    block again in the backward."""

    mesh: MeshShape
    schedule: str
    lengths: tuple[int, ...]
    micro_batch: int
    micro_batches: int
    in_flight: int
    ranks: tuple[RankPlan, ...]
    is_counted: bool  # what a layer saves and sends was tried, not estimated
    recomputes: bool = False

    @property
    def slowest(self) -> RankPlan:
        """The rank that decides."""
        return max(self.ranks, key=lambda rank: rank.step_seconds)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.slowest.step_seconds

    @property
    def slower(self) -> float:
        """How many times longer a step takes than with all state on the devices."""
        return self.step_seconds / max(rank.resident_seconds for rank in self.ranks)

    @property
    def why(self) -> str:
        """The reason in a line: what a step's time consists of, and what the homes cost."""
        slowest = self.slowest
        shares = [
            f"{slowest.share_of(name):.0%} {said}"
            for name, said in SHARES.items()
            if slowest.share_of(name) >= 0.005
        ]
        reasons = [f"bound by {slowest.bottleneck}", *shares]
        below = [
            f"{what} {' and '.join(PLACES[tier] for tier in Tier if str(tier) in tiers)}"
            for what, tiers in self._homes.items()
            if tiers != {str(Tier.DEVICE)}
        ]
        if below:
            slower = f"{self.slower:.3g} x slower" if self.slower >= 1.005 else "at the same speed"
            reasons.append(
                f"Too large for the GPU alone; with {', '.join(below)} it fits, {slower}"
            )
        return "; ".join(reasons)

    @property
    def _homes(self) -> dict[str, set[str]]:
        """The tiers on which any rank has its weights, moments and gradients."""
        homes: dict[str, set[str]] = {}
        for rank in self.ranks:
            for what, tiers in rank.homes.items():
                homes.setdefault(what, set()).update(tiers)
        return homes


def seconds_of(
    plan: MemoryPlan,
    units: Sequence[UnitSize],
    edges: dict[str, int],
    machine: Machine,
    mesh: MeshShape,
    *,
    gathers: Sequence[int],
    sent: Mapping[str, float],
    passes: int = 1,
    meetings: int = 1,
) -> dict[str, float]:
    """Computes what a step needs of each resource but the chain's, on a node with as much to do on
    every device. ``gathers``: of each unit. ``sent``: bytes that a rank sends over pp, and over tp
    or ep. ``passes``: in each of which gradients go home. ``meetings``: of all ranks."""
    axes = {name: mesh.axis(name, machine) for name in sent}
    received = edges["all-gather"] + edges["reduce-scatter"]
    of_experts = sum(
        received_nbytes(flat, count)
        for unit, count in zip(units, gathers)
        for flat in unit.flat_params
        if mesh.ep > 1 and flat.shards == mesh.dp
    )
    steps = optimizer_traffic(plan, units)
    collectives = sum(gathers) + passes * len(units)
    network = mesh.axis("data", machine).network_seconds(
        received - of_experts, collectives * (mesh.data - 1)
    )
    if of_experts:
        network += mesh.axis("dp", machine).network_seconds(of_experts, 0)
    if not axes["pp"].is_inside:
        crossing = min(axes["pp"].stride, machine.devices)
        network += crossing * sent["pp"] / machine.network
    if "tp" in axes and not axes["tp"].is_inside:
        network += axes["tp"].rings * sent["tp"] / machine.network
    if "ep" in axes:
        network += axes["ep"].exchange_network_seconds(sent["ep"])
    return {
        "devices' links": (received + sum(sent.values())) / machine.device_link,
        "network": network,
        **home_seconds(edges, steps[Tier.HOST], machine),
        "optimizer on device": steps[Tier.DEVICE] / (machine.device_bandwidth or math.inf),
        "meetings": meetings * MEETINGS * barrier_seconds(mesh.ranks, machine),
    }


def count_gathers(uses: Sequence[int], nbytes: Sequence[int], window: int) -> list[int]:
    """Counts how often each unit is gathered for ``uses`` in this order, in a window that evicts
    the unit whose next use is furthest. A unit larger than the window is there by itself."""
    counts = [0] * len(nbytes)
    following, last = [len(uses)] * len(uses), dict[int, int]()
    for place in range(len(uses) - 1, -1, -1):
        following[place] = last.get(uses[place], len(uses))
        last[uses[place]] = place
    resident: dict[int, int] = {}  # unit -> its next use
    room = window
    for place, unit in enumerate(uses):
        if unit not in resident:
            while resident and room < nbytes[unit]:
                furthest = max(resident, key=resident.__getitem__)
                del resident[furthest]
                room += nbytes[furthest]
            counts[unit] += 1
            room -= nbytes[unit]
        resident[unit] = following[place]
    return counts


def best_of(plans: Iterable[MeshPlan]) -> list[MeshPlan]:
    """Returns the fastest plans, at most :data:`SHOWN`. Of equally fast ones, those with fewer
    stages and parts come first."""
    return sorted(
        plans, key=lambda plan: (plan.step_seconds, plan.mesh.pp * plan.mesh.tp, plan.mesh)
    )[:SHOWN]
