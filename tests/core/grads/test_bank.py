"""GradientBank: what lands, what ``p.grad`` is, and what the step is to apply."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, Elsewhere, small_at_home

from infinity.core.grads.bank import GradientBank
from infinity.core.grads.record import GradState
from infinity.core.grads.whole import WholeGradients
from infinity.core.machine import accelerator
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.run.operations import State
from infinity.core.units.handle import raw_grad, set_raw_grad
from infinity.errors import UsageError
from infinity.ext.tiles.landing import landing_rows

ROWS = torch.stack([RAMP, RAMP])
ODD = torch.linspace(0.1, 0.8, 8).view(2, 4)  # whose sums and products are rounded


class Update:
    """Of a flat param; counts its waits."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


class Averager:
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        self.added, self.averages = [], []

    def add(self, handle: Any, grad: torch.Tensor) -> None:
        self.added.append((handle, grad))

    def average(self, *, are_gone: bool = False, of: object = None) -> None:
        self.averages.append(are_gone)


@pytest.fixture
def job() -> AtHome:
    return small_at_home()


@pytest.fixture(params=["host", "nvme", "elsewhere"])
def anywhere(request, monkeypatch, tmp_path) -> AtHome:
    if request.param == "elsewhere":
        monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    return small_at_home("nvme" if request.param == "nvme" else "host", tmp_path)


def bank_of(job: AtHome) -> GradientBank:
    return parts_of(job).gradients


def at_home(job: AtHome, index: int = 0) -> torch.Tensor:
    bank_of(job).homes.settle()  # a disk has it, too
    return bank_of(job).homes.view(job.handles[index], write=False).clone()


def consume(job: AtHome) -> None:
    for handle in job.handles[:2]:
        handle.grad.move(GradState.CONSUMED)


def averaged_by(job: AtHome) -> Averager:
    reducer = Averager()
    bank_of(job).reduce_with(reducer.add, reducer.average)
    return reducer


def of_two(job: AtHome, shard: str) -> GradientBank:
    """Makes the bank one of two ranks', which meet nobody here."""
    bank = bank_of(job)
    bank.ranks = replace(bank.ranks, size=2, shard=shard)
    return bank


# --- what p.grad is ---


def test_a_gradient_is_none_until_it_lands_and_then_one_stand_in(anywhere):
    """Twin: the other parameter's is None still."""
    first, second, *_ = anywhere.handles
    assert first.param.grad is None
    bank_of(anywhere).land(first, ODD)
    shown = bank_of(anywhere).get(first)
    assert shown is first.param.grad is first.grad.proxy
    assert torch.equal(shown.clone(), ODD) and second.param.grad is None
    bank_of(anywhere).land(first, ODD * 3)
    assert torch.equal(first.param.grad.clone(), ODD + ODD * 3)


def test_a_gradient_that_this_rank_lacks_is_averaged_before_it_is_read(job):
    """Twins: one that is there is shown as it is; torch's zero_grad() meets no other rank."""
    reducer, bank = averaged_by(job), bank_of(job)
    first, *_ = job.handles
    assert bank.get(first) is None and reducer.averages == [False]
    torch.nn.Module.zero_grad(job.model)
    assert reducer.averages == [False]
    first.grad.move(GradState.LANDED)
    assert bank.get(first) is not None and reducer.averages == [False]


@pytest.mark.parametrize("state", [State.ACCUMULATING, State.STEPPED])
def test_gradients_are_refused_while_they_are_incomplete(job, state):
    """Between the backwards of a pass both ways; between half a step and the rest the set alone."""
    job.backward(RAMP)
    first, is_in = job.handles[0], True
    parts_of(job).uses.define({state: lambda: is_in})
    with pytest.raises(UsageError, match=r"layers\.0\.weight\.grad"):
        bank_of(job).set(first, None)
    if state is State.ACCUMULATING:
        with pytest.raises(UsageError, match=r"layers\.0\.weight\.grad"):
            bank_of(job).get(first)
    else:
        assert bank_of(job).get(first) is not None
    is_in = False
    bank_of(job).set(first, None)
    assert bank_of(job).get(first) is None


def test_reading_and_setting_are_uses_of_the_job(job, monkeypatch):
    """Method: whether a scope is open while a gradient is averaged."""
    bank, seen = bank_of(job), []
    running = lambda **_: seen.append(parts_of(job).scopes.running_here)
    bank.reduce_with(None, running)
    bank.get(job.handles[0])
    bank.set(job.handles[0], ODD.clone())
    assert seen == [True, True]
    assert not parts_of(job).scopes.running_here


# --- setting ---


def test_a_set_gradient_is_at_home_and_the_next_step_applies_it(anywhere):
    """It replaces what has landed, was consumed or waits with factors. Twin: the other's stays."""
    first, second, *_ = anywhere.handles
    anywhere.backward(RAMP, RAMP)
    first.grad.factors.append(0.5)
    first.grad.move(GradState.CONSUMED)
    value = ODD.clone()
    bank_of(anywhere).set(first, value)
    assert first.grad.state is GradState.LANDED and first.grad.factors == []
    assert torch.equal(at_home(anywhere), ODD) and torch.equal(at_home(anywhere, 1), ROWS)
    assert bank_of(anywhere).get(first) is value and not first.grad.averaged


def test_a_set_gradient_meets_the_other_ranks_and_counts_as_averaged(job):
    """Twin: with one rank it does not."""
    for make, is_averaged in ((bank_of, False), (lambda job: of_two(job, "gradients"), True)):
        bank, reducer = make(job), averaged_by(job)
        bank.set(job.handles[0], ODD.clone())
        assert job.handles[0].grad.averaged == is_averaged
        assert False in reducer.averages


def test_the_ranks_compare_what_each_of_them_sets(job):
    """Method: what the flat param's collectives are asked."""
    asked = []
    job.handles[0].flat_param.collectives = SimpleNamespace(
        meet=lambda what, value, *, over_tensors: asked.append((what, value, over_tensors))
    )
    bank_of(job).set(job.handles[0], ODD.clone())
    ((what, value, over_tensors),) = asked
    assert what == "setting the gradient of layers.0.weight"
    assert torch.equal(value, ODD) and over_tensors


def test_what_a_gradient_is_already_may_be_set_again(job):
    """It changes nothing: its factors stay. Twin: a copy of it replaces it."""
    first, *_ = job.handles
    job.backward(RAMP)
    first.grad.factors.append(0.5)
    record, shown = first.grad, first.param.grad
    bank_of(job).set(first, shown)
    assert first.grad is record and record.factors == [0.5]
    bank_of(job).set(first, shown.clone())
    assert first.grad is not record and torch.equal(at_home(job), ROWS * 0.5)
    record = first.grad
    bank_of(job).set(first, bank_of(job).get(first))
    assert first.grad is record


def test_a_stand_in_that_is_replaced_keeps_its_values(job):
    job.backward(RAMP)
    before = job.handles[0].param.grad
    bank_of(job).set(job.handles[0], ODD.clone())
    assert torch.equal(before + 0, ROWS) and torch.equal(at_home(job), ODD)


WRONG = {
    "a list": ([1.0], "not list"),
    "another dtype": (ODD.double(), "not torch.float64"),
    "another shape": (ODD.t(), r"shape \(4, 2\)"),
    "sparse": (ODD.to_sparse(), "layout torch.sparse_coo"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_the_gradient_is_refused_and_changes_nothing(job, what):
    job.backward(RAMP)
    record, (value, message) = job.handles[0].grad, WRONG[what]
    with pytest.raises(UsageError, match=rf"layers\.0\.weight\.grad.*{message}"):
        bank_of(job).set(job.handles[0], value)
    assert job.handles[0].grad is record and torch.equal(at_home(job), ROWS)


def test_a_gradient_may_have_the_weights_dtype_or_its_own():
    """Twin: a third one is refused."""
    job = small_at_home(param_dtype=torch.bfloat16, grad_dtype=torch.float32)
    first, *_ = job.handles
    for value in (ODD.clone(), ODD.bfloat16()):
        bank_of(job).set(first, value)
        assert torch.equal(at_home(job), value.float())
    with pytest.raises(UsageError, match=r"must be None or a tensor of torch\.float32"):
        bank_of(job).set(first, ODD.half())


def test_a_gradient_is_written_after_the_update_that_reads_it(job):
    """Whole, or in rows. Twin: of another flat param none is waited for."""
    first, second, *_ = job.handles
    other = Update()
    second.flat_param.homes.commit(second.flat_param.homes.draft(), other)

    def rows() -> None:
        with landing_rows(bank_of(job), first) as land:
            land(0, 1, lambda: ODD[:1])

    for write in (rows, lambda: bank_of(job).set(first, ODD.clone())):
        update = Update()
        first.flat_param.homes.commit(first.flat_param.homes.draft(), update)
        write()
        assert (update.waits, other.waits) == (1, 0)
    second.flat_param.homes.wait()


# --- clearing ---


def test_clearing_the_last_gradient_forgets_the_backwards_before_it(job):
    """On all ranks, of which this one tells the others that none is left. Twin: not before."""
    job.backward(RAMP, RAMP)
    bank, reducer = bank_of(job), averaged_by(job)
    bank.clips.append(0.5)
    backwards = parts_of(job).steps.backwards
    assert backwards > 0
    bank.set(job.handles[0], None)
    assert reducer.averages == [] and bank.clips == [0.5]
    assert parts_of(job).steps.backwards == backwards
    bank.clear(job.handles[1])
    assert reducer.averages == [True] and bank.clips == []
    assert parts_of(job).steps.backwards == 0
    bank.clear(job.handles[1])
    assert reducer.averages == [True]
    assert all(handle.grad.state is GradState.ABSENT for handle in job.handles)


def test_clearing_inside_a_backward_forgets_none(job):
    """From a hook of the parameter. Twin: after it."""
    first, bank, seen = job.handles[0], bank_of(job), []

    def hook(param: torch.Tensor) -> None:
        bank.clips.append(0.5)
        bank.clear(first)
        seen.append((parts_of(job).computing, list(bank.clips)))

    first.param.register_post_accumulate_grad_hook(hook)
    job.backward(RAMP)
    assert seen == [(True, [0.5])] and first.param.grad is None
    bank.land(first, ODD)
    bank.clear(first)
    assert bank.clips == []


def test_clearing_drops_what_autograd_has_accumulated(job):
    first = job.handles[0]
    set_raw_grad(first.param, torch.zeros(first.param.shape))
    assert raw_grad(first.param) is not None
    bank_of(job).clear(first)
    assert raw_grad(first.param) is None


def test_only_a_gradient_that_is_there_is_zeroed(job):
    first, second, *_ = job.handles
    reducer = averaged_by(job)
    bank_of(job).homes.view(second, write=True).fill_(7.0)
    bank_of(job).set(first, ODD.clone())
    reducer.averages.clear()
    for handle in (first, second):
        bank_of(job).zero_here(handle)
    assert first.grad.state is GradState.LANDED and second.grad.state is GradState.ABSENT
    assert at_home(job).count_nonzero() == 0 and at_home(job, 1).tolist() == [[7.0] * 4] * 2
    assert reducer.averages == [] and first.param.grad.count_nonzero() == 0


def test_what_was_written_to_assigned_tensors_is_settled_before_an_average(job):
    """Of all of them, or of the one that is to be read."""
    first, second, *_ = job.handles
    values = ODD.clone(), ODD.clone()
    for handle, value in zip((first, second), values):
        bank_of(job).set(handle, value)
    reducer = averaged_by(job)
    for value in values:
        value.mul_(2)
    bank_of(job).refresh(first)
    assert torch.equal(at_home(job), ODD * 2) and torch.equal(at_home(job, 1), ODD)
    assert reducer.averages == [False]
    bank_of(job).average()
    assert torch.equal(at_home(job, 1), ODD * 2) and reducer.averages == [False] * 2


# --- landing ---


def test_a_sparse_gradient_is_refused(job):
    with pytest.raises(UsageError, match=r"layers\.0\.weight got a sparse gradient"):
        bank_of(job).land(job.handles[0], ODD.to_sparse())
    assert job.handles[0].grad.state is GradState.ABSENT


def test_what_a_step_has_consumed_is_added_to(anywhere):
    """Claim: a known norm is forgotten. Twin: of another parameter nothing changes."""
    bank, first = bank_of(anywhere), anywhere.handles[0]
    bank.homes.view(first, write=True).fill_(math.nan)
    bank.land(first, ODD)
    bank.end_backward()
    first.grad.move(GradState.CONSUMED)
    first.grad.norm = (2.0, torch.ones(()))
    bank.land(first, ODD * 3)
    assert first.grad.state is GradState.LANDED and first.grad.norm is None
    assert torch.equal(at_home(anywhere), ODD + ODD * 3)
    assert anywhere.handles[1].grad.state is GradState.ABSENT


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_an_average_that_is_consumed_is_not_added_to_if_ranks_keep_gradients(job, shard):
    """Whole at home they would be this rank's shard only. Twin: with shards the reducer adds."""
    bank, reducer, first = of_two(job, shard), averaged_by(job), job.handles[0]
    first.grad.move(GradState.CONSUMED)
    if shard == "optimizer":
        with pytest.raises(UsageError, match="it cannot be added to, nor stepped again"):
            bank.land(first, ODD)
        assert first.grad.state is GradState.CONSUMED and reducer.added == []
        bank.land(job.handles[1], ODD)  # not consumed
        assert torch.equal(at_home(job, 1), ODD)
    else:
        bank.land(first, ODD)
        assert first.grad.state is GradState.LANDED and reducer.added == [(first, ODD)]


def test_a_gradient_goes_to_the_reducer_unless_ranks_keep_theirs(job):
    """Twin: if they do it lands at home, until it is averaged."""
    reducer, first = averaged_by(job), job.handles[0]
    of_two(job, "gradients").land(first, ODD)
    assert reducer.added == [(first, ODD)] and first.grad.state is GradState.ABSENT
    bank = of_two(job, "optimizer")
    bank.land(first, ODD)
    assert len(reducer.added) == 1 and torch.equal(at_home(job), ODD)
    first.grad.averaged = True
    with pytest.raises(UsageError, match="layers.0.weight after its gradient was read"):
        bank.land(first, ODD)
    assert torch.equal(at_home(job), ODD)


def test_gradients_that_ranks_share_are_sampled_if_so_asked(job):
    """The sum of all that landed, in fp32. Twin: without the question there is no sample."""
    first, bank = job.handles[0], bank_of(job)
    bank.land(first, ODD)
    assert first.grad.sample is None
    bank.takes_samples = True
    bank.land(first, ODD)
    bank.land(first, ODD * 3)
    assert torch.equal(first.grad.sample, ODD.view(-1) + ODD.view(-1) * 3)


def test_a_gradient_whose_change_was_cut_short_is_torn_and_takes_no_more(anywhere):
    """Until it is zeroed. Twin: what had landed in a backward before is whole."""
    bank, (first, second, *_) = bank_of(anywhere), anywhere.handles
    bank.land(first, ODD)
    bank.end_backward()
    bank.land(second, ODD)
    parts_of(anywhere).device.drain()  # as recovery does before
    bank.rebuild()
    assert first.grad.state is GradState.LANDED and second.grad.state is GradState.TORN
    before = at_home(anywhere, 1)
    bank.land(second, ODD)
    with landing_rows(bank, second) as land:
        land(0, 1, lambda: pytest.fail("a torn gradient is not computed"))
    assert second.grad.state is GradState.TORN and torch.equal(at_home(anywhere, 1), before)
    bank.land(first, ODD)
    assert torch.equal(at_home(anywhere), ODD + ODD)
    bank.zero_here(second)
    bank.land(second, ODD)
    assert torch.equal(at_home(anywhere, 1), ODD)


@torch.no_grad()
def test_a_gradient_is_added_to_the_tensor_that_was_assigned(anywhere):
    """Twin: rows of it, too."""
    value, bank, first = ODD.clone(), bank_of(anywhere), anywhere.handles[0]
    bank.set(first, value)
    bank.land(first, ODD * 3)
    assert torch.equal(value, ODD + ODD * 3)
    with landing_rows(bank, first) as land:
        land(1, 2, lambda: ODD[:1])
    assert torch.equal(value[0], (ODD + ODD * 3)[0])
    assert torch.equal(value[1], (ODD + ODD * 3)[1] + ODD[0])
    bank.average()
    assert torch.equal(at_home(anywhere), value)


def test_after_an_exception_a_disks_gradients_are_sent_home(tmp_path):
    """Method: bytes that are written to the slot after that are nobody's."""
    job = small_at_home("nvme", tmp_path)
    bank_of(job).land(job.handles[0], ODD)
    bank_of(job).end_backward()
    view = bank_of(job).homes.view(job.handles[0], write=True).fill_(3.0)
    bank_of(job).rebuild()
    view.fill_(4.0)
    assert at_home(job).tolist() == [[3.0] * 4] * 2


# --- averages ---


def test_averages_are_added_up_until_the_step(anywhere):
    """In the gradient's dtype; a norm of the stand-in is forgotten."""
    bank, first = bank_of(anywhere), anywhere.handles[0]
    bank.homes.view(first, write=True).fill_(math.nan)
    bank.land_average(first, ODD.view(-1))
    assert first.grad.state is GradState.LANDED and first.grad.averaged
    first.grad.proxy_norm = (2.0, torch.ones(()))
    bank.land_average(first, ODD.view(-1) * 3)
    assert torch.equal(at_home(anywhere), ODD + ODD * 3) and first.grad.proxy_norm is None
    first.grad.move(GradState.CONSUMED)
    bank.land_average(first, ODD.view(-1))
    assert first.grad.state is GradState.LANDED
    assert torch.equal(at_home(anywhere), ODD + ODD * 3 + ODD)


def test_an_average_replaces_the_whole_gradient_that_a_rank_keeps(job):
    """And a consumed one is averaged all the same. Twin: a torn one drops it."""
    bank, (first, second, *_) = of_two(job, "optimizer"), job.handles
    for handle in (first, second):
        bank.land(handle, ODD)
    bank.land_average(first, ODD.view(-1) * 3)
    assert torch.equal(at_home(job), ODD * 3)
    first.grad.move(GradState.CONSUMED)
    bank.land_average(first, ODD.view(-1))
    assert torch.equal(at_home(job), ODD)
    bank.rebuild()
    bank.land_average(second, ODD.view(-1) * 3)
    assert second.grad.state is GradState.TORN and not second.grad.averaged
    assert torch.equal(at_home(job, 1), ODD)


def test_an_average_outside_of_a_backward_is_not_lost_in_a_recovery(anywhere):
    """It is on its way, not held back: nothing would be torn. Twin: what a backward that failed had
    landed is torn."""
    bank, (first, second, *_) = of_two(anywhere, "optimizer"), anywhere.handles
    for handle in (first, second):
        bank.land(handle, ODD)
    bank.end_backward()
    bank.land_average(first, ODD.view(-1) * 3)
    parts_of(anywhere).device.drain()  # as recovery does before
    bank.rebuild()
    assert first.grad.state is GradState.LANDED and torch.equal(at_home(anywhere), ODD * 3)
    bank.land(second, ODD)
    parts_of(anywhere).device.drain()
    bank.rebuild()
    assert second.grad.state is GradState.TORN


def test_an_average_lands_in_the_gradients_dtype():
    """Method: one that only fp32 tells from one, added to another."""
    job = small_at_home(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    average = torch.full((8,), 1 + 2.0**-9)
    for _ in range(2):
        bank_of(job).land_average(job.handles[0], average)
    assert torch.equal(at_home(job), (average.bfloat16() * 2).view(2, 4))


# --- several backwards in one pass ---


@contextmanager
def accumulation(job: AtHome, budget: int | None = None):
    """A pass whose sums are kept where the device computes, if it has room. Yields what the ledger
    has charged."""
    ledger, bank = Ledger(), bank_of(job)
    ledger.limit(Tier.DEVICE, budget_nbytes=budget, planned_nbytes=0)
    bank.join_backwards(WholeGradients(ledger, parts_of(job).device))
    yield lambda: ledger.accounts[Tier.DEVICE].charged_nbytes
    bank.land_together(parts_of(job).units)
    assert ledger.accounts[Tier.DEVICE].charged_nbytes == 0


def waits(job: AtHome) -> bool:
    return (
        job.handles[0].flat_param.arrays["grad"].tier is Tier.NVME
        or not parts_of(job).device.is_host
    )


def test_gradients_of_one_pass_land_together_where_that_saves_a_transfer(anywhere):
    """Twin: at a home that the device adds to they land at once. After the pass they are home
    everywhere."""
    bank, first = bank_of(anywhere), anywhere.handles[0]
    with accumulation(anywhere) as charged:
        for factor in (1, 3, 5):
            bank.land(first, ODD * factor)
        assert (charged() > 0) == waits(anywhere)
        assert (first.grad.state is GradState.ABSENT) == waits(anywhere)
    total = ODD + ODD * 3 + ODD * 5
    assert torch.equal(at_home(anywhere), total)
    assert first.grad.state is GradState.LANDED
    bank.land(first, ODD)
    assert torch.equal(at_home(anywhere), total + ODD)


def test_gradients_from_before_a_pass_are_added_to_in_the_order_of_a_plain_loop(anywhere):
    """A sum of the pass's own would be rounded in another order. One that the pass did not bring
    stays."""
    bank, (first, second, *_) = bank_of(anywhere), anywhere.handles
    odd = ODD / 3
    bank.land(second, odd * 7)
    bank.land(first, odd)
    with accumulation(anywhere):
        for factor in (3, 1e3):
            bank.land(first, odd * factor)
    total = odd + odd * 3 + odd * 1e3
    assert not torch.equal(total, odd + (odd * 3 + odd * 1e3))
    assert torch.equal(at_home(anywhere), total) and torch.equal(at_home(anywhere, 1), odd * 7)


def test_without_room_on_the_device_each_lands_at_once(anywhere):
    bank, first = bank_of(anywhere), anywhere.handles[0]
    with accumulation(anywhere, budget=64) as charged:
        bank.land(first, ODD)
        bank.land(first, ODD * 3)
        assert charged() == 0
        assert torch.equal(at_home(anywhere), ODD + ODD * 3)


def test_parameters_of_one_shard_land_each_with_its_own_sum(monkeypatch):
    """Of which one got none: it stays absent."""
    monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    job = small_at_home(bias=True)
    bank, (weight, bias, other, another, *_) = bank_of(job), job.handles
    with accumulation(job):
        bank.land(weight, ODD)
        bank.land(bias, ODD[0, :2])
        bank.land(another, ODD[1, :2])
    assert torch.equal(at_home(job), ODD) and torch.equal(at_home(job, 1), ODD[0, :2])
    assert torch.equal(at_home(job, 3), ODD[1, :2]) and other.grad.state is GradState.ABSENT


def test_sums_of_a_disk_are_sent_home_one_shard_after_the_other(tmp_path, monkeypatch):
    """Method: what the store is told to write by then. Twin: of a flat param without sums
    nothing."""
    job = small_at_home("nvme", tmp_path)
    bank, store, (first, second, *_) = bank_of(job), parts_of(job).store, job.handles
    start, written = store.start_write, []
    monkeypatch.setattr(
        store,
        "start_write",
        lambda array, *args, at: (written.append(array), start(array, *args, at=at))[1],
    )
    with accumulation(job):
        bank.land(first, ODD)
    assert written == [first.flat_param.arrays["grad"]] and torch.equal(at_home(job), ODD)
    with accumulation(job):
        bank.land(second, ODD)
    assert written[1:] == [second.flat_param.arrays["grad"]]


def test_a_pass_that_fails_keeps_no_sums(monkeypatch):
    """Nor does the next backward wait. Twin: a reducer's pass has none to land."""
    monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    job = small_at_home()
    bank, first = bank_of(job), job.handles[0]
    with accumulation(job) as charged:
        bank.land(first, ODD)
        assert charged() > 0
        bank.rebuild()
        bank.land(job.handles[1], ODD)
        assert charged() == 0 and torch.equal(at_home(job, 1), ODD)
    assert first.grad.state is GradState.TORN
    bank.zero_here(first)
    bank.land(first, ODD)
    assert torch.equal(at_home(job), ODD)
    bank.join_backwards(None)
    bank.land_together(parts_of(job).units)
    assert torch.equal(at_home(job), ODD)


# --- rows ---


def test_rows_replace_the_first_gradient_and_are_added_to_others(anywhere):
    """With the factors that wait, once; the norm is forgotten. Bytes are counted."""
    bank, first = bank_of(anywhere), anywhere.handles[0]
    bank.homes.view(first, write=True).fill_(math.nan)
    edge = parts_of(anywhere).traffic.edges["device->host"]
    before = edge.nbytes
    with landing_rows(bank, first) as land:
        land(0, 1, lambda: ODD[:1])
        assert first.grad.state is GradState.ABSENT
        land(1, 2, lambda: ODD[1:])
    assert edge.nbytes - before == 32
    assert first.grad.state is GradState.LANDED and torch.equal(at_home(anywhere), ODD)
    bank.end_backward()
    first.grad.factors.append(0.3)
    first.grad.norm = (2.0, torch.ones(()))
    with landing_rows(bank, first) as land:
        for row in (1, 0):
            land(row, row + 1, lambda row=row: ODD[row : row + 1] * 7)
    assert first.grad.factors == [] and first.grad.norm is None
    assert torch.equal(at_home(anywhere), ODD * 0.3 + ODD * 7)


def test_rows_that_are_cut_short_leave_the_gradient_torn(job):
    bank, first = bank_of(job), job.handles[0]
    bank.land(first, ODD)
    bank.end_backward()
    with pytest.raises(ValueError, match="stop"), landing_rows(bank, first) as land:
        land(0, 1, lambda: ODD[:1])
        raise ValueError("stop")
    bank.rebuild()
    assert first.grad.state is GradState.TORN


def test_rows_are_added_to_what_a_step_has_consumed(job):
    bank, first = bank_of(job), job.handles[0]
    bank.land(first, ODD)
    first.grad.move(GradState.CONSUMED)
    with landing_rows(bank, first) as land:
        land(0, 2, lambda: ODD * 3)
    assert torch.equal(at_home(job), ODD + ODD * 3) and first.grad.state is GradState.LANDED
