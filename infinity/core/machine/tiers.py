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


# What people call the homes, by the name that they have here.
OTHER_NAMES = {
    "gpu": "device",
    "cuda": "device",
    "vram": "device",
    "hbm": "device",
    "cpu": "host",
    "ram": "host",
    "dram": "host",
    "memory": "host",
    "disk": "nvme",
    "ssd": "nvme",
}


def home_of(name: str) -> str:
    """Returns the home that people call ``name``, or the name itself."""
    return OTHER_NAMES.get(name.lower(), name)
