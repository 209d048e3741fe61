"""CollectiveTrace: passes of several ranks that nobody meets in, and what becomes of ranks that
part in one.

Words used here: see `ranks` (job, launch), `parting_jobs` and `infinity.ranks.collective_trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import models
import parting_jobs
import pytest
import torch
from ranks import Jobs, launch

import infinity
from infinity.ranks.collective_trace import Collective, CollectiveTrace
from infinity.ranks.tree import CHILDREN, family_of

SCRIPT = "parting_jobs.py"
MET = {"parameters": 6, "gradients": 6, "optimizer": 4}  # in a step of three micro-batches
STRUCK = {
    "parameters": {"shard": "parameters"},
    "gradients": {"shard": "gradients"},
}
CLEARED = [("by the optimizer", False), ("by the optimizer", True), ("by the model", False)]
HOWS = [
    "another order",
    "fewer",
    "evaluates",
    "reads",
    "raises in a forward",
    "raises in a backward",
    "skips a backward",
    "skips a step",
]


SHARDS = ("parameters", "optimizer")


@pytest.fixture(scope="module")
def two(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    """Everything that two ranks do here."""
    jobs: dict[str, dict] = {f"parts:{how}": {"how": how} for how in HOWS}
    jobs |= {
        f"parts:whole-{how}": {"how": how, "shard": "gradients"}
        for how in ("raises in a backward", "evaluates")
    }
    jobs |= {
        f"changes:{shard}": {"shard": shard} for shard in ("parameters", "gradients", "optimizer")
    }
    jobs |= {
        f"moved:{budget}": {"config": {"device_memory": budget}}
        for budget in (None, "520KiB", "600KiB", "800KiB")
    }
    jobs |= {
        "interrupted": {},
        **{f"unlike_the_last:{parts}": {"parts": parts} for parts in (False, True)},
    }
    jobs |= {f"goes_back:{how}-{zeros}": {"how": how, "zeros": zeros} for how, zeros in CLEARED}
    jobs |= {f"measured:{tight}": {"tight": tight} for tight in (False, True)}
    jobs |= {f"measured:{shard}": {"tight": False, "shard": shard} for shard in SHARDS}
    jobs["goes_back:twin"] = {"how": "by the optimizer", "counts_on": True}
    jobs |= {f"struck:{name}": {"every": 9, **how} for name, how in STRUCK.items()}
    jobs["moved:nvme"] = {
        "config": (
            models.at_home("nvme", "nvme", tmp_path_factory.mktemp("swap"))
            | {"host_memory": "6MiB"}
        )
    }
    nvme = models.at_home("nvme", "nvme", tmp_path_factory.mktemp("slots")) | {"units": ["Linear"]}
    jobs |= {
        f"late_slots:{budget}": {"config": nvme | {"device_memory": budget}}
        for budget in ("290KiB", "330KiB")
    }
    jobs |= {f"counted:{blocks}": {"blocks": blocks} for blocks in (4, 12)}
    jobs |= {f"counted:streams-{blocks}": {"blocks": blocks, "streams": True} for blocks in (4, 12)}
    jobs |= {f"counted:{shard}": {"blocks": 4, "shard": shard, "micro": 3} for shard in MET}
    return Jobs(standing_ranks(2), "parting_jobs", jobs)


@pytest.fixture(scope="module")
def four(standing_ranks) -> Mapping[str, list[Any]]:
    """Four ranks: three that hear of one, in a tree of three levels, and replicas."""
    jobs: dict[str, dict] = {f"parts:{how}": {"how": how, "children": 1} for how in HOWS}
    jobs |= {
        f"parts:replicas-{how}": {"how": how, "replicas": True}
        for how in ("another order", "raises in a backward")
    }
    return Jobs(standing_ranks(4), "parting_jobs", jobs)


def check_parted(found: list[dict], how: str) -> None:
    """All ranks were told, in that step and no other one; none has stepped with anything else than
    one process has."""
    for rank, of_rank in enumerate(found):
        assert of_rank["off"] < 1e-6, how
        assert of_rank["said"] and {step for step, _, _ in of_rank["said"]} == {4}, of_rank["said"]
        told = [text for _, kind, text in of_rank["said"] if kind == "UsageError"]
        assert told and all(f"rank {rank} is at" in text for text in told), of_rank["said"]
        assert of_rank["agreed"][3] and of_rank["agreed"][-1]  # before, and again


@pytest.mark.parametrize("how", HOWS)
def test_ranks_that_part_in_an_agreed_pass_are_told_and_go_on(two, how):
    """Rank 1 does something else in mid-pass while rank 0 waits for what it does not start: both
    get an error, try again, and end with the weights of plain torch."""
    check_parted(two[f"parts:{how}"], how)


@pytest.mark.parametrize("how", ["raises in a backward", "evaluates"])
def test_ranks_that_keep_their_weights_are_told_too(two, how):
    check_parted(two[f"parts:whole-{how}"], how)


@pytest.mark.parametrize("tight", [False, True])
def test_a_rank_that_has_all_weights_measures_alone(two, tight):
    """Two replicas: the first one's losses and all weights are those of plain torch. Twins: ranks
    with shards are told."""
    first, second = two[f"measured:{tight}"]
    assert first["off"] < 1e-6 and second["off"] < 1e-6
    assert (first["count"], second["count"]) == (14, 0)
    for shard in SHARDS:
        assert all("all ranks must run" in found["said"] for found in two[f"measured:{shard}"])


@pytest.mark.slow
@pytest.mark.parametrize("how", [*HOWS, "replicas-another order", "replicas-raises in a backward"])
def test_all_of_four_ranks_are_told(four, how):
    check_parted(four[f"parts:{how}"], how)


@pytest.mark.slow
def test_a_rank_that_hears_no_alarm_waits_until_the_timeout(tmp_path):
    """The twin: without the alarm rank 0 waits for a gather that rank 1 never starts, and nothing
    but the timeout ends that."""
    jobs = {"parts": {"how": "evaluates", "deaf": True}}
    results, done = launch(tmp_path, 2, jobs, script=SCRIPT, environment={"RANK_TIMEOUT": "6"})
    assert done.returncode != 0
    assert any(found is not None and found.kind == "PeerError" for found in results["parts"])


@pytest.mark.parametrize(("how", "zeros"), CLEARED)
def test_a_rank_that_ran_fewer_backwards_goes_on_once_gradients_are_cleared(two, how, zeros):
    """With shard="optimizer", where ranks do not meet in a backward: two steps are begun again by
    all, to gradients of None or of zeros."""
    for of_rank in two[f"goes_back:{how}-{zeros}"]:
        assert of_rank["said"] == [] and of_rank["off"] < 1e-6


def test_backwards_that_only_a_step_sets_back_part_the_ranks_for_ever(two):
    """The twin."""
    for of_rank in two["goes_back:twin"]:
        assert len(of_rank["said"]) >= 3 and all(
            "1 steps and 1 backwards" in text for text in of_rank["said"]
        )


def check_struck(found: list[dict]) -> None:
    """Every place was struck on the last rank, and where that left the first one waiting it was
    told; both have the weights of one process."""
    for of_rank in found:
        assert of_rank["off"] < 1e-6
    first, last = (of_rank["said"] for of_rank in found)
    places = found[0]["places"]
    assert [place for _, place, kind, _ in last if kind != "UsageError"] == places
    assert any("rank 0 is at 'gathering" in text for *_, kind, text in first)
    assert {kind for *_, kind, _ in first} == {"UsageError"} and len(
        {step for step, *_ in first}
    ) > len(places) / 2


@pytest.mark.parametrize("name", STRUCK)
def test_an_exception_between_a_meeting_and_its_collective_leaves_nobody_waiting(two, name):
    """In passes that are not agreed, at lines of all that runs there: Ctrl-C, memory that runs out,
    an ordinary error. The other rank waits in the collective, or has done with it."""
    check_struck(two[f"struck:{name}"])


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCK)
def test_no_line_between_a_meeting_and_its_collective_leaves_anybody_waiting(tmp_path, name):
    """The same at every line."""
    results, done = launch(tmp_path, 2, {"struck": STRUCK[name]}, script=SCRIPT)
    assert done.returncode == 0, done.stderr
    check_struck(results["struck"])


@pytest.mark.slow
def test_a_struck_rank_that_does_not_say_so_leaves_the_others_waiting_until_the_timeout(tmp_path):
    """The twin."""
    jobs = {"struck": {"shard": "parameters", "numb": True}}
    results, done = launch(tmp_path, 2, jobs, script=SCRIPT, environment={"RANK_TIMEOUT": "6"})
    assert done.returncode != 0
    assert any(found is not None and found.kind == "PeerError" for found in results["struck"])


@pytest.mark.parametrize("shard", ["parameters", "gradients", "optimizer"])
def test_ranks_that_change_together_go_on_with_the_bits_of_one_process(two, shard):
    """All ranks leave a block out in some steps; a parameter gets a gradient on one rank, or on
    none, in turn. Where nobody has one it is None."""
    first, second = two[f"changes:{shard}"]
    model = parting_jobs.build()
    model, optimizer = infinity.wrap_model(
        model, parting_jobs.adamw(model), {"params": "device", "optimizer": "device"}
    )
    parting_jobs.in_turn(
        model, optimizer, 2, 10, order=parting_jobs.changing_order, scaled=parting_jobs.changing_use
    )
    assert not models.differing(first["weights"], parting_jobs.state_of(model))
    infinity.unwrap_model(model, optimizer)
    assert all(
        torch.equal(value, second["weights"][name]) for name, value in first["weights"].items()
    )
    assert first["grads"] == second["grads"] == [step % 3 == 1 for step in range(10)]


def test_meetings_of_a_step_do_not_grow_with_the_model(two):
    """Two in each step from the third on, for 4 units and for 12; the first steps, in which nothing
    is verified yet, do meet for each."""
    few, many = (two[f"counted:{blocks}"][0]["met"] for blocks in (4, 12))
    assert few[3:] == many[3:] == [2, 2, 2]
    assert many[0] > few[0] > 4


def test_steps_in_the_backward_meet_no_more_for_more_units(two):
    """Who has gradients of a unit has to be known in mid-backward: its reduction tells."""
    few, many = (two[f"counted:streams-{blocks}"][0]["met"] for blocks in (4, 12))
    assert few[3:] == many[3:] == [2, 2, 2]


def test_what_all_ranks_do_between_two_steps_leaves_the_next_pass_as_it_was(two):
    """A pass is agreed on with the step before it; parameters are read before it comes. It is
    agreed on again, and no more gradients wait on the device than in the others, then or later.
    Twin: before anything was verified more of them wait."""
    for of_rank in two["interrupted"]:
        waiting, met, followed = zip(*of_rank["found"])
        assert set(waiting[2:]) == {1} and waiting[0] > 1
        assert met[3:] == (1, 2, 2, 1, 1) and all(followed[2:])


def test_a_backward_that_an_agreed_pass_had_not_is_met_for(two):
    """Method: a pass is agreed on as one without a backward, and has one: gradients do not all wait
    for its end."""
    for of_rank in two["unlike_the_last:False"]:
        assert of_rank["agreed without a backward"][3] and not of_rank["told"]
        assert of_rank["kept"][3] <= of_rank["kept"][0] < 6


def test_ranks_that_part_behind_the_end_of_an_agreed_pass_are_told(two):
    """The same, and one rank's backward reaches fewer blocks: it ends while the other waits at a
    gather."""
    for rank, of_rank in enumerate(two["unlike_the_last:True"]):
        ((step, text),) = of_rank["told"]
        assert (
            step == 3 and of_rank["agreed without a backward"][3] and f"rank {rank} is at" in text
        )


@pytest.mark.parametrize("budget", ["290KiB", "330KiB"])
def test_staging_memory_that_is_late_on_one_rank_parts_nobody(two, budget):
    """What is gathered ahead must not go by what a rank happens to have read: both go on, with one
    process's weights."""
    first, second = two[f"late_slots:{budget}"]
    assert first["refused"] > 3 < second["refused"]
    model = parting_jobs.build()
    model, optimizer = infinity.wrap_model(
        model, parting_jobs.adamw(model), {"params": "device", "optimizer": "device"}
    )
    parting_jobs.in_turn(model, optimizer, 2, 8)
    for of_rank in (first, second):
        assert not models.differing(of_rank["weights"], parting_jobs.state_of(model))
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("shard", MET)
def test_what_a_step_foresees_is_the_first_of_several_passes(two, shard):
    """With weights or gradients that stay, later passes find other units gathered: a step that
    foresaw one of those would meet once more."""
    assert two[f"counted:{shard}"][0]["met"][3:] == [MET[shard]] * 3


@pytest.mark.parametrize("budget", [None, "520KiB", "600KiB", "800KiB", "nvme"])
def test_a_step_moves_the_bytes_that_the_plan_predicts(two, budget):
    """Over every edge and from the other rank, in windows of two to all units, in the steady state:
    exactly, but for reads of a disk."""
    for of_rank in two[f"moved:{budget}"]:
        found, predicted = of_rank["found"], of_rank["predicted"]
        # What is still on its way to the disk is read from memory, as it comes.
        assert found.pop("nvme->host") == pytest.approx(predicted.pop("nvme->host"), rel=0.15)
        assert {name: predicted[name] for name in found if name in predicted} == {
            name: found[name] for name in found if name in predicted
        }
        assert found["all-gather"] > 0 and found["reduce-scatter"] > 0
    assert (
        len({sum(two[f"moved:{each}"][0]["gathers"]) for each in ("520KiB", "600KiB", "800KiB")})
        == 3
    )  # the twin: they do differ


# --- without ranks ---


class DummyCollectives:
    """What a rank starts for others alone, by the numbers that they have told."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def of(self, numbers: Sequence[int]) -> tuple[Callable, Callable]:
        def begin() -> Any:
            self.begun.append(numbers[0])
            return work()

        return begin, lambda: len(self.begun)


def work() -> Any:
    return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


def collective(what: str) -> Collective:
    return Collective(what, 8, [ord(what), 0, 0, 0, 0, 0])


def start(collective_trace: CollectiveTrace, names: str) -> None:
    for name in names:
        collective_trace.start(collective(name), work, lambda: 0)


def passed(collective_trace: CollectiveTrace, key: bytes, names: str, *, verified: bool) -> None:
    collective_trace.begin(key, verified=verified)
    start(collective_trace, names)
    collective_trace.end()


def test_a_pass_is_known_by_how_it_went():
    """Digests are equal for equal passes, and differ for others, another key, and none."""
    one, other = CollectiveTrace(), CollectiveTrace()
    passed(one, b"k", "abc", verified=False)
    passed(other, b"k", "abd", verified=False)
    assert one.digest_of(b"k") != other.digest_of(b"k") and one.digest_of(b"other") == 0
    passed(other, b"k", "abc", verified=False)
    assert one.digest_of(b"k") == other.digest_of(b"k")


@pytest.mark.parametrize("verified", [True, False])
def test_what_another_rank_has_started_is_completed(verified):
    """Method: of five collectives this rank has started two, another one four, agreed on or not.
    They are none of this rank's pass."""
    collective_trace, other = CollectiveTrace(), CollectiveTrace()
    dummies = DummyCollectives()
    collective_trace.dummy_of = dummies.of
    for each in (collective_trace, other):
        passed(each, b"k", "abcde", verified=False)
        each.forget(each.total)
        each.begin(b"k", verified=verified)
    start(other, "abcd")
    assert not verified or collective_trace.next == collective("a")
    start(collective_trace, "ab")
    assert (
        collective_trace.is_open is verified
        and collective_trace.reach == 2 * verified
        and (collective_trace.total, other.total) == (7, 9)
    )
    described = torch.maximum(collective_trace.described(8, 9), other.described(8, 9)).tolist()
    for _ in range(2):  # cut short, it is done again
        collective_trace.part(9, described)
    assert (
        dummies.begun == [ord("c"), ord("d")]
        and not collective_trace.is_open
        and not collective_trace.is_verified
        and collective_trace.total == 9
    )
    assert [each.what for each in collective_trace._started] == ["a", "b"]


@pytest.mark.parametrize("line", range(4))
def test_what_an_exception_strikes_as_it_starts_is_noted_where_its_transport_has_begun_it(line):
    """Struck before its transport, in it before it has begun, in it after that, and behind it.
    Failing twin: none, which is not struck."""
    collective_trace, begun = CollectiveTrace(), []

    def begin() -> Any:
        if line == 1:
            raise KeyboardInterrupt
        begun.append(1)
        if line == 2:
            raise KeyboardInterrupt
        return work()

    def count() -> int:
        if line == 0 and not begun:
            raise KeyboardInterrupt
        return len(begun)

    if line == 3:
        collective_trace.start(collective("a"), begin, count)
        assert not collective_trace.has_diverged
    else:
        collective_trace.expect()
        with pytest.raises(KeyboardInterrupt):
            collective_trace.start(collective("a"), begin, count)
        assert collective_trace.has_diverged
    collective_trace.settle()
    assert collective_trace.total == len(begun) and collective_trace.has_diverged is (line != 3)
    collective_trace.part(collective_trace.total)
    assert not collective_trace.has_diverged


def test_a_pass_that_was_left_does_not_replace_a_whole_one():
    collective_trace = CollectiveTrace()
    passed(collective_trace, b"k", "abc", verified=False)
    before = collective_trace.digest_of(b"k")
    passed(collective_trace, b"k", "a", verified=True)
    assert collective_trace.digest_of(b"k") == before


@pytest.mark.parametrize("comes", [False, True])
def test_a_foreseen_pass_that_never_came_is_not_remembered(comes):
    """It is parted from before its forward. One that came, and was parted from at once, is: what it
    did counts."""
    collective_trace = CollectiveTrace()
    passed(collective_trace, b"k", "abc", verified=False)
    before = collective_trace.digest_of(b"k")
    collective_trace.begin(b"k", verified=True, predicted=True)
    assert not comes or collective_trace.enter(b"k")
    collective_trace.part(0)
    assert not collective_trace.enter(b"k")
    assert (collective_trace.digest_of(b"k") == before) is not comes


@pytest.mark.parametrize("size", [1, 2, CHILDREN + 1, CHILDREN + 2, 1000, 5000])
def test_every_rank_of_a_tree_has_one_parent_and_few_children(size):
    parents = {}
    for place in range(size):
        own, above = family_of(place, size)
        assert len(own) <= CHILDREN + 1 and (not above) == (place == 0)
        for child in own[1:]:
            assert parents.setdefault(child, place) == place and family_of(child, size)[1] == own
    assert sorted(parents) == list(range(1, size))
