"""AccumulationPass: makes several forwards and backwards one pass.

Micro-batches, and the stages of a pipeline, use the same weights several times before a step. In a
accumulation pass they record one trace, and between them nothing is reduced or sent home, and ranks
do not meet. Units stay while the window has room. Gradients land once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..grads.backward import Backward
from ..grads.whole import WholeGradients
from .job import Job
from .operations import Operation


class AccumulationPass:
    """The pass that several forwards and backwards make together. Used from the thread that runs
    the model."""

    def __init__(self, job: Job, backward: Backward):
        self._job, self._pass, self._backward = job, job.running, backward

    @contextmanager
    def opened(self, finish: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Makes one pass of all forwards and backwards inside the block. Every rank calls this. If
        an exception leaves it, the gradients that they changed become invalid.

        ``finish`` changes the gradients after they have landed and before a step; its failure
        invalidates them too.

        Raises UsageError if a pass is open already, or runs.
        """
        uses = self._job.uses
        uses.check(Operation.ACCUMULATION_PASS)
        try:
            with uses.begin():
                self._open()
            yield
            with uses.begin():
                self._close(finish)
        except BaseException:
            uses.interrupt()  # the next use recovers, once nothing runs
            raise

    def _open(self) -> None:
        job = self._job
        reduced = job.reducer is not None and not job.ranks.keeps_gradients
        job.gradients.join_backwards(None if reduced else WholeGradients(job.ledger, job.device))
        if job.reducer is not None:
            job.reducer.waits_for_more = True
        self._pass.is_accumulating, self._pass.has_begun, self._pass.backward_count = True, False, 0

    def _close(self, finish: Callable[[], None]) -> None:
        job = self._job
        if not self._pass.is_accumulating:
            return  # an error inside was caught, and recovered from
        # An exception from here on leaves partial gradients: mark them invalid.
        job.uses.interrupt()
        self._pass.is_accumulating = False
        with job.store.guard:
            job.gradients.land_together(job.units)
        if job.reducer is not None:
            with job.store.guard:
                job.reducer.reduce_all()
        finish()
        for unit in reversed(job.units):
            self._backward.notify_if_final(unit)
        if self._pass.backward_count:
            self._backward.end_accumulation()
        else:
            job.prefetcher.release_idle()
        job.scopes.interrupted = False

    def begin_anew(self) -> None:
        """Restarts the pass with the next root forward: the forwards until now were only a
        trial."""
        if self._pass.is_accumulating and self._pass.has_begun:
            self._job.schedule.forget()
            self._pass.has_begun = False
