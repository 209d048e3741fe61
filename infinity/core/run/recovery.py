"""Recovery: recovers a job after an exception at any line (docs/recovery.md).

Drain the transfers, drop the pass and its graph, discard the gradients that were being changed,
finish the journal. If recovery is interrupted or not finished, the next use starts it over.
"""

from __future__ import annotations

from ..grads.record import GradState
from ..units.handle import drop_raw_grads
from .job import Job
from .tasks import drop_failed


def is_interrupted(job: Job) -> bool:
    """Tells whether an exception has left something to recover from. Only while no use runs."""
    return job.scopes.interrupted or job.running.is_cut_short or not job.journal.is_clear


def recover(job: Job, *, finishing: bool) -> None:
    """Drops the state of the running pass, and restores the rest from the homes. Blocks until
    transfers are done.

    ``finishing``: also finish the journal; without it the journal stays as it is, for the next use.
    """
    # Set first: if recovery is interrupted, the next use starts it over.
    job.scopes.interrupted = True
    job.store.check_process()
    job.collectives.complete_started()
    job.device.drain()
    drop_failed()
    job.running.drop()
    if job.reducer is not None:
        job.reducer.abandon()
    for unit in job.prefetcher.units:
        unit.rebuild()
    job.ledger.forget_passing()
    drop_raw_grads([handle.param for handle in job.trained])
    if job.store.guard.failure is None:  # else the disk gets no more transfers
        with job.store.guard:
            job.gradients.rebuild()
            if job.activations is not None:
                job.activations.rebuild()
            job.store.rebuild()
            if finishing:
                job.journal.finish()
    for extension in job.extensions:  # the journal may have swapped two versions of weights
        extension.drop(job)
    if not finishing:
        return  # still marked as interrupted: the next use does the rest
    if job.steps.streaming:
        if any(handle.grad.state is GradState.CONSUMED for handle in job.trained):
            job.uses.halt("an exception inside step_in_backward left part of a step done")
        job.steps.give_up()
    job.scopes.interrupted = False  # the last thing
