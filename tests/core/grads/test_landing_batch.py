"""LandingBatch: the gradients of a unit land in one call, before anybody reads them."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, small_at_home

import infinity


@pytest.fixture(params=["device", "host"])
def job(request) -> AtHome:
    return small_at_home(request.param, bias=True)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, int]]:
    """The calls that set or add gradients, with how many each."""
    made: list[tuple[str, int]] = []
    for name in ("_foreach_copy_", "_foreach_add_"):

        def call(homes, values, *, real=getattr(torch, name), name=name):
            made.append((name, len(homes)))
            return real(homes, values)

        monkeypatch.setattr(torch, name, call)
    return made


def grads(job: AtHome) -> list[torch.Tensor]:
    params = list(job.model.parameters())[:4]
    return [param.grad.clone() for param in params if param.grad is not None]


def test_a_unit_lands_in_one_call(job, calls):
    """Twin: the next backward's are added in one."""
    job.backward(RAMP, RAMP)
    assert calls == [("_foreach_copy_", 2)] * 2
    job.backward(RAMP, RAMP)
    assert calls[2:] == [("_foreach_add_", 2)] * 2
    assert [grad.unique().tolist() for grad in grads(job)[::2]] == [[2.0, 4.0, 6.0, 8.0]] * 2


def test_what_waits_lands_before_it_is_read(job, calls):
    """A hook reads the first gradient in the middle of the backward. Twin: the other waits."""
    bank, seen = parts_of(job.engine).gradients, []
    first, second = job.handles[:2]

    def land(handle, value):
        bank.lander.land(handle, value, adds=False)

    job.backward(RAMP)
    calls.clear()
    land(first, torch.full((2, 4), 3.0))
    land(second, torch.full((2,), 5.0))
    assert calls == [] and bank.homes.batch._unit is first.unit
    seen += bank.homes.view(second, write=False).tolist()
    assert seen == [5.0, 5.0] and calls == [("_foreach_copy_", 2)]


def test_gradients_of_another_unit_do_not_wait_together(job, calls):
    """A plan has room for those of one unit. Nor do two of one parameter: each is rounded."""
    bank = parts_of(job.engine).gradients
    job.backward(RAMP, RAMP)
    calls.clear()
    for handle in (job.handles[0], job.handles[2], job.handles[2]):
        bank.lander.land(handle, torch.ones(2, 4), adds=True)
    assert calls == [("_foreach_add_", 1)] * 2
    bank.end_backward()
    assert calls == [("_foreach_add_", 1)] * 3


def test_large_gradients_do_not_wait(job, calls, monkeypatch):
    """A GPU may have no room for a unit's. Twin: small ones wait for each other."""
    monkeypatch.setattr("infinity.core.grads.landing_batch.SHARED_NBYTES", 8)
    job.backward(RAMP, RAMP)
    assert calls == [("_foreach_copy_", 1)] * 4


def test_a_backward_that_fails_leaves_no_gradient_half_done(job, calls):
    """The second layer's gradients have landed, the first layer's wait, as the backward fails.
    Twin: after zero_grad() the same backward is right."""

    def fail(_grad: torch.Tensor) -> None:
        raise RuntimeError("no")

    handle = job.model.layers[0].bias.register_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        job.backward(RAMP, RAMP)
    with pytest.raises(infinity.UsageError, match="half done"):
        job.optimizer.step()
    handle.remove()
    job.optimizer.zero_grad()
    calls.clear()
    job.backward(RAMP, RAMP)
    assert calls == [("_foreach_copy_", 2)] * 2
    assert grads(job)[0].tolist() == [RAMP.tolist()] * 2


def test_a_gradient_that_was_scaled_is_not_scaled_again(job):
    """Twin: what is added is not scaled."""
    job.backward(RAMP)
    job.model.layers[0].weight.grad.mul_(0.5)
    job.backward(RAMP)
    assert grads(job)[0].tolist() == [(RAMP * 0.5 + RAMP).tolist()] * 2


def test_a_unit_is_stepped_in_the_backward_with_all_its_gradients(job):
    before = [param.detach().clone() for param in list(job.model.parameters())[:4]]
    loss = job.model(RAMP, RAMP)
    with job.optimizer.step_in_backward():
        loss.backward()
    job.optimizer.step()
    after = [param.detach().clone() for param in list(job.model.parameters())[:4]]
    for then, now, grad in zip(before, after, [RAMP.expand(2, 4), torch.ones(2)] * 2):
        assert torch.equal(now, then - grad)
