"""Tiers: kinds of memory: ``device``, the compute device; ``host``, memory; ``nvme``, disk."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A kind of memory, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


# Config's names
BUDGETS = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.NVME: "nvme_capacity"}
