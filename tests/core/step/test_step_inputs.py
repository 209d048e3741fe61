"""StepInputs: what ranks compare before they step, and what each difference is called."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, small_at_home

from infinity import UsageError
from infinity.core.grads.record import GradState
from infinity.core.step.members import Members
from infinity.core.step.step_inputs import StepInputs, settings_of


def inputs(job: AtHome, clip: float = 1.0, without: int = 6, **context) -> StepInputs:
    """Those of a step now. ``without``: the number of a parameter that is in no group."""
    made = replace(parts_of(job).make_step_context(), **context)
    members = Members(made)
    members.read(job.optimizer.param_groups)
    numbered = enumerate(job.handles)
    group_index_of = {
        handle: members.group_index_of[handle] for number, handle in numbered if number != without
    }
    return StepInputs(made, job.optimizer.param_groups, group_index_of, clip)


def landed(**changes) -> AtHome:
    job = small_at_home(make=lambda params: torch.optim.AdamW(params, lr=0.25), **changes)
    job.backward(RAMP, RAMP)
    return job


def test_settings_are_numbers_and_text_whatever_they_are_kept_in():
    """Twin: parameters are no settings, and of other objects the type counts."""
    group = {"params": [torch.ones(2)], "param_names": ["a"], "lr": torch.tensor(0.5), "eps": 1e-8}
    group |= {"betas": (0.9, torch.tensor(0.75)), "maximize": False, "foreach": None}
    group |= {"name": "decay", "object": object(), "table": torch.ones(2)}
    assert settings_of([group, {"params": []}]) == [
        {"lr": 0.5, "eps": 1e-8, "betas": [0.9, 0.75], "maximize": False, "foreach": None}
        | {"name": "decay", "object": "object", "table": "Tensor"},
        {},
    ]


CHANGES = {
    "hyperparameter": lambda job: job.optimizer.param_groups[0].update(weight_decay=0.5),
    "step count": lambda job: setattr(job.handles[1], "step", 5),
    "gradient": lambda job: setattr(job.handles[1].param, "grad", None),
    "edit": lambda job: job.handles[1].grad.note_edit(0.5, is_own=False),
    "state": lambda job: parts_of(job).borrowed.write(
        job.handles[1], {"exp_avg": torch.ones(2, 4)}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_ranks_with_equal_inputs_say_the_same_and_a_difference_shows(change):
    one, other = landed(), landed()
    assert inputs(one).common == inputs(other).common
    CHANGES[change](other)
    assert inputs(one).common != inputs(other).common
    assert inputs(other).own == ""


def test_the_clipping_and_the_groups_members_show_too():
    job = landed()
    told = [inputs(job).common, inputs(job, clip=0.5).common, inputs(job, without=1).common]
    assert len(set(told)) == 3
    assert all(each.endswith("with learning rates 0.25") for each in told)


def test_values_of_which_others_have_other_parts_are_told_apart():
    """They differ between ranks with other parts, which compare the rest."""
    job, other = landed(), landed()
    before = inputs(job).common
    job.handles[1].grad.note_edit(torch.ones(2), is_own=True)
    other.handles[0].grad.note_edit(torch.ones(2), is_own=True)
    assert inputs(job).common == before
    assert inputs(job).own != inputs(other).own
    assert "put into gradients or optimizer.state" in inputs(job).own


def test_stages_say_their_settings_and_clipping_and_not_their_units():
    one, other = landed(), landed()
    CHANGES["gradient"](other)
    CHANGES["step count"](other)
    assert inputs(one).of_stages == inputs(other).of_stages
    assert inputs(one).of_stages != inputs(one, clip=0.5).of_stages
    CHANGES["hyperparameter"](other)
    assert inputs(one).of_stages != inputs(other).of_stages


def spans(*stages: StepInputs) -> list[tuple[int, int]]:
    """The least and the most of each number over the stages, as they are exchanged."""
    return [(min(told), max(told)) for told in zip(*(stage.values() for stage in stages))]


class Pipeline:
    """What a stage has of the others: rank 3 tells another number than it does."""

    def __init__(self) -> None:
        self.ranks = SimpleNamespace(pp_group=object(), world_rank=0)

    def collect(self, mine: tuple, what: str, among: list) -> list[tuple]:
        assert among == [self.ranks.pp_group]
        return [mine, (1, None), (2, mine[1]), (3, mine[1] + 1)]


def told_of(one: AtHome, other: AtHome) -> str:
    """What two stages differ in, as the first one says it; empty if they agree."""
    pipeline = Pipeline()
    first, found = inputs(one, collectives=pipeline), spans(inputs(one), inputs(other))
    assert inputs(other).agrees(found) == first.agrees(found)
    try:
        first.check(found)
    except UsageError as error:
        assert not first.agrees(found)
        return str(error)
    assert first.agrees(found)
    return ""


def test_stages_agree_if_all_have_gradients_or_none_has():
    """Or if one has nothing to train. Twin: zeros of zero_grad() come from no backward."""
    none, some, zeros = small_at_home(), landed(), landed()
    zeros.optimizer.zero_grad(set_to_none=False)
    frozen = small_at_home()
    frozen.model.requires_grad_(False)
    assert told_of(some, some) == "" == told_of(none, none)
    assert told_of(some, frozen) == "" == told_of(frozen, frozen)
    for other in (none, zeros):
        told = told_of(some, other)
        assert told.startswith("step(): the gradients of rank 0 and of rank 3 differ. Stages of")


def test_gradients_that_a_step_in_the_backward_has_applied_are_gradients():
    """And so are those of parameters that were frozen since."""
    one, other, frozen = landed(), landed(), landed()
    for handle in other.handles[:2]:
        handle.grad.move(GradState.CONSUMED)
    frozen.model.requires_grad_(False)
    assert told_of(one, other) == "" == told_of(one, frozen)
    assert "the gradients" in told_of(frozen, small_at_home())


def test_stages_agree_if_their_clips_are_equal():
    """Twin: a stage without gradients clips nothing."""
    one, other, none = landed(), landed(), small_at_home()
    none.model.requires_grad_(False)
    one.engine.gradients.clips.append(0.5)
    assert told_of(one, none) == ""
    assert "the clipping of rank 0" in told_of(one, other)
    other.engine.gradients.clips.append(0.5)
    assert told_of(one, other) == ""


TIED = {
    "value": lambda job: job.handles[0].note_edit(torch.ones(2, 4)),
    "gradient": lambda job: job.handles[0].grad.note_edit(0.5, is_own=False),
    "own values": lambda job: job.handles[0].grad.note_edit(torch.ones(2), is_own=True),
    "step count": lambda job: setattr(job.handles[0], "step", 5),
    "requires_grad": lambda job: job.handles[0].param.requires_grad_(False),
    "hyperparameter": CHANGES["hyperparameter"],
    "state": lambda job: parts_of(job).borrowed.write(
        job.handles[0], {"exp_avg": torch.ones(2, 4)}
    ),
    "zeros": lambda job: setattr(job.handles[0].param, "grad", None),
}


@pytest.mark.parametrize("change", TIED)
def test_two_stages_with_one_table_make_the_same_change_of_it(change):
    """Twin: a stage without the table takes no part."""
    one, other, without = landed(), landed(), landed()
    for job in (one, other):
        job.handles[0].is_tied = True
    assert told_of(one, other) == ""
    TIED[change](other)
    assert "the shared table of rank 0 and of rank 3" in told_of(one, other)
    assert told_of(one, without) == ""
