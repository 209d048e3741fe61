"""Members: which group steps a parameter, and which groups cannot be stepped."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, Small, small_at_home

from infinity import UsageError
from infinity.core.grads.record import GradState
from infinity.core.step.members import Members


def members(job: AtHome) -> Members:
    return Members(parts_of(job).make_step_context())


def test_each_parameter_has_the_group_that_it_is_in():
    job = small_at_home()
    first, second, third, *_ = job.handles
    found = members(job)
    found.read([{"params": [second.param]}, {"params": []}, {"params": [third.param, first.param]}])
    assert found.group_index_of == {second: 0, third: 2, first: 2}


@pytest.mark.parametrize("how", ["in place", "another list", "another group"])
def test_a_change_of_the_groups_is_seen_at_the_next_read(how):
    """Twin: without a read nothing changes."""
    job = small_at_home()
    first, second, *_ = job.handles
    found, groups = members(job), [{"params": [first.param]}]
    found.read(groups)
    if how == "in place":
        groups[0]["params"][0] = second.param
    elif how == "another list":
        groups[0]["params"] = [first.param, second.param]
    else:
        groups.insert(0, {"params": [second.param]})
    assert found.group_index_of == {first: 0}
    found.read(groups)
    assert (
        found.group_index_of
        == {
            "in place": {second: 0},
            "another list": {first: 0, second: 0},
            "another group": {second: 0, first: 1},
        }[how]
    )


def test_a_parameter_that_moves_between_groups_moves():
    job = small_at_home()
    first, second, *_ = job.handles
    found = members(job)
    found.read([{"params": [first.param]}, {"params": [second.param]}])
    found.read([{"params": [second.param]}, {"params": [first.param]}])
    assert found.group_index_of == {second: 0, first: 1}


def refused(job: AtHome, groups: list[dict], message: str) -> None:
    """The groups are refused with that, and what was read before stands; then they are refused
    again."""
    found, first = members(job), job.handles[0]
    found.read([{"params": [first.param]}])
    for _ in range(2):
        with pytest.raises(UsageError, match=message):
            found.read(groups)
        assert found.group_index_of == {first: 0}


def test_a_parameter_in_two_groups_or_twice_in_one_is_refused():
    job = small_at_home()
    first, second, *_ = (handle.param for handle in job.handles)
    name = r"layers\.1\.weight"
    two = [{"params": [first, second]}, {"params": [second]}]
    refused(job, two, f"{name} is in the optimizer's groups 0 and 1")
    refused(job, [{"params": []}, {"params": [second, second]}], f"{name} is twice in .* group 1")


def test_a_tensor_that_is_not_at_home_with_this_optimizer_is_refused():
    """One of another job. Twins: the others of the group are taken, and a plain one is not the
    engine's to step."""
    job, other = small_at_home(), small_at_home()
    first = job.handles[0].param
    stranger = other.handles[0].param
    refused(
        job,
        [{"params": [first]}, {"params": [stranger]}],
        "group 1 has .* of another wrapped model",
    )
    found = members(job)
    found.read([{"params": [first, Small().layers[0].weight]}])
    assert list(found.group_index_of) == job.handles[:1]
    members(other).read([{"params": [other.handles[0].param]}])


def test_a_parameter_that_was_in_no_group_at_the_wrap_is_refused():
    job = small_at_home(make=lambda params: torch.optim.SGD(list(params)[:3], lr=1.0))
    frozen = job.handles[3].param
    refused(job, [{"params": [frozen]}], r"layers\.3\.weight.*add_param_group")


def test_gradients_of_the_last_step_are_told_and_opened_again():
    """Twins: before the step, after zero_grad(), and of parameters that are in no group."""
    job = small_at_home()
    first, second, *_ = job.handles
    found, others = members(job), members(job)
    found.read(job.optimizer.param_groups)
    others.read([{"params": [second.param]}])
    job.backward(RAMP)
    assert not found.are_consumed
    found.check_unconsumed()
    job.optimizer.step()
    assert found.are_consumed and not others.are_consumed
    with pytest.raises(UsageError, match=r"the gradient of layers\.0\.weight from the last step"):
        found.check_unconsumed()
    others.check_unconsumed()
    others.reopen_consumed()
    assert found.are_consumed
    found.reopen_consumed()
    assert not found.are_consumed and first.grad.state is GradState.LANDED
    first.grad.move(GradState.CONSUMED)
    job.optimizer.zero_grad()
    assert not found.are_consumed
    found.check_unconsumed()


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_consumed_gradient_counts_again_if_its_assigned_tensor_was_changed(is_changed):
    job, flat = small_at_home(), torch.ones(2, 4)
    job.handles[0].param.grad = flat
    found = members(job)
    found.read(job.optimizer.param_groups)
    job.optimizer.step()
    if is_changed:
        flat.fill_(2.0)
        found.check_unconsumed()
        assert not found.are_consumed
    else:
        with pytest.raises(UsageError, match="from the last step"):
            found.check_unconsumed()
