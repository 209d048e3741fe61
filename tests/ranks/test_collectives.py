"""Collectives without a launch: what they compute, with other ranks made up, or between two threads
(see `pair`)."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pair
import pytest
import torch

from infinity.core.wrap.agreement import compare, least
from infinity.errors import ConfigError, PeerError, UsageError
from infinity.ext.shared_homes.quantize import BlockCodes, decode_blocks, encode_blocks
from infinity.ranks import kinds
from infinity.ranks.collective_trace import CollectiveTrace
from infinity.ranks.collectives import Collectives
from infinity.ranks.parallel_dims import ParallelDims

SAID = SimpleNamespace(
    values=lambda: [1],
    agrees=lambda spans: True,
    check=lambda spans: None,
)


def replicas(of: torch.Tensor, monkeypatch) -> Collectives:
    """This rank's collectives beside one replica, which has ``of``; nobody shares the arrays."""

    def all_gather(out, mine, **how):
        out, mine = out.view(torch.float32), mine.view(torch.float32)
        out.view(2, -1)[0].copy_(mine)
        out.view(2, -1)[1].copy_(of)
        return SimpleNamespace(wait=lambda limit: None, is_completed=lambda: True)

    monkeypatch.setattr(kinds, "all_gather", all_gather)
    place = SimpleNamespace(
        rank=0, size=2, bulk=None, collective_trace=CollectiveTrace(), finish_sync=lambda: None
    )
    place.flags_nbytes = 0
    place.lock, place.raise_heard = contextlib.nullcontext(), lambda: None
    return Collectives(ParallelDims(replicate_group=place))


def test_averages_are_over_all_data_ranks(monkeypatch):
    """A row of one and two replicas: the sum of both is divided by two, not by the row's size."""
    found = []
    pending = replicas(torch.tensor([5.0, 7.0]), monkeypatch).reduce(
        torch.tensor([1.0, 2.0]), "a gradient", lambda average, _: found.append(average)
    )
    pending.wait()
    assert torch.equal(found[0], torch.tensor([3.0, 4.5]))


@pytest.fixture
def both(monkeypatch) -> Callable[..., list]:
    """Runs something on two ranks, given each one's collectives; ``axis``: what the ranks have each
    a part of."""
    monkeypatch.setattr(kinds, "all_gather", pair.all_gather)
    monkeypatch.setattr(kinds, "dist", pair)
    monkeypatch.setattr(
        ParallelDims,
        "world_rank",
        property(lambda ranks: next((each.rank for each in ranks.channels), 0)),
    )

    def run(work: Callable[[Collectives], Any], *, axis: str = "shard_group", **more: Any) -> list:
        def make(meeting: pair.Pair, rank: int) -> Collectives:
            own = {"rank": rank, "size": 2} if axis == "shard_group" else {}
            return Collectives(
                ParallelDims(**own, **{axis: pair.PairChannel(meeting, rank)}, **more)
            )

        return pair.run_pair(make, work)

    return run


def filled(
    collectives: Collectives, numel: int = 512, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A flat array of which this rank's shard is there."""
    flat = torch.full((numel,), -1.0, dtype=dtype)
    rank = collectives.ranks.rank
    flat.view(2, -1)[rank] = torch.arange(numel // 2) + 1000 * rank
    return flat


WHOLE = torch.cat([torch.arange(256), torch.arange(256) + 1000])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gather_brings_the_others_slices(both, dtype):
    """The bytes that came are counted."""

    def work(collectives: Collectives) -> tuple:
        flat = filled(collectives, dtype=dtype)
        collectives.gather(flat, "unit 0").wait()
        return flat, collectives.traffic.collectives["all-gather"].nbytes

    for flat, nbytes in both(work):
        assert torch.equal(flat, WHOLE.to(dtype)) and nbytes == 256 * dtype.itemsize
    assert Collectives().gather(torch.zeros(4), "unit 0") is None


def test_a_compressed_gather_passes_a_quarter_within_half_a_step(both):
    def work(collectives: Collectives) -> tuple:
        flat = filled(collectives)
        collectives.gather(flat, "unit 0").wait()
        return flat, collectives.traffic.collectives["all-gather"].nbytes

    first, second = both(work, encoding=BlockCodes())
    assert torch.equal(first[0], second[0]) and first[1] == 256 + 4
    assert not torch.equal(first[0], WHOLE.float())
    for half, largest in zip(first[0].view(2, -1) - WHOLE.view(2, -1), (255, 1255)):
        assert half.abs().max() <= largest / 254 * 1.001


@pytest.mark.parametrize("bucket", [None, 256])
def test_codes_of_a_gather_take_the_memory_of_two_buckets(both, bucket):
    """Counts the codes that are there when more are sent: those of two buckets at most, of eight.
    The bits are those of whole codes. Twin: without buckets all codes of the gather are there."""

    def work(collectives: Collectives) -> tuple:
        rank, sent, most = collectives.ranks.rank, [], 0
        flat = torch.zeros(2, 8 * 256)
        flat[rank] = torch.arange(8 * 256) ** 1.5 * (1 + rank)
        begin = collectives._gather

        def gather(kind: object, codes: torch.Tensor, *rest: object) -> object:
            nonlocal most
            sent.append(weakref.ref(codes))
            there = [each() for each in sent]
            most = max(most, sum(each.numel() for each in there if each is not None))
            return begin(kind, codes, *rest)

        collectives._gather = gather
        collectives.gather(flat.view(-1), "unit 0").wait()
        return flat, len(sent), most

    for found, count, most in both(work, encoding=BlockCodes(bucket)):
        right = torch.zeros(2, 8 * 256)
        for rank in range(2):
            value = torch.arange(8 * 256) ** 1.5 * (1 + rank)
            decode_blocks(encode_blocks(value), right[rank : rank + 1])
        assert torch.equal(found, right)
        assert count == (8 if bucket else 1) and most <= (2 if bucket else 8) * 2 * (256 + 4)
        assert bucket or most == 8 * 2 * (256 + 4)


def test_a_pass_tells_whether_both_expect_the_same_units(both):
    def work(traces: list[list[int]]) -> Callable[[Collectives], bool]:
        def gather(collectives: Collectives) -> bool:
            rank = collectives.ranks.rank
            agree = collectives.begin_pass(traces[rank], [], training=True)
            collectives.gather(filled(collectives), "unit 0").wait()
            return agree()

        return gather

    assert both(work([[0, 1, 2], [0, 1, 2]])) == [True, True]
    assert both(work([[0, 1, 2], [0, 2, 1]])) == [False, False]


def test_a_reduction_gives_each_rank_its_slice_of_the_mean(both):
    """In fp32, also of 16-bit gradients: a sum of theirs would round away what one rank has."""

    def work(collectives: Collectives) -> tuple:
        rank, found = collectives.ranks.rank, []
        flat = torch.full((512,), 256.0 if rank else 1.0, dtype=torch.bfloat16)
        collectives.reduce(flat, "unit 0", lambda average, _: found.append(average)).wait()
        return found[0], collectives.traffic.collectives["reduce-scatter"].nbytes

    for average, nbytes in both(work):
        assert (
            average.dtype == torch.float32
            and torch.equal(average, torch.full((256,), 128.5))
            and nbytes == 512
        )


def test_flags_that_any_rank_has_set_are_set(both):
    flags = [[True, False, False], [False, False, True]]
    assert both(lambda c: c.meet("flags", flags=flags[c.ranks.rank])) == [[True, False, True]] * 2
    assert (
        both(lambda c: c.meet("flags", flags=flags[c.ranks.tp_group.rank]), axis="tp_group")
        == [[True, False, True]] * 2
    )
    assert Collectives().meet("flags", flags=[1, 0]) == [True, False]


@pytest.mark.parametrize("axis", ["shard_group", "tp_group", "pp_group"])
def test_tensors_are_collected_along_the_axes_that_are_asked_for(both, axis):
    """Twin: along none."""

    def work(collectives: Collectives) -> tuple:
        mine = torch.tensor([1.0, 2.0]) + 10 * collectives.ranks.channels[0].rank
        own = collectives.collect(mine, "values", [])
        return collectives.collect(mine, "values").tolist(), own.tolist() == [mine.tolist()]

    assert both(work, axis=axis) == [([[1.0, 2.0], [11.0, 12.0]], True)] * 2


def test_the_least_of_each_value_is_found(both):
    values = [[3, 5], [4, 2]]
    assert both(lambda c: least(c, values[c.ranks.rank], "values")) == [[3, 2]] * 2
    assert (
        both(lambda c: least(c, values[c.ranks.pp_rank], "values"), axis="pp_group") == [[3, 2]] * 2
    )
    assert both(lambda c: least(c, values[c.ranks.pp_rank], "", []), axis="pp_group") == values


def test_pieces_of_any_length_are_assembled(both):
    """Rank 0 has the first three of eight, rank 1 the rest; where one has none, nothing of it is
    sent."""

    def work(pieces: list[tuple[int, int]]) -> Callable[[Collectives], list]:
        def assemble(collectives: Collectives) -> list:
            rank, out = collectives.ranks.rank, torch.zeros(8)
            out[slice(*pieces[rank])] = 1.0 + rank
            collectives.assemble(out, "a gradient", pieces)
            return out.tolist()

        return assemble

    assert both(work([(0, 3), (3, 8)])) == [[1.0] * 3 + [2.0] * 5] * 2
    assert both(work([(0, 0), (0, 8)])) == [[2.0] * 8] * 2
    alone = torch.ones(2)
    Collectives().assemble(alone, "a gradient", [(0, 2)])
    assert alone.tolist() == [1.0, 1.0]


def test_the_first_ranks_tensor_is_everyones(both):
    assert both(lambda c: c.assemble(torch.tensor([5 + c.ranks.rank]), "a value").tolist()) == [
        [5],
        [5],
    ]
    found = both(
        lambda c: c.assemble(
            torch.tensor([5 + c.ranks.tp_rank]), "a value", over_tensors=True
        ).tolist(),
        axis="tp_group",
    )
    assert found == [[5], [5]]
    assert both(
        lambda c: c.assemble(torch.tensor([5 + c.ranks.tp_rank]), "a value").tolist(),
        axis="tp_group",
    ) == [[5], [6]]


def test_objects_are_collected_in_the_order_of_ranks(both):
    assert (
        both(lambda c: c.collect({"rank": c.ranks.rank}, "objects"))
        == [[{"rank": 0}, {"rank": 1}]] * 2
    )
    assert both(lambda c: c.collect(c.ranks.rank, "objects", among=[])) == [[0], [1]]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"a": "1"}, None),
        ({"a": "2"}, "a is 1 on rank 0 and 2 on rank 1"),
        ({}, "a is 1 on rank 0 and absent on rank 1"),
    ],
)
def test_descriptions_that_differ_are_told_with_the_first_difference(both, theirs, said):
    def work(collectives: Collectives) -> str | None:
        try:
            compare(collectives, theirs if collectives.ranks.rank else {"a": "1"}, "wrap_model")
        except ConfigError as error:
            return str(error)
        return None

    for found in both(work):
        assert found is None if said is None else said in found
    compare(Collectives(), {"a": "1"}, "wrap_model")


@pytest.mark.parametrize(
    ("axis", "over_tensors", "meets"),
    [("shard_group", False, True), ("tp_group", True, True), ("tp_group", False, False)],
)
def test_values_that_differ_are_refused_where_they_are_to_be_the_same(
    both, axis, over_tensors, meets
):
    def work(change: int) -> Callable[[Collectives], bool]:
        def same(collectives: Collectives) -> bool:
            tensor = torch.arange(6).view(2, 3).t() + change * collectives.ranks.channels[0].rank
            try:
                collectives.meet("setting it", tensor, over_tensors=over_tensors)
            except UsageError:
                return False
            return True

        return same

    assert both(work(0), axis=axis) == [True, True]
    assert both(work(1), axis=axis) == [not meets] * 2


def test_what_one_rank_raises_all_raise_and_can_go_on(both):
    def work(collectives: Collectives) -> list[str]:
        said = []
        for number in range(3):
            try:
                with collectives.together(f"block {number}"):
                    if number == 1 and collectives.ranks.rank:
                        raise ConfigError("mine")
            except (ConfigError, PeerError) as error:
                said.append(f"{number} {type(error).__name__}: {error}")
        return said

    assert both(work) == [["1 PeerError: failed: mine"], ["1 ConfigError: mine"]]


def test_ranks_that_are_at_other_steps_are_told(both):
    def work(collectives: Collectives) -> str:
        collectives.steps.finish(2)
        collectives.steps.count_backwards(collectives.ranks.channels[0].rank)
        try:
            collectives.meet_for_step(
                "step()",
                "",
                over_stages=("a step", SAID),
                trace=[],
                also=[],
                then=lambda: None,
            )
        except UsageError as error:
            return str(error)
        return "met"

    assert (
        both(work)
        == ["'step() (after 2 steps and 0 backwards)' and 'step() (after 2 steps and 1 backwards)'"]
        * 2
    )
    assert both(work, axis="pp_group") == ["met"] * 2


@pytest.mark.parametrize("what", ["barrier", "differs", "spans"])
def test_an_error_of_the_stages_is_raised_on_the_data_ranks_too(what):
    """At a barrier, where values differ, and where the stages do not meet. Twins: not on the stages
    again, and nothing where nothing failed."""
    told: list[tuple[str, str]] = []

    def fail(*_: object, **__: object) -> None:
        raise UsageError("differs")

    def place(name: str, **own: object) -> SimpleNamespace:
        met = {"barrier": lambda *_, **__: None, "spans": lambda *_, **__: [(1, 2)]} | own
        said = {"fail": lambda error: told.append((name, str(error)))}
        trace = SimpleNamespace()
        return SimpleNamespace(
            rank=0, size=2, flags_nbytes=0, collective_trace=trace, **said, **met
        )

    def meet(failing: str) -> None:
        own = {failing: fail} if failing in ("barrier", "spans") else {}
        check = fail if failing == "differs" else lambda spans: None
        data, stages = place("data"), place("stages", **own)
        collectives = Collectives(ParallelDims(shard_group=data, pp_group=stages))
        if what == "barrier":
            collectives.barrier("a step of a schedule", among=[stages])
        else:
            compared = SimpleNamespace(values=lambda: [1], agrees=lambda _: True, check=check)
            collectives._predict = lambda *_, **__: None
            collectives.meet_for_step(
                "", "", over_stages=("a step", compared), trace=[], also=[], then=list
            )

    meet("")
    assert told == []
    with pytest.raises(UsageError):
        meet(what)
    assert told == [("data", "differs")]


@pytest.mark.parametrize("agree", [True, False])
def test_a_step_of_parts_is_written_down_only_where_they_have_the_same(agree):
    """Where no data ranks meet behind them: as soon as the spans are known, before the meeting
    returns. Twin: spans that differ."""
    told: list[str] = []

    class Place:
        flags_nbytes = 0

        def spans(self, what: str, values: list[int], then: Callable) -> list[tuple[int, int]]:
            then([(1, 1 if agree else 2)])
            told.append("met")
            return [(1, 1 if agree else 2)]

    def check(spans: list[tuple[int, int]]) -> None:
        if not in_common.agrees(spans):
            raise UsageError("differ")

    in_common = SimpleNamespace(
        values=lambda: [1],
        agrees=lambda spans: all(least == most for least, most in spans),
        check=check,
    )
    collectives = Collectives(ParallelDims(tp_group=(parts := Place())))
    try:
        collectives.meet_for_step(
            "step()",
            "",
            over_stages=None,
            trace=[],
            also=[partial(collectives.compare_over, parts, comparison=in_common)],
            then=lambda: told.append("written"),
        )
    except UsageError:
        told.append("refused")
    assert told == (["written", "met"] if agree else ["met", "refused"])


def test_closing_gives_this_thread_its_processors_back_once():
    allowed = frozenset(os.sched_getaffinity(0))
    collectives, one = Collectives(ParallelDims(allowed_processors=allowed)), {min(allowed)}
    try:
        os.sched_setaffinity(0, one)
        collectives.close()
        assert os.sched_getaffinity(0) == allowed
        os.sched_setaffinity(0, one)
        collectives.close()  # a second call does nothing: they are another job's by now
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, allowed)
