"""The schedule predicts what a repeated pass uses next, survives every change of order, and never
makes units up."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.run.schedule import RESYNC_DISTANCE, Schedule

TRACES = st.lists(st.integers(0, 12), max_size=60)


def run(schedule: Schedule, trace: list[int], kind: str = "train") -> None:
    schedule.begin(kind)
    for unit in trace:
        schedule.use(unit)


def upcoming(schedule: Schedule, *, backward: bool = False) -> list[int]:
    return list(schedule.upcoming(backward=backward))


def without_repeats(trace: list[int]) -> list[int]:
    """Consecutive uses of one unit are one use."""
    return [unit for unit, _ in groupby(trace)]


def each_once(trace: list[int], skip: int | None = None) -> list[int]:
    return [unit for unit in dict.fromkeys(trace) if unit != skip]


# --- the same pass again ---


@settings(derandomize=True, deadline=None)
@given(TRACES)
def test_a_repeated_pass_is_predicted_at_every_place(trace):
    """Runs any trace twice: at each use of the second pass, what comes next is the rest of it, each
    unit once."""
    schedule = Schedule()
    run(schedule, trace)
    schedule.begin("train")
    trace = without_repeats(trace)
    assert upcoming(schedule) == each_once(trace)
    for place, unit in enumerate(trace):
        schedule.use(unit)
        schedule.use(unit)  # again in a row is the same use
        assert upcoming(schedule) == each_once(trace[place + 1 :], skip=unit)


@pytest.mark.parametrize("rooted", [False, True])
def test_a_step_ends_the_pass_of_a_model_whose_own_forward_is_never_called(rooted):
    """As of an nn.ModuleDict: what the next pass uses is predicted, and uses do not pile up; asking
    for the first units ends nothing. Twin: root forwards, which end a pass themselves."""
    schedule = Schedule()
    if rooted:
        schedule.begin("train")
    for _ in range(3):
        for unit in (1, 2, 1):
            schedule.use(unit)
        assert list(schedule.first()) == list(schedule.first()) == [1, 2]
        schedule.end_step()
        assert list(schedule.first()) == [1, 2]
        assert upcoming(schedule) == ([] if rooted else [1, 2])
    schedule.use(1)
    assert upcoming(schedule) == ([] if rooted else [2])


def test_an_evaluation_by_the_root_does_not_end_that_for_good():
    """Twin: the step of a training forward of the root keeps its own kind."""
    schedule = Schedule()
    schedule.begin("infer")
    for _ in range(3):
        run_by_hand(schedule)
    assert upcoming(schedule) == [1, 2]
    schedule.begin("train")
    run_by_hand(schedule)
    assert upcoming(schedule) == []


def run_by_hand(schedule: Schedule) -> None:
    for unit in (1, 2):
        schedule.use(unit)
    schedule.end_step()


def test_a_unit_is_known_by_its_number():
    """Large numbers, of which Python has an object for each time: used again in a row it is one use
    all the same."""
    schedule = Schedule()
    run(schedule, [int("1000"), int("1000"), 1001])
    schedule.begin("train")
    assert schedule.expected() == [1000, 1001]


def test_the_first_forward_predicts_nothing():
    """Nothing was recorded yet: whatever it said would be made up."""
    schedule = Schedule()
    assert upcoming(schedule) == upcoming(schedule, backward=True) == list(schedule.first()) == []
    run(schedule, [0, 1, 2])
    assert upcoming(schedule) == []


def test_the_first_backward_is_the_forward_reversed():
    """Asks in the middle of the first pass, as backward begins, and once more after its first
    unit."""
    schedule = Schedule()
    run(schedule, [0, 1, 2, 3])
    assert upcoming(schedule, backward=True) == [2, 1, 0]
    schedule.use(2)
    assert upcoming(schedule, backward=True) == [3, 1, 0]
    schedule.begin("train")  # from the second pass on, the record says it
    for unit in (0, 1, 2, 3):
        schedule.use(unit)
    assert upcoming(schedule, backward=True) == [2]


def test_kinds_of_passes_have_traces_of_their_own():
    """Evaluates between two training passes, the other way round: neither disturbs the other."""
    schedule = Schedule()
    run(schedule, [0, 1, 2, 1, 0])
    run(schedule, [2, 1, 0], kind="infer")
    schedule.begin("train")
    assert upcoming(schedule) == [0, 1, 2]
    run(schedule, [0, 1, 2, 1, 0])
    schedule.begin("infer")
    assert upcoming(schedule) == [2, 1, 0]
    schedule.begin("train")
    schedule.use(0)
    assert upcoming(schedule) == [1, 2]


def test_a_step_knows_what_the_next_pass_begins_with():
    """Asks for the first units at the end of a training pass, within an evaluation, and before
    anything ran."""
    schedule = Schedule()
    assert list(schedule.first()) == []
    run(schedule, [3, 1, 2, 1, 3])
    assert list(schedule.first()) == [3, 1, 2]
    run(schedule, [9, 8], kind="infer")
    assert list(schedule.first()) == [3, 1, 2]
    run(schedule, [4, 5])
    assert list(schedule.first()) == [4, 5]


# --- another pass ---


def test_a_skipped_unit_costs_only_itself():
    """Leaves unit 4 out of ten: from the next unit on the prediction is right again."""
    schedule = Schedule()
    run(schedule, list(range(10)))
    run(schedule, [0, 1, 2, 3])
    assert upcoming(schedule)[0] == 4
    schedule.use(5)
    assert upcoming(schedule) == [6, 7, 8, 9]


def test_an_unknown_unit_keeps_the_place():
    """Uses a unit that was never seen in the middle of a known pass."""
    schedule = Schedule()
    run(schedule, list(range(6)))
    run(schedule, [0, 1, 77])
    assert upcoming(schedule) == [2, 3, 4, 5]
    schedule.use(2)
    assert upcoming(schedule) == [3, 4, 5]


def test_a_changed_pass_is_the_next_ones_trace():
    """Runs forwards, then backwards twice: the second time backwards is predicted in full."""
    schedule = Schedule()
    run(schedule, [0, 1, 2, 3])
    run(schedule, [3, 2, 1, 0])
    schedule.begin("train")
    assert upcoming(schedule) == [3, 2, 1, 0]


@pytest.mark.parametrize("distance, found", [(RESYNC_DISTANCE - 1, True), (RESYNC_DISTANCE, False)])
def test_a_place_is_looked_for_within_its_distance(distance, found):
    """Jumps ahead in a long pass, by as much as is looked at and by one more."""
    schedule = Schedule()
    run(schedule, list(range(200)))
    schedule.begin("train")
    schedule.use(distance)
    expected = distance + 1 if found else 0
    assert upcoming(schedule)[0] == expected


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["train", "infer"]), TRACES), max_size=6))
def test_any_sequence_of_passes_is_survived_and_re_recorded(passes):
    """Runs anything after anything: predictions name units that were used, each once, never the one
    in use; then one pass run twice is predicted in full, whatever came before."""
    schedule, known = Schedule(), set()
    for kind, trace in passes:
        schedule.begin(kind)
        for unit in trace:
            schedule.use(unit)
            known.add(unit)
            for backward in (False, True):
                found = upcoming(schedule, backward=backward)
                assert len(found) == len(set(found))
                assert set(found) <= known - {unit}
        first = list(schedule.first())
        assert len(first) == len(set(first)) and set(first) <= known
    for _ in range(2):
        run(schedule, [5, 6, 7, 6, 5])
    schedule.begin("train")
    assert upcoming(schedule) == [5, 6, 7]


@settings(derandomize=True, deadline=None)
@given(TRACES, TRACES)
def test_prediction_depends_on_the_last_pass_alone(old, last):
    """Two schedules with different pasts and the same last pass say the same (when there was
    one)."""
    if not last:
        return
    fresh, used = Schedule(), Schedule()
    run(used, old)
    for schedule in (fresh, used):
        run(schedule, last)
        schedule.begin("train")
    assert upcoming(fresh) == upcoming(used)


def test_a_pass_that_used_nothing_forgets_nothing():
    """A forward that fails before its first unit leaves the record of the pass before."""
    schedule = Schedule()
    run(schedule, [0, 1, 2])
    run(schedule, [])
    assert list(schedule.first()) == [0, 1, 2]
    schedule.begin("train")
    assert upcoming(schedule) == [0, 1, 2]
