"""Step traffic: counts the bytes that one step of a plan moves over each edge."""

from __future__ import annotations

from collections.abc import Sequence

from ..machine.tiers import Tier
from ..state.flat_param_spec import SCALES
from .memory_plan import MemoryPlan
from .unit_sizes import STATE, UnitSize


def traffic(plan: MemoryPlan, units: Sequence[UnitSize], *, passes: int = 1) -> dict[str, int]:
    """Counts the bytes of a step with ``passes`` forwards and backwards over every edge.
    "optimizer": bytes that the update reads and writes in memory."""
    edges = dict.fromkeys(
        ("nvme->host", "host->nvme", "host->device", "device->host", "optimizer"), 0
    )
    for index, unit in enumerate(units):
        tiers, kept = plan.tiers_of(index), plan.kept_of(index)
        for flat_param in unit.flat_params:
            weight = flat_param.nbytes("weight")
            on_disk = {name: tiers[name] is Tier.NVME and name not in kept for name in tiers}
            if tiers["weight"] is not Tier.DEVICE or flat_param.shards > 1:
                edges["host->device"] += 2 * passes * weight
                edges["nvme->host"] += 2 * passes * weight * on_disk["weight"]
            if not flat_param.spec.stepped:
                continue
            grad = flat_param.nbytes("grad")
            edges["device->host"] += passes * grad
            # Read by every backward after the first, which adds to it, and by the step.
            edges["nvme->host"] += passes * grad * on_disk["grad"]
            edges["host->nvme"] += passes * grad * on_disk["grad"]
            for name in STATE:
                edges["nvme->host"] += flat_param.nbytes(name) * on_disk[name]
                edges["host->nvme"] += flat_param.nbytes(name) * on_disk[name]
    edges["optimizer"] = sum(optimizer_traffic(plan, units).values())
    return edges


def optimizer_traffic(plan: MemoryPlan, units: Sequence[UnitSize]) -> dict[Tier, int]:
    """Counts the bytes that the optimizer reads and writes in one step, by memory: the device's for
    arrays at home there, else the host's."""
    passed = {Tier.DEVICE: 0, Tier.HOST: 0}
    for index, unit in enumerate(units):
        tiers = plan.tiers_of(index)
        for flat_param in unit.flat_params:
            for name in ("grad", *STATE, *SCALES.values()) if flat_param.spec.stepped else ():
                home = tiers.get(name, tiers[name.removesuffix("_scale")])
                times = 1 if name == "grad" else 2  # a gradient is only read
                passed[Tier.DEVICE if home is Tier.DEVICE else Tier.HOST] += (
                    times * flat_param.nbytes(name)
                )
    return passed


def step_cost(plan: MemoryPlan, units: Sequence[UnitSize]) -> tuple[int, int]:
    """Returns the bytes of a step to and from NVMe, then those to and from the device."""
    edges = traffic(plan, units)
    return edges["nvme->host"] + edges["host->nvme"], edges["host->device"] + edges["device->host"]
