"""Clipping: the factor of the gradients, and which of them it is applied to."""

from __future__ import annotations

import math

import pytest
import torch
from inside import parts_of
from small import RAMP, Small, small_at_home

import infinity
from infinity.core.step.clipping import clip_factor, clip_grad_norm_


def of_torch(norm: torch.Tensor, most: float) -> float:
    """What torch multiplies a gradient of this norm by: seen at a gradient of ones, of any norm."""
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    torch.nn.utils.clip_grads_with_norm_([param], most, norm)
    return param.grad.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 1.7, 1e4, math.inf])
def test_the_factor_is_that_of_torch(norm, dtype):
    total = torch.tensor(norm, dtype=dtype)
    for most in (0.1, 1.0, 3.0):
        assert clip_factor(total, most) == of_torch(total, most)


def test_the_factor_bounds_large_norms_and_leaves_small_ones():
    """By hand. Twin: a NaN is no norm."""
    assert clip_factor(torch.tensor(4.0), 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(torch.tensor(0.5), 1.0) == 1.0
    assert clip_factor(torch.tensor(1.0), 1.0) < 1.0  # torch adds 1e-6 to the norm
    assert math.isnan(clip_factor(torch.tensor(math.nan), 1.0))


def gradients(model: torch.nn.Module) -> list:
    grads = [param.grad for param in model.parameters()]
    return [None if grad is None else grad.tolist() for grad in grads]


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("most", [0.5, 1e6])
def test_gradients_are_clipped_as_by_torch(order, most):
    """With its bits, and its norm. Twin: a large bound leaves them."""
    job, plain = small_at_home(), Small()
    job.backward(RAMP, 3 * RAMP)
    plain(RAMP, 3 * RAMP).backward()
    before = gradients(plain)
    total = clip_grad_norm_(job.optimizer, most, order)
    assert torch.equal(total, torch.nn.utils.clip_grad_norm_(plain.parameters(), most, order))
    assert gradients(job.model) == gradients(plain)
    assert (gradients(plain) == before) == (most > 1)
    assert gradients(job.model)[2:] == [None] * 4  # without a backward they stay absent


def test_a_clip_is_noted_once_with_its_factor():
    """Stages compare it. Twin: without gradients nothing is clipped."""
    job = small_at_home()
    assert clip_grad_norm_(job.optimizer, 1.0).item() == 0
    assert parts_of(job).gradients.clips == []
    job.backward(RAMP, RAMP)
    total = clip_grad_norm_(job.optimizer, 1.0)
    assert parts_of(job).gradients.clips == [clip_factor(total, 1.0)]
    assert 0 < parts_of(job).gradients.clips[0] < 1
    clip_grad_norm_(job.optimizer, 10.0)
    assert parts_of(job).gradients.clips[1:] == [1.0]


def test_every_group_is_clipped_by_the_norm_of_all():
    def groups(params):
        first, second, *others = params
        return torch.optim.SGD([{"params": [first]}, {"params": [second, *others]}], lr=1.0)

    job = small_at_home(make=groups)
    job.backward(RAMP, RAMP)
    total = clip_grad_norm_(job.optimizer, 1.0)
    assert total.item() == pytest.approx(math.sqrt(4 * 30))
    for grad in gradients(job.model)[:2]:
        assert grad == [(RAMP * clip_factor(total, 1.0)).tolist()] * 2


@pytest.mark.parametrize("refuses", [True, False])
def test_a_norm_that_is_not_finite_is_refused_on_demand(refuses):
    """And nothing is changed then. Twin: else the gradients are what torch makes of them."""
    job, plain = small_at_home(), Small()
    job.backward(RAMP * math.inf, RAMP)
    if refuses:
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(job.optimizer, 1.0, error_if_nonfinite=True)
        assert gradients(job.model)[1] == [RAMP.tolist()] * 2
        assert parts_of(job).gradients.clips == []
        return
    plain(RAMP * math.inf, RAMP).backward()
    assert clip_grad_norm_(job.optimizer, 1.0).isinf()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert gradients(job.model)[1] == gradients(plain)[1] == [[0.0] * 4] * 2
    assert all(math.isnan(value) for row in gradients(job.model)[0] for value in row)


def test_a_plain_optimizer_is_refused_and_torchs_function_named():
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(infinity.UsageError, match=r"not a SGD.*torch\.nn\.utils\.clip_grad_norm_"):
        clip_grad_norm_(torch.optim.SGD(params, lr=1.0), 1.0)
