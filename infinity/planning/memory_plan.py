"""MemoryPlan: says which array lives on which tier, and how many bytes each part of the engine may hold there.

term    one part's bytes on one tier, with a reason; a plan is the sum of its terms
rung    one set of buffer sizes, from generous to least workable; a plan is tried on each in turn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .. import native
from ..config.config import Config
from ..machine.device import Device
from ..machine.sizes import round_up
from ..machine.tiers import Tier
from ..state.shard_spec import ARRAYS, home_of
from .device_slots import DEVICE_SLOTS
from .slots import needed_device_slot_nbytes, optimizer_slot_nbytes
from .unit_sizes import CHECKSUMMED, MIN_CHUNK, UnitSize

MIB = 1024 * 1024


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder from generous to least workable."""

    units_ahead: int  # staged before they are needed
    slot_count: int  # of the optimizer: with one stepping, the others keep loads and saves in flight
    chunk: int  # elements of one optimizer slot
    service_nbytes: int


LADDER = (
    Rung(3, 8, 512 * 1024, 4 * MIB),
    Rung(2, 8, 256 * 1024, 4 * MIB),
    Rung(2, 8, 128 * 1024, 2 * MIB),
    Rung(1, 8, 128 * 1024, MIB),
    Rung(1, 8, 64 * 1024, MIB),
    Rung(1, 8, 32 * 1024, MIB // 2),
    Rung(0, 4, MIN_CHUNK, native.CHECKSUM_NBYTES),
)


@dataclass(frozen=True)
class MemoryPlan:
    """Tiers of the arrays, sizes of the engine's own buffers, and the planned peak of every tier."""

    tiers: dict[str, Tier]
    units_ahead: int
    staging_nbytes: int  # weights on their way from disk; 0 without any
    grad_staging_nbytes: int  # gradients on their way to disk; 0 without any
    activation_staging_nbytes: int  # activations on their way to or from disk; 0 without any
    slot_count: int
    slot_nbytes: int  # one optimizer slot; 0 when all state is in memory
    service_nbytes: int
    device_window_nbytes: int  # weights gathered at once
    borrowed_nbytes: int = 0  # gradients of the device that are still being copied, at most
    device_slot_nbytes: int = 0  # a slot for state that passes through a device which steps it
    terms: dict[Tier, dict[str, int]] = field(default_factory=dict)
    placed: dict[str, dict[int, Tier]] = field(default_factory=dict)  # array -> unit -> its home, where not ``tiers``'
    kept: dict[str, frozenset[int]] = field(default_factory=dict)  # array -> units whose NVMe home is cached on the host
    shadowed: frozenset[int] = frozenset()  # units with room for a second copy of their state

    def tiers_of(self, unit: int) -> dict[str, Tier]:
        """The home of every array of the unit with this index."""
        return {name: self.placed.get(name, {}).get(unit, tier) for name, tier in self.tiers.items()}

    def kept_of(self, unit: int) -> set[str]:
        """The arrays of the unit with this index that are cached."""
        return {name for name, units in self.kept.items() if unit in units}

    def planned_nbytes(self, tier: Tier) -> int:
        """The most that ``tier`` will be charged."""
        return sum(self.terms[tier].values())


def term_of(name: str) -> str:
    return {"weight": "weights", "grad": "gradients"}.get(name, "optimizer state")


def lay_out_memory(
    units: Sequence[UnitSize],
    config: Config,
    params: Tier,
    optimizer: Tier,
    grad: Tier,
    choice: Rung,
    held: int,
    device: Device,
) -> MemoryPlan:
    tiers = {name: home_of(name, params, optimizer, grad) for name in ARRAYS}
    shards = [shard for unit in units for shard in unit.shards]
    terms: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}

    def add(tier: Tier, what: str, nbytes: int) -> None:
        if nbytes:
            terms[tier][what] = terms[tier].get(what, 0) + nbytes

    for name, tier in tiers.items():
        add(tier, term_of(name), sum(shard.nbytes(name) for shard in shards))

    sizes = sorted((unit.weight_nbytes for unit in units if not unit.tile_nbytes), reverse=True)
    largest = sizes[0] if sizes else 0
    slices = sorted((unit.slice_nbytes for unit in units if not unit.tile_nbytes), reverse=True)
    staging = sum(slices[: 1 + choice.units_ahead]) if params is Tier.NVME else 0
    grad_sizes = sorted((shard.nbytes("grad") for shard in shards), reverse=True)
    grad_staging = sum(grad_sizes[:3]) if grad is Tier.NVME else 0
    if choice is LADDER[-1] and grad is Tier.NVME:
        grad_staging = sum(grad_sizes[:1])
    # Four at once, each of whole checksum blocks.
    activation_staging = 8 * max(choice.service_nbytes, native.CHECKSUM_NBYTES) if config.activations == "nvme" else 0
    slot = optimizer_slot_nbytes(shards, tiers, choice.chunk)
    service = choice.service_nbytes if Tier.NVME in tiers.values() else native.BLOCK_NBYTES
    checksums = 4 * (sum(terms[Tier.NVME].values()) // native.CHECKSUM_NBYTES + len(shards) * CHECKSUMMED)

    add(Tier.HOST, "staged weights", staging)
    add(Tier.HOST, "staged gradients", grad_staging)
    add(Tier.HOST, "staged activations", activation_staging)
    add(Tier.HOST, "optimizer slots", choice.slot_count * slot)
    add(Tier.HOST, "service buffer", service)
    add(Tier.HOST, "checksums", checksums if terms[Tier.NVME] else 0)

    if node_size := max((shard.node_size for shard in shards), default=0):
        add(Tier.DEVICE, "second slices", sum(shard.whole_nbytes("weight") for shard in shards) // node_size)
    if any(shard.slices > 1 and shard.spec.stepped for shard in shards):
        whole = max(shard.whole_nbytes("grad") for shard in shards if shard.spec.stepped)
        if not any(shard.whole_grad for shard in shards):
            # Filled while weights of the same units are held; one waits, and one more is on its way to the others.
            ratio = max(shard.spec.grad_dtype.itemsize / shard.spec.dtype.itemsize for shard in shards if shard.spec.stepped)
            add(Tier.DEVICE, "gradients to be averaged", 2 * whole + round_up(int(held * ratio), native.BLOCK_NBYTES))
        # As they come, and their sum in fp32; a whole gradient that is at home elsewhere.
        own = whole * (not device.is_host) * any(shard.whole_grad for shard in shards)
        add(Tier.DEVICE, "gradients of other ranks", 2 * whole + own)
    window = 0
    tile = max((unit.tile_nbytes for unit in units), default=0)
    sliced = any(unit.is_sliced for unit in units)
    keeps = sliced and config.shard != "parameters"
    if params is not Tier.DEVICE or sliced:
        # What one moment holds, and one unit more: in backward the next unit arrives while the last one's gradients
        # are still landing.
        least = held + largest
        if config.device_memory is None:
            least += device.overlaps * largest  # and one on its way meanwhile
        total = sum(sizes)
        window = total if keeps else min(least, total)
        if config.device_memory is not None and config.params != "auto":  # with "auto" units have a home in the rest
            window = min(total, max(window, config.device_memory - tile - sum(terms[Tier.DEVICE].values())))
    add(Tier.DEVICE, "gathered weights", window)
    add(Tier.DEVICE, "a tile", tile)
    borrowed = device_slot = 0
    if not device.is_host and any(shard.spec.stepped for shard in shards):
        # Gradients that are still being read; one more, as it is converted, and as it is added to what is at home.
        borrowed = max(shard.nbytes("grad") for shard in shards)
        add(Tier.DEVICE, "gradients on their way", 3 * borrowed)
        if len({params, optimizer}) > 1 and Tier.DEVICE in (params, optimizer):
            device_slot = needed_device_slot_nbytes(units)
            add(Tier.DEVICE, "optimizer slots", DEVICE_SLOTS * device_slot)
    return MemoryPlan(
        tiers=tiers,
        units_ahead=choice.units_ahead,
        staging_nbytes=staging,
        grad_staging_nbytes=grad_staging,
        activation_staging_nbytes=activation_staging,
        slot_count=choice.slot_count,
        slot_nbytes=slot,
        service_nbytes=service,
        device_window_nbytes=window,
        borrowed_nbytes=borrowed,
        device_slot_nbytes=device_slot,
        terms=terms,
    )
