"""The reducer of two ranks that are threads of this process: what is averaged, in which order, and
when.

Words used here:

**pair**: see `pair`. **landed**: what a rank's bank was given: (unit, parameter) -> this rank's
elements of averages, one for each time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pair import Pair, run_pair

from infinity.core.grads.reducer import Reducer
from infinity.core.machine.device import Device
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.run.schedule import Schedule
from infinity.core.units.flat_layout import FlatLayout
from infinity.core.units.unit import ParamUnit
from infinity.ranks.parallel_dims import ParallelDims
from infinity.ranks.pending import Pending

UNITS, NUMEL = 4, 4096  # each unit of two parameters, of which each rank's shard is one


class Collectives:
    """One rank's side of a pair."""

    def __init__(self, pair: Pair, rank: int, shard: str):
        self._pair, self._rank, self.traffic = pair, rank, Traffic()
        keeps = {
            "keeps_weights": shard != "parameters",
            "keeps_gradients": shard == "optimizer",
        }
        self.ranks = SimpleNamespace(rank=rank, size=2, data_size=2, can_reduce_flags=True, **keeps)

    def end_pass(self) -> None:
        pass

    def is_next(self, what: str) -> bool:
        return False

    def meet(self, what: str, *, flags: list) -> list[bool]:
        return [
            any(both)
            for both in zip(*self._pair.exchange(self._rank, what, list(flags)), strict=True)
        ]

    def assemble(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        return self._pair.exchange(self._rank, what, tensor)[0]

    def reduce(
        self,
        flat: torch.Tensor,
        what: str,
        done: Callable[[torch.Tensor, list[bool]], None],
        *,
        flags: list = (),
        meets: bool,
    ) -> Pending:
        if meets:
            self._pair.exchange(self._rank, what, None)
        total = sum(self._pair.exchange(self._rank, what, flat.clone()))
        own = total.view(2, -1)[self._rank] / 2
        anywhere = self.meet(f"{what}: who has them", flags=flags) if flags else []
        return Pending([], what, lambda: done(own, anywhere))


class Shard:
    is_whole = True

    def __init__(self, rank: int, params: list[torch.Tensor]):
        self.params, self.layout = params, FlatLayout.of(params, ParallelDims(rank=rank, size=2))
        self.spec = SimpleNamespace(stepped=True, grad_dtype=torch.float32)


class Handle(SimpleNamespace):
    """One parameter's."""

    def __init__(self, unit: Any, flat_param: Shard, index: int):
        super().__init__(unit=unit, flat_param=flat_param, index=index)

    __hash__, __eq__ = object.__hash__, object.__eq__


class Unit(ParamUnit):
    """One with flat params of a row of two, which needs no store."""

    def __init__(self, index: int, rank: int, is_shared: bool):
        self.index, self.name, self.lands_apart = index, f"unit {index}", is_shared
        self.flat_params = [Shard(rank, [torch.zeros(NUMEL), torch.zeros(NUMEL)])]
        self.flat_params[0].handles = [Handle(self, self.flat_params[0], i) for i in range(2)]


class Bank:
    """Keeps what lands, and how."""

    def __init__(self, device: Device):
        self.landed, self.fails = {}, False
        self.homes = SimpleNamespace(device=device, whole=lambda flat_param: flat_param.at_home)

    def land_average(self, handle: Any, average: torch.Tensor, begin: int = 0) -> None:
        if self.fails:
            raise RuntimeError("no room")
        self.landed.setdefault((handle.unit.index, handle.index), []).append(average.clone())


class Rank:
    """One rank's reducer, with units that its first forward used in their order."""

    def __init__(self, pair: Pair, rank: int, shard: str, shared: tuple[int, ...]):
        self.rank, self.pair, device = rank, pair, Device(torch.device("cpu"), Traffic())
        ledger = Ledger()
        schedule = self.schedule = Schedule()
        ledger.limit(Tier.DEVICE, budget_nbytes=None, planned_nbytes=0)
        self.account = ledger.accounts[Tier.DEVICE]
        self.units = [Unit(index, rank, index in shared) for index in range(UNITS)]
        schedule.begin("train")
        for unit in self.units:
            schedule.use(unit.index)
            schedule.leave(unit.index)
        self.bank, self.reduced = Bank(device), []
        collectives = Collectives(pair, rank, shard)
        for of_unit in self.units:
            of_unit.flat_params[0].collectives = collectives
        self.reducer = Reducer(
            collectives,
            self.units,
            self.bank,
            ledger,
            schedule,
            lambda unit: self.reduced.append(unit.index),
            lambda: True,
        )

    def gets(self, unit: int, value: float, params: tuple[int, ...] = (0, 1)) -> None:
        """A backward brings gradients of ``value`` for parameters of a unit."""
        for index in params:
            self.reducer.add(self.units[unit].handles[index], torch.full((NUMEL,), value))

    def ready(self, unit: int) -> None:
        self.reducer.ready(self.units[unit])

    def reach(self, unit: int) -> None:
        self.reducer.reach(self.units[unit])

    def averages(self, unit: int) -> list[float]:
        """Of the one parameter whose elements this rank has: the other's are empty."""
        own, other = (
            self.bank.landed.get((unit, self.rank), []),
            self.bank.landed.get((unit, 1 - self.rank), []),
        )
        assert not any(each.numel() for each in other)
        assert all(each.numel() == NUMEL and (each == each[0]).all() for each in own)
        return [float(each[0]) for each in own]


def run(
    work: Callable[[Rank], None], shard: str = "gradients", shared: tuple[int, ...] = ()
) -> tuple[Rank, Rank]:
    """Runs ``work`` on both ranks. Raises what either raises."""

    def both(rank: Rank) -> Rank:
        work(rank)
        return rank

    first, second = run_pair(lambda pair, rank: Rank(pair, rank, shard, shared), both)
    return first, second


def backward(rank: Rank, order: tuple[int, ...] = (3, 2, 1, 0)) -> None:
    """Every rank reaches the units in the forward's order reversed; gradients come in ``order``."""
    for place, unit in enumerate(order):
        rank.reach(3 - place)
        rank.gets(unit, 2.0 * unit + 10 * rank.rank)
        rank.ready(unit)
    rank.reducer.end_backward()


@pytest.mark.parametrize(
    "orders",
    [((3, 2, 1, 0), (3, 2, 1, 0)), ((3, 2, 1, 0), (0, 1, 2, 3)), ((2, 3, 0, 1), (3, 0, 2, 1))],
)
def test_every_rank_lands_its_slice_of_the_average_whatever_order_gradients_come_in(orders):
    """Both reduce the first forward's units in reverse; each unit is told of once, and no memory
    stays. What comes after its turn lands apart, for the bank to add."""
    ranks = run(lambda rank: backward(rank, orders[rank.rank]))
    for rank in ranks:
        assert [sum(rank.averages(unit)) for unit in range(UNITS)] == [
            2.0 * unit + 5 for unit in range(UNITS)
        ]
        assert (
            sorted(rank.reduced) == [0, 1, 2, 3]
            and rank.reduced == ranks[0].reduced
            and rank.account.charged_nbytes == 0
        )
    reductions = [
        what.split(" (")[0] for what in ranks[0].pair.meetings if what.startswith("reducing")
    ]
    assert list(dict.fromkeys(reductions)) == [f"reducing unit {unit}" for unit in (3, 2, 1, 0)]


def test_units_that_several_modules_share_come_last():
    ranks = run(backward, shared=(3,))
    assert ranks[0].reduced == ranks[1].reduced == [2, 1, 0, 3]


def test_a_reduction_starts_when_the_backward_reaches_a_later_unit():
    """Whatever gradients a rank has: rank 1 lacks those of unit 3, and nothing is complete. Twin:
    the unit that is reached is not reduced yet."""

    def work(rank: Rank) -> None:
        rank.reach(3)
        if not rank.rank:
            rank.gets(3, 6.0)
        rank.reach(2)
        assert [what for what in rank.pair.meetings if "unit 3" in what]
        assert not [what for what in rank.pair.meetings if "unit 2" in what]
        rank.reducer.end_backward()

    for rank in run(work):
        assert rank.averages(3) == [3.0]


@pytest.mark.parametrize("why", ["shared", "used twice", "around the others"])
def test_nothing_starts_at_a_unit_whose_forward_ended_last(why):
    """A head's unit that is tied to the embedding, or a model's own parameters, whose unit is in
    use around the others: the backward reaches it first. It is reduced last."""

    def work(rank: Rank) -> None:
        if why == "around the others":
            rank.schedule.begin("train")
            for unit in range(UNITS):
                rank.schedule.use(unit)
        else:
            rank.schedule.use(0)
        rank.schedule.leave(0)
        rank.reach(0)
        assert not [what for what in rank.pair.meetings if what.startswith("reducing")]
        backward(rank)

    ranks = run(work, shared=(0,) if why == "shared" else ())
    assert ranks[0].reduced[-1] == 0 and ranks[0].averages(3) == [11.0]


@pytest.mark.parametrize("uses", [[0, 1, 2, 3] * 2, [0, 1, 2, 3, 2, 1, 0], [0, 1, 0, 2, 0, 3]])
def test_what_is_used_again_is_reduced_once_its_first_use_is_done(uses):
    """Method: a backward reaches every use, the last one first; a unit's gradients come with its
    first use. Claim: no more than one unit's waits. Twin: the first sweep, which reduces nothing
    that is used before."""

    def work(rank: Rank) -> None:
        rank.schedule.begin("train")
        for unit in uses:
            rank.schedule.use(unit)
            rank.schedule.leave(unit)
        for place in reversed(range(len(uses))):
            rank.reach(uses[place])
            first = [uses.index(unit) for unit in range(UNITS)]
            meetings = rank.pair.meetings
            started = {each for each in range(UNITS) if f"reducing unit {each} (0)" in meetings}
            assert started == {each for each in range(UNITS) if first[each] > place}
            if place in first:
                rank.gets(uses[place], 2.0)
                rank.ready(uses[place])
        rank.reducer.end_backward()

    for rank in run(work):
        assert [rank.averages(unit) for unit in range(UNITS)] == [[2.0]] * UNITS


def test_what_one_rank_lacks_counts_as_nothing_and_what_all_lack_stays_absent():
    """Rank 0 has no gradient of unit 2, neither has one of unit 1."""

    def work(rank: Rank) -> None:
        for unit in (3, 2, 0) if rank.rank else (3, 0):
            rank.gets(unit, 8.0)
            rank.ready(unit)
        rank.reducer.end_backward()

    for rank in run(work):
        assert [rank.averages(unit) for unit in range(UNITS)] == [[8.0], [], [4.0], [8.0]]


def test_a_gradient_that_comes_after_its_units_turn_takes_another_round():
    """Unit 3 is reduced when both reach unit 2; then rank 1 gets more of it: the average lands
    apart, for the bank to add."""

    def work(rank: Rank) -> None:
        rank.gets(3, 4.0)
        rank.ready(3)
        rank.reach(2)
        if rank.rank:
            rank.gets(3, 6.0)
        rank.reducer.end_backward()

    for rank in run(work):
        assert rank.averages(3) == [4.0, 3.0]


@pytest.mark.parametrize("again", [False, True])
def test_an_order_that_brings_gradients_late_is_agreed_on_anew(again):
    """In the second forward unit 0 is the last: the backward reaches it first, where the verified
    order starts the others, whose gradients then need another round at the end. In the third pass
    they do not. Twin: the second pass."""
    late = []

    def work(rank: Rank) -> None:
        backward(rank)
        for _ in range(1 + again):
            rank.bank.landed.clear()
            rank.schedule.begin("train")
            before = len(rank.pair.meetings)
            for unit in (3, 1, 2, 0):
                rank.schedule.use(unit)
                rank.schedule.leave(unit)
            for unit in (0, 2, 1, 3):
                rank.reach(unit)
                rank.gets(unit, 2.0)
                rank.ready(unit)
            rank.reducer.end_backward()
        late.append("reducing unit 2" in rank.pair.meetings[before:])

    for rank in run(work):
        assert [rank.averages(unit) for unit in range(UNITS)] == [[2.0]] * UNITS
    assert late == [not again] * 2


def test_a_unit_that_got_only_a_part_is_told_of_when_it_is_complete():
    """Rank 1 lacks a gradient of unit 3, and may still get it: the unit is reported as the last."""

    def work(rank: Rank) -> None:
        rank.gets(3, 4.0, (0,) if rank.rank else (0, 1))
        if not rank.rank:
            rank.ready(3)
        rank.reach(2)
        rank.gets(2, 2.0)
        rank.ready(2)
        rank.reach(1)
        rank.reducer.end_backward()

    first, second = run(work, "parameters")
    assert first.averages(3) == [4.0] and second.averages(3) == [2.0]
    assert first.reduced == second.reduced and first.reduced.index(2) < first.reduced.index(3)


def test_a_rank_that_comes_to_fewer_units_reduces_them_in_the_same_order_at_its_end():
    """Rank 1 comes to two units more, for which it needs no gather."""

    def work(rank: Rank) -> None:
        rank.gets(3, 1.0)
        rank.ready(3)
        for unit in (2, 1)[: 2 * rank.rank]:
            rank.reach(unit)
        rank.reducer.end_backward()

    for rank in run(work, "parameters"):
        assert rank.averages(3) == [1.0] and rank.averages(2) == []


def test_backwards_of_one_pass_are_reduced_once_at_its_end():
    """Nothing is met for between them; sums of two backwards are averaged."""

    def work(rank: Rank) -> None:
        rank.reducer.waits_for_more = True
        for _ in range(2):
            for unit in (3, 2):
                rank.gets(unit, 2.0 + 2 * rank.rank)
                rank.ready(unit)
            rank.reach(0)
        assert not rank.pair.meetings
        rank.reducer.reduce_all()
        assert not rank.reducer.waits_for_more

    for rank in run(work, "parameters"):
        assert [rank.averages(unit) for unit in range(UNITS)] == [
            [],
            [],
            [6.0],
            [6.0],
        ] and rank.account.charged_nbytes == 0
        assert len([what for what in rank.pair.meetings if what.startswith("reducing the")]) == 1


def test_a_rank_that_cannot_land_goes_on_with_the_other_and_raises_at_the_end():
    raised = []

    def work(rank: Rank) -> None:
        rank.reducer.waits_for_more = True
        for unit in (3, 2):
            rank.gets(unit, 2.0)
        rank.bank.fails = rank.rank == 1
        try:
            rank.reducer.reduce_all()
        except RuntimeError as error:
            raised.append((rank.rank, str(error)))
        rank.bank.fails = False
        backward(rank)

    first, second = run(work)
    assert raised == [(1, "no room")]
    assert first.averages(3) == [2.0, 11.0] and second.averages(3) == [11.0]


def test_a_failed_backward_leaves_nothing_behind():
    """Both fail half-way, with a reduction under way, and abandon; the next backward's averages are
    its own, from the first unit on."""

    def work(rank: Rank) -> None:
        rank.gets(3, 100.0)
        rank.ready(3)
        rank.reach(2)
        rank.gets(2, 100.0, (0,))
        rank.reducer.abandon()
        assert rank.account.charged_nbytes == 0 and not rank.bank.landed
        rank.reduced.clear()
        backward(rank)

    for rank in run(work):
        assert [rank.averages(unit) for unit in range(UNITS)] == [
            [2.0 * unit + 5] for unit in range(UNITS)
        ]
        assert rank.reduced == [3, 2, 1, 0]


def test_zero_1_averages_what_is_at_home_when_somebody_looks_once():
    """Whole gradients are at home; those that have landed, and were not averaged, are."""
    from infinity.core.grads.record import GradRecord, GradState

    def work(rank: Rank) -> None:
        for unit in rank.units:
            unit.flat_params[0].at_home = torch.full((2 * NUMEL,), 4.0 + 4 * rank.rank)
            for handle in unit.handles:
                handle.grad = GradRecord(GradState.LANDED if unit.index else GradState.ABSENT)
        rank.units[2].handles[0].grad.averaged = rank.units[2].handles[1].grad.averaged = True
        rank.reducer.average()
        assert not rank.pair.meetings  # no backward has ended
        rank.ready(3)
        rank.reducer.end_backward()
        assert not rank.pair.meetings
        rank.reducer.average()
        met = len(rank.pair.meetings)
        rank.reducer.average()
        assert len(rank.pair.meetings) == met > 0

    for rank in run(work, "optimizer"):
        assert [rank.averages(unit) for unit in range(UNITS)] == [[], [6.0], [], [6.0]]


@pytest.mark.parametrize("parts", [[(3,), (2, 1, 0)], [(0, 2), (1,), (3,)], [(1, 2), (0, 3)]])
def test_optimizers_that_have_averaged_their_own_parts_meet_no_more(parts):
    """Method: each of several optimizers averages its units' gradients, then somebody looks at all
    of them, and at one. Twin: the next backward, after which they meet again."""
    from infinity.core.grads.record import GradRecord, GradState

    def work(rank: Rank) -> None:
        for unit in rank.units:
            unit.flat_params[0].at_home = torch.full((2 * NUMEL,), 4.0 + 4 * rank.rank)
            for handle in unit.handles:
                handle.grad = GradRecord(GradState.LANDED)
        for times in (1, 2):
            rank.reducer.end_backward()
            for part in parts:
                flats = {rank.units[index].flat_params[0] for index in part}
                rank.reducer.average(of=flats.__contains__)
            met = len(rank.pair.meetings)
            rank.reducer.average(of=flats.__contains__)
            rank.reducer.average()
            assert len(rank.pair.meetings) == met
            assert met and rank.averages(parts[0][0]) == [6.0] * times

    run(work, "optimizer")
