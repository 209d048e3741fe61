"""Hooks: a wrapped model cannot be copied, its gradients are told of, and all hooks go away."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import UsageError
from infinity.runtime.hooks import LandingHook, RefusedCopy

HOST = {"params": "host", "optimizer": "host"}


@pytest.mark.parametrize("take", [copy.deepcopy, copy.copy, pickle.dumps, torch.jit.script])
def test_a_copy_is_refused_until_that_is_removed(take):
    """Claim: a removal may be repeated. Twin: a module beside it is copied."""
    module, beside = nn.Linear(2, 2), nn.Linear(2, 2)
    refused = RefusedCopy(module)
    with pytest.raises(UsageError, match="this Linear is wrapped"):
        take(module)
    assert take(beside) is not None
    for _ in range(2):
        refused.remove()
    assert take(module) is not None
    gone = RefusedCopy(nn.Linear(1, 1))
    gc.collect()
    gone.remove()


def test_a_landed_gradient_is_told_with_its_parameter():
    """Twins: another parameter's is not, nor one after the removal."""
    param, other, told = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), []
    hook = LandingHook(param, lambda each: told.append((each, each.grad.tolist())))
    (3 * param + other).sum().backward()
    assert len(told) == 1 and told[0][0] is param and told[0][1] == [3.0, 3.0]
    hook.remove()
    hook.remove()
    param.sum().backward()
    assert len(told) == 1


@pytest.mark.parametrize("requires", [True, False])
def test_a_hook_leaves_the_parameter_trained_or_frozen(requires):
    """Claim: a frozen one is told of once it is unfrozen."""
    param, told = nn.Parameter(torch.ones(2), requires_grad=requires), []
    LandingHook(param, told.append)
    assert param.requires_grad == requires
    param.requires_grad_(True).sum().backward()
    assert len(told) == 1


def test_a_hook_comes_last_when_it_is_asked_to():
    """Twin: before it is asked it comes in its turn; asked twice it is called once."""
    param, told = nn.Parameter(torch.ones(2)), []
    hook = LandingHook(param, lambda _: told.append("ours"))
    param.register_post_accumulate_grad_hook(lambda _: told.append("theirs"))
    param.sum().backward()
    assert told == ["ours", "theirs"]
    for _ in range(2):
        told.clear()
        hook.come_last()
        param.sum().backward()
        assert told == ["theirs", "ours"]
    hook.remove()
    param.sum().backward()
    assert told == ["theirs", "ours", "theirs"]


def test_a_hook_keeps_no_parameter():
    param = nn.Parameter(torch.ones(2))
    hook, gone = LandingHook(param, lambda _: None), weakref.ref(param)
    del param
    gc.collect()
    assert gone() is None
    hook.come_last()


def hooks_of(model: nn.Module) -> list[int]:
    return [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ]


def test_an_unwrapped_model_has_the_hooks_that_it_had():
    """Method: the user's own hook is there before, and comes after ours as the weights are there.
    Twin: while it is wrapped there are more."""
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.sum().item()))
    before, expected = hooks_of(model), model[0].weight.sum().item()
    names = [set(vars(module)) for module in model.modules()]
    wrapped, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), HOST
    )
    assert all(now > then for now, then in zip(hooks_of(wrapped), before))
    wrapped(torch.ones(1, 2))
    assert seen == [expected]
    plain, _ = infinity.unwrap_model(wrapped, optimizer)
    assert hooks_of(plain) == before and [set(vars(each)) for each in plain.modules()] == names
    assert copy.deepcopy(plain) is not None


@pytest.mark.parametrize("frozen", [True, False])
def test_only_what_is_stepped_is_hooked(frozen):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if frozen:
        model[0].requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    model, _ = infinity.wrap_model(model, torch.optim.SGD(params, lr=0.1), HOST)
    hooked = [bool(param._post_accumulate_grad_hooks) for param in model.parameters()]
    assert hooked == [not frozen] * 2 + [True] * 2


def test_ours_come_before_the_hooks_that_a_module_had():
    """So that those find the weights. Twin: a hook that is registered later runs in its turn."""
    model, order = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: order.append("before"))
    model, _ = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: order.append("after"))
        ours, *others = module._forward_pre_hooks.values()
        assert getattr(ours, "is_infinity", False)
        assert not any(getattr(each, "is_infinity", False) for each in others)
    model(torch.ones(1, 2))
    assert order == ["before", "after"] * 3


def test_every_module_of_the_engine_is_left_and_refuses_to_be_copied():
    """Left even if its forward raises. Method: the hook that torch calls in any case. Twin: a
    module without weights of its own has none."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model, _ = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)
    for module, is_ours in ((model, True), (model[0], True), (model[1], False)):
        ours = [
            number
            for number, hook in module._forward_hooks.items()
            if getattr(hook, "is_infinity", False)
        ]
        assert len(ours) == is_ours and list(module._forward_hooks_always_called) == ours
        if is_ours:
            with pytest.raises(UsageError, match="is wrapped"):
                copy.deepcopy(module)
        else:
            copy.deepcopy(module)
