"""StepContext: what an optimizer has of its job, and what it calls."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from small import small_at_home

from infinity.core.step.context import StepContext

OWN = {"optimizer_index"}  # of one among several optimizers
CALLED = {
    "is_only",
    "in_use",
    "is_cut_short",
    "stages_differ",
    "release",
    "end_step",
    "admit",
}


def test_a_context_has_exactly_the_objects_of_its_job():
    """Beside them it has functions. Twin: the context of another job has others."""
    job, other = (small_at_home().engine for _ in range(2))
    made, of_other = job.make_step_context(), other.make_step_context()
    names = {field.name for field in dataclasses.fields(StepContext)}
    assert names - CALLED - OWN == names & {field.name for field in dataclasses.fields(job.job)}
    assert made.trained == job.job.trained and made.optimizer_index == 0 and made.is_only()
    for name in names - CALLED - OWN:
        assert getattr(made, name) is getattr(job.job, name) is not getattr(of_other, name)
    assert CALLED < names and all(callable(getattr(made, name)) for name in CALLED)


def test_a_context_is_fixed_and_equals_only_itself():
    """Two contexts of one job differ. Twin: the objects in it may change."""
    job = small_at_home().engine
    made, again = job.make_step_context(), job.make_step_context()
    assert made != again and made == made and len({made, again}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.steps = SimpleNamespace(index=3)
    made.steps.index = 3
    assert again.steps.index == 3 == job.steps.index


def test_no_part_of_a_context_may_be_left_out():
    """Twin: with all of them it is made."""
    job = small_at_home().engine
    made = job.make_step_context()
    parts = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    assert isinstance(StepContext(**parts), StepContext)
    for name in parts:
        with pytest.raises(TypeError, match=name):
            StepContext(**{other: part for other, part in parts.items() if other != name})
