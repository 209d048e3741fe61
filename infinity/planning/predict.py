"""predict: estimates how long a step takes, from the bytes it moves and the rates of the machine.

traffic    bytes of one step over each edge, from the plan: with one backward, and weights that are not kept
rates      what the machine does: disk and memory measured once, compute given by whoever knows the batch
processor  compute, copies, checksums and the optimizer share it; the disk works beside it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..machine.rates import Rates
from ..machine.tiers import Tier
from .memory_plan import MemoryPlan
from .step_traffic import optimizer_traffic, traffic
from .unit_sizes import UnitSize


@dataclass(frozen=True)
class Prediction:
    """One optimizer step. ``edges``: bytes; ``seconds``: what each resource alone needs."""

    edges: dict[str, int]
    seconds: dict[str, float]
    step_seconds: float

    @property
    def bottleneck(self) -> str:
        """The resource that needs most."""
        return max(self.seconds, key=self.seconds.__getitem__)


def predict(plan: MemoryPlan, units: Sequence[UnitSize], rates: Rates, *, compute_seconds: float, passes: int = 1) -> Prediction:
    """Predicts the step time from what the processor has to do in turn and the disk beside it.

    ``compute_seconds``: forward and backward of one step's whole batch, without the optimizer.
    """
    edges = traffic(plan, units, passes=passes)
    through_disk = edges["nvme->host"] + edges["host->nvme"]
    steps = optimizer_traffic(plan, units)
    seconds = {
        "compute": compute_seconds,
        "copies": 2 * (edges["host->device"] + edges["device->host"]) / rates.memory,
        "checksums": through_disk / rates.checksum,
        "optimizer": steps[Tier.HOST] / rates.memory,
    }
    if rates.device_memory is None:  # one memory, the processor's
        seconds["optimizer"] += steps[Tier.DEVICE] / rates.memory
    else:
        seconds["optimizer on device"] = steps[Tier.DEVICE] / rates.device_memory
    processor = sum(seconds.values())
    if through_disk and rates.disk_read and rates.disk_write and rates.disk_mixed:
        seconds["disk"] = max(
            edges["nvme->host"] / rates.disk_read, edges["host->nvme"] / rates.disk_write, through_disk / rates.disk_mixed
        )
    return Prediction(edges, seconds, max(processor, seconds.get("disk", 0.0)))
