"""ChosenExperts: which rows of one unit are brought to the device: the experts that the router
chose, or an embedding's rows of the tokens.

row     along the first dimension of every parameter of the module: an expert, or a token's vector
rows    their numbers; None: all of them

The device has room for all rows. Rows that were not brought have no defined values there. The
forward and backward of the module's class read none of them, which is known of the classes that
:mod:`.experts` finds. Only while that forward runs are the parameters ordinary ones. For
everybody else they stay at rest, and any use of them brings all rows.

Parts of packed weights are at rest always. Who unpacks them tells which rows it reads.

If each rank has a part of the experts, their forward begins with an exchange of tokens between the
ranks. Which rows it reads is known once its own tokens are there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...core.seams import Extension
from ...core.units.added import always_rests
from ...core.units.flat_layout import FlatLayout
from ...core.units.forms import local_of
from ...core.units.handle import handle_of
from ...core.units.inner import has_inner
from ...core.units.rows import MANY, RowReader, Rows, Spans
from ...core.wrap.described_model import DescribedModel
from ...errors import InternalError
from ...torch_private import current_task
from ..packed.packed import moved_tensors
from .expert_rows import ExpertRows
from .experts import (
    INDICES,
    clamps_choice,
    divided_parameters,
    divides_experts,
    exchanges_of,
    has_experts,
    is_frozen_table,
    runs_known_code,
)


class ChosenExperts:
    """The rows of one unit on the device, and those that its next use needs."""

    def __init__(self, module: nn.Module, layouts: Sequence[FlatLayout]):
        self._kind, self._module = type(module), weakref.ref(module)
        self.count = len(local_of(next(module.parameters(recurse=False))))
        self._exchanges_first = bool(exchanges_of(module))
        self._layouts = layouts
        self._demand: tuple[Rows] | None = None  # of the next use, if that is known
        self._last: Rows = None  # of the last forward
        self._may_be_viewed = False  # by others, whose views show all rows
        self._read: tuple[Rows] | None = None  # of packed weights, by who unpacks them now
        self.there: Rows = None  # on the device, or on their way there

    @property
    def module(self) -> nn.Module:
        """The module whose rows are brought."""
        return cast(nn.Module, self._module())

    def want(self, rows: Rows) -> None:
        """Sets the rows that the next use needs."""
        self._demand = (None if self._may_be_viewed else rows,)

    def want_all(self) -> None:
        """Sets all rows, for a use by others than the forward of the module's class. They may keep
        views, so all rows come until :meth:`begin_pass`."""
        self._may_be_viewed = True
        self.want(None)

    def want_touched(self, param: torch.Tensor) -> None:
        """Sets the rows for a use of ``param`` at rest: all, unless it is a part of a packed weight
        that somebody unpacks."""
        if self._read is None or not always_rests(param):
            self.want_all()

    @contextlib.contextmanager
    def reading(self, rows: Rows) -> Iterator[Rows]:
        """Begins a block that reads ``rows`` of packed weights. In a block inside another one the
        outer one's are read."""
        if rows is not None and not all(0 <= row < self.count for row in rows):
            raise InternalError(f"rows {sorted(rows)} of {self.count} are to be read")
        before = self._read
        self._read = before or (rows,)
        try:
            yield self._read[0]
        finally:
            self._read = before

    def begin_pass(self, *, are_held: bool) -> None:
        """Begins a pass. ``are_held``: others still hold the device memory."""
        self._may_be_viewed = are_held

    def want_for(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None) -> None:
        """Sets the rows for a forward of ``module``: those that the router chose, if its code still
        is the one that is known. None yet if it begins with an exchange of tokens."""
        if not self._exchanges_first:
            self.want_arrived(module, args, kwargs)
            return
        before = self._last if _in_backward() else frozenset()  # a recomputation finds the same
        self.want(before if self._knows(module) else None)

    def want_arrived(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None) -> None:
        """Sets the rows for the forward of the class of ``module``, which has its tokens."""
        self._last = self._chosen(module, args, kwargs or {})
        self.want(self._last)

    def _knows(self, module: nn.Module) -> bool:
        return not self._may_be_viewed and type(module) is self._kind and runs_known_code(module)

    def _chosen(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Rows:
        if not self._knows(module):
            return None
        if isinstance(module, nn.Embedding):
            if module.max_norm is not None:
                return None
            index = next(iter((*args, *kwargs.values())), None)
        else:
            named = (kwargs[name] for name in INDICES if name in kwargs)
            index = next(named, (*args, None, None)[1])
        if not isinstance(index, torch.Tensor):
            return None
        rows = torch.unique(index.detach())
        if clamps_choice(module):
            rows = rows.clamp(max=self.count - 1)
        return frozenset(row for row in rows.tolist() if 0 <= row < self.count)

    @property
    def expected(self) -> Rows:
        """The rows that the next use needs, or a guess: in a backward those of the forward, in a
        forward all if nearly all were chosen the last time."""
        if known := self._demand or self._read:
            return known[0]
        many = self._last is None or len(self._last) >= MANY * self.count
        return None if many and not _in_backward() else self._last

    @property
    def come_ahead(self) -> bool:
        """Whether it is known, ahead of the next use, what it needs. Of parts of experts it does
        not depend on the rank, as they all do the same ahead."""
        return _in_backward() or (not self._exchanges_first and self.expected is None)

    def choose(self) -> None:
        """Begins to bring what is expected."""
        self.there = self.expected

    def take_missing(self) -> Rows:
        """Takes the rows that the use which begins needs, and that are not there; without a demand
        it needs those that are read, or all. They are there from now on."""
        (demand,) = self._demand or self._read or (None,)
        self._demand = None
        if self.there is None:
            return frozenset()
        needed = frozenset(range(self.count)) if demand is None else demand
        missing, there = needed - self.there, self.there | needed
        self.there = None if len(there) == self.count else there
        return missing

    def forget(self) -> None:
        """Forgets the demand, after an exception."""
        self._demand = None

    def make_steps(self, places: Sequence[tuple[int, int]]) -> ExpertRows:
        """Makes what keeps the steps that experts of one flat param miss."""
        return ExpertRows(self.count, places)

    def places(self, rows: Rows) -> Spans | None:
        """Returns the elements of ``rows`` in each flat param, neighbours in one span."""
        if rows is None:
            return None
        spans: list[tuple[int, int]] = []
        for row in sorted(rows):
            if spans and spans[-1][1] == row:
                spans[-1] = spans[-1][0], row + 1
            else:
                spans.append((row, row + 1))
        return [
            [
                (place.offset + begin * each, place.offset + end * each)
                for place in layout.placements
                for each in (place.numel // self.count,)
                for begin, end in spans
            ]
            for layout in self._layouts
        ]


class RowReaders(Extension):
    """Finds modules with divided experts, and those whose forward reads some rows only."""

    @classmethod
    def divides(cls, model: Any) -> bool:
        return divides_experts(model)

    @classmethod
    def describe_model(cls, model: DescribedModel) -> None:
        for module in model.modules:
            if divided := divided_parameters(module):
                model.divided[module] = divided
            if has_experts(module) or is_frozen_table(module):
                packed = filter(has_inner, module.parameters(recurse=False))
                if all(getattr(param, "tells_rows", False) for param in packed):
                    model.read_by_rows[module] = RowReader(
                        moved_tensors(module), partial(ChosenExperts, module)
                    )


@contextlib.contextmanager
def reading(part: torch.Tensor, rows: Rows) -> Iterator[Rows]:
    """Begins a block that reads ``rows`` of ``part`` of a packed weight, which may be at rest.
    Yields the rows that have values in it."""
    handle = handle_of(part)
    experts = None if handle is None else handle.unit.arrival.rows
    if experts is None:
        yield rows
        return
    with experts.reading(rows) as there:
        yield there


def _in_backward() -> bool:
    return current_task() != -1
