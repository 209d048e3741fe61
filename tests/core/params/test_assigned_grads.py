"""AssignedGrads: which tensors are watched, when what was written to them counts, and when they are
let go."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, Elsewhere, small_at_home

from infinity.core.grads.record import GradState
from infinity.core.machine import accelerator
from infinity.core.params import lent
from infinity.core.params.assigned_grads import AssignedGrads
from infinity.core.run.operations import State
from infinity.errors import UsageError

ROWS = torch.stack([RAMP, RAMP])
ODD = torch.linspace(0.1, 0.8, 8).view(2, 4)  # whose sums and products are rounded
OTHERS = SimpleNamespace(alone=False)  # several ranks


class Update:
    """Of a flat param; counts its waits."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def job() -> AtHome:
    """With the ramp and twice the ramp as gradients."""
    job = small_at_home()
    job.backward(RAMP, 2 * RAMP)
    return job


@pytest.fixture(params=["host", "nvme", "elsewhere"])
def anywhere(request, monkeypatch, tmp_path) -> AtHome:
    if request.param == "elsewhere":
        monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    job = small_at_home("nvme" if request.param == "nvme" else "host", tmp_path)
    job.backward(RAMP, 2 * RAMP)
    return job


def of(job: AtHome) -> AssignedGrads:
    return parts_of(job).gradients.assigned


def at_home(job: AtHome, index: int = 0) -> torch.Tensor:
    parts_of(job).gradients.homes.settle()
    return parts_of(job).gradients.values.value(job.handles[index], write=False).clone()


def assign(job: AtHome, value: torch.Tensor, index: int = 0) -> torch.Tensor:
    """Makes ``value`` a gradient, as the bank does."""
    parts_of(job).gradients.set(job.handles[index], value)
    return value


# --- settling ---


def test_what_is_written_to_an_assigned_tensor_is_home_once_it_is_settled(anywhere):
    """Twins: before it is not; the other's is left alone, and one without an assignment."""
    values = [assign(anywhere, ODD.clone(), index) for index in range(2)]
    for value in values:
        value.mul_(3)
    assert torch.equal(at_home(anywhere), ODD)
    of(anywhere).settle(anywhere.handles[0])
    assert torch.equal(at_home(anywhere), ODD * 3) and torch.equal(at_home(anywhere, 1), ODD)
    of(anywhere).settle_all()
    assert torch.equal(at_home(anywhere, 1), ODD * 3)
    of(anywhere).settle(anywhere.handles[2])


def test_a_write_that_torch_does_not_count_is_found_by_its_bits(job):
    """Through memory of NumPy. Twin: bits that are at home are not sent again."""
    array = np.ones((2, 4), np.float32)
    assign(job, torch.from_numpy(array))
    array *= 5
    of(job).settle(job.handles[0])
    assert at_home(job).tolist() == [[5.0] * 4] * 2
    record = job.handles[0].grad
    record.norm = (2.0, torch.ones(()))
    of(job).settle(job.handles[0])
    assert record.norm is not None


def test_a_settled_gradient_waits_for_the_update_that_reads_it(job):
    """And a consumed one that changed since counts for the next step. Twin: unchanged it does
    not."""
    first, value = job.handles[0], assign(job, ODD.clone())
    first.grad.move(GradState.CONSUMED)
    of(job).settle(first)
    assert first.grad.state is GradState.CONSUMED
    value.mul_(2)
    update = Update()
    first.flat_param.homes.commit(first.flat_param.homes.draft(), update)
    of(job).settle(first)
    assert first.grad.state is GradState.LANDED and update.waits == 1
    assert torch.equal(at_home(job), ODD * 2)


def test_a_torn_gradient_is_not_settled(job):
    value = assign(job, ODD.clone())
    value.mul_(2)
    job.handles[0].grad.state = GradState.TORN
    of(job).settle(job.handles[0])
    assert of(job).lands_on(job.handles[0]) is None
    job.handles[0].grad.state = GradState.LANDED
    assert torch.equal(at_home(job), ODD)


def test_a_unit_that_is_stepped_in_the_backward_is_settled_once(job):
    """What is written after that counts for the next step, not for this one. Twins: a gradient that
    is absent or consumed is not settled early."""
    first, second, third, *_ = job.handles
    values = [assign(job, ODD.clone(), index) for index in range(2)]
    second.grad.move(GradState.CONSUMED)
    for value in values:
        value.mul_(2)
    of(job).settle_early([first, second, third])
    assert torch.equal(at_home(job), ODD * 2) and torch.equal(at_home(job, 1), ODD)
    assert first.grad.assigned.is_early and not second.grad.assigned.is_early
    first.grad.move(GradState.CONSUMED)  # by that step
    values[0].mul_(2)
    of(job).settle(first)
    assert first.grad.state is GradState.CONSUMED
    of(job).settle_all()
    assert first.grad.state is GradState.CONSUMED and torch.equal(at_home(job), ODD * 2)
    assert not first.grad.assigned.is_early
    of(job).settle_all()
    assert first.grad.state is GradState.LANDED and torch.equal(at_home(job), ODD * 4)


def test_the_rest_of_an_early_step_takes_its_own_tensor_as_it_is(job):
    """What torch has counted by then is of that step: it is no change after it."""
    first, value = job.handles[0], assign(job, ODD.clone())
    of(job).settle_early([first])
    first.grad.move(GradState.CONSUMED)
    value.add_(0)
    of(job).settle_all()
    of(job).settle_all()
    assert first.grad.state is GradState.CONSUMED


def test_an_early_gradient_that_landed_anew_is_settled(job):
    first, value = job.handles[0], assign(job, ODD.clone())
    of(job).settle_early([first])
    value.mul_(2)
    of(job).settle_all()
    assert torch.equal(at_home(job), ODD * 2)


def test_with_several_ranks_a_tensor_counts_until_its_gradient_has_parted_from_it(job):
    """By a landing, a step or a change. Then a write to it is refused."""
    first, bank = job.handles[0], parts_of(job).gradients
    for part in (
        lambda: first.grad.assigned.outdate(),
        lambda: first.grad.move(GradState.CONSUMED),
        lambda: setattr(first.grad.assigned, "is_copied", True),
    ):
        of(job).ranks = SimpleNamespace(alone=True)
        bank.clear(first)
        of(job).ranks = OTHERS
        value = assign(job, ODD.clone())
        value.mul_(2)
        of(job).settle(first)
        assert torch.equal(at_home(job), ODD * 2)
        part()
        of(job).settle(first)  # unchanged since
        value.mul_(2)
        with pytest.raises(UsageError, match=r"layers\.0\.weight\.grad was changed after"):
            of(job).settle(first)
        assert torch.equal(at_home(job), ODD * 2)


# --- what is watched ---


def test_the_assigned_tensor_is_shown_while_it_is_held(job):
    """Twins: with several ranks, and once nobody holds it, the stand-in is."""
    first, value = job.handles[0], assign(job, ODD.clone())
    assert of(job).shown(first) is value
    of(job).ranks = OTHERS
    assert of(job).shown(first) is None and first.grad.assigned is not None
    of(job).ranks = SimpleNamespace(alone=True)
    value.mul_(2)
    del value
    assert of(job).shown(first) is None and first.grad.assigned is None
    assert torch.equal(at_home(job), ODD * 2)  # settled before it was let go
    assert of(job).shown(first) is None


def test_a_tensor_whose_memory_is_held_is_shown_anew(job):
    """By a view of it; what is written there counts, and the new tensor is the one from then on."""
    first, flat = job.handles[0], torch.zeros(8)
    parts_of(job).gradients.set(first, flat.view(2, 4))
    shown = of(job).shown(first)
    assert shown.data_ptr() == flat.data_ptr() and of(job).shown(first) is shown
    flat.fill_(3.0)
    of(job).settle_all()
    assert at_home(job).tolist() == [[3.0] * 4] * 2


def test_assigning_what_it_is_already_counts_for_the_next_step_again(job):
    """Twins: another tensor, and with several ranks; a landed gradient keeps its norm."""
    first, value = job.handles[0], assign(job, ODD.clone())
    first.grad.norm = norm = (2.0, torch.ones(()))
    assert of(job).is_assigned(first, value) and first.grad.norm is norm
    first.grad.move(GradState.CONSUMED)
    assert not of(job).is_assigned(first, ODD)
    of(job).ranks = OTHERS
    assert not of(job).is_assigned(first, value) and first.grad.state is GradState.CONSUMED
    of(job).ranks = SimpleNamespace(alone=True)
    assert of(job).is_assigned(first, value)
    assert first.grad.state is GradState.LANDED and first.grad.norm is None
    assert not of(job).is_assigned(job.handles[1], value)


def test_a_tensor_without_memory_of_its_own_is_not_watched(job):
    """A stand-in, a sparse one, one on meta. Twin: any other is."""
    first, second, *_ = job.handles
    grad, part = second.param.grad, torch.zeros(2, 4)
    for value in (grad, ODD.to_sparse(), ODD.to("meta")):
        of(job).watch(first, value, part)
        assert first.grad.assigned is None
    of(job).watch(first, ODD, ODD)
    assert not first.grad.assigned.is_copied
    of(job).watch(first, ODD, part)
    assert first.grad.assigned.is_copied


@pytest.mark.parametrize("limit", ["TRIMMED_AT_COUNT", "TRIMMED_AT_NBYTES"])
def test_temporary_tensors_are_let_go_when_there_are_too_many(limit, monkeypatch):
    """Room for two of them, by number or by bytes. Twin: while they are held all stay."""
    monkeypatch.setattr(lent, limit, 2 if limit.endswith("COUNT") else 2 * 32)
    for holds in (True, False):
        job = small_at_home()
        watched, held = of(job), []
        for at in range(6):
            value = torch.ones(2, 4) * at
            held += [value] if holds else []
            assign(job, value, at)
            del value
            there = sum(handle.grad.assigned is not None for handle in job.handles)
            assert there == at + 1 if holds else there <= 3
        watched.let_go_unheld()
        there = sum(handle.grad.assigned is not None for handle in job.handles)
        assert there == (6 if holds else 0)
        assert [at_home(job, at)[0, 0].item() for at in range(6)] == list(range(6))


def test_held_tensors_make_room_for_as_many_temporary_ones(monkeypatch):
    """Method: what a trim leaves; the next one comes after as many again."""
    monkeypatch.setattr(lent, "TRIMMED_AT_COUNT", 1)
    job, trims = small_at_home(), []
    watched = AssignedGrads(parts_of(job).gradients.values, parts_of(job).store)
    let_go = watched.let_go_unheld
    monkeypatch.setattr(watched, "let_go_unheld", lambda: (trims.append(at), let_go()))
    held = [torch.ones(2, 4) for _ in job.handles]
    for at, (handle, value) in enumerate(zip(job.handles, held)):
        watched.watch(handle, value, value)
    # after one: room for the one that was there, then for as many as are
    assert trims == [1, 3]


def test_a_record_that_was_replaced_is_forgotten(job):
    """Twin: one that is there is kept."""
    values = [assign(job, ODD.clone(), index) for index in range(2)]
    parts_of(job).gradients.clear(job.handles[0])
    of(job).let_go_unheld()
    assert of(job)._assigned == {job.handles[1]} and len(values) == 2


def test_memory_that_was_replaced_is_watched_where_it_is_now(job):
    """``tensor.data = other``: the other's values count, and writes to it."""
    first, value = job.handles[0], assign(job, ODD.clone())
    first.grad.assigned.is_early = True
    other = ODD * 3
    value.data = other
    of(job).settle(first)
    assert torch.equal(at_home(job), ODD * 3) and first.grad.assigned.is_early
    other.mul_(2)
    of(job).settle(first)
    assert torch.equal(at_home(job), ODD * 3 * 2)
    value.data = torch.ones(4)
    with pytest.raises(UsageError, match=r"another shape, \(4,\)"):
        of(job).settle(first)


# --- one tensor for two ---


def test_another_gradients_stand_in_becomes_a_tensor_that_is_both(job):
    """The stand-in is that tensor, too. A consumed one stays so. Twins: its own, and a plain
    tensor."""
    first, second, *_ = job.handles
    mine, other = first.param.grad, second.param.grad
    assert of(job).plain_of(first, mine) is mine and of(job).plain_of(first, ODD) is ODD
    second.grad.move(GradState.CONSUMED)
    plain = of(job).plain_of(first, other)
    assert type(plain) is torch.Tensor and torch.equal(plain, 2 * ROWS)
    assert other.plain is plain and second.param.grad is plain
    assert second.grad.state is GradState.CONSUMED
    assert of(job).plain_of(first, other) is plain


def test_a_landed_gradient_that_is_shared_stays_landed(job):
    of(job).plain_of(job.handles[0], job.handles[1].param.grad)
    assert job.handles[1].grad.state is GradState.LANDED
    assert torch.equal(at_home(job, 1), 2 * ROWS)


def test_another_gradient_is_refused_with_several_ranks(job):
    """Its stand-in, and the tensor that was assigned to it. Twins: on one rank, and a view of
    memory that is no gradient's."""
    first, second, *_ = job.handles
    view = second.param.grad.view(-1)
    assert of(job).plain_of(first, view) is view
    del view
    flat = torch.zeros(16)
    assert of(job).plain_of(first, flat) is flat
    proxy, assigned = second.param.grad, assign(job, ODD.clone(), 2)
    assert of(job).plain_of(first, assigned) is assigned
    of(job).ranks = OTHERS
    for value in (proxy, assigned, assigned.view(-1)):
        with pytest.raises(UsageError, match=r"another parameter's gradient"):
            of(job).plain_of(first, value)
    assert of(job).plain_of(job.handles[2], assigned) is assigned
    other = ODD.clone()
    assert of(job).plain_of(first, other) is other
    sparse, meta = ODD.to_sparse(), ODD.to("meta")
    assert of(job).plain_of(first, sparse) is sparse and of(job).plain_of(first, meta) is meta


def test_what_is_lent_is_the_gradient_while_it_is_held(job):
    """And only so long: an array refers to the tensor. Twin: with several ranks it is a copy."""
    first, second, *_ = job.handles
    lent = of(job).lend(first)
    assert torch.equal(lent, ROWS) and of(job).lend(first) is lent is first.param.grad
    array = lent.numpy()
    del lent
    of(job).let_go_unheld()
    array[:] = 3.0
    of(job).settle_all()
    assert torch.equal(at_home(job), torch.full((2, 4), 3.0)) and first.grad.assigned is not None
    del array
    of(job).let_go_unheld()
    assert first.grad.assigned is None
    of(job).ranks = OTHERS
    of(job).lend(second).zero_()
    assert second.grad.assigned is None and torch.equal(at_home(job, 1), 2 * ROWS)


@pytest.mark.parametrize("case", ["held", "not held", "torn", "several ranks"])
def test_a_stand_in_that_is_held_keeps_its_values_when_it_is_parted(job, case):
    """Once. Twins: without users, torn or with several ranks there is nothing to keep."""
    first, held = job.handles[0], job.handles[0].param.grad
    if case == "torn":
        first.grad.state = GradState.TORN
    if case == "several ranks":
        of(job).ranks = OTHERS
    if case == "not held":
        del held
        of(job).part_from(first)
        assert first.grad.proxy is None is first.grad.shown
        of(job).part_from(first)
        return
    of(job).part_from(first)
    if case != "held":
        assert held.plain is None and first.grad.proxy is held
        return
    assert torch.equal(held.plain, ROWS) and first.grad.proxy is None is first.grad.shown
    parts_of(job).gradients.homes.view(first, write=True).fill_(7.0)
    assert torch.equal(held.plain, ROWS)
    first.grad.proxy, plain = held, held.plain
    of(job).part_from(first)
    assert held.plain is plain


# --- changes and landings ---


def test_zeros_reach_the_home_and_the_tensor(job):
    """Which is then the gradient as before. Twin: one that torch cannot write in place is let
    go."""
    first, value = job.handles[0], assign(job, ODD.clone())
    first.grad.assigned.is_outdated = first.grad.assigned.is_early = True
    of(job).zero(first)
    assert value.count_nonzero() == 0 == at_home(job).count_nonzero()
    assert not first.grad.assigned.is_outdated and not first.grad.assigned.is_early
    assert not first.grad.assigned.is_counted
    once = assign(job, torch.ones(1, 4).expand(2, 4))
    of(job).zero(first)
    assert once.tolist() == [[1.0] * 4] * 2 and first.grad.assigned is None
    assert at_home(job).count_nonzero() == 0
    of(job).zero(job.handles[1])
    assert at_home(job, 1).count_nonzero() == 0


@torch.no_grad()
def test_a_users_factor_changes_the_tensor_or_waits_at_home(job):
    """Twin: a gradient that half a step has applied refuses it."""
    first, second, *_ = job.handles
    value = assign(job, ODD.clone())
    of(job).scale_as_user(first, 0.3)
    assert torch.equal(value, ODD * 0.3) and first.grad.factors == []
    of(job).scale_as_user(second, 0.5)
    assert second.grad.factors == [0.5]
    second.grad.move(GradState.CONSUMED)
    of(job).scale_as_user(second, 0.25)
    assert second.grad.factors == [0.5, 0.25]
    parts_of(job).uses.define({State.STEPPED: lambda: True})
    with pytest.raises(UsageError, match=r"layers\.1\.weight\.grad between step_in_backward"):
        of(job).scale_as_user(second, 0.5)


def test_a_gradient_lands_on_the_tensor_that_torch_would_add_to(job):
    """Not with grad mode on, nor if its elements share memory or nobody holds it."""
    first, second, *_ = job.handles
    assert of(job).lands_on(second) is None
    value = assign(job, ODD.clone())
    with torch.no_grad():
        assert of(job).lands_on(first) is first.grad.assigned
    value.mul_(2)
    assert of(job).lands_on(first) is None and first.grad.assigned is None
    assert torch.equal(at_home(job), ODD * 2)  # settled
    with torch.no_grad():
        kept = assign(job, torch.ones(1, 4).expand(2, 4))
        assert of(job).lands_on(first) is None and first.grad.assigned is None
        parts_of(job).gradients.set(first, ODD.clone())
        assert of(job).lands_on(first) is None and kept.shape == (2, 4)


@torch.no_grad()
@pytest.mark.parametrize("how", ["unchanged", "changed", "zero", "early"])
def test_a_consumed_gradient_takes_more_once_its_tensor_changed(job, how):
    """Or if it is zero anyhow, as ``flat.zero_()`` leaves it. Twins: unchanged it was consumed, and
    after an early step it still is."""
    first, value = job.handles[0], assign(job, torch.zeros(2, 4) if how == "zero" else ODD.clone())
    of(job).settle_all()
    first.grad.move(GradState.CONSUMED)
    if how in ("changed", "early"):
        value.mul_(2)
    first.grad.assigned.is_early = how == "early"
    assert of(job).lands_on(first) is first.grad.assigned
    expected = GradState.LANDED if how in ("changed", "zero") else GradState.CONSUMED
    assert first.grad.state is expected


@torch.no_grad()
def test_with_several_ranks_a_gradient_lands_at_home_and_the_tensor_is_outdated(job):
    """What was written to it before counts."""
    of(job).ranks = OTHERS
    first, value = job.handles[0], assign(job, ODD.clone())
    value.mul_(2)
    assert of(job).lands_on(first) is None
    assert torch.equal(at_home(job), ODD * 2) and first.grad.assigned.is_outdated


@torch.no_grad()
def test_what_is_added_is_cast_and_counts_as_the_gradient(job):
    first, value = job.handles[0], assign(job, ODD.clone())
    assigned = of(job).lands_on(first)
    of(job).add_to(first, assigned, ODD.double() * 3)
    assert torch.equal(value, ODD + (ODD.double() * 3).float())
    of(job).settle_all()
    assert torch.equal(at_home(job), value)
