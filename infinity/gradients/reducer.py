"""Reducer: averages gradients over the ranks, unit by unit, while the backward runs.

average   this rank's slice of the mean of all ranks' whole gradients (see `whole`)
order     of the units' reductions: the first rank's forward reversed, shared units last

All ranks reduce the units in the same order. A reduction starts when all ranks are at the same
point. In an agreed pass (see `lockstep`) that is the point where it started last time: before the
same gather, or, if no gather follows, as soon as it is ready. In any other pass the ranks meet when
the backward reaches a unit, at its gather or at a rendezvous. There each reports how many
reductions it has ready. A rank that reaches fewer units meets the others at the end of its
backward. The remaining ones start at the end of the backward.

If weights stay gathered (ZeRO-2), no rank waits in a gather, so a reduction starts as soon as it is
ready. A unit not complete when the backward reaches the next one usually stays incomplete to the
end.

[Note: why missing gradients are negative zeros] Ranks do not ask before a reduction which of them
has which gradient. A rank contributes **negative zeros** for a gradient that it lacks: adding them
changes no bit. At the end of the backward all ranks meet once and report which gradients they had.
A parameter without a gradient on any rank keeps none. An average that consists of negative zeros
lands only then. A gradient that came after its unit's reduction is reduced in another round. An
update made in mid-backward needs these flags earlier: then the ranks of the shard group exchange
them beside each reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..distributed.collectives import Collectives
from ..distributed.pending import Pending
from ..machine.ledger import Ledger
from ..planning.schedule import Schedule
from ..state.handle import ParamHandle
from ..state.shard import ParamShard
from ..state.unit import ParamUnit
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
    ):
        self._collectives, self._ranks, self._bank = collectives, collectives.ranks, bank
        self._schedule = schedule
        self._on_reduced = on_reduced  # called when a unit's averages are at home
        self._decides_early = decides_early  # an update in mid-backward needs flags early
        self._units = list(units)
        self._whole = WholeGradients(ledger, bank.device)
        self._order: list[ParamUnit] = []
        self._ready: list[ParamUnit] = []
        self._position = 0  # in the order
        self._incomplete: list[ParamUnit] = []  # reduced before known complete on all ranks
        self._late: set[ParamUnit] = set()  # a rank reported that more of its gradients may come
        self._got: set[ParamHandle] = set()  # for which this rank had a gradient in this backward
        self._undecided: list[ParamHandle] = []  # perhaps no rank had a gradient
        self._pending: list[Pending | ParamUnit] = []  # a unit's reductions, then the unit
        self.waits_elsewhere = collectives.ranks.size > 1 and not collectives.ranks.keeps_weights
        self._unread = False  # a backward has ended since the last average (ZeRO-1)
        self._is_reducing_all = False  # in reduce_all(): no rendezvous between reductions
        self._failure: BaseException | None = None  # to land an average, in reduce_all()
        self.waits_for_more = False  # more backwards of this pass follow: the last one reduces

    # --- during a backward ---

    def add(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Adds ``grad`` to this rank's whole gradient."""
        self._whole.add(handle, grad)

    def ready(self, unit: ParamUnit) -> None:
        """Marks ``unit``'s gradients as complete on this rank, and starts due reductions."""
        if self._ranks.keeps_gradients or self.waits_for_more or unit in self._ready:
            return
        self._ready.append(unit)
        if not self.waits_elsewhere:
            self._start_more(self.count_ready())
        elif self._collectives.is_agreed:
            self.start_due(only_ready=True)

    @property
    def offered(self) -> int:
        """How many reductions this rank offers at a gather in mid-backward."""
        return self.count_ready() if self.waits_elsewhere and not self.waits_for_more else 0

    def come_to_unit(self, least: int | None) -> None:
        """Starts the reductions that all ranks have ready, when the backward reaches a unit.
        ``least``: the minimum offered at its gather; None if none was needed: then ranks meet here.
        """
        if not self.waits_elsewhere or self.waits_for_more:
            return
        if self._goes_as_agreed:
            self.start_due(only_ready=True)
        else:
            self._start_more(
                self._collectives.offer(self.count_ready()) if least is None else least
            )

    @property
    def _goes_as_agreed(self) -> bool:
        """Whether the remaining reductions start as in the agreed pass. One agreed as a pass
        without a backward may be over: then ranks meet."""
        is_over = self._position == len(self._order)
        return self._collectives.is_agreed or (self._collectives.was_agreed and is_over)

    def start_offered(self, least: int | None) -> None:
        """Starts the reductions that all ranks offered at a gather, if they met for one."""
        if self.waits_elsewhere and not self.waits_for_more and least is not None:
            self._start_more(least)

    def start_due(self, *, only_ready: bool = False) -> None:
        """Starts the next reductions of the agreed pass. ``only_ready``: if complete on this
        rank."""
        while self._position < len(self._order) and self._is_next(self._order[self._position]):
            if only_ready and not self.count_ready():
                break
            self._start_more(1)

    def _is_next(self, unit: ParamUnit) -> bool:
        stepped = [number for number, shard in enumerate(unit.shards) if shard.spec.stepped]
        return bool(stepped) and self._collectives.is_next(f"reducing {unit.name} ({stepped[0]})")

    def count_ready(self) -> int:
        """Counts the next units of the order that this rank can reduce now."""
        own = ((i, unit) for i, unit in enumerate(self._order) if not unit.is_shared)
        last = max(
            (i for i, unit in own if unit in self._ready or any(map(self._whole.has, unit.shards))),
            default=0,
        )
        count = self._position
        while count < len(self._order):
            unit = self._order[count]
            if unit not in self._ready and (unit.is_shared or count + 1 > last):
                break
            count += 1
        return count - self._position

    def _start_more(self, count: int) -> None:
        """Starts the next ``count`` reductions. Every rank of the shard group calls this."""
        if not self._order:
            self._order = self._agree_on_order()
        for unit in self._order[self._position : self._position + count]:
            self._position += 1
            self._start(unit)

    def end_backward(self) -> None:
        """Ends the backward: averages the remaining gradients. Every rank calls this."""
        if self._ranks.keeps_gradients:
            self._unread = True
            return
        self.start_due()
        met = self.waits_elsewhere and not self._goes_as_agreed
        while met and (least := self._collectives.offer(None)) is not None:
            self._start_more(least)  # another rank is still in its backward
        self._start_more(len(self._units))
        self._collectives.end_pass()
        self._decide()
        for unit in self._incomplete:  # complete now
            self._on_reduced(unit)
        self._incomplete, self._late, self._ready, self._position = [], set(), [], 0

    def _decide(self) -> None:
        """Exchanges which gradients any rank had, then lands the undecided and late ones."""
        shards = [
            (unit, shard) for unit in self._order for shard in unit.shards if shard.spec.stepped
        ]
        handles = [
            handle for unit, shard in shards for handle in unit.handles if handle.shard is shard
        ]
        while True:
            late = {handle for handle in handles if self._whole.has_gradient(handle)}
            flags = self._collectives.agree(
                [
                    *(handle in self._got or handle in late for handle in handles),
                    *(handle in late for handle in handles),
                ],
                "the end of a backward",
            )
            self._finish()
            anywhere = {handle for handle, had in zip(handles, flags) if had}
            undecided, self._undecided, self._got = self._undecided, [], set()
            for handle in undecided:
                if handle in anywhere:
                    begin, end = handle.shard.layout.slice_part(handle.index)
                    self._bank.land_average(
                        handle, torch.full((end - begin,), -0.0, device=self._bank.device.where)
                    )
            late_anywhere = {
                handle for handle, is_late in zip(handles, flags[len(handles) :]) if is_late
            }
            if not late_anywhere:
                return
            for unit, shard in shards:
                wanted = [
                    handle
                    for handle in unit.handles
                    if handle.shard is shard and handle in late_anywhere
                ]
                self._reduce(
                    unit,
                    shard,
                    self._whole.pop_got(shard),
                    wanted,
                    f"reducing {unit.name}",
                    decided=True,
                )

    def reduce_all(self) -> None:
        """Ends a joined pass: averages its gradients. Every rank calls this, and all meet once. An
        error in landing is raised after the last reduction: other ranks do not learn of it."""
        self.waits_for_more = False
        if self._ranks.keeps_gradients:
            self._unread = True
            return
        if not self._order:
            self._order = self._agree_on_order()
        shards = [
            (unit, shard) for unit in self._order for shard in unit.shards if shard.spec.stepped
        ]
        handles = {
            shard: [handle for handle in unit.handles if handle.shard is shard]
            for unit, shard in shards
        }
        got = {shard: self._whole.pop_got(shard) for _, shard in shards}
        flags = [handle.index in got[shard] for _, shard in shards for handle in handles[shard]]
        self._collectives.end_pass()
        anywhere = iter(self._collectives.agree(flags, "reducing the gradients of a pass"))
        self._is_reducing_all, self._failure = True, None
        try:
            for unit, shard in shards:
                wanted = [handle for handle in handles[shard] if next(anywhere)]
                self._reduce(unit, shard, got[shard], wanted, f"reducing {unit.name}", decided=True)
            self._finish()
        finally:
            self._is_reducing_all = False
        if self._failure is not None:
            raise self._failure

    def _agree_on_order(self) -> list[ParamUnit]:
        by_index = {unit.index: unit for unit in self._units}
        order = torch.tensor(
            _order_of(by_index, self._schedule.first()), dtype=torch.int64, device="cpu"
        )
        return [
            by_index[index]
            for index in self._collectives.broadcast(order, "the order of gradients").tolist()
        ]

    def abandon(self) -> None:
        """Drops the gradients that a failed backward has not averaged."""
        self._whole.drop()
        for pending in self._pending:
            if isinstance(pending, Pending):
                pending.drop()
        self._pending.clear()
        self._incomplete, self._undecided, self._got, self._late = [], [], set(), set()
        self._ready, self._position = [], 0
        self.waits_for_more = self._is_reducing_all = False

    # --- one unit ---

    def _start(self, unit: ParamUnit) -> None:
        is_complete = True
        for number, shard in enumerate(unit.shards):
            if shard.spec.stepped:
                is_complete &= self._average(
                    unit, shard, self._whole.pop_got(shard), f"reducing {unit.name} ({number})"
                )
        (self._pending if is_complete else self._incomplete).append(unit)

    def _average(self, unit: ParamUnit, shard: ParamShard, got: set[int], what: str) -> bool:
        """Starts averaging a shard's gradients, and finishes the previous reduction. Returns
        whether no rank will add more, as far as is known before the reduction is complete."""
        handles = [handle for handle in unit.handles if handle.shard is shard]
        self._got |= {handle for handle in handles if handle.index in got}
        has_met = self.waits_elsewhere or self._collectives.was_agreed
        if has_met and not self._decides_early():
            self._reduce(unit, shard, got, handles, what)
            return False
        flags = [*(handle.index in got for handle in handles), unit not in self._ready]
        if has_met and self._collectives.can_share_flags:
            self._reduce(unit, shard, got, handles, what, flags=flags)
            return True
        *anywhere, incomplete = self._collectives.agree(flags, what)
        self._reduce(
            unit,
            shard,
            got,
            [handle for handle, wanted in zip(handles, anywhere) if wanted],
            what,
            decided=True,
        )
        return not incomplete

    def _reduce(
        self,
        unit: ParamUnit,
        shard: ParamShard,
        got: set[int],
        wanted: list[ParamHandle],
        what: str,
        *,
        decided: bool = False,
        flags: Sequence[bool] = (),
    ) -> None:
        """Starts averaging the gradients ``wanted``. This rank has the indices ``got``. Every rank
        of the group calls this. ``decided``: each exists on some rank. ``flags``: per gradient
        whether this rank has it, then whether more may come; others' arrive with the average."""
        if not wanted:
            return
        if self._ranks.keeps_gradients:
            whole = self._bank.homes.whole(shard)
        else:
            self._whole.take(unit, shard)
            whole, charge = self._whole.pop(shard)
        reduction = Reduction(shard, wanted, got, is_decided=decided)
        reduction.bring_nothing(whole)

        def done(average: torch.Tensor) -> None:
            if telling is not None:
                telling.wait()
            if reduction.more_comes:
                self._late.add(unit)
            with self._landing():
                self._undecided += reduction.land(average, self._bank.land_average)

        pending = shard.collectives.reduce(whole, what, done)
        telling = (
            self._collectives.share_flags(flags, f"{what}: who has them", reduction.hear)
            if flags
            else None
        )
        if not self._ranks.keeps_gradients:
            pending.release = charge.release
        self._finish()
        self._pending += [pending] if telling is None else [pending, telling]

    @contextmanager
    def _landing(self) -> Iterator[None]:
        """Lands an average. :meth:`reduce_all` raises an error only after all reductions."""
        try:
            yield
        except BaseException as error:
            if not self._is_reducing_all:
                raise
            self._failure = self._failure or error

    def _finish(self) -> None:
        while self._pending:
            pending = self._pending.pop(0)
            if isinstance(pending, ParamUnit):
                self._end_unit(pending)
                continue
            with self._collectives.traffic.stalled("reduce-scatter"):
                pending.wait()

    def _end_unit(self, unit: ParamUnit) -> None:
        """Ends the reductions of ``unit``. It stays incomplete if more may come on a rank."""
        if unit in self._late:
            self._late.remove(unit)
            self._incomplete.append(unit)
        else:
            self._on_reduced(unit)

    # --- gradients kept whole until someone looks (ZeRO-1) ---

    def average(self, *, are_gone: bool = False) -> None:
        """Averages landed gradients. Every rank calls this. ``are_gone``: none is left."""
        self._unread &= not are_gone
        if not self._unread:
            return
        shards = [
            (unit, shard) for unit in self._units for shard in unit.shards if shard.spec.stepped
        ]
        handles = [
            [handle for handle in unit.handles if handle.shard is shard] for unit, shard in shards
        ]
        got = [
            {h.index for h in of_shard if h.grad.state is GradState.LANDED and not h.grad.averaged}
            for of_shard in handles
        ]
        flags = [handle.index in had for of_shard, had in zip(handles, got) for handle in of_shard]
        anywhere = iter(self._collectives.agree(flags, "averaging the gradients"))
        for (unit, shard), of_shard, had in zip(shards, handles, got):
            wanted = [handle for handle in of_shard if next(anywhere)]
            self._reduce(unit, shard, had, wanted, f"reducing {unit.name}", decided=True)
        self._finish()
        self._unread = False


def _order_of(units: Mapping[int, ParamUnit], forward: Iterable[int]) -> list[int]:
    """Returns the indices of ``units`` in reduction order: the forward reversed, then unused units,
    then those that several modules share."""
    used = [index for index in reversed(list(forward)) if index in units]
    used += [index for index in reversed(units) if index not in used]
    return sorted(used, key=lambda index: units[index].is_shared)
