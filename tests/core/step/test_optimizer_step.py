"""OptimizerStep: all units at once, or each one in the backward, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, small_at_home

from infinity import UsageError, native
from infinity.core.grads.record import GradRecord, GradState
from infinity.core.step.known import KNOWN
from infinity.core.step.members import Members
from infinity.core.step.optimizer_step import OptimizerStep
from infinity.core.step.stepper import Stepper

GIVEN = RAMP.clone().requires_grad_()  # so that the backward leaves the units


def step_of(job: AtHome) -> OptimizerStep:
    context = parts_of(job).make_step_context()
    members = Members(context)
    members.read(job.optimizer.param_groups)
    return OptimizerStep(
        context, KNOWN[native.Rule.SGD], members, job.optimizer.wrapped, job.optimizer.state
    )


def weights(job: AtHome) -> list[list]:
    """The first rows of the first three weights."""
    found = job.model.state_dict().values()
    return [weight[0].tolist() for weight in list(found)[:3]]


def less(*grads: torch.Tensor | float) -> list[list]:
    """Ones less these gradients."""
    return [(torch.ones(4) - grad).tolist() for grad in grads]


@pytest.mark.parametrize("clip", [1.0, 0.5])
def test_a_step_takes_the_clipped_gradients_off_and_leaves_them_as_they_were(clip):
    """Of all groups. Twin: a parameter without a gradient keeps its value."""
    job = small_at_home()
    job.backward(RAMP, 2 * RAMP)
    step = step_of(job)
    step.prepare()
    step.make(job.optimizer.param_groups, clip)
    first, second, third, *_ = job.handles
    assert first.param.grad.tolist() == [RAMP.tolist()] * 2
    assert first.grad.state is second.grad.state is GradState.CONSUMED
    assert third.grad.state is GradState.ABSENT
    assert [handle.step for handle in (first, second, third)] == [1, 1, 0]
    assert weights(job) == less(RAMP * clip, 2 * RAMP * clip, 0.0)


def test_a_step_is_counted_and_closes_the_books_on_what_it_has_applied():
    job = small_at_home(make=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5))
    job.backward(RAMP)
    parts_of(job).gradients.clips.append(0.5)
    held = torch.ones(2, 4)
    job.optimizer.state[job.handles[0].param]["momentum_buffer"] = held
    assert parts_of(job).borrowed.edits != []
    step, steps = step_of(job), parts_of(job).steps
    assert (steps.index, steps.backwards) == (0, 1)
    step.make(job.optimizer.param_groups, 1.0)
    assert (steps.index, steps.backwards, steps.begun, steps.untold) == (1, 0, False, 1)
    assert parts_of(job).gradients.clips == [] == parts_of(job).borrowed.edits
    assert parts_of(job).updates.clock.steps == 1
    assert held.tolist() == [(RAMP + 0.5).tolist()] * 2  # what is held has the new state
    job.optimizer.zero_grad()
    job.backward(RAMP)
    step.make(job.optimizer.param_groups, 1.0)
    assert steps.index == 2 and job.handles[0].step == 3


def test_the_groups_of_the_call_are_stepped_by():
    """Users may replace them after the wrap."""
    job = small_at_home()
    job.backward(RAMP)
    groups = [job.optimizer.param_groups[0] | {"lr": 0.25}]
    step_of(job).make(groups, 1.0)
    assert weights(job)[0] == less(RAMP / 4)[0]


def test_each_unit_is_planned_once_in_the_order_of_the_next_forward(monkeypatch):
    """Then those that it did not use. Method: what the stepper is asked to plan."""
    job, planned = small_at_home(), []
    job.model.layers[3](RAMP).sum().backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.backward(RAMP, RAMP)
    monkeypatch.setattr(
        Stepper, "plan", lambda self, unit, *more: (planned.append(unit.index), [])[1]
    )
    step_of(job).make(job.optimizer.param_groups, 1.0)
    first = [index for index in parts_of(job).schedule.first() if index < len(parts_of(job).units)]
    assert sorted(planned) == [unit.index for unit in parts_of(job).units]
    assert 0 < len(first) < len(planned) and planned[: len(first)] == first


def test_gradients_are_averaged_before_a_step_and_each_step_begins_once():
    """Twin: the rest of a step that has begun does not begin again."""
    job, averages, begun = small_at_home(), [], []
    job.backward(RAMP)
    averager = SimpleNamespace(average=lambda **_: averages.append(True))
    parts_of(job).gradients.reduce_with(None, averager.average)
    parts_of(job).updates.begin_step = lambda units: begun.append(parts_of(job).steps.index)
    step = step_of(job)
    step.prepare()
    assert averages == [True]
    step.make(job.optimizer.param_groups, 1.0)
    assert begun == [0] and parts_of(job).steps.index == 1
    parts_of(job).steps.begun = True
    step.make(job.optimizer.param_groups, 1.0)
    assert begun == [0] and parts_of(job).steps.index == 1


def test_a_torn_gradient_is_refused_and_a_consumed_one_is_stepped_again():
    """Twin: not if the step has begun, for it is that step's own."""
    job = small_at_home()
    job.backward(RAMP)
    step, handle = step_of(job), job.handles[0]
    step.prepare()
    handle.grad.move(GradState.CONSUMED)
    step.prepare()
    assert handle.grad.state is GradState.LANDED
    handle.grad.move(GradState.CONSUMED)
    parts_of(job).steps.begun = True
    step.prepare()
    assert handle.grad.state is GradState.CONSUMED
    handle.grad = GradRecord(GradState.TORN)
    with pytest.raises(UsageError, match=r"layers\.0\.weight is half done"):
        step.prepare()


def test_units_are_stepped_in_the_backward_and_the_step_does_the_rest():
    """The second unit has a frozen parameter, which the backward may still need."""
    job = small_at_home(bias=True)
    job.handles[3].param.requires_grad_(False)
    with job.optimizer.step_in_backward():
        job.backward(GIVEN, GIVEN)
        first, _, second, _, *_ = job.handles
        assert first.grad.state is GradState.CONSUMED and first.step == 1
        assert second.grad.state is GradState.LANDED and second.step == 0
        assert parts_of(job).steps.streaming and parts_of(job).steps.index == 1
    assert not parts_of(job).steps.streaming and parts_of(job).steps.begun
    job.optimizer.step()
    assert first.step == second.step == 1 and parts_of(job).steps.index == 1
    assert not parts_of(job).steps.begun
    found = job.model.state_dict()
    for number in (0, 1):
        assert found[f"layers.{number}.weight"][0].tolist() == less(RAMP)[0]
    assert (
        found["layers.1.bias"].tolist() == [1.0] * 2
        and found["layers.0.bias"].tolist() == [0.0] * 2
    )


def test_without_the_block_a_backward_steps_nothing():
    job = small_at_home()
    job.backward(GIVEN, GIVEN)
    assert weights(job) == less(0.0, 0.0, 0.0) and parts_of(job).steps.index == 0


def test_a_bound_of_the_norm_cannot_be_kept_in_the_backward():
    """Twin: without one nothing is refused."""
    step_of(small_at_home()).check_stream()
    with pytest.raises(UsageError, match="max_grad_norm needs the norm of all gradients"):
        step_of(small_at_home(max_grad_norm=1.0)).check_stream()


def test_a_stream_is_not_begun_with_gradients_that_a_step_has_consumed():
    """And the step is not counted. Twin: after zero_grad() it is."""
    job = small_at_home()
    job.backward(RAMP)
    step = step_of(job)
    step.make(job.optimizer.param_groups, 1.0)
    with pytest.raises(UsageError, match="gradient of layers.0.weight from the last"):
        step.begin_stream()
    assert parts_of(job).steps.index == 1 and not parts_of(job).steps.streaming
    job.optimizer.zero_grad()
    step.begin_stream()
    assert parts_of(job).steps.index == 2 and parts_of(job).steps.streaming


@pytest.mark.parametrize("is_open", [True, False])
def test_a_stream_whose_backward_failed_inside_it_is_recovered_by_the_next_use(is_open):
    """Twin: a whole one ends."""
    job = small_at_home()
    step = step_of(job)
    step.begin_stream()
    if is_open:
        parts_of(job).gradients.changes.begin(job.handles[0])
    step.end_stream()
    assert parts_of(job).scopes.interrupted == is_open == parts_of(job).steps.streaming
