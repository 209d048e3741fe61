"""Jobs of ranks that average gradients in buckets (see `ranks`)."""

from __future__ import annotations

from typing import Any

import rank_jobs

from infinity.core.grads.bank import GradientBank
from infinity.core.plan import memory_terms, unit_sizes
from infinity.ext.shared_homes import quantize


def bucketed(job: str, piece: int, loses: bool = False, **arguments: Any) -> Any:
    """Runs a ``job`` of `rank_jobs` with pieces of ``piece`` bytes. ``loses``: of each gradient
    what the first bucket does not have."""
    before, land = memory_terms.PIECE_NBYTES, GradientBank.land_average

    def land_first(self: GradientBank, handle: Any, average: Any, begin: int = 0) -> None:
        land(self, handle, average if not begin else average.zero_(), begin)

    try:
        memory_terms.PIECE_NBYTES = unit_sizes.PIECE_NBYTES = quantize.PIECE_NBYTES = piece
        GradientBank.land_average = land_first if loses else land
        return getattr(rank_jobs, job)(**arguments)
    finally:
        memory_terms.PIECE_NBYTES = unit_sizes.PIECE_NBYTES = quantize.PIECE_NBYTES = before
        GradientBank.land_average = land
