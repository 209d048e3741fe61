"""Reducer: averages gradients over the ranks, unit by unit, while the backward runs.

average   this rank's shard of the mean of all ranks' whole gradients (see `whole`)
order     of the units' reductions: the first rank's forward reversed, shared units last

[Note: where a reduction starts] All ranks must start the same collectives in the same order. So a
reduction starts at a place that does not depend on which gradients a rank has: when the backward
reaches a use of a unit that ended in the forward before the first use of the reduced one began. By
then autograd has accumulated the gradients. Of a unit that is used several times the backward
reaches the last use first. The remaining reductions start at the end of the backward. In a verified
pass (see `collective_trace`) the order of all collectives is known, so a reduction that is next
starts as soon as its gradients are complete.

[Note: why missing gradients are negative zeros] Ranks do not ask before a reduction which of them
has which gradient. A rank contributes **negative zeros** for a gradient that it lacks: adding them
changes no bit. At the end of the backward all ranks meet once and report which gradients they had.
A parameter without a gradient on any rank keeps none. An average that consists of negative zeros
lands only then. A gradient that came after its unit's reduction is reduced in another round. An
update made in mid-backward needs these flags earlier: then the ranks of the shard group exchange
them beside each reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from ...ranks.collectives import Collectives
from ...ranks.pending import Pending
from ..machine.ledger import Ledger
from ..plan.unit_sizes import bucket_numel
from ..run.schedule import Schedule
from ..units.flat_param import FlatParam
from ..units.handle import ParamHandle
from ..units.unit import ParamUnit
from .bank import GradientBank
from .record import GradState
from .reduction import Reduction
from .whole import WholeGradients


class Reducer:
    """Used from the thread that runs backward, and by readers of gradients."""

    def __init__(
        self,
        collectives: Collectives,
        units: Sequence[ParamUnit],
        bank: GradientBank,
        ledger: Ledger,
        schedule: Schedule,
        on_reduced: Callable[[ParamUnit], None],
        decides_early: Callable[[], bool],
        averaged: Sequence[Callable] = (),
        *,
        in_buckets: bool = False,
    ):
        self._collectives, self._ranks, self._bank = collectives, collectives.ranks, bank
        self._schedule, self._listeners = schedule, averaged
        self._in_buckets = in_buckets  # gradients are averaged
        self._on_reduced = on_reduced  # called when a unit's averages are at home
        self._decides_early = decides_early  # an update in mid-backward needs flags early
        self._units = list(units)
        self._by_index = {unit.index: unit for unit in units}
        self.whole = WholeGradients(ledger, bank.homes.device)  # of this rank's batches
        self._order: list[ParamUnit] = []
        # The uses of each unit in the first rank's forward: see Schedule.spans().
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._starts: list[int] = []  # of the first uses, in the order
        self._reached = math.inf  # this many uses of the forward are still ahead in the backward
        self._ready: set[ParamUnit] = set()  # complete on this rank
        self._position = 0  # in the order: of the next reduction
        self._incomplete: list[ParamUnit] = []  # reduced before known complete on all ranks
        self._late: set[ParamUnit] = set()  # a rank reported that more of its gradients may come
        self._got: set[ParamHandle] = set()  # for which this rank had a gradient in this backward
        self._undecided: list[ParamHandle] = []  # perhaps no rank had a gradient
        self._pending: list[Pending | ParamUnit] = []  # a unit's reductions, then the unit
        # The backward gathers weights, too.
        self.gathers_meanwhile = collectives.ranks.size > 1 and not collectives.ranks.keeps_weights
        self._unread = False  # a backward has ended since the last average (ZeRO-1)
        self._averaged: set[FlatParam] = set()  # since then, by one of several optimizers
        self._is_reducing_all = False  # in reduce_all(): no barrier between reductions
        self._failure: BaseException | None = None  # to land an average, in reduce_all()
        self.waits_for_more = False  # more backwards of this pass follow: the last one reduces

    # --- during a backward ---

    def add(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Adds ``grad`` to this rank's whole gradient."""
        self.whole.add(handle, grad)

    def ready(self, unit: ParamUnit) -> None:
        """Marks ``unit``'s gradients as complete on this rank. Starts its reduction if that is next
        in a verified pass, whose order is fixed."""
        if self._ranks.keeps_gradients or self.waits_for_more:
            return
        self._ready.add(unit)
        while self._position < len(self._order):  # next of the order, and of a verified pass
            following = self._order[self._position]
            what = f"reducing {following.name} (0)"
            if not self._collectives.is_next(what) or following not in self._ready:
                break
            self._start_before(self._position + 1)

    def reach(self, unit: ParamUnit) -> None:
        """Starts the reductions of the units whose forward began after that of ``unit`` ended: the
        backward reaches it. Every rank of the shard group calls this after the same gather."""
        if not self._ranks.keeps_gradients and not self.waits_for_more:
            self._agree_on_order()
            uses = reversed(self._spans.get(unit.index, []))
            end = next((end for start, end in uses if start < self._reached), math.inf)
            self._reached = min(self._reached, end)
            self._start_before(sum(start >= self._reached for start in self._starts))

    def _start_before(self, position: int) -> None:
        while self._position < position:
            self._position += 1
            self._start(self._order[self._position - 1])

    def end_backward(self) -> None:
        """Ends the backward: averages the remaining gradients. Every rank calls this."""
        if self._waits_for_step():
            return
        self._start_before(len(self._order))
        self._collectives.end_pass()
        self._decide()
        for unit in self._incomplete:  # complete now
            self._on_reduced(unit)
        self._forget()

    def _waits_for_step(self) -> bool:
        """Tells whether gradients stay whole until someone looks. If not, agrees on an order."""
        if self._ranks.keeps_gradients:
            self._unread, self._averaged = True, set()
        else:
            self._agree_on_order()
        return self._ranks.keeps_gradients

    def _decide(self) -> None:
        """Exchanges which gradients any rank had, then lands the undecided and late ones."""
        flat_params = _stepped(self._order)
        handles = [handle for *_, of_flat_param in flat_params for handle in of_flat_param]
        while True:
            late = {handle for handle in handles if self.whole.has_gradient(handle)}
            *flags, is_outdated = self._collectives.meet(
                "the end of a backward",
                flags=[
                    *(handle in self._got or handle in late for handle in handles),
                    *(handle in late for handle in handles),
                    bool(late) and self._own_spans() != self._spans,
                ],
            )
            if is_outdated:
                self._order = []  # the next backward agrees on one anew
            self._finish()
            anywhere = {handle for handle, had in zip(handles, flags) if had}
            undecided, self._undecided, self._got = self._undecided, [], set()
            for handle in undecided:
                if handle in anywhere:
                    begin, end = handle.flat_param.layout.shard_part(handle.index)
                    self._bank.land_average(
                        handle,
                        torch.full((end - begin,), -0.0, device=self._bank.homes.device.where),
                    )
            late_anywhere = {
                handle for handle, is_late in zip(handles, flags[len(handles) :]) if is_late
            }
            if not late_anywhere:
                return
            for unit, flat_param, of_flat_param in flat_params:
                wanted = [handle for handle in of_flat_param if handle in late_anywhere]
                got = self.whole.pop_got(flat_param)
                if wanted:
                    self._reduce(
                        unit, flat_param, got, wanted, f"reducing {unit.name}", decided=True
                    )

    def reduce_all(self) -> None:
        """Ends an accumulation pass: averages its gradients. Every rank calls this, and all meet
        once. An error in landing is raised after the last reduction: other ranks do not learn of
        it."""
        self.waits_for_more = False
        if self._waits_for_step():
            return
        flat_params = _stepped(self._order)
        got = {flat_param: self.whole.pop_got(flat_param) for _, flat_param, _ in flat_params}
        flags = [
            handle.index in got[flat_param]
            for _, flat_param, handles in flat_params
            for handle in handles
        ]
        self._collectives.end_pass()
        anywhere = iter(self._collectives.meet("reducing the gradients of a pass", flags=flags))
        self._is_reducing_all, self._failure = True, None
        try:
            for unit, flat_param, handles in flat_params:
                wanted = [handle for handle in handles if next(anywhere)]
                if wanted:
                    what = f"reducing {unit.name}"
                    self._reduce(unit, flat_param, got[flat_param], wanted, what, decided=True)
            self._finish()
        finally:
            self._is_reducing_all = False
        if self._failure is not None:
            raise self._failure

    def _agree_on_order(self) -> None:
        """Takes the first rank's order, in the first backward, and in the next one after gradients
        came late because the forward took another order. Every rank calls this."""
        if self._order:
            return
        entries = [(unit, *span) for unit, spans in self._own_spans().items() for span in spans]
        what = "the order of gradients"
        count = self._collectives.assemble(torch.tensor(len(entries), device="cpu"), what).item()
        table = torch.tensor((entries + [(0, 0, 0)] * count)[:count], device="cpu").view(count, 3)
        self._spans = {}
        for index, start, end in self._collectives.assemble(table, what).tolist():
            self._spans.setdefault(index, []).append((start, end))
        self._order = _order_of(self._by_index, self._spans)
        used = (unit for unit in self._order if unit.index in self._spans and not unit.lands_apart)
        self._starts = [self._spans[unit.index][0][0] for unit in used]

    def _own_spans(self) -> dict[int, list[tuple[int, int]]]:
        """Returns the uses of this rank's forward."""
        spans = self._schedule.spans()
        return {index: spans[index] for index in spans if index in self._by_index}

    def abandon(self) -> None:
        """Drops the gradients that a failed backward has not averaged."""
        self.whole.drop()
        for pending in self._pending:
            if isinstance(pending, Pending):
                pending.drop()
        self._pending.clear()
        self._forget()
        self.waits_for_more = self._is_reducing_all = False

    def _forget(self) -> None:
        self._incomplete, self._undecided, self._got, self._late = [], [], set(), set()
        self._ready, self._position, self._reached = set(), 0, math.inf

    # --- one unit ---

    def _start(self, unit: ParamUnit) -> None:
        is_complete = True
        for number, (_, flat_param, handles) in enumerate(_stepped([unit])):
            what = f"reducing {unit.name} ({number})"
            is_complete &= self._average(unit, flat_param, handles, what)
        (self._pending if is_complete else self._incomplete).append(unit)

    def _average(
        self, unit: ParamUnit, flat_param: FlatParam, handles: list[ParamHandle], what: str
    ) -> bool:
        """Starts averaging a flat param's gradients, and finishes the previous reduction. Returns
        whether no rank will add more, as far as is known before the reduction is complete."""
        got = self.whole.pop_got(flat_param)
        self._got |= {handle for handle in handles if handle.index in got}
        flags = [*(handle.index in got for handle in handles), unit not in self._ready]
        early = self._decides_early() or self._in_buckets  # each lands once it is known
        if early and not self._ranks.can_reduce_flags:
            *anywhere, incomplete = self._collectives.meet(what, flags=flags)
            wanted = [handle for handle, is_wanted in zip(handles, anywhere) if is_wanted]
            self._reduce(unit, flat_param, got, wanted, what, decided=True)
            return not incomplete
        self._reduce(unit, flat_param, got, handles, what, flags=flags if early else ())
        return early

    def _reduce(
        self,
        unit: ParamUnit,
        flat_param: FlatParam,
        got: set[int],
        wanted: list[ParamHandle],
        what: str,
        *,
        decided: bool = False,
        flags: Sequence[bool] = (),
    ) -> None:
        """Starts averaging the gradients ``wanted``. This rank has the indices ``got``. Every rank
        of the group calls this, even if it wants none: a pass repeats the last one's collectives.

        ``decided``: each exists on some rank. ``flags``: per gradient
        whether this rank has it, then whether more may come; others' arrive with the average."""
        if self._ranks.keeps_gradients:
            whole = self._bank.homes.whole(flat_param)
        else:
            self.whole.take(unit, flat_param)
            whole, charge = self.whole.pop(flat_param)
        reduction = Reduction(flat_param, wanted, got, is_decided=decided)
        reduction.bring_nothing(whole)

        def done(
            part: torch.Tensor, begin: int, average: torch.Tensor, any_flags: list[bool]
        ) -> None:
            for listener in self._listeners:
                listener(flat_param, part, begin, average)
            if any_flags:
                reduction.note_flags(any_flags)
            if reduction.more_comes:
                self._late.add(unit)
            try:
                self._undecided += reduction.land(average, begin, self._bank.land_average)
            except BaseException as error:
                if not self._is_reducing_all:  # which raises an error only after all reductions
                    raise
                self._failure = self._failure or error

        rows = whole.view(flat_param.layout.ranks.size, -1)
        numel = most = rows.size(1)
        if self._in_buckets:
            most = bucket_numel(len(rows), rows.itemsize)
        for begin in range(0, numel, most):
            part = rows[:, begin : begin + most].reshape(-1)
            said = f"{what} from {begin}" if begin else what
            pending = flat_param.collectives.reduce(
                part,
                said,
                partial(done, part, begin),
                flags=() if begin else flags,
                meets=not (decided or begin),
            )
            self._finish()
            self._pending.append(pending)
        if not self._ranks.keeps_gradients:
            if most < numel and len(rows) > 1:  # each bucket is a copy
                charge.release()
            else:
                pending.release = charge.release

    def _finish(self) -> None:
        while self._pending:
            pending = self._pending.pop(0)
            if isinstance(pending, ParamUnit):
                # It stays incomplete if more may come on a rank.
                if pending in self._late:
                    self._late.remove(pending)
                    self._incomplete.append(pending)
                else:
                    self._on_reduced(pending)
                continue
            with self._collectives.traffic.stalled("reduce-scatter"):
                pending.wait()

    # --- gradients kept whole until someone looks (ZeRO-1) ---

    def average(
        self, *, are_gone: bool = False, of: Callable[[FlatParam], bool] = lambda flat: True
    ) -> None:
        """Averages landed gradients of the flat params ``of``, as one of several optimizers steps
        them: more backwards may add to the others. Every rank calls this. ``are_gone``: none is
        left."""
        self._unread &= not are_gone
        if not self._unread:
            return
        stepped = _stepped(self._units)
        flat_params = [
            entry for entry in stepped if of(entry[1]) and entry[1] not in self._averaged
        ]
        if not flat_params:
            return
        got = [
            {h.index for h in handles if h.grad.state is GradState.LANDED and not h.grad.averaged}
            for *_, handles in flat_params
        ]
        flags = [h.index in had for (*_, handles), had in zip(flat_params, got) for h in handles]
        anywhere = iter(self._collectives.meet("averaging the gradients", flags=flags))
        for (unit, flat_param, handles), had in zip(flat_params, got):
            wanted = [handle for handle in handles if next(anywhere)]
            if wanted:
                self._reduce(unit, flat_param, had, wanted, f"reducing {unit.name}", decided=True)
        self._finish()
        self._averaged |= {flat_param for _, flat_param, _ in flat_params}
        self._unread = any(flat_param not in self._averaged for _, flat_param, _ in stepped)


def _stepped(units: Iterable[ParamUnit]) -> list[tuple[ParamUnit, FlatParam, list[ParamHandle]]]:
    """Lists the flat params of ``units`` that are averaged whole, each with its unit and
    handles."""
    return [
        (unit, flat, [handle for handle in unit.handles if handle.flat_param is flat])
        for unit in units
        for flat in unit.flat_params
        if flat.spec.stepped and flat.is_whole
    ]


def _order_of(
    units: Mapping[int, ParamUnit], spans: Mapping[int, list[tuple[int, int]]]
) -> list[ParamUnit]:
    """Returns ``units`` in reduction order: by their first use in the forward, the last one first,
    then unused units, then those that several modules share. ``spans``: see
    :meth:`Schedule.spans`."""
    order = [units[index] for index in reversed(spans)]
    order += [units[index] for index in reversed(units) if index not in spans]
    return sorted(order, key=lambda unit: unit.lands_apart)
