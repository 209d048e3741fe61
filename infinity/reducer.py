"""Reducer: averages gradients over the ranks, unit by unit, while the backward goes on.

whole     a shard's gradient of this rank's part of the batch, all elements
average   this rank's slice of the mean of all ranks' whole gradients
order     of the units' reductions: the first rank's forward reversed, then the one in which they were ready there

All ranks reduce every unit in one order. A unit that is not ready on a rank (a branch it did not take) waits there for
the end of the backward, and brings zeros where it got nothing; a parameter that no rank has a gradient of keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .collectives import Peers, Pending
from .gradients import GradientBank, GradState
from .parameter import ParamHandle
from .schedule import Schedule
from .shard import ParamShard
from .tiers import Ledger, Reservation, Tier
from .unit import ParamUnit


class Reducer:
    """Used from the thread that runs backward, and by whoever reads gradients."""

    def __init__(
        self,
        peers: Peers,
        units: Sequence[ParamUnit],
        bank: GradientBank,
        ledger: Ledger,
        schedule: Schedule,
        on_reduced: Callable[[ParamUnit], None],
    ):
        self._peers, self._bank, self._ledger = peers, bank, ledger
        self._schedule = schedule
        self._on_reduced = on_reduced  # told when a unit's averages are at home
        self._units = list(units)
        self._whole: dict[ParamShard, tuple[torch.Tensor, Reservation]] = {}
        self._got: dict[ParamShard, set[int]] = {}  # parameters with a whole gradient, by index
        self._order: list[ParamUnit] = []
        self._settled = False  # whether the order is that of a whole backward
        self._ready: list[ParamUnit] = []
        self._position = 0  # in the order
        self._pending: list[Pending | ParamUnit] = []  # reductions, each unit's followed by the unit
        self._unread = False  # a backward has ended since the last average (ZeRO-1)

    # --- during a backward ---

    def add(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Adds to this rank's whole gradient."""
        shard = handle.shard
        got = self._got.setdefault(shard, set())
        self._take(handle.unit, shard)
        view = shard.layout.placements[handle.index].view(self._whole[shard][0])
        view.add_(grad) if handle.index in got else view.copy_(grad)
        got.add(handle.index)

    def _take(self, unit: ParamUnit, shard: ParamShard) -> None:
        """Takes memory for a shard's whole gradient, unless it has some."""
        if shard not in self._whole:
            nbytes = shard.layout.numel * shard.spec.grad_dtype.itemsize
            charge = self._ledger.reserve(Tier.DEVICE, nbytes, f"the gradients of unit {unit.name}")
            self._whole[shard] = torch.empty(shard.layout.numel, dtype=shard.spec.grad_dtype, device="cpu"), charge

    def ready(self, unit: ParamUnit) -> None:
        """All of ``unit``'s gradients have come."""
        if self._peers.keeps_gradients or unit in self._ready:
            return
        self._ready.append(unit)
        if not self._order:
            self._order = self._agree_on_order(reversed(list(self._schedule.first())))
        while self._position < len(self._order) and self._order[self._position] in self._ready:
            self._start(self._order[self._position])
            self._position += 1

    def end_backward(self) -> None:
        """The backward is over: averages what is left. Every rank comes here."""
        if self._peers.keeps_gradients:
            self._unread = True
            return
        if not self._order:
            self._order = self._agree_on_order(reversed(list(self._schedule.first())))
        for unit in self._order[self._position :]:
            self._start(unit)
        # A gradient that came after its unit's turn (a second use, a nested backward) takes another round.
        while any(self._peers.agree([any(self._got.values())], "the end of a backward")):
            for unit in self._order:
                self._start(unit)
        self._finish()
        if not self._settled:
            self._order, self._settled = self._agree_on_order(unit.index for unit in self._ready), True
        self._ready, self._position = [], 0

    def _agree_on_order(self, first: Iterable[int]) -> list[ParamUnit]:
        """The first rank's order: ``first``, then the rest from the last unit on."""
        by_index = {unit.index: unit for unit in self._units}
        order = [index for index in first if index in by_index]
        order += [index for index in reversed(by_index) if index not in order]
        indices = torch.tensor(order, dtype=torch.int64, device="cpu")
        return [by_index[index] for index in self._peers.broadcast(indices, "the order of gradients").tolist()]

    def abandon(self) -> None:
        """A backward failed half-way: what it has not averaged is dropped."""
        for _, charge in self._whole.values():
            charge.release()
        self._whole.clear()
        self._got.clear()
        self._pending.clear()
        self._ready, self._position = [], 0

    # --- one unit ---

    def _start(self, unit: ParamUnit) -> None:
        for number, shard in enumerate(unit.shards):
            if shard.spec.stepped:
                self._average(unit, shard, self._got.pop(shard, set()), f"{unit.name} ({number})")
        self._pending.append(unit)

    def _average(self, unit: ParamUnit, shard: ParamShard, got: set[int], what: str) -> None:
        """Starts averaging where any rank has a gradient; the reduction before this one is finished meanwhile."""
        what = f"reducing {what}"
        handles = [handle for handle in unit.handles if handle.shard is shard]
        anywhere = self._peers.agree([handle.index in got for handle in handles], what)
        wanted = [handle for handle, wanted in zip(handles, anywhere) if wanted]
        if not wanted:
            return
        if self._peers.keeps_gradients:
            whole = self._bank.whole(shard)
        else:
            self._take(unit, shard)
            whole, charge = self._whole.pop(shard)
        for handle in wanted:
            if handle.index not in got:
                shard.layout.placements[handle.index].view(whole).zero_()

        def done(average: torch.Tensor) -> None:
            for handle in wanted:
                begin, end = shard.slice_part(handle.index)
                first = shard.own_slice[0]
                self._bank.land_average(handle, average[begin - first : end - first])
            if not self._peers.keeps_gradients:
                charge.release()

        pending = self._peers.reduce(whole, what, done)
        self._finish()
        self._pending.append(pending)

    def _finish(self) -> None:
        while self._pending:
            pending = self._pending.pop(0)
            if isinstance(pending, ParamUnit):
                self._on_reduced(pending)
                continue
            with self._peers.traffic.stalled("reduce-scatter"):
                pending.wait()

    # --- gradients kept whole until someone looks (ZeRO-1) ---

    def average(self) -> None:
        """Every gradient that has landed becomes the average. Every rank comes here."""
        if not self._unread:
            return
        self._unread = False
        for unit in self._units:
            for number, shard in enumerate(unit.shards):
                if not shard.spec.stepped:
                    continue
                records = {handle.index: handle.grad for handle in unit.handles if handle.shard is shard}
                got = {i for i, record in records.items() if record.state is GradState.LANDED and not record.averaged}
                self._average(unit, shard, got, f"{unit.name} ({number})")
        self._finish()
