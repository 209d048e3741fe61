"""BorrowedState: the tensors of optimizer state that users hold, and the state at home."""

from __future__ import annotations

import gc

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, small_at_home

from infinity import UsageError
from infinity.core.params.borrowed_state import STEP, BorrowedState, checked_step

NAMES = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def job() -> AtHome:
    """After a step of the first two parameters, which have state."""
    job = small_at_home(make=lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.5, 0.75)))
    job.backward(RAMP, 2 * RAMP)
    job.optimizer.step()
    return job


def borrowed(job: AtHome) -> BorrowedState:
    return parts_of(job).borrowed


def kept(job: AtHome, index: int = 0, name: str = "exp_avg") -> list:
    """What is at home."""
    handle = job.handles[index]
    return handle.flat_param.read_moment(parts_of(job).store, name, handle.index).tolist()


def rows(value: float | torch.Tensor) -> list:
    return (torch.zeros(2, 4) + value).tolist()


def test_what_is_read_is_the_state_at_home_and_the_same_tensor_while_it_is_held(job):
    """Twin: another parameter's is another tensor."""
    first, second, *_ = job.handles
    tensor = borrowed(job).read(first, "exp_avg")
    assert tensor.tolist() == rows(RAMP / 2) == kept(job)
    assert borrowed(job).read(first, "exp_avg") is tensor
    assert borrowed(job).read(second, "exp_avg").tolist() == rows(RAMP)
    assert borrowed(job).read(first, "exp_avg_sq").tolist() == rows(RAMP.square() / 4)
    assert borrowed(job).read(first, STEP).equal(torch.tensor(1.0))


WRITES = {
    "the tensor": lambda tensor: tensor.fill_(3.0),
    "a view": lambda tensor: tensor.view(-1)[:8].fill_(3.0),
    "NumPy": lambda tensor: tensor.numpy().fill(3.0),
    "other memory": lambda tensor: tensor.set_(torch.full((2, 4), 3.0)),
    "data": lambda tensor: setattr(tensor, "data", torch.full((2, 4), 3.0)),
}


@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_to_it_is_at_home_once_it_is_settled(job, how):
    """Twins: not before, and no other value."""
    tensor = borrowed(job).read(job.handles[0], "exp_avg")
    WRITES[how](tensor)
    assert kept(job) == rows(RAMP / 2)
    for _ in range(2):
        parts_of(job).lents.settle_followers()
        assert borrowed(job).stamp(job.handles[0], "exp_avg") == (1, 0, 1)  # written once
    assert kept(job) == rows(3.0)
    assert kept(job, 1) == rows(RAMP) and kept(job, 0, "exp_avg_sq") == rows(RAMP.square() / 4)


def test_a_tensor_that_was_changed_and_dropped_counts_and_its_views_count_on(job):
    """So does one that was given other memory."""
    view = borrowed(job).read(job.handles[0], "exp_avg").view(-1)
    gc.collect()
    view.fill_(3.0)
    parts_of(job).lents.settle_followers()
    assert kept(job) == rows(3.0)
    view.fill_(4.0)
    parts_of(job).lents.settle_followers()
    assert kept(job) == rows(4.0)
    assert borrowed(job).read(job.handles[0], "exp_avg").data_ptr() == view.data_ptr()
    borrowed(job).read(job.handles[1], "exp_avg").set_(torch.full((2, 4), 5.0))
    gc.collect()
    parts_of(job).lents.settle_followers()
    assert kept(job, 1) == rows(5.0)


def test_after_a_step_what_is_held_has_the_new_state(job):
    tensor, count = (borrowed(job).read(job.handles[0], name) for name in ("exp_avg", STEP))
    job.optimizer.zero_grad()
    job.backward(2 * RAMP)
    job.optimizer.step()
    assert tensor.tolist() == rows(RAMP / 4 + RAMP) == kept(job) and count == 2
    parts_of(job).lents.settle_followers()
    assert borrowed(job).edits == [] and borrowed(job).read(job.handles[0], "exp_avg") is tensor


def test_a_write_of_a_count_and_values_is_at_home(job):
    first, second, third, *_ = job.handles
    for handle in (first, third):
        borrowed(job).write(handle, {"exp_avg": torch.full((2, 4), 6.0), STEP: torch.tensor(9.0)})
        assert handle.step == 9 and not handle.keeps_moments
    assert kept(job) == kept(job, 2) == rows(6.0) and second.step == 1
    borrowed(job).write(first, {STEP: torch.tensor(0.0)})
    assert first.step == 0 and first.keeps_moments and first.has_state
    called = []
    borrowed(job).write(first, {STEP: torch.tensor(2.0)}, lambda: called.append(first.step))
    assert called == [2]


def test_a_restart_leaves_the_user_what_was_held(job):
    """Twin: the other parameter's state stays, and its tensors are watched on."""
    first, second, *_ = job.handles
    own, other = borrowed(job).read(first, "exp_avg"), borrowed(job).read(second, "exp_avg")
    borrowed(job).restart(first, list(NAMES))
    assert not first.has_state and kept(job) == rows(0.0) == kept(job, 0, "exp_avg_sq")
    assert own.tolist() == rows(RAMP / 2) and second.step == 1
    own.fill_(3.0)
    other.fill_(3.0)
    parts_of(job).lents.settle_followers()
    assert kept(job) == rows(0.0) and kept(job, 1) == rows(3.0)


def test_one_tensor_for_two_values_is_refused_until_one_is_a_copy(job):
    shared = torch.ones(2, 4)
    for handle in job.handles[:2]:
        borrowed(job).lend(handle, "exp_avg", shared)
    with pytest.raises(UsageError, match=r"exp_avg of layers\.0\.weight and exp_avg of layers\.1"):
        parts_of(job).lents.settle_followers()
    borrowed(job).lend(job.handles[1], "exp_avg", shared.clone())
    parts_of(job).lents.settle_followers()


def test_another_shape_is_refused_once_and_the_state_stands(job):
    tensor = borrowed(job).read(job.handles[0], "exp_avg")
    tensor.data = torch.ones(3)
    with pytest.raises(UsageError, match=r"was given the shape \(3,\), not \(2, 4\)"):
        parts_of(job).lents.settle_followers()
    assert kept(job) == rows(RAMP / 2)
    parts_of(job).lents.settle_followers()


def test_writes_inside_a_step_in_backward_are_refused(job):
    parts_of(job).steps.streaming = True
    with pytest.raises(UsageError, match=r"layers\.0\.weight inside `with optimizer\.step_in_back"):
        borrowed(job).write(job.handles[0], {STEP: torch.tensor(4.0)})
    parts_of(job).steps.streaming = False
    assert job.handles[0].step == 1 and borrowed(job).edits == []


def test_the_digests_tell_writes_apart_until_they_are_forgotten(job):
    """By value, key and parameter. Twin: the same writes have the same digests, in any order."""
    first, second, *_ = job.handles

    def digests(*writes: tuple) -> list[bytes]:
        borrowed(job).forget_edits()
        for handle, name, value in writes:
            value = torch.tensor(value) if name == STEP else torch.full((2, 4), value)
            borrowed(job).write(handle, {name: value})
        return borrowed(job).edits

    one, two = (first, "exp_avg", 1.0), (second, "exp_avg", 2.0)
    assert digests() == [] and borrowed(job).edits_of(first) is None
    assert digests(one, two) == digests(two, one) and len(borrowed(job).edits) == 2
    assert borrowed(job).own_edits == [] and borrowed(job).edits_of(first) != borrowed(
        job
    ).edits_of(second)
    others = [(first, "exp_avg", 2.0), (first, "exp_avg_sq", 1.0), (first, STEP, 1.0)]
    told = [digests(one), digests(one, one), *map(digests, others)]
    assert len({tuple(each) for each in told}) == 5
    assert digests() == []


def test_changes_outside_of_steps_are_counted_for_each_value(job):
    first, second, *_ = job.handles
    before = borrowed(job).stamp(second, "exp_avg")
    borrowed(job).write(first, {"exp_avg": torch.ones(2, 4)})
    assert borrowed(job).stamp(second, "exp_avg") == before
    tensor = borrowed(job).read(second, "exp_avg")
    borrowed(job).forget()
    assert borrowed(job).stamp(second, "exp_avg") != before
    tensor.fill_(3.0)  # the user's own
    parts_of(job).lents.settle_followers()
    assert kept(job, 1) == rows(RAMP)


def test_what_was_written_home_elsewhere_is_followed_and_is_no_change(job):
    """By a tensor of a state dict, which is current afterwards as well."""
    tensor = borrowed(job).read(job.handles[0], "exp_avg")
    state = job.optimizer.state_dict()["state"]
    for index in range(2):
        state[index]["exp_avg"].fill_(7.0)
    parts_of(job).lents.settle_all()
    assert tensor.tolist() == rows(7.0) == kept(job) == kept(job, 1)
    written = borrowed(job).stamp(job.handles[0], "exp_avg")
    parts_of(job).lents.settle_all()
    assert borrowed(job).stamp(job.handles[0], "exp_avg") == written


def test_a_count_is_a_whole_number_that_a_kernel_takes():
    assert checked_step(torch.tensor(3), "a") == 3 and checked_step(2**31 - 1, "a") == 2**31 - 1
    for wrong in (-1, 0.5, 2**31, float("inf")):
        with pytest.raises(UsageError, match="step of a is"):
            checked_step(wrong, "a")
