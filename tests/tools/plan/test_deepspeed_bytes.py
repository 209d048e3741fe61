"""DeepSpeed's bytes: those of its paper, per parameter."""

from __future__ import annotations

from infinity.tools.plan.deepspeed_bytes import deepspeed_bytes


def test_everything_on_nvme_moves_20_bytes_in_and_18_out_per_parameter():
    """ZeRO-Infinity's figures: 2 x 2 of weights, 12 of state and 4 of gradient are read; 4, 12 and
    2 written."""
    found = deepspeed_bytes(1000, 100, "nvme", "nvme")
    assert (
        found.edges["nvme->host"] == 20_000
        and found.edges["host->nvme"] == 18_000
        and found.tiers["nvme"] == 18_000
    )


def test_without_a_disk_nothing_moves_over_it():
    found = deepspeed_bytes(1000, 100, "host", "host")
    assert (
        found.edges["nvme->host"] == found.edges["host->nvme"] == found.tiers["nvme"] == 0
        and found.tiers["host"] == 18_000
    )


def test_on_the_device_16_bytes_stay_and_nothing_moves():
    """Weight, gradient and state: 2 + 2 + 12."""
    found = deepspeed_bytes(1000, 100, "device", "device")
    assert found.tiers == {"device": 16_000, "host": 0, "nvme": 0} and not any(found.edges.values())
