"""Spans: by which hyperparameters the parameters of a flat param are stepped.

span   consecutive parameters of a flat param with the same hyperparameters, step count and
       counters: one kernel call
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ... import native
from ...errors import UsageError
from ..grads.record import GradState
from ..params.books import OptimizerBooks
from ..units.flat_param import FlatParam
from ..units.handle import ParamHandle
from .counters import Counters, Numbers
from .device_step import Span
from .known import Known

# Of a parameter: its group, step count, factors of the gradient, hyperparameters of its own
Key = tuple[int, int, tuple[float, ...], tuple[tuple[str, float], ...]]


def runs_of(spans: list[Span]) -> list[native.Run]:
    """Lists the runs of a kernel for ``spans``."""
    return [native.Run(begin, end, hyper) for begin, end, hyper in spans]


def numbers_of(
    counters: type[Counters],
    param_group: Mapping[str, Any],
    handle: ParamHandle,
    books: OptimizerBooks,
) -> Numbers:
    """Returns a parameter's counters before its next step. Raises UsageError if its state lacks
    one."""
    numbers = counters.first(param_group)
    if not handle.has_state:
        return numbers
    values = books.own_of(handle.param)
    if lacking := [name for name in numbers if name not in values]:
        raise UsageError(
            f"optimizer.state of {handle.name} lacks {', '.join(lacking)}: set it, or delete this"
            " parameter's state to begin anew"
        )
    return {name: torch.as_tensor(values[name]) for name in numbers}


def next_step(param_group: Mapping[str, Any]) -> int:
    """Returns the number of the next step of ``param_group``, for classes that count there."""
    return int(param_group.get("step", 0)) + 1


class Spans:
    """The spans of one step, by the rule and the groups of an optimizer. ``group_of``: the
    parameters to step, each with the index of its group."""

    def __init__(
        self,
        known: Known,
        param_groups: list[dict[str, Any]],
        group_index_of: Mapping[ParamHandle, int],
        books: OptimizerBooks,
    ):
        self._known, self._param_groups, self._group_index_of = known, param_groups, group_index_of
        self._books = books
        self._counted: dict[ParamHandle, tuple[dict[str, float], Numbers]] = {}
        # Of the next step of each group, if the class counts there
        self._numbers = [*map(next_step, param_groups)] if known.counts_in_groups else None

    def stepped(self, flat_param: FlatParam) -> list[ParamHandle]:
        """Lists the parameters that have a landed gradient and are in a group."""
        stepped = [handle for handle in flat_param.handles if handle in self._group_index_of]
        return [handle for handle in stepped if handle.grad.state is GradState.LANDED]

    def of(self, flat_param: FlatParam, clip: float = 1.0) -> Iterator[Span]:
        """Yields the spans of landed gradients. Neighbours with the same key form one. ``clip``:
        applied after the gradients' own factors."""
        last = () if clip == 1.0 else (clip,)
        key, begin, end = None, 0, 0
        first, stepped = flat_param.layout.own_shard[0], set(self.stepped(flat_param))
        for handle, (low, high) in zip(flat_param.handles, flat_param.layout.shard_parts):
            current = None
            if handle in stepped and low < high:
                current = self.key(handle, (*handle.grad.factors, *last))
            if current != key:
                if key is not None:
                    yield begin, end, self.hyperparameters(*key)
                key, begin = current, low - first
            end = high - first
        if key is not None:
            yield begin, end, self.hyperparameters(*key)

    def key(self, handle: ParamHandle, factors: tuple[float, ...]) -> Key:
        """Returns what the hyperparameters of a parameter's next step are made of."""
        counters: tuple[tuple[str, float], ...] = ()
        if self._known.counters is not None:
            counters = tuple(self.counted(handle)[0].items())
        index, number = self._group_index_of[handle], handle.step + 1
        if self._numbers is not None:
            number, counters = self._numbers[index], (*counters, ("fresh", not handle.has_state))
        return index, number, factors, counters

    def counted(self, handle: ParamHandle) -> tuple[dict[str, float], Numbers]:
        """Returns the hyperparameters of a parameter's counters in its next step, and the counters
        after it. Raises what :func:`numbers_of` raises."""
        if self._known.counters is None:
            return {}, {}
        if handle not in self._counted:
            group_index = self._group_index_of[handle]
            param_group = self._param_groups[group_index]
            number = handle.step + 1 if self._numbers is None else self._numbers[group_index]
            numbers = numbers_of(self._known.counters, param_group, handle, self._books)
            self._counted[handle] = self._known.counters.step(param_group, number, numbers)
        return self._counted[handle]

    def hyperparameters(
        self,
        group_index: int,
        step: int,
        factors: tuple[float, ...],
        counters: tuple[tuple[str, float], ...],
    ) -> native.Hyperparameters:
        """Makes the hyperparameters of a :attr:`Key`."""
        hyper = native.Hyperparameters()
        self._known.set_on(hyper, self._param_groups[group_index])
        for name, value in counters:
            setattr(hyper, name, value)
        hyper.step = step
        hyper.grad_factors = list(factors)
        return hyper
