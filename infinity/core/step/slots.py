"""Slots: sizes the memory in which the optimizer steps state whose home is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from ... import native
from ..machine.sizes import round_up
from ..machine.tiers import Tier
from ..plan.unit_sizes import FlatParamSize, UnitSize
from .device_slots import device_slot_nbytes


def needed_device_slot_nbytes(units: Sequence[UnitSize]) -> int:
    """Returns the bytes of a device slot for the largest stepped flat param; 0 if none is
    stepped."""
    stepped = [flat for unit in units for flat in unit.flat_params if flat.spec.stepped]
    return max(
        (
            device_slot_nbytes(sum(flat.spec.nbytes_per_element.values()), flat.numel)
            for flat in stepped
        ),
        default=0,
    )


def optimizer_slot_nbytes(
    flat_params: Sequence[FlatParamSize], tiers: dict[str, Tier], chunk: int
) -> int:
    """Returns the bytes of one optimizer slot: ``chunk`` elements of each array on NVMe, of the
    flat param that needs most."""
    needed = 0
    for flat_param in flat_params:
        if flat_param.spec.stepped and flat_param.spec.needs is None:
            sizes = flat_param.spec.nbytes_per_element
            per_element = sum(int(size) for name, size in sizes.items() if tiers[name] is Tier.NVME)
            # A chunk of 1-byte elements must be whole checksum blocks too.
            least = native.CHECKSUM_NBYTES if 1 in sizes.values() else 0
            needed = max(needed, per_element * min(max(chunk, least), flat_param.numel))
    return round_up(needed, native.BLOCK_NBYTES)
