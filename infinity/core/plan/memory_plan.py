"""MemoryPlan: the home of every array, and the bytes each part of the engine may hold per tier.

term    one part's bytes on one tier, with a reason; a plan is the sum of its terms
rung    one set of buffer sizes; rungs are tried in turn, from generous to least workable
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ... import native
from ..homes.staging import ThroughHost
from ..machine.tiers import Tier
from .unit_sizes import MIN_CHUNK

MIB = 1024 * 1024
BUFFERS = "buffers"  # the term of the model's buffers
GRADIENTS = "gradients in the backward"  # that of what autograd makes


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder from generous to least workable."""

    units_ahead: int  # staged before they are needed; 0: no unit is staged whole but small ones
    slot_count: int  # of the optimizer: one is stepped, the others load and save
    chunk: int  # elements of one optimizer slot
    service_nbytes: int
    sums_on_disk: bool = False  # whether checksums lie on the disk, if there are many


LADDER = (
    Rung(3, 8, 512 * 1024, 4 * MIB),
    Rung(2, 8, 256 * 1024, 4 * MIB),
    Rung(2, 8, 128 * 1024, 2 * MIB),
    Rung(1, 8, 128 * 1024, MIB),
    Rung(1, 8, 64 * 1024, MIB),
    Rung(1, 8, 32 * 1024, MIB // 2),
    Rung(0, 8, 32 * 1024, MIB // 2),
    Rung(0, 4, MIN_CHUNK, native.CHECKSUM_NBYTES),
    Rung(0, 4, MIN_CHUNK, native.CHECKSUM_NBYTES, sums_on_disk=True),
)


@dataclass(frozen=True)
class MemoryPlan:
    """Tiers of the arrays, sizes of the engine's buffers, and the planned peak of every tier."""

    tiers: dict[str, Tier]
    units_ahead: int
    staging_nbytes: int  # weights on their way from disk; 0 without any
    grad_staging_nbytes: int  # gradients on their way to disk; 0 without any
    activation_staging_nbytes: int  # activations on their way to or from disk; 0 without any
    slot_count: int
    slot_nbytes: int  # one optimizer slot; 0 when all state is in memory
    service_nbytes: int
    device_window_nbytes: int  # weights gathered at once
    autograd_nbytes: int = 0  # of gradients that autograd makes, beside the window's room for them
    in_buckets: bool = False  # ranks average a gradient in buckets; else whole
    landing_nbytes: int = 0  # device gradients still being copied, at most
    staging_backend: type[ThroughHost] = ThroughHost
    device_slot_nbytes: int = 0  # one device slot, for state that the device steps
    terms: dict[Tier, dict[str, int]] = field(default_factory=dict)
    # array -> unit -> its home, if it differs from ``tiers``
    placed: dict[str, dict[int, Tier]] = field(default_factory=dict)
    # array -> units whose NVMe home is cached on the host
    cached: dict[str, frozenset[int]] = field(default_factory=dict)

    def tiers_of(self, unit: int) -> dict[str, Tier]:
        """Returns the home of every array of the unit with this index."""
        return {
            name: self.placed.get(name, {}).get(unit, tier) for name, tier in self.tiers.items()
        }

    def cached_of(self, unit: int) -> set[str]:
        """Returns the arrays of the unit with this index that are cached on the host."""
        return {name for name, units in self.cached.items() if unit in units}

    def with_gradients(self, nbytes: int) -> MemoryPlan:
        """Returns the plan with ``nbytes`` more for gradients that autograd makes."""
        plan = self.with_term(Tier.DEVICE, GRADIENTS, nbytes)
        return replace(plan, autograd_nbytes=self.autograd_nbytes + nbytes)

    def with_term(self, tier: Tier, term: str, nbytes: int) -> MemoryPlan:
        """Returns the plan with ``nbytes`` more of ``tier`` for ``term``; less if negative."""
        terms = self.terms[tier] | {term: self.terms[tier].get(term, 0) + nbytes}
        terms = {name: size for name, size in terms.items() if size}
        return replace(self, terms={**self.terms, tier: terms})

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of the model's buffers, on all tiers."""
        return sum(terms.get(BUFFERS, 0) for terms in self.terms.values())

    def planned_nbytes(self, tier: Tier) -> int:
        """Returns the planned peak of ``tier`` in bytes."""
        return sum(self.terms[tier].values())


def term_of(name: str) -> str:
    """Returns the name of the term that counts array ``name``."""
    return {"weight": "weights", "grad": "gradients"}.get(name, "optimizer state")
