"""WholeGradients: sums of gradients on the device, and what the ledger is charged for them."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from small import AtHome, small_at_home

from infinity.core.grads.whole import WholeGradients
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.errors import CapacityError

NBYTES = 4 * 4096  # of one flat param: its elements are padded to 4096, each of four bytes


def sums(job: AtHome, budget: int | None = None) -> tuple[WholeGradients, Ledger]:
    ledger = Ledger()
    ledger.limit(Tier.DEVICE, budget_nbytes=budget, planned_nbytes=0)
    return WholeGradients(ledger, parts_of(job).device), ledger


def charged(ledger: Ledger) -> int:
    return ledger.accounts[Tier.DEVICE].charged_nbytes


def values(whole: torch.Tensor, handle) -> torch.Tensor:
    """The elements of one parameter in a flat param's flat memory."""
    place = handle.flat_param.layout.placements[handle.index]
    return whole[place.offset : place.offset + place.numel]


def test_the_first_gradient_replaces_what_is_in_the_memory_and_others_are_added():
    job = small_at_home(bias=True)
    (weights, ledger), (weight, bias, *_) = sums(job), job.handles
    weights.take(weight.unit, weight.flat_param).fill_(float("nan"))
    weights.add(weight, torch.full((2, 4), 1.0))
    weights.add(weight, torch.full((2, 4), 2.0))
    weights.add(bias, torch.full((2,), 5.0))
    whole, charge = weights.pop(weight.flat_param)
    assert values(whole, weight).tolist() == [3.0] * 8 and values(whole, bias).tolist() == [5.0] * 2
    assert whole.dtype == torch.float32 and whole.numel() == 4096
    assert charged(ledger) == charge.nbytes == NBYTES


def test_it_is_known_which_parameters_have_a_gradient():
    """Memory alone is no gradient. Twin: the other parameter, and the other flat param."""
    job = small_at_home(bias=True)
    (weights, _), (weight, bias, other, *_) = sums(job), job.handles
    weights.take(weight.unit, weight.flat_param)
    assert weights.is_empty and not weights.has_gradient(weight)
    weights.add(bias, torch.ones(2))
    assert not weights.is_empty
    assert weights.has_gradient(bias) and not weights.has_gradient(weight)
    assert not weights.has_gradient(other)
    assert weights.pop_got(other.flat_param) == set()
    assert weights.pop_got(weight.flat_param) == {bias.index} == {1}
    assert weights.is_empty and weights.pop_got(weight.flat_param) == set()


def test_a_sum_that_is_given_back_is_replaced_by_the_next_gradient():
    """Twins: another parameter's sum stays; of a parameter without one there is none to give."""
    job = small_at_home(bias=True)
    (weights, _), (weight, bias, other, *_) = sums(job), job.handles
    weights.add(weight, torch.full((2, 4), 3.0))
    weights.add(bias, torch.full((2,), 5.0))
    given = weights.give_back(weight)
    assert given.tolist() == [[3.0] * 4] * 2 and not weights.has_gradient(weight)
    assert weights.give_back(weight) is None and weights.give_back(other) is None
    weights.add(weight, torch.ones(2, 4))
    weights.add(bias, torch.ones(2))
    whole, _ = weights.pop(weight.flat_param)
    assert values(whole, weight).tolist() == [1.0] * 8 and values(whole, bias).tolist() == [6.0] * 2


def test_after_it_is_handed_over_the_next_gradient_is_the_first_again():
    """Twin: before, a second gradient needs no more memory."""
    job = small_at_home()
    (weights, ledger), (weight, *_) = sums(job), job.handles
    for _ in range(2):
        weights.add(weight, torch.ones(2, 4))
        assert charged(ledger) == NBYTES
    _, charge = weights.pop(weight.flat_param)
    weights.pop_got(weight.flat_param)
    weights.add(weight, torch.full((2, 4), 7.0))
    assert charged(ledger) == 2 * NBYTES
    charge.release()
    assert charged(ledger) == NBYTES
    assert values(weights.take(weight.unit, weight.flat_param), weight).tolist() == [7.0] * 8


@pytest.mark.parametrize("fits", [False, True])
def test_a_shard_without_room_is_refused_and_nothing_is_kept_of_it(fits):
    job = small_at_home()
    (first, second, *_), room = job.handles, 2 * NBYTES - (not fits)
    weights, ledger = sums(job, room)
    weights.add(first, torch.ones(2, 4))
    if fits:
        weights.add(second, torch.ones(2, 4))
        assert weights.has_gradient(second)
        return
    with pytest.raises(CapacityError, match=r"the gradients of unit layers\.1"):
        weights.add(second, torch.ones(2, 4))
    assert not weights.has_gradient(second) and charged(ledger) == NBYTES
    weights.add(first, torch.ones(2, 4))  # what has room goes on
    assert values(weights.take(first.unit, first.flat_param), first).tolist() == [2.0] * 8


def test_all_memory_is_given_back_at_once():
    job = small_at_home()
    (weights, ledger), handles = sums(job), job.handles[:2]
    for handle in handles:
        weights.add(handle, torch.ones(2, 4))
    weights.drop()
    assert charged(ledger) == 0 and weights.is_empty
    for handle in handles:
        weights.add(handle, torch.full((2, 4), 9.0))
        assert values(weights.take(handle.unit, handle.flat_param), handle).tolist() == [9.0] * 8
    assert charged(ledger) == 2 * NBYTES


def test_the_memory_is_charged_for_the_running_backward_at_most():
    job = small_at_home()
    weights, ledger = sums(job)
    weights.add(job.handles[0], torch.ones(2, 4))
    ledger.forget_passing()
    assert charged(ledger) == 0
