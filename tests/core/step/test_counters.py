"""Counters: torch's numbers beside the moments, for the step, after it, and from every state."""

from __future__ import annotations

import pytest
import torch
from small_net import model, steps, wrapped
from torch import nn, optim

import infinity
from infinity.core.step.counters import MuProduct, StepSize
from infinity.errors import UsageError

MADE = {
    "NAdam": (MuProduct, lambda p: optim.NAdam(p, lr=1e-2, betas=(0.8, 0.9))),
    "ASGD": (StepSize, lambda p: optim.ASGD(p, lr=1e-2, lambd=0.1, alpha=0.6, t0=3)),
}


@pytest.mark.parametrize("case", MADE)
def test_the_numbers_are_torchs_step_by_step(case):
    """Claim: bit for bit, also after the rate has changed. The twin: of another rate."""
    counters, make = MADE[case]
    param = nn.Parameter(torch.ones(3))
    optimizer = make([param])
    group = optimizer.param_groups[0]
    numbers = counters.first(group)
    for step in range(1, 9):
        group["lr"] = 1e-2 if step < 5 else 3e-3
        _, numbers = counters.step(group, step, numbers)
        param.grad = torch.ones(3)
        optimizer.step()
        for name, value in numbers.items():
            assert torch.equal(value, optimizer.state[param][name]), (step, name)
    _, other = counters.step(group | {"lr": 1.0, "betas": (0.5, 0.9)}, 9, numbers)
    _, next_one = counters.step(group, 9, numbers)
    assert other != next_one


@pytest.mark.parametrize("case", MADE)
def test_a_step_that_fails_leaves_the_numbers(case):
    """Claim: a step counts only when it is made."""
    net, optimizer = wrapped(MADE[case][1], "host", ".")
    steps(net, optimizer, 2)
    param = next(net.parameters())
    names = MADE[case][0].first(optimizer.param_groups[0])
    before = {name: optimizer.state[param][name].clone() for name in names}
    net(torch.ones(2, 64)).sum().backward()
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(UsageError, match="lr='fast'"):
        optimizer.step()
    assert all(torch.equal(optimizer.state[param][name], before[name]) for name in names)
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    assert any(not torch.equal(optimizer.state[param][name], before[name]) for name in names)


@pytest.mark.parametrize("case", MADE)
def test_what_users_write_is_used(case):
    """Claim: a number that is set is that of the next step, as in torch."""

    def trained(home):
        net, optimizer = wrapped(MADE[case][1], home, ".")
        steps(net, optimizer, 2)
        for param in net.parameters():
            for name in MADE[case][0].first(optimizer.param_groups[0]):
                optimizer.state[param][name] = torch.tensor(0.25)
        steps(net, optimizer, 2, seed=2)
        return {name: value.detach().clone() for name, value in net.state_dict().items()}

    found, expected = trained("host"), trained(None)
    start = dict(model().state_dict())
    for name, value in expected.items():
        moved = (value - start[name]).abs().max()
        assert (found[name] - value).abs().max() < 1e-4 * moved


def test_a_number_that_is_missing_is_named():
    net, optimizer = wrapped(MADE["NAdam"][1], "host", ".")
    steps(net, optimizer, 1)
    del optimizer.state[net[3].bias]["mu_product"]
    before = net.state_dict()["3.bias"].clone()
    net(torch.ones(2, 64)).sum().backward()
    with pytest.raises(UsageError, match="3.bias lacks mu_product: set it, or delete"):
        optimizer.step()
    assert torch.equal(net.state_dict()["3.bias"], before)
    del optimizer.state[net[3].bias]
    optimizer.step()
    assert optimizer.state[net[3].bias]["mu_product"] > 0.3


def test_a_state_dict_that_is_loaded_keeps_its_own_numbers():
    """Claim: the tensors of the dict are not changed by later steps."""
    net, optimizer = wrapped(MADE["NAdam"][1], "host", ".")
    steps(net, optimizer, 2)
    saved = infinity.unwrap_model(net, optimizer)[1].state_dict()
    kept = saved["state"][0]["mu_product"].clone()
    net, optimizer = wrapped(MADE["NAdam"][1], "host", ".")
    optimizer.load_state_dict(saved)
    steps(net, optimizer, 2)
    assert torch.equal(saved["state"][0]["mu_product"], kept)
    assert not torch.equal(optimizer.state[net[3].bias]["mu_product"], kept)


def test_a_state_dict_is_of_one_moment():
    """Claim: later steps change none of its values."""
    net, optimizer = wrapped(MADE["ASGD"][1], "host", ".")
    steps(net, optimizer, 5)
    saved = optimizer.state_dict()["state"][0]
    kept = {name: value.clone() for name, value in saved.items()}
    steps(net, optimizer, 2)
    assert all(torch.equal(saved[name], value) for name, value in kept.items())


def test_numbers_that_were_made_for_inference_are_stepped():
    net, optimizer = wrapped(MADE["NAdam"][1], "host", ".")
    steps(net, optimizer, 1)
    with torch.inference_mode():
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state[net[3].bias]["mu_product"] = torch.tensor(0.5)
    steps(net, optimizer, 2)
    assert optimizer.state[net[3].bias]["mu_product"] < 0.5
