"""Kept data: what a wrapped model's host memory is charged for the data that this process keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ... import native
from ...core.machine.tiers import Tier
from ...core.run.job import Job
from ...core.seams import Events, Extension, Term
from .arena import KEPT_DATA, kept_data_nbytes


class KeptData(Extension):
    """The part of this process's arenas that the plan of a model counts."""

    _charge: native.Charge

    @classmethod
    def terms(cls, config: Any, units: Sequence[Any], device: Any) -> Iterator[Term]:
        """Yields the bytes of the arenas that are there."""
        if nbytes := kept_data_nbytes():
            yield Term(Tier.HOST, KEPT_DATA, nbytes)

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> KeptData | None:
        """Returns the extension, which charges what was planned, if there are arenas."""
        if not kept_data_nbytes():
            return None
        kept = cls()
        events.allocated.append(kept.charge)
        return kept

    def charge(self, job: Job) -> None:
        """Charges the planned bytes."""
        planned = job.planned.plan.terms[Tier.HOST].get(KEPT_DATA, 0)
        self._charge = job.ledger.reserve(Tier.HOST, planned, KEPT_DATA)
