"""Rows: what a unit needs to be brought, and stepped, by rows. An extension says which rows a use
reads, and keeps the steps that rows have missed.

row     along the first dimension of each parameter of the unit: an expert, or a token's vector
rows    their numbers; None: all of them
chosen  rows that a use reads. The device has room for all rows; those that were not brought have no
        defined values there
behind  a row without a gradient in the last steps. torch updates it in each of them, with a
        gradient of zeros. A replay makes up for that before the row is used, read, saved or stepped
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ... import native
from .flat_layout import FlatLayout

MANY = 0.95  # share of the rows from which on all are brought ahead

Rows = frozenset[int] | None
# Elements, begin and end, of each flat param
Spans = Sequence[Sequence[tuple[int, int]]]
Hyper = native.Hyperparameters


@dataclass(frozen=True, eq=False)
class Replay:
    """What brings rows up to date.

    make
        Makes the update of runs without a gradient.
    submit
        Submits an update, if it was not yet. Returns its ticket.
    """

    make: Callable[[list[native.Run]], native.UnitUpdate]
    submit: Callable[[native.UnitUpdate], native.Ticket]


class RowSteps(Protocol):
    """The steps that rows of one flat param have missed."""

    count: int  # of the rows

    def runs(
        self, index: int, rows: Iterable[int], hyper: Hyper, number: int
    ) -> Iterator[native.Run]:
        """Yields the runs of step ``number`` of parameter ``index``: of the ``rows`` with a
        gradient, and of those that are far behind."""

    def note_step(self, index: int, rows: Iterable[int], zeros: Hyper, number: int) -> None:
        """Records step ``number`` of parameter ``index``, whose ``rows`` had a gradient. ``zeros``:
        the hyperparameters for the others. Idempotent."""

    def replay_after(self, ticket: native.Ticket | None, replay: Replay) -> Any:
        """Returns the update that is over when every row is up to date. ``ticket``: of the update
        that runs."""

    def are_current(self, rows: Iterable[int] | None) -> bool:
        """Tells whether ``rows`` are up to date, and no update runs."""

    def wait_running(self) -> None:
        """Waits for the update that runs. Raises its error."""

    def catch_up(self, rows: Iterable[int] | None) -> None:
        """Brings ``rows`` up to date, and waits for that. Raises the error of an update."""

    def forget(self) -> None:
        """Forgets what is behind: the engine is being shut down."""


class ChosenRows(Protocol):
    """The rows of one unit on the device, and those that its next use needs."""

    count: int
    there: Rows  # on the device, or on their way there

    @property
    def expected(self) -> Rows:
        """The rows that the next use needs, or a guess."""

    @property
    def come_ahead(self) -> bool:
        """Whether it is known, ahead of the next use, what it needs. The same on every rank."""

    def begin_pass(self, *, are_held: bool) -> None:
        """Begins a pass. ``are_held``: others still hold the device memory."""

    def want(self, rows: Rows) -> None:
        """Sets the rows that the next use needs."""

    def want_for(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None) -> None:
        """Sets the rows for a forward of ``module``, called with these arguments."""

    def want_touched(self, param: torch.Tensor) -> None:
        """Sets the rows for a use of ``param`` at rest: all that it may read."""

    def choose(self) -> None:
        """Begins to bring what is expected."""

    def take_missing(self) -> Rows:
        """Takes the rows that the use which begins needs, and that are not there. They are there
        from now on."""

    def forget(self) -> None:
        """Forgets what the next use needs, after an exception."""

    def places(self, rows: Rows) -> Spans | None:
        """Returns the elements of ``rows`` in each flat param, neighbours in one span."""

    def make_steps(self, places: Sequence[tuple[int, int]]) -> RowSteps:
        """Makes what keeps the steps that rows of one flat param miss. ``places``: of each
        parameter, its first element and the elements of a row."""


class RowReader(NamedTuple):
    """How the forward of a module reads some rows only. ``params``: all its own parameters.
    ``choose``: makes what chooses the rows, given the layouts of its unit."""

    params: list[nn.Parameter]
    choose: Callable[[Sequence[FlatLayout]], ChosenRows]
