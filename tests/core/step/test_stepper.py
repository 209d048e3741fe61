"""Stepper: what a step does with gradients that were multiplied as often as a kernel can do it."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from torch import nn

import infinity
from infinity import native
from infinity.core.step.known import KNOWN
from infinity.core.step.stepper import Stepper


@pytest.mark.parametrize("clip", [1.0, 0.5, 2.0])
def test_a_gradient_with_every_factor_a_kernel_takes_is_stepped(clip):
    """Method: multiply the gradient so often by a half, and step with another factor from clipping,
    as a rank does whose part of it counted in no norm. All are powers of two, so that the weight is
    exact."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=1.0), {"params": "host", "optimizer": "host"}
    )
    engine, handle = parts_of(model).engine, model.weight._infinity
    model(torch.full((1, 4), 2.0)).sum().backward()
    for _ in range(native.MAX_GRAD_FACTORS):
        model.weight.grad.mul_(0.5)
    assert len(handle.grad.factors) == native.MAX_GRAD_FACTORS
    stepper = Stepper(
        engine.make_step_context(),
        KNOWN[native.Rule.SGD],
        optimizer.param_groups,
        {handle: 0},
        optimizer.state,
    )
    stepper.carry_out(stepper.plan(parts_of(engine).units[0], 1, clip))
    assert torch.equal(
        model.state_dict()["weight"],
        torch.full((2, 4), 1 - 2.0 * 0.5**native.MAX_GRAD_FACTORS * clip),
    )
