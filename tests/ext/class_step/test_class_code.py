"""The code of a class on other parameters: as the class does it; the user's stay as they are."""

from __future__ import annotations

import torch
from torch import nn, optim

from infinity.ext.class_step.class_code import class_step, step_as


def given() -> tuple[nn.Parameter, optim.Optimizer]:
    param = nn.Parameter(torch.linspace(-1, 1, 6))
    return param, optim.NAdam([param], lr=0.1)


def with_grad() -> nn.Parameter:
    param = nn.Parameter(torch.linspace(-1, 1, 6))
    param.grad = torch.ones(6)
    return param


def test_a_step_is_the_classs_and_the_optimizer_stays_as_it_is():
    """The twin: other settings are another step."""
    owned, optimizer = given()
    before, settings = owned.detach().clone(), dict(optimizer.param_groups[0])
    param, other = with_grad(), with_grad()
    state, changed = class_step(optimizer, settings, param, {})
    class_step(optimizer, settings | {"lr": 0.2}, other, {})
    assert torch.equal(owned, before) and not optimizer.state
    assert optimizer.param_groups[0] == settings and changed == {}
    owned.grad = torch.ones(6)
    optimizer.step()
    assert torch.equal(owned, param) and not torch.equal(owned, other)
    assert all(torch.equal(state[name], value) for name, value in optimizer.state[owned].items())


def test_a_hook_or_a_patched_step_of_the_user_does_not_run():
    _, optimizer = given()
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    optimizer.step = lambda: called.append("step")
    param = with_grad()
    class_step(optimizer, optimizer.param_groups[0], param, {})
    assert called == [] and not torch.equal(param, torch.linspace(-1, 1, 6))


class Counting(optim.Optimizer):
    """Counts its steps in its group, and a list of them in place."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "count": 0, "seen": []})

    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            group["seen"].append(len(group["params"]))


def test_settings_that_a_class_changes_are_told_and_not_set():
    optimizer = Counting([nn.Parameter(torch.zeros(1))])
    group = optimizer.param_groups[0]
    states, changed = step_as(optimizer, group, [with_grad(), with_grad()], [{}, {}])
    assert changed == {"count": 1, "seen": [2]} and states == [{}, {}]
    assert group["count"] == 0 and group["seen"] == []
