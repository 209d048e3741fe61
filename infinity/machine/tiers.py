"""Tiers: where bytes lie: ``device``, the compute device; ``host``, memory; ``nvme``, disk."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """Where bytes lie, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


BUDGETS = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.NVME: "nvme_capacity"}  # Config's names
