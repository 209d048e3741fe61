"""JoinedPass: makes several forwards and backwards one pass.

Micro-batches, and the stages of a pipeline, use the same weights several times before a step. Joined, they record one trace, nothing is
reduced, sent home or met for between them, units stay while the window has room, and gradients land once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..gradients.whole import WholeGradients
from ..state.operations import Operation
from .backward import Backward
from .job import Job


class JoinedPass:
    """The pass that several forwards and backwards make together. Used from the thread that runs the model."""

    def __init__(self, job: Job, backward: Backward):
        self._job, self._pass, self._backward = job, job.running, backward

    @contextmanager
    def opened(self, finish: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Joins all forwards and backwards inside the block. Left by an exception, what they added to gradients is torn.

        ``finish``: what is to be done to the gradients once they have landed, before anybody steps them; cut short, they are torn, too.

        Raises UsageError where a pass is open already, or runs.
        """
        uses = self._job.uses
        uses.check(Operation.JOINED_PASS)
        try:
            with uses.begin():
                self._open()
            yield
            with uses.begin():
                self._close(finish)
        except BaseException:
            uses.interrupt()  # the next use puts things right, once nothing runs
            raise

    def _open(self) -> None:
        job = self._job
        reduced = job.reducer is not None and not job.ranks.keeps_gradients
        job.gradients.join_backwards(None if reduced else WholeGradients(job.ledger, job.device))
        if job.reducer is not None:
            job.reducer.waits_for_more = True
        self._pass.is_joined, self._pass.has_begun, self._pass.backward_count = True, False, 0

    def _close(self, finish: Callable[[], None]) -> None:
        job = self._job
        if not self._pass.is_joined:
            return  # something inside failed, was caught, and all was put right since
        job.uses.interrupt()  # an exception from here on leaves partial gradients: they are torn
        self._pass.is_joined = False
        with job.store.guarding():
            job.gradients.land_together(job.units)
        if job.reducer is not None:
            with job.store.guarding():
                job.reducer.reduce_all()
        finish()
        for unit in reversed(job.units):
            self._backward.landed_at_home(unit)
        if self._pass.backward_count:
            self._backward.end_joined()
        else:
            job.prefetcher.release_idle()
        job.scopes.interrupted = False

    def begin_anew(self) -> None:
        """Has the next root forward begin the pass once more: what ran until now only tried things out."""
        if self._pass.is_joined and self._pass.has_begun:
            self._job.schedule.forget()
            self._pass.has_begun = False
