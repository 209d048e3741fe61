"""Contents: one shard's arrays, and the running updates of them.

    AT_HOME    nothing is running
    STEPPING   an update is running, and defines the bytes at home once it is done
    SHADOWED   the results of an update made ahead are beside the state, or on their way there

[Note: why contents refer to no parameter] A table of the process holds them until an engine's
memory is freed, which may be after the engine is gone. Objects that users attach to parameters,
often the model itself, must not live as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from .. import native
from ..storage.arrays import StateArray


class Activity(Enum):
    """The running activity in a shard's arrays."""

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
        """Whether it is done."""

    def wait(self) -> None:
        """Blocks until it is done. Raises its error."""


@dataclass(frozen=True, eq=False)
class Shadow:
    """An update made ahead, and all its inputs: a step with other inputs cannot use it."""

    update: native.UnitUpdate
    inputs: object

    @property
    def ticket(self) -> native.Ticket | None:
        """The ticket; None before the update is submitted."""
        return self.update.ticket


@dataclass(eq=False)
class Contents:
    """The arrays of one shard, and their running updates."""

    arrays: dict[str, StateArray] = field(default_factory=dict)
    # Buffers of a shadow; empty if none are made.
    beside: dict[str, StateArray] = field(default_factory=dict)
    # Disk space of arrays that are cached on the host.
    reserved: list[StateArray] = field(default_factory=list)
    update: Update | None = None  # the last one that was submitted
    shadow: Shadow | None = None

    @property
    def activity(self) -> Activity:
        """Derived from the fields, so that an exception between two statements cannot leave it
        wrong."""
        if self.shadow is not None:
            return Activity.SHADOWED
        return Activity.AT_HOME if self.update is None else Activity.STEPPING

    def wait(self) -> None:
        """Waits until the last step's bytes are at home (STEPPING -> AT_HOME). Raises its error."""
        if self.update is not None:
            self.update.wait()
            self.update = None

    def drop_shadow(self) -> None:
        """Waits for the shadow and drops it (SHADOWED -> AT_HOME). Raises its error."""
        if self.shadow is not None and (ticket := self.shadow.ticket) is not None:
            try:
                ticket.wait()
            finally:  # keeps the update if it still runs because the wait was interrupted
                self.shadow = self.shadow if not ticket.done else None
        self.shadow = None

    def settle(self) -> None:
        """Waits for running updates and ignores their errors (-> AT_HOME): the engine is being shut
        down."""
        for wait in (self.drop_shadow, self.wait):
            try:
                wait()
            except Exception:  # noqa: BLE001 - whoever needed these bytes was told; here they are thrown away
                pass
        self.update = self.shadow = None

    def clear(self) -> None:
        """Drops the arrays. Units and handles form a cycle, for which the memory must not wait."""
        self.arrays.clear()
        self.beside.clear()
        self.reserved.clear()
