"""DeepSpeed bytes: counts ZeRO's state per tier and traffic per step, to compare with a plan.

Mixed-precision Adam as in ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857, section 3).
Each parameter has a 16-bit weight and gradient, and 12 bytes of optimizer state (fp32 master and
moments). An offloaded optimizer keeps an fp32 gradient instead of a 16-bit one.

Buffers are DeepSpeed's defaults. Forward and backward read every weight once each. A step reads
state and gradient, and writes state and weight; with the optimizer on NVMe, the gradient too.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT, GRADIENT, STATE, FP32_GRADIENT = 2, 2, 12, 4  # bytes per parameter
PARAM_BUFFERS, PARAM_BUFFER_NUMEL = 5, 100_000_000  # offload_param's buffer_count and buffer_size
STATE_BUFFERS = 4  # offload_optimizer's buffer_count, each of the largest parameter in fp32


@dataclass(frozen=True)
class DeepSpeedBytes:
    """Bytes of state on every tier, and bytes over every edge, in a step of one rank."""

    tiers: dict[str, int]
    edges: dict[str, int]


def deepspeed_bytes(numel: int, largest_numel: int, params: str, optimizer: str) -> DeepSpeedBytes:
    """Counts the bytes of ``numel`` parameters on one rank, the largest of ``largest_numel``
    elements. ``params``, ``optimizer``: their homes, "device", "host" or "nvme"."""
    tiers = dict.fromkeys(("device", "host", "nvme"), 0)
    tiers[params] += WEIGHT * numel
    tiers[optimizer] += STATE * numel
    grads = FP32_GRADIENT if optimizer != "device" else GRADIENT
    tiers[optimizer] += grads * numel
    if params == "nvme":
        tiers["host"] += PARAM_BUFFERS * PARAM_BUFFER_NUMEL * WEIGHT
    if optimizer == "nvme":
        tiers["host"] += STATE_BUFFERS * largest_numel * 4
    edges = dict.fromkeys(("nvme->host", "host->nvme", "host->device", "device->host"), 0)
    if params != "device":
        edges["host->device"] += 2 * WEIGHT * numel
    if params == "nvme":
        edges["nvme->host"] += 2 * WEIGHT * numel
        edges["host->nvme"] += WEIGHT * numel
    if optimizer != "device":
        edges["device->host"] += GRADIENT * numel
    if optimizer == "nvme":
        edges["host->nvme"] += (FP32_GRADIENT + STATE) * numel
        edges["nvme->host"] += (FP32_GRADIENT + STATE) * numel
    return DeepSpeedBytes(tiers, edges)
