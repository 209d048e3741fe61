"""GradChanges: which gradients an exception tears, and factors that are applied late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.core.grads.changes import GradChanges, multiply
from infinity.core.grads.record import GradRecord, GradState


class Handle(SimpleNamespace):
    __hash__, __eq__ = object.__hash__, object.__eq__


def handle_in(state: GradState = GradState.LANDED, factors: tuple[float, ...] = ()) -> Handle:
    return Handle(grad=GradRecord(state, list(factors)))


def unchangeable() -> torch.Tensor:
    """One that torch refuses to multiply in place."""
    return torch.ones(3, requires_grad=True)


def test_factors_are_applied_one_after_the_other_with_a_rounding_each():
    """Twin: their product rounds otherwise."""
    values = torch.linspace(0.1, 3, 500)
    expected = values * 0.1 * 0.7 * 1.3
    grad = values.clone()
    assert multiply(grad, [0.1, 0.7, 1.3]) is grad and torch.equal(grad, expected)
    assert not torch.equal(values * (0.1 * 0.7 * 1.3), expected)


def test_an_exception_tears_the_gradients_that_were_changing_and_no_other():
    changes, begun, other = GradChanges(), handle_in(), handle_in()
    changes.begin(begun)
    changes.tear()
    assert begun.grad.state is GradState.TORN and other.grad.state is GradState.LANDED


@pytest.mark.parametrize("state", GradState, ids=lambda state: state.name)
def test_a_torn_gradient_begins_a_new_record_unless_a_step_has_consumed_it(state):
    """The values of a consumed one are applied: nothing of it is missing."""
    changes, handle = GradChanges(), handle_in(state, (0.5,))
    before = handle.grad
    changes.begin(handle)
    changes.tear()
    if state is GradState.CONSUMED:
        assert handle.grad is before and before.factors == [0.5]
    else:
        assert handle.grad.state is GradState.TORN and handle.grad.factors == []


def test_changes_that_have_ended_are_not_torn():
    changes, handle = GradChanges(), handle_in()
    assert not changes.are_open
    changes.begin(handle)
    assert changes.are_open
    changes.end()
    assert not changes.are_open
    changes.tear()
    assert handle.grad.state is GradState.LANDED


def test_a_tear_ends_the_changes():
    """What has come since is not torn by the next one."""
    changes, handle = GradChanges(), handle_in()
    changes.begin(handle)
    changes.tear()
    assert not changes.are_open
    handle.grad = GradRecord(GradState.LANDED)
    changes.tear()
    assert handle.grad.state is GradState.LANDED


def test_pending_factors_are_applied_once():
    changes, handle, home = GradChanges(), handle_in(factors=(0.5, 3.0)), torch.ones(2)
    for _ in range(2):
        changes.apply_factors(handle, home)
        assert home.tolist() == [1.5, 1.5]
    assert handle.grad.factors == [] and not changes.are_open


def test_without_factors_nothing_is_touched():
    changes, handle = GradChanges(), handle_in()
    changes.apply_factors(handle, [unchangeable()])
    assert not changes.are_open


def test_a_multiplication_in_a_backward_leaves_the_backwards_mark():
    """Twin: outside of one nothing stays marked (``pending_factors_are_applied_once``)."""
    changes, handle = GradChanges(), handle_in(factors=(0.5,))
    changes.begin(handle)
    changes.apply_factors(handle, torch.ones(2))
    assert changes.are_open
    changes.tear()
    assert handle.grad.state is GradState.TORN


def test_a_multiplication_that_fails_leaves_the_gradient_to_be_torn():
    changes, handle = GradChanges(), handle_in(factors=(0.5,))
    with pytest.raises(RuntimeError, match="in-place"):
        changes.apply_factors(handle, [unchangeable()])
    assert changes.are_open
    changes.tear()
    assert handle.grad.state is GradState.TORN
