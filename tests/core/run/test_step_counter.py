"""StepCounter: the steps and backwards that are counted, and what other ranks are told."""

from __future__ import annotations

import pytest

from infinity.core.run.step_counter import StepCounter


def test_a_new_counter_is_before_the_first_step():
    new = StepCounter()
    assert (new.index, new.backwards, new.untold) == (0, 0, -1)
    assert not new.begun and not new.streaming
    new.finish(1)
    assert new.index == new.done == 1


def test_a_streamed_step_is_begun_until_it_is_finished_and_streams_in_its_backward():
    steps = StepCounter(index=4)
    steps.stream()
    assert (steps.index, steps.begun, steps.streaming) == (5, True, True)
    steps.end_stream()
    assert (steps.index, steps.begun, steps.streaming) == (5, True, False)
    steps.finish(5)
    assert (steps.index, steps.begun, steps.streaming) == (5, False, False)


def test_a_lost_step_is_not_begun_any_more_but_its_number_is_used():
    steps = StepCounter(index=4)
    steps.stream()
    steps.give_up()
    assert (steps.index, steps.begun, steps.streaming) == (5, False, False)


def test_a_finished_step_resets_what_is_counted_since_and_is_told_to_the_ranks():
    """Finishing it again, in recovery, changes nothing. Twin: one that has begun is not told."""
    steps = StepCounter(index=4, backwards=3, forwards=3, done=4)
    steps.stream()
    assert steps.done == 4
    for _ in range(2):
        steps.finish(5)
        assert (steps.index, steps.backwards, steps.begun, steps.untold) == (5, 0, False, 5)
        assert (steps.done, steps.forwards) == (5, 0)


def test_a_finished_step_is_untold_until_it_is_reported_or_a_backward_follows():
    """The value that reports it is the caller's."""
    assert StepCounter().reported(3.5) == 3.5
    for after in (lambda steps: steps.reported(None), lambda steps: steps.count_backwards(1)):
        steps = StepCounter()
        steps.finish(7)
        assert steps.untold == 7
        after(steps)
        assert steps.untold == -1 and steps.index == 7


def test_the_number_of_backwards_is_set_and_forwards_are_counted_anew():
    steps = StepCounter(index=4)
    for count in (1, 2, 2):  # again, in recovery
        assert [steps.count_forward(), steps.count_forward()] == [1, 2]
        steps.count_backwards(count)
        assert (steps.index, steps.backwards, steps.forwards) == (4, count, 0)
        assert steps.done == 4


@pytest.mark.parametrize("backwards", [0, 2])
def test_forgetting_backwards_counts_forwards_anew_only_if_there_were_any(backwards):
    steps = StepCounter(index=4, backwards=backwards, forwards=1, untold=4)
    steps.forget_backwards()
    assert steps.backwards == 0 and steps.forwards == (0 if backwards else 1)
    assert steps.untold == (-1 if backwards else 4)


def test_training_resumes_after_the_steps_of_a_checkpoint_with_none_begun():
    steps = StepCounter(index=9)
    steps.stream()
    steps.end_stream()
    steps.resume(3)
    assert (steps.index, steps.begun) == (3, False)
    steps.stream()
    assert steps.index == 4
