"""GradValues: gradients at home, read, changed and measured as torch would."""

from __future__ import annotations

import math

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, Elsewhere, small_at_home

from infinity import native
from infinity.core.grads.record import GradRecord, GradState
from infinity.core.grads.values import GradValues
from infinity.core.machine import accelerator

ROWS = torch.stack([RAMP, RAMP])


@pytest.fixture(params=["host", "nvme", "elsewhere"])
def job(request, monkeypatch, tmp_path) -> AtHome:
    """With the ramp and twice the ramp as gradients."""
    if request.param == "elsewhere":
        monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    job = small_at_home("nvme" if request.param == "nvme" else "host", tmp_path)
    job.backward(RAMP, 2 * RAMP)
    return job


def values(job: AtHome) -> GradValues:
    return parts_of(job).gradients.values


def is_elsewhere(job: AtHome) -> bool:
    return not parts_of(job).device.is_host


def read(job: AtHome, index: int = 0) -> torch.Tensor:
    return values(job).value(job.handles[index], write=False).clone()


def test_a_value_has_every_factor_and_is_the_home_where_that_can_be_computed_with(job):
    """Twin: of a home elsewhere it is a copy, and a change counts once it is put back."""
    first, second, *_ = job.handles
    first.grad.factors += [0.3, 0.7]
    assert torch.equal(read(job), ROWS * 0.3 * 0.7) and torch.equal(read(job, 1), ROWS * 2)
    value = values(job).value(first, write=True)
    value.fill_(5.0)
    assert values(job).lends_copies(first) == is_elsewhere(job)
    if is_elsewhere(job):
        assert torch.equal(read(job), ROWS * 0.3 * 0.7)
        values(job).put(first, value)
    assert read(job).tolist() == [[5.0] * 4] * 2 and first.grad.factors == []


def test_reading_what_a_step_has_consumed_changes_nothing(job):
    """Factors are applied to a copy, and stay. Twin: a landed one is multiplied at home."""
    first, second, *_ = job.handles
    for handle in (first, second):
        handle.grad.factors.append(0.5)
    first.grad.move(GradState.CONSUMED)
    for _ in range(2):
        assert torch.equal(read(job), ROWS * 0.5) and torch.equal(read(job, 1), ROWS)
    assert first.grad.factors == [0.5]
    assert torch.equal(parts_of(job).gradients.homes.view(first, write=False), ROWS)


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_a_norm_is_forgotten_when_its_gradient_is_lent_for_writing(home, tmp_path):
    """Or when factors are applied. Twin: a plain read keeps it."""
    job = small_at_home(home, tmp_path)
    job.backward(RAMP)
    record = job.handles[0].grad
    for write, factors, is_kept in ((False, [], True), (True, [], False), (False, [0.5], False)):
        record.norm, record.factors[:] = (2.0, torch.ones(())), factors
        values(job).value(job.handles[0], write=write)
        assert (record.norm is not None) == is_kept


def test_what_is_put_replaces_the_gradient_with_its_factors_and_norm(job):
    first, second, *_ = job.handles
    first.grad.factors.append(0.5)
    values(job).norm(first, 2.0)
    values(job).put(first, ROWS.t().contiguous().t() * 7)
    assert torch.equal(read(job), ROWS * 7) and first.grad.factors == []
    assert first.grad.norm is None and torch.equal(read(job, 1), ROWS * 2)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_a_norm_is_torchs_and_follows_every_change(job, order):
    """Twin: one that is still valid is not taken again: what the record has is told."""
    first = job.handles[0]
    expected = torch.linalg.vector_norm(ROWS, order)
    for _ in range(3):
        found = values(job).norm(first, order)
        assert torch.equal(found, expected)
        found.zero_()  # a copy
    values(job).scale(first, 0.3)
    assert torch.equal(values(job).norm(first, order), torch.linalg.vector_norm(ROWS * 0.3, order))
    first.grad.norm = (order, torch.tensor(9.0))
    assert values(job).norm(first, order) == 9
    assert values(job).norm(first, 3.0) != 9


def test_later_gradients_are_measured_as_they_land(job):
    """Twin: before anyone asks for a norm none is known."""
    assert job.handles[0].grad.norm is None
    values(job).norm(job.handles[0], 1.0)
    job.backward(RAMP)
    job.handles[0].grad.landing.precede()
    assert job.handles[0].grad.norm[0] == 1 and job.handles[0].grad.norm[1] == 40


def test_the_norm_of_several_gradients_counts_the_ones_that_are_meant(job):
    """Of each element once. Twins: others, absent ones and those of which another rank counts."""
    first, second, third, *_ = job.handles
    expected = torch.tensor(math.sqrt(60 + 240))
    among = [first, second, third]
    torch.testing.assert_close(values(job).total_norm(2.0, among=among), expected)
    assert values(job).total_norm(math.inf, among=among) == 8
    assert values(job).total_norm(1.0, among=[first]) == 20
    assert values(job).total_norm(2.0, among=[third]) == 0
    second.is_counted = False
    assert values(job).total_norm(math.inf, among=among) == 4
    assert values(job).counts(first) and not values(job).counts(second)


def test_a_change_of_this_ranks_elements_reaches_home(job):
    first = job.handles[0]
    first.grad.factors.append(0.5)
    values(job).change_own(first, lambda own: own.add_(1.0))
    assert torch.equal(read(job), ROWS * 0.5 + 1) and first.grad.factors == []
    values(job).norm(first, 2.0)
    values(job).change_own(first, lambda own: own.add_(1.0))
    assert torch.equal(read(job), ROWS * 0.5 + 2)
    assert first.grad.norm is None and torch.equal(read(job, 1), ROWS * 2)


def test_zeros_are_a_gradient_that_the_next_step_applies(job):
    """Of a torn one, a consumed one and one with factors."""
    first, second, *_ = job.handles
    shown = first.param.grad
    first.grad = GradRecord(GradState.TORN, proxy=shown, shown=shown)
    second.grad.factors.append(math.nan)
    second.grad.move(GradState.CONSUMED)
    second.grad.averaged = True
    for index, handle in enumerate((first, second)):
        values(job).zero(handle)
        assert read(job, index).tolist() == [[0.0] * 4] * 2
        assert handle.grad.state is GradState.LANDED and not handle.grad.averaged
        assert handle.grad.norm[0] == math.inf and handle.grad.norm[1] == 0
    assert first.param.grad is shown


def test_factors_wait_for_the_step_as_many_as_a_kernel_takes(job):
    """The next one is applied with them at home. Twin: one is no factor."""
    first = job.handles[0]
    values(job).norm(first, 2.0)
    values(job).scale(first, 1.0)
    assert first.grad.factors == [] and first.grad.norm is not None
    for _ in range(native.MAX_GRAD_FACTORS):
        values(job).scale(first, 0.5)
    assert first.grad.factors == [0.5] * native.MAX_GRAD_FACTORS and first.grad.norm is None
    values(job).scale(first, 0.25)
    assert first.grad.factors == [0.25]
    assert torch.equal(read(job), ROWS * 0.5**native.MAX_GRAD_FACTORS * 0.25)


def test_the_number_of_a_tensor_is_read_again_only_if_it_has_changed():
    """Method: a factor whose bytes change behind torch's back keeps its number. Twins: torch counts
    a change, and another tensor is another number."""
    known, factor = values(small_at_home()), torch.tensor(2.0)
    behind = factor.numpy()
    assert known.number(factor) == 2
    behind[...] = 3.0
    assert known.number(factor) == 2
    factor.mul_(2)
    assert known.number(factor) == 6
    assert known.number(torch.tensor(5.0)) == 5 and known.number(factor) == 6


def test_a_change_is_noted_for_other_ranks_only_if_there_are_some():
    job = small_at_home()
    job.backward(RAMP)
    values(job).note_edit(job.handles[0], 0.5)
    assert job.handles[0].grad.edits == 0 == job.handles[0].grad.own_edits
