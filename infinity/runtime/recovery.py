"""Recovery: puts an engine right after an exception, whatever it struck (docs/recovery.md)."""

from __future__ import annotations

from ..gradients.record import GradState
from ..state.handle import set_raw_grad
from .running import Running


def recover(engine: Running, *, finishing: bool) -> None:
    """Gives up what only a running pass needs, and takes it anew from what is at home. ``finishing``: carries to its end what had to be
    whole; without it the journal stays as it is, for the next use.

    Cut short, or not finished, all of it is done again by the next use.
    """
    engine.scopes.interrupted = True  # what asks for this is cleared on the way: cut short, all of it is done again
    engine.store.check_process()
    engine.collectives.strike()
    engine.device.drain()
    engine.passes.rebuild()
    engine.joined.rebuild()
    if engine.reducer is not None:
        engine.reducer.abandon()
    engine.prefetcher.rebuild()
    engine.ledger.forget_passing()
    for handle in engine.trained:
        set_raw_grad(handle.param, None)
    if engine.store.failure is None:  # else nothing more goes to or comes from the disk
        _rebuild_homes(engine, finishing=finishing)
    if engine.older is not None:
        engine.older.rebuild()  # behind the journal: an update may have changed their places
    if not finishing:
        return  # still marked: the next use does the rest
    if engine.steps.streaming:
        if any(handle.grad.state is GradState.CONSUMED for handle in engine.trained):
            engine.uses.halt("an exception inside step_in_backward left part of a step done")
        engine.steps.give_up()
    engine.scopes.interrupted = False  # the last thing


def _rebuild_homes(engine: Running, *, finishing: bool) -> None:
    with engine.store.guarding():
        engine.gradients.rebuild()
        if engine.activations is not None:
            engine.activations.rebuild()
        engine.store.rebuild()
        if not finishing:
            return
        engine.journal.finish()  # a step may make shadows the state
        for unit in engine.units:
            for shard in unit.shards:
                shard.drop_shadow()
