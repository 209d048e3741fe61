"""Journal: changes that must be whole, written down before they begin and struck out when they are done.

A change is a function that may be called again from the start, however far it came before: it sets things to what they are to
be, and never by how much. Whatever interrupts one (Ctrl-C at any line, memory that runs out), the next use of the engine
carries it out to its end before it does anything else (:mod:`infinity.runtime.recovery`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import call

Change = Callable[[], None]
Meet = Callable[[Change], None]  # meets other ranks, and calls what it is given at the moment when all are known to agree


class Journal:
    """The changes of one engine that have begun."""

    def __init__(self) -> None:
        self._begun: list[Change] = []

    @property
    def is_clear(self) -> bool:
        """Whether nothing was left half done."""
        return not self._begun

    def carry_out(self, change: Change, meet: Meet = call) -> None:
        """Makes ``change``, where other ranks make it too as soon as they ``meet``: one that is
        struck as it hears of that makes it all the same."""
        meet(partial(self.begin, change))
        self.end(change)

    def begin(self, change: Change) -> None:
        """Writes down a change that :meth:`finish` will make. Doing so again changes nothing."""
        if all(each is not change for each in self._begun):
            self._begun.append(change)

    def end(self, change: Change) -> None:
        """Makes a change that has begun, and strikes it out."""
        change()
        self._begun.remove(change)

    def finish(self) -> None:
        """Makes every change that stands here, in order. One that raises stays, and is made anew next time."""
        while self._begun:
            self._begun[0]()
            self._begun.pop(0)

    def forget(self) -> None:
        """Strikes everything out: all of the state is about to be set anew."""
        self._begun.clear()
