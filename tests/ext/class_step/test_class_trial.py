"""The trial of a class: what it keeps of each element, and what needs all parameters at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_net import stepped_by_class
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import infinity
from infinity.core.step.rules import recognise
from infinity.errors import ConfigError, UsageError
from infinity.ext.class_step import class_trial
from infinity.ext.class_step.entries import class_entry

Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def made(make: Make) -> optim.Optimizer:
    return make(list(nn.Linear(4, 4).parameters()))


MOMENTS = {
    "one name of its own": (
        lambda p: stepped_by_class(p),
        {"exp_avg": "exp_avg", "exp_avg_var": "exp_avg_sq"},
    ),
    "as many as there are": (
        lambda p: pytest.importorskip("pytorch_optimizer").Adan(p, use_gc=True),
        {
            "exp_avg": "exp_avg",
            "exp_avg_sq": "exp_avg_sq",
            "exp_avg_diff": "moment_3",
            "previous_grad": "moment_4",
        },
    ),
    "of one group": (
        lambda p: stepped_by_class([{"params": p[:1]}, {"params": p[1:], "ams_bound": True}]),
        {"exp_avg": "exp_avg", "exp_avg_var": "exp_avg_sq", "max_exp_avg_var": "moment_3"},
    ),
    "none": (lambda p: optim.Adafactor(p), {}),
}


@pytest.mark.parametrize("what", MOMENTS)
def test_what_is_kept_for_each_element_gets_an_array(what):
    """Claim: every group is tried. What has another shape than the parameter gets no array."""
    make, expected = MOMENTS[what]
    assert recognise(made(make)).moments == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_class_keeps_in_16_bits_comes_back_in_16_bits(dtype):
    """Claim: a class of fp32 weights that keeps sums in 16 bits steps as alone. Twin: in fp32 the
    weights are others."""
    kind = pytest.importorskip("pytorch_optimizer").FAdam

    def stepped(home, **settings):
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        optimizer = kind(net.parameters(), lr=1e-2, **settings)
        if home:
            net, optimizer = infinity.wrap_model(net, optimizer, {"params": home})
        for turn in range(4):
            net.weight.grad = torch.cos(torch.arange(64) * (turn + 1.0)).view(8, 8)
            optimizer.step()
        return net.weight.detach().clone()

    assert torch.equal(stepped("host", fim_dtype=dtype), stepped(None, fim_dtype=dtype))
    assert not torch.equal(stepped(None, fim_dtype=dtype), stepped(None))


def test_nothing_of_the_users_changes():
    optimizer = made(stepped_by_class)
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    settings = dict(optimizer.param_groups[0])
    recognise(optimizer)
    assert not optimizer.state and optimizer.param_groups[0] == settings
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


class OfAll(optim.Optimizer):
    """Steps by the mean of all gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        mean = sum(p.grad.mean() for p in params)
        for param in params:
            param.sub_(mean)


class Keeping(optim.Optimizer):
    """Keeps a value of each shape, or several of a parameter's."""

    def __init__(self, params, shape=(), count=0, fails=False):
        self.shape, self.count, self.fails = shape, count, fails
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                if self.fails:
                    raise ValueError("not on this processor")
                self.state[param]["other"] = torch.zeros(self.shape)
                for number in range(self.count):
                    self.state[param][f"moment {number}"] = torch.zeros_like(param)


TRIED = {
    "all at once": (OfAll, "steps all parameters at once"),
    "large values of another shape": (
        lambda p: Keeping(p, shape=(6, 4)),
        "keeps other, which are as large as a parameter",
    ),
    "five of each element": (lambda p: Keeping(p, count=5), "there is room for 4"),
    "a step that raises": (lambda p: Keeping(p, fails=True), "raised ValueError.*not on this"),
}


def tried(known, optimizer: optim.Optimizer):
    return class_trial.with_moments(known, optimizer, optimizer.param_groups)


@pytest.mark.parametrize("what", TRIED)
def test_what_cannot_be_stepped_one_at_a_time_is_refused(what):
    """The twin: the same class with little to keep is not."""
    make, said = TRIED[what]
    known = class_entry(optim.SGD)
    with pytest.raises(ConfigError, match=said):
        tried(known, made(make))
    found = tried(known, made(lambda p: Keeping(p, shape=(4, 1), count=4)))
    assert len(found.moments) == 4


WHOLE = {
    "centralized gradients": lambda p: po().Lion(p, use_gc=True),
    "cautious": lambda p: po().ADOPT(p, cautious=True),
    "a norm of the gradient": lambda p: po().AdaBelief(p, adanorm=True),
    "factors": lambda p: pytest.importorskip("adv_optm").AdamW_adv(p, nnmf_factor=True),
}


def po():
    return pytest.importorskip("pytorch_optimizer")


@pytest.mark.parametrize("what", WHOLE)
def test_a_setting_that_needs_whole_parameters_is_found(what):
    """The twin: the same class with its defaults may step any part."""
    kind = type(made(WHOLE[what]))
    assert recognise(made(WHOLE[what])).whole
    assert not recognise(made(lambda p: kind(p))).whole


def test_a_rate_of_zero_hides_nothing():
    """Claim: a clip of all parameters is refused while a warm-up begins, too."""
    optimizer = made(lambda p: po().Adan(p, max_grad_norm=0.01, use_gc=True))
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    with pytest.raises(ConfigError, match="steps all parameters at once"):
        recognise(optimizer)


LATER = {
    "another moment": (
        lambda p: pytest.importorskip("transformers.optimization").Adafactor(
            p, lr=1e-3, relative_step=False
        ),
        {"beta1": 0.9},
        "keeps exp_avg in group 0",
    ),
    "whole parameters": (lambda p: po().ADOPT(p), {"cautious": True}, "needs whole parameters"),
}


@pytest.mark.parametrize("what", LATER)
def test_a_setting_that_is_switched_on_later_is_tried(what):
    """The twin: weight decay, switched on later, is not refused."""
    make, later, said = LATER[what]
    net = nn.Linear(4, 4)
    net, optimizer = infinity.wrap_model(net, make(list(net.parameters())), {"params": "host"})
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 1e-3
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0].update(later)
    net(torch.ones(1, 4)).sum().backward()
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(UsageError, match=said):
        optimizer.step()
    assert all(map(torch.equal, before, net.parameters()))


def test_a_scheduler_that_a_user_keeps_on_the_optimizer_is_no_helper():
    """The twin, a helper of the class, is refused (`test_class_step.py`)."""
    optimizer = made(stepped_by_class)
    optimizer.scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert recognise(optimizer).moments


def test_hooks_of_all_optimizers_run_once_a_step():
    net = nn.Linear(4, 4)
    called = []
    handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        net, optimizer = infinity.wrap_model(
            net, stepped_by_class(net.parameters()), {"params": "host"}
        )
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    finally:
        handle.remove()
    assert len(called) <= 1


def test_another_default_dtype_changes_nothing():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert recognise(made(stepped_by_class)).moments
    finally:
        torch.set_default_dtype(default)


REFUSED = {
    "Prodigy, of all parameters at once": (
        lambda p: pytest.importorskip("pytorch_optimizer").Prodigy(p),
        {},
        "Prodigy is not supported",
    ),
    "a clip of all parameters": (
        lambda p: po().Adan(p, max_grad_norm=0.5, use_gc=True),
        {},
        "steps all parameters at once",
    ),
    "narrow moments": (
        stepped_by_class,
        {"moments": "int8"},
        "moments='int8' is not for .*AdaBelief",
    ),
    "a flag of every class": (
        lambda p: optim.Adafactor([{"params": p, "differentiable": True}]),
        {},
        "differentiable=True, which is not supported",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_class_step_cannot_do_is_refused(what):
    make, config, said = REFUSED[what]
    net = nn.Linear(4, 4)
    optimizer = make(list(net.parameters()))
    with pytest.raises(ConfigError, match=said):
        infinity.wrap_model(net, optimizer, {"params": "host", **config})


def test_each_group_is_tried_by_itself():
    """Claim: a group has the moments that its own settings need."""
    optimizer = made(
        lambda p: stepped_by_class([{"params": p[:1]}, {"params": p[1:], "ams_bound": True}])
    )
    known = recognise(optimizer)
    found = [list(known.moments_of([group])) for group in optimizer.param_groups]
    assert found[0] == ["exp_avg", "exp_avg_var"]
    assert found[1] == [*found[0], "max_exp_avg_var"]
