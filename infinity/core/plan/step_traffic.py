"""Step traffic: counts the bytes that one step of a plan moves over each edge."""

from __future__ import annotations

from collections.abc import Sequence

from ..machine.tiers import Tier
from ..units.flat_param_spec import SCALES
from .memory_plan import MemoryPlan
from .unit_sizes import STATE, FlatParamSize, UnitSize

EDGES = ("nvme->host", "host->nvme", "host->device", "device->host")


def traffic(plan: MemoryPlan, units: Sequence[UnitSize], *, passes: int = 1) -> dict[str, int]:
    """Counts the bytes of a step with ``passes`` forwards and backwards over every edge.
    "optimizer": bytes that the update reads and writes in memory."""
    edges = dict.fromkeys((*EDGES, "optimizer"), 0)
    for index, unit in enumerate(units):
        weights, state = weight_traffic(plan, index, unit), state_traffic(plan, index, unit)
        for edge in EDGES:
            edges[edge] += 2 * passes * weights[edge] + state[edge]
        for edge, nbytes in grad_traffic(plan, index, unit).items():
            edges[edge] += passes * nbytes
    edges["optimizer"] = sum(optimizer_traffic(plan, units).values())
    return edges


def weight_traffic(plan: MemoryPlan, index: int, unit: UnitSize) -> dict[str, int]:
    """Counts the bytes of one copy of a unit's weights to the device."""
    edges = dict.fromkeys(EDGES, 0)
    home = plan.tiers_of(index)["weight"]
    for flat_param in unit.flat_params:
        if home is not Tier.DEVICE or flat_param.shards > 1:
            edges["host->device"] += flat_param.nbytes("weight")
            edges["nvme->host"] += flat_param.nbytes("weight") * _on_disk(plan, index, "weight")
    return edges


def grad_traffic(plan: MemoryPlan, index: int, unit: UnitSize) -> dict[str, int]:
    """Counts the bytes of a unit's gradients in one backward. On disk they are read by every
    backward after the first, which adds to them, and by the step."""
    edges = dict.fromkeys(EDGES, 0)
    for flat_param in stepped(unit):
        edges["device->host"] += flat_param.nbytes("grad")
        for edge in ("nvme->host", "host->nvme"):
            edges[edge] += flat_param.nbytes("grad") * _on_disk(plan, index, "grad")
    return edges


def state_traffic(plan: MemoryPlan, index: int, unit: UnitSize) -> dict[str, int]:
    """Counts the bytes of a unit's weights and state to and from disk for one update."""
    edges = dict.fromkeys(EDGES, 0)
    for flat_param in stepped(unit):
        for name in STATE:
            for edge in ("nvme->host", "host->nvme"):
                edges[edge] += flat_param.nbytes(name) * _on_disk(plan, index, name)
    return edges


def optimizer_traffic(plan: MemoryPlan, units: Sequence[UnitSize]) -> dict[Tier, int]:
    """Counts the bytes that the optimizer reads and writes in one step, by memory: the device's for
    arrays at home or stepped there, else the host's."""
    passed = {Tier.DEVICE: 0, Tier.HOST: 0}
    for index, unit in enumerate(units):
        for tier, nbytes in update_traffic(plan, index, unit).items():
            passed[tier] += nbytes
    return passed


def update_traffic(plan: MemoryPlan, index: int, unit: UnitSize) -> dict[Tier, int]:
    """Counts as :func:`optimizer_traffic`, for one unit."""
    passed, tiers = {Tier.DEVICE: 0, Tier.HOST: 0}, plan.tiers_of(index)
    there = steps_on_device(plan, index)
    for flat_param in stepped(unit):
        for name in ("grad", *STATE, *SCALES.values()):
            home = tiers.get(name, tiers[name.removesuffix("_scale")])
            times = 1 if name == "grad" else 2  # a gradient is only read
            memory = Tier.DEVICE if there or home is Tier.DEVICE else Tier.HOST
            passed[memory] += times * flat_param.nbytes(name)
    return passed


def steps_on_device(plan: MemoryPlan, index: int) -> bool:
    """Tells whether a unit's arrays on the host pass a device, which alone has the others."""
    tiers = plan.tiers_of(index)
    return plan.device_slot_nbytes > 0 and any(tiers[name] is Tier.DEVICE for name in STATE)


def stepped(unit: UnitSize) -> list[FlatParamSize]:
    """Lists the flat params of a unit that an optimizer steps."""
    return [flat_param for flat_param in unit.flat_params if flat_param.spec.stepped]


def _on_disk(plan: MemoryPlan, index: int, name: str) -> bool:
    return plan.tiers_of(index)[name] is Tier.NVME and name not in plan.cached_of(index)


def step_cost(plan: MemoryPlan, units: Sequence[UnitSize]) -> tuple[int, int]:
    """Returns the bytes of a step to and from NVMe, then those to and from the device."""
    edges = traffic(plan, units)
    return edges["nvme->host"] + edges["host->nvme"], edges["host->device"] + edges["device->host"]
