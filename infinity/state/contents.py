"""Contents: holds one shard's arrays, and what is under way in them.

    AT_HOME    nothing is under way
    STEPPING   an update is under way: the bytes at home are its once it is over
    SHADOWED   the results of an update made ahead lie beside the state, or are on their way there

Contents refer to no parameter. Whoever gives an engine's memory back when the engine is gone holds them until then, in a table of the
process; what users hang on their parameters, often the model itself, must not live as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from .. import native
from ..storage.arrays import StateArray


class Activity(Enum):
    """What goes on in a shard's arrays."""

    AT_HOME = auto()
    STEPPING = auto()
    SHADOWED = auto()


MOVES = {
    Activity.AT_HOME: {Activity.STEPPING, Activity.SHADOWED},
    Activity.STEPPING: {Activity.AT_HOME},
    Activity.SHADOWED: {Activity.AT_HOME, Activity.STEPPING},
}


class Update(Protocol):
    """A submitted update."""

    @property
    def done(self) -> bool:
        """Whether it is over."""

    def wait(self) -> None:
        """Blocks until it is over. Raises what went wrong with it."""


@dataclass(frozen=True, eq=False)
class Shadow:
    """An update made ahead, and all that it was made with: a step with other inputs is another one."""

    update: native.UnitUpdate
    inputs: object

    @property
    def ticket(self) -> native.Ticket | None:
        """None before it is submitted."""
        return self.update.ticket


@dataclass(eq=False)
class Contents:
    """The arrays of one shard, and the updates of them that are under way."""

    arrays: dict[str, StateArray] = field(default_factory=dict)
    beside: dict[str, StateArray] = field(default_factory=dict)  # room for a shadow; empty where none are made
    reserved: list[StateArray] = field(default_factory=list)  # places on disk of what is cached on the host
    update: Update | None = None  # the last one that was submitted
    shadow: Shadow | None = None

    @property
    def activity(self) -> Activity:
        """Reads it off what there is, so that an exception between two statements cannot leave it untrue."""
        if self.shadow is not None:
            return Activity.SHADOWED
        return Activity.AT_HOME if self.update is None else Activity.STEPPING

    def wait(self) -> None:
        """Waits until the last step's bytes are at home (STEPPING -> AT_HOME). Raises what went wrong with it."""
        if self.update is not None:
            self.update.wait()
            self.update = None

    def drop_shadow(self) -> None:
        """Forgets the shadow once it is over (SHADOWED -> AT_HOME). Raises what went wrong with it."""
        if self.shadow is not None and (ticket := self.shadow.ticket) is not None:
            try:
                ticket.wait()
            finally:  # where the wait itself was interrupted the update is still under way, and not forgotten
                self.shadow = self.shadow if not ticket.done else None
        self.shadow = None

    def settle(self) -> None:
        """Waits for what is under way, whatever comes of it (-> AT_HOME): the engine is being shut down."""
        for wait in (self.drop_shadow, self.wait):
            try:
                wait()
            except Exception:  # noqa: BLE001 - whoever needed these bytes was told; here they are thrown away
                pass
        self.update = self.shadow = None

    def clear(self) -> None:
        """Drops the arrays. Units and their handles refer to each other: the memory must not wait for them."""
        self.arrays.clear()
        self.beside.clear()
        self.reserved.clear()
