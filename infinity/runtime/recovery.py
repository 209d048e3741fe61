"""Recovery: puts a job right after an exception, whatever it struck (docs/recovery.md).

Drain what moves bytes, drop the pass, discard the gradients that were being changed, finish the
journal. Interrupted, or not finished, all of it is done again by the next use.
"""

from __future__ import annotations

from ..gradients.record import GradState
from ..state.handle import set_raw_grad
from .job import Job, wait_idle
from .older_weights import OlderWeights


def is_interrupted(job: Job) -> bool:
    """Tells whether an exception has left something that has to be put right. Asked while no use runs."""
    return job.scopes.interrupted or job.running.is_cut_short or not job.journal.is_clear


def is_sound(job: Job) -> bool:
    """Tells whether the state is whole, and nothing of the last use waits to be put right."""
    return not job.uses.is_halted and job.store.failure is None and not is_interrupted(job)


def begin_repair(job: Job, why: str) -> None:
    """Gives the old state up, for all of it is about to be set anew. ``why`` is what every use is told until
    :meth:`Uses.go_on`. Raises StorageError when an update that is under way fails."""
    try:
        job.journal.finish()  # so that updates which were submitted are known, and waited for, before anything is written
    except Exception:  # noqa: BLE001 - the journal cannot be completed; all state is about to be loaded anyway
        job.uses.halt(why)
        job.journal.forget()
    job.lent.forget()
    wait_idle(job)
    job.prefetcher.release_all(job.units)
    job.uses.halt(why)


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
