"""predict: estimates the seconds of a step, from the bytes it moves and the rates of the machine.

traffic    bytes of one step over each edge, from the plan; weights are gathered for each use
rates      of the machine: disk and memory are measured once; the caller gives compute seconds
processor  runs compute, copies, checksums and the optimizer in turn; the disk works in parallel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.machine.tiers import Tier
from ...core.plan.memory_plan import MemoryPlan
from ...core.plan.step_traffic import optimizer_traffic, stepped, steps_on_device, traffic
from ...core.plan.unit_sizes import UnitSize
from ...ext.rates.rates import Rates


@dataclass(frozen=True)
class Prediction:
    """One optimizer step. ``edges``: bytes; ``seconds``: the time of each resource alone."""

    edges: dict[str, int]
    seconds: dict[str, float]
    step_seconds: float

    @property
    def bottleneck(self) -> str:
        """The resource that needs most time."""
        return max(self.seconds, key=self.seconds.__getitem__)


def predict(
    plan: MemoryPlan,
    units: Sequence[UnitSize],
    rates: Rates,
    *,
    compute_seconds: float,
    passes: int = 1,
) -> Prediction:
    """Predicts a step: the larger of the processor's total time and the disk's.

    ``compute_seconds``: forward and backward of one step's whole batch, without the optimizer.
    ``passes``: forwards and backwards in a step.
    """
    edges = traffic(plan, units, passes=passes)
    for index, unit in enumerate(units):
        for edge, nbytes in passing_traffic(plan, index, unit).items():
            edges[edge] += nbytes
    through_disk = edges["nvme->host"] + edges["host->nvme"]
    steps = optimizer_traffic(plan, units)
    seconds = {
        "compute": compute_seconds,
        "copies": 2 * (edges["host->device"] + edges["device->host"]) / rates.memory,
        "checksums": through_disk / rates.checksum,
        "optimizer": steps[Tier.HOST] / rates.memory,
    }
    if rates.device_memory is None:  # the CPU computes, in one memory
        seconds["optimizer"] += steps[Tier.DEVICE] / rates.memory
    else:
        seconds["optimizer on device"] = steps[Tier.DEVICE] / rates.device_memory
    processor = sum(seconds.values())
    if through_disk and rates.disk_read and rates.disk_write and rates.disk_mixed:
        seconds["disk"] = max(
            edges["nvme->host"] / rates.disk_read,
            edges["host->nvme"] / rates.disk_write,
            through_disk / rates.disk_mixed,
        )
    return Prediction(edges, seconds, max(processor, seconds.get("disk", 0.0)))


def passing_traffic(plan: MemoryPlan, index: int, unit: UnitSize) -> dict[str, int]:
    """Counts the bytes of a unit's arrays at home on the host that pass a device for its step; a
    gradient is not brought back."""
    edges = {"host->device": 0, "device->host": 0}
    if steps_on_device(plan, index):
        for name, home in plan.tiers_of(index).items():
            nbytes = sum(flat.nbytes(name) for flat in stepped(unit)) * (home is Tier.HOST)
            edges["host->device"] += nbytes
            edges["device->host"] += nbytes * (name != "grad")
    return edges
