"""Slots: sizes the memory in which the optimizer steps state whose home is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from .. import native
from ..machine.sizes import round_up
from ..machine.tiers import Tier
from .device_slots import device_slot_nbytes
from .unit_sizes import ShardSize, UnitSize


def needed_device_slot_nbytes(units: Sequence[UnitSize]) -> int:
    """Returns the bytes of a device slot for the largest stepped shard; 0 if none is stepped."""
    stepped = [shard for unit in units for shard in unit.shards if shard.spec.stepped]
    return max(
        (
            device_slot_nbytes(sum(shard.spec.nbytes_per_element().values()), shard.numel)
            for shard in stepped
        ),
        default=0,
    )


def optimizer_slot_nbytes(shards: Sequence[ShardSize], tiers: dict[str, Tier], chunk: int) -> int:
    """Returns the bytes of one optimizer slot: ``chunk`` elements of each array on NVMe, of the
    shard that needs most."""
    needed = 0
    for shard in shards:
        if shard.spec.stepped:
            sizes = shard.spec.nbytes_per_element()
            per_element = sum(int(size) for name, size in sizes.items() if tiers[name] is Tier.NVME)
            # A chunk of 1-byte elements must be whole checksum blocks too.
            least = native.CHECKSUM_NBYTES if 1 in sizes.values() else 0
            needed = max(needed, per_element * min(max(chunk, least), shard.numel))
    return round_up(needed, native.BLOCK_NBYTES)
