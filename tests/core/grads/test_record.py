"""GradRecord: what a gradient's states allow, its sample, and the digests of users' changes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from infinity.core.grads.record import (
    SAMPLED,
    GradRecord,
    GradState,
    has_landed,
    refuse_torn,
    sample_of,
    writable,
)
from infinity.core.params.assigned import Assigned
from infinity.core.run.operations import Operation
from infinity.errors import InternalError, UsageError
from infinity.ext.checkpoint.save import would_be_lost

ABSENT, LANDED, CONSUMED, TORN = GradState
STEPS = {  # whither a gradient may go from where, by hand
    ABSENT: {LANDED, CONSUMED},
    LANDED: {LANDED, CONSUMED},
    CONSUMED: {LANDED, CONSUMED},
    TORN: {CONSUMED},
}


def handle_with(
    record: GradRecord | None, *, is_over: bool = True, torn: tuple = ()
) -> SimpleNamespace:
    """``is_over``: the last step is; ``torn``: gradients of its model that were."""

    def check(operation: Operation, what: str) -> None:
        assert operation is Operation.SET_GRAD
        if not is_over:
            raise UsageError(f"{what} in half a step")

    gradients = SimpleNamespace(changes=SimpleNamespace(torn=torn))
    engine = SimpleNamespace(uses=SimpleNamespace(check=check), gradients=gradients)
    return SimpleNamespace(name="a.weight", grad=record, engine=engine)


def zeros_at_home() -> GradRecord:
    """What zero_grad(set_to_none=False) leaves."""
    return GradRecord(LANDED, norm=(math.inf, torch.zeros(())))


@pytest.mark.parametrize("start", GradState, ids=lambda state: state.name)
def test_a_gradient_goes_where_its_state_allows_and_nowhere_else(start):
    for to in GradState:
        record = GradRecord(start)
        if to in STEPS[start]:
            record.move(to)
            assert record.state is to
        else:
            with pytest.raises(InternalError, match=f"{start.name} cannot become {to.name}"):
                record.move(to)
            assert record.state is start


def test_a_new_gradient_is_absent_and_has_no_past():
    record, other = GradRecord(), GradRecord()
    assert record.state is ABSENT and record.norm is record.sample is record.assigned is None
    record.factors.append(0.5)
    assert other.factors == [] and not record.averaged


def test_a_sample_has_about_64_elements_at_equal_distances():
    """Twins: a small tensor is taken whole, and a column-major one by rows."""
    assert SAMPLED == 64
    taken = sample_of(torch.arange(640, dtype=torch.float64))
    assert taken.dtype == torch.float32 and taken.tolist() == list(range(0, 640, 10))
    assert sample_of(torch.arange(3.0)).tolist() == [0, 1, 2]
    assert sample_of(torch.arange(6.0).view(2, 3).t()).tolist() == [0, 3, 1, 4, 2, 5]
    assert sample_of(torch.zeros(0)).numel() == 0


def test_samples_of_several_gradients_add_up_and_share_no_memory():
    record, first = GradRecord(), torch.tensor([1.0, 2.0])
    record.take_sample(first)
    record.take_sample(torch.tensor([10.0, 20.0]))
    assert record.sample.tolist() == [11, 22]
    assert first.tolist() == [1, 2]


def test_the_digests_tell_edits_apart_by_value_order_and_kind():
    def digests(*edits: tuple) -> tuple[int, int]:
        record = GradRecord()
        for by, is_own in edits:
            record.note_edit(by, is_own=is_own)
        return record.edits, record.own_edits

    half, third, ones = (0.5, False), (1 / 3, False), (torch.ones(3), False)
    assert digests() == (0, 0)
    assert digests(half, third) == digests(half, third)
    edits = [(half,), (third,), (ones,), (half, third), (third, half), (half, half)]
    assert len({digests(*each) for each in edits} | {(0, 0)}) == len(edits) + 1
    common, own = digests((torch.ones(3), True))
    assert common == 0 and own == digests(ones)[0] != 0
    assert digests(half, (torch.ones(3), True)) == (digests(half)[0], own)


@pytest.mark.parametrize("state", GradState, ids=lambda state: state.name)
def test_only_a_landed_gradient_is_there_for_the_step(state):
    assert has_landed(handle_with(GradRecord(state))) == (state is LANDED)
    assert would_be_lost(handle_with(GradRecord(state))) == (state is LANDED)
    assert not has_landed(handle_with(None)) and not would_be_lost(handle_with(None))


def test_zeros_of_zero_grad_are_no_loss_and_anything_else_is():
    """Twins: another order of the norm rounds small elements away; a factor may have changed what
    the norm was taken of."""
    assert not would_be_lost(handle_with(zeros_at_home()))
    for norm in (None, (2.0, torch.zeros(())), (math.inf, torch.tensor(1e-45))):
        assert would_be_lost(handle_with(GradRecord(LANDED, norm=norm)))
    multiplied = zeros_at_home()
    multiplied.factors.append(0.5)
    assert would_be_lost(handle_with(multiplied))


@pytest.mark.parametrize("arrives", [0.0, 3.0])
def test_a_norm_is_read_after_it_has_arrived(arrives):
    record = GradRecord(LANDED, norm=(math.inf, torch.tensor(3.0 - arrives)))
    norm = record.norm[1]
    record.landing = SimpleNamespace(done=False, precede=lambda: norm.fill_(arrives))
    assert would_be_lost(handle_with(record)) == (arrives != 0)


@pytest.mark.parametrize("state", GradState, ids=lambda state: state.name)
def test_only_a_torn_gradient_cannot_be_read(state):
    handle = handle_with(GradRecord(state))
    if state is TORN:
        with pytest.raises(UsageError, match=r"a\.weight is half done.*zero_grad"):
            refuse_torn(handle)
    else:
        refuse_torn(handle)


@pytest.mark.parametrize("state", GradState, ids=lambda state: state.name)
def test_torn_gradients_and_those_of_half_a_step_cannot_be_changed(state):
    """Twin: after the whole step a consumed one can be."""
    for is_over in (False, True):
        handle = handle_with(GradRecord(state), is_over=is_over)
        if state is TORN or (state is CONSUMED and not is_over):
            with pytest.raises(UsageError, match="half done" if state is TORN else "half a step"):
                writable(handle)
        else:
            assert writable(handle) is handle


def test_a_loop_of_changes_is_refused_before_the_first_if_any_gradient_is_torn():
    """Twin: once that one is zeroed the others are changed."""
    other = handle_with(GradRecord(TORN))
    handle = handle_with(GradRecord(LANDED), torn=(other,))
    with pytest.raises(UsageError, match="half done"):
        writable(handle)
    other.grad = zeros_at_home()
    assert writable(handle) is handle


def test_an_assigned_tensor_is_left_behind_by_a_change_that_is_allowed():
    """Twin: a refused change leaves it as it is."""
    for state, is_left in ((LANDED, True), (CONSUMED, True), (TORN, False)):
        tensor = torch.ones(3)
        assigned = Assigned(handle_with(None), tensor, is_copied=True)
        handle = handle_with(GradRecord(state, assigned=assigned))
        try:
            writable(handle)
        except UsageError:
            assert not is_left
        assert assigned.is_outdated == is_left
