"""Journal: changes that must be completed. They are recorded before they begin and removed when
done.

A change is a function that may be called again from the start, however far it got. It sets values,
and never increments them. If it is interrupted (Ctrl-C at any line, out of memory), the next use of
the engine completes it first (:mod:`infinity.core.run.recovery`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import call

Change = Callable[[], None]
# Meets other ranks, and calls its argument as soon as all are known to agree.
Meet = Callable[[Change], None]


class Journal:
    """The changes of one engine that have begun."""

    def __init__(self) -> None:
        self._begun: list[Change] = []

    @property
    def is_clear(self) -> bool:
        """Whether no change was left unfinished."""
        return not self._begun

    def carry_out(self, change: Change, meet: Meet = call) -> None:
        """Makes ``change`` once ``meet`` shows that other ranks make it too. A rank that is
        interrupted right then still makes it, in recovery. Blocks if ``meet`` does."""
        meet(partial(self.begin, change))
        self.end(change)

    def begin(self, change: Change) -> None:
        """Records a change that :meth:`finish` will make. Idempotent."""
        if all(begun is not change for begun in self._begun):
            self._begun.append(change)

    def end(self, change: Change) -> None:
        """Makes a recorded change, and removes it."""
        change()
        self._begun = [begun for begun in self._begun if begun is not change]

    def finish(self) -> None:
        """Makes every recorded change, in order. One that raises stays, and is made again next
        time."""
        while self._begun:
            self._begun[0]()
            self._begun.pop(0)

    def cancel(self, change: Change) -> None:
        """Removes a change that has changed nothing."""
        self._begun = [begun for begun in self._begun if begun is not change]

    def forget(self) -> None:
        """Removes all changes: the whole state is about to be loaded."""
        self._begun.clear()
