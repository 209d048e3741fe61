"""Repair: gives up the state of a job that is about to be loaded whole."""

from __future__ import annotations

from ...core.run.job import Job, wait_idle
from ...core.run.recovery import is_interrupted


def is_sound(job: Job) -> bool:
    """Tells whether the job is usable, its storage has not failed, and no recovery is due."""
    return not job.uses.is_halted and job.store.guard.failure is None and not is_interrupted(job)


def begin_repair(job: Job, why: str) -> None:
    """Gives the old state up, because all of it is about to be loaded. Until :meth:`Uses.go_on`
    every use raises ``why``. Blocks until transfers are done. Raises StorageError if a running
    update fails."""
    try:
        # So that submitted updates are known, and waited for, before any write.
        job.journal.finish()
    # The journal cannot be completed, but all state is about to be loaded anyway.
    except Exception:  # noqa: BLE001
        job.uses.halt(why)
        job.journal.forget()
    job.borrowed.forget()
    wait_idle(job)
    job.prefetcher.release_all(job.units)
    job.uses.halt(why)
