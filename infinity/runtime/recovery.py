"""Recovery: puts a job right after an exception, whatever it struck (docs/recovery.md).

Drain what moves bytes, drop the pass, discard the gradients that were being changed, finish the
journal. Interrupted, or not finished, all of it is done again by the next use.
"""

from __future__ import annotations

from ..gradients.record import GradState
from ..state.handle import set_raw_grad
from .job import Job
from .older_weights import OlderWeights


def recover(job: Job, older: OlderWeights | None, *, finishing: bool) -> None:
    """Gives up what only a running pass needs, and takes it anew from what is at home. ``finishing``: carries to its end what had to be
    whole; without it the journal stays as it is, for the next use."""
    job.scopes.interrupted = True  # what asks for this is cleared on the way: interrupted, all of it is done again
    job.store.check_process()
    job.collectives.strike()
    job.device.drain()
    job.running.drop()
    if job.reducer is not None:
        job.reducer.abandon()
    for unit in job.prefetcher.units:
        unit.rebuild()
    job.ledger.forget_passing()
    for handle in job.trained:
        set_raw_grad(handle.param, None)
    if job.store.failure is None:  # else nothing more goes to or comes from the disk
        _rebuild_homes(job, finishing=finishing)
    if older is not None:
        older.settle()  # behind the journal: an update may have changed their places
    if not finishing:
        return  # still marked: the next use does the rest
    if job.steps.streaming:
        if any(handle.grad.state is GradState.CONSUMED for handle in job.trained):
            job.uses.halt("an exception inside step_in_backward left part of a step done")
        job.steps.give_up()
    job.scopes.interrupted = False  # the last thing


def _rebuild_homes(job: Job, *, finishing: bool) -> None:
    with job.store.guarding():
        job.gradients.rebuild()
        if job.activations is not None:
            job.activations.rebuild()
        job.store.rebuild()
        if not finishing:
            return
        job.journal.finish()  # a step may make shadows the state
        for unit in job.units:
            for shard in unit.shards:
                shard.drop_shadow()
