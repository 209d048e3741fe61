"""Audit: does a share of the work twice, and compares the bits (``Config(audit=share)``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...core.machine.tiers import Tier
from ...core.run.job import Job
from ...core.seams import Events, Extension, Term
from .blocks import Blocks
from .findings import Findings
from .homes import HomeChecks
from .meetings import Gathered, Reduced
from .rotation import PIECE_NUMEL
from .updates import SERVICE_NBYTES, Updates

TERM = "audited pieces"


class Audit(Extension):
    """The audits of one wrapped model. They change no bit of what it computes."""

    findings: Findings

    def __init__(self, share: float):
        self._share = share
        self._charge: Any = None

    @classmethod
    def terms(cls, config: Any, units: Sequence[Any], device: Any) -> Iterator[Term]:
        """Yields the copies of the pieces that one step audits."""
        if config.audit:
            flats = [flat for unit in units for flat in unit.flat_params if flat.spec.stepped]
            numel = sum(flat.numel // flat.shards for flat in flats)
            each = max((sum(f.spec.nbytes_per_element.values()) for f in flats), default=0)
            copied = min(numel, config.audit * numel + PIECE_NUMEL) * each
            yield Term(Tier.HOST, TERM, int(2 * copied) + SERVICE_NBYTES)

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> Audit | None:
        """Returns the audit if there is a share."""
        if not config.audit:
            return None
        audit = cls(config.audit)
        events.allocated.append(audit.charge)
        return audit

    def charge(self, job: Job) -> None:
        """Charges the planned bytes."""
        planned = job.planned.plan.terms[Tier.HOST].get(TERM, 0)
        self._charge = job.ledger.reserve(Tier.HOST, planned, TERM)

    def install(self, job: Job, model: object) -> None:
        """Adds the listeners of all audits."""
        share, events = self._share, job.events
        self.findings = findings = Findings(share, job.store.guard, job.ranks.world_rank)
        self._homes = homes = HomeChecks(job, share, findings)
        self._updates = updates = Updates(job, share, findings, homes)
        self._gathered = Gathered(job, share, findings, homes)
        self._reduced, blocks = Reduced(job, share, findings), Blocks(job, share, findings)
        if any(flat.spec.needs for unit in job.units for flat in unit.flat_params):
            findings.leave_out("updates by an optimizer's own code")
        events.use_ready.append(findings.raise_found)
        events.finishing.append(self.finish)
        events.step_begun.append(self.meet)
        events.update_planned.append(updates.planned)
        events.update_submitted.append(updates.submitted)
        events.step_ended.append(self.visit)
        events.pass_begun.append(blocks.pass_begun)
        events.packing.append(blocks.packing)
        events.forward_begun.append(self._gathered.forward_begun)
        events.unit_landed.append(self._gathered.unit_landed)
        events.averaged.append(self._reduced.averaged)
        events.closed.append(updates.close)

    def drop(self, job: Job) -> None:
        """Forgets what ranks have not compared."""
        self._gathered.drop()
        self._reduced.drop()

    def meet(self) -> None:
        """Compares with the other ranks. Every rank calls this."""
        self.findings.raise_found()
        self._gathered.meet()
        self._reduced.meet()

    def visit(self, steps: int) -> None:
        """Looks at pieces of frozen weights at home."""
        self._homes.visit(steps, self._updates.run)

    def finish(self) -> None:
        """Waits for the running audits, and looks at what a save reads. Raises CorruptionError."""
        self._updates.finish()
        self._homes.check_all()
        self.findings.raise_found()


def audited(job: Job) -> dict[str, Any]:
    """Returns what was audited of ``job``, as values for JSON; empty without audits."""
    audit = job.find(Audit)
    return {} if audit is None else audit.findings.told()
