"""JoinedPass: makes several forwards and backwards one pass.

Micro-batches, and the stages of a pipeline, use the same weights several times before a step. Joined, they record one trace, nothing is
reduced, sent home or met for between them, units stay while the window has room, and gradients land once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..gradients.whole import WholeGradients
from ..state.operations import Operation
from .running import Running


class JoinedPass:
    """The pass that several forwards and backwards make together. Used from the thread that runs the model."""

    def __init__(self) -> None:
        self.is_open = False
        self._has_begun = False  # with its first root forward
        self._backwards = 0

    @contextmanager
    def opened(self, engine: Running, finish: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Joins all forwards and backwards inside the block. Left by an exception, what they added to gradients is torn.

        ``finish``: what is to be done to the gradients once they have landed, before anybody steps them; cut short, they are torn, too.

        Raises UsageError where a pass is open already, or runs.
        """
        engine.uses.check(Operation.JOINED_PASS)
        try:
            with engine.uses.begin():
                self._open(engine)
            yield
            with engine.uses.begin():
                self._close(engine, finish)
        except BaseException:
            engine.uses.interrupt()  # the next use puts things right, once nothing runs
            raise

    def _open(self, engine: Running) -> None:
        reduced = engine.reducer is not None and not engine.ranks.keeps_gradients
        engine.gradients.join_backwards(None if reduced else WholeGradients(engine.ledger, engine.device))
        if engine.reducer is not None:
            engine.reducer.waits_for_more = True
        self.is_open, self._has_begun, self._backwards = True, False, 0

    def _close(self, engine: Running, finish: Callable[[], None]) -> None:
        if not self.is_open:
            return  # something inside failed, was caught, and all was put right since
        engine.uses.interrupt()  # cut short from here on, what is half landed is torn
        self.is_open = False
        with engine.store.guarding():
            engine.gradients.land_together(engine.units)
        if engine.reducer is not None:
            with engine.store.guarding():
                engine.reducer.reduce_all()
        finish()
        for unit in reversed(engine.units):
            engine.backward.landed_at_home(unit)
        if self._backwards:
            engine.backward.end_joined()
        else:
            engine.release_idle()
        engine.scopes.interrupted = False

    def begins(self) -> bool:
        """Tells whether a root forward that starts now begins a pass."""
        begins = not (self.is_open and self._has_begun)
        self._has_begun = True
        return begins

    def begin_anew(self, engine: Running) -> None:
        """Has the next root forward begin the pass once more: what ran until now only tried things out."""
        if self.is_open and self._has_begun:
            engine.schedule.forget()
            self._has_begun = False

    def note_backward(self) -> None:
        """Counts a backward that ended."""
        self._backwards += 1

    def rebuild(self) -> None:
        """Forgets the pass, which an exception cut short. Only while nothing is running."""
        self.is_open = self._has_begun = False
