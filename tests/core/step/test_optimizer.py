"""InfinityOptimizer: torch's interface of an optimizer, over state at home."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deleted import needs
from inside import parts_of
from models import at_home
from small import RAMP, AtHome, Small, small_at_home
from striker import Striker

import infinity
from infinity import UsageError
from infinity.core.grads.record import GradState
from infinity.core.run.operations import State
from infinity.core.seams import Events
from infinity.core.step.optimizer import InfinityOptimizer

GIVEN = RAMP.clone().requires_grad_()  # so that the backward leaves the units


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0, momentum=0.5)


def in_half(params: Any) -> torch.optim.Optimizer:
    """Makes the weights bf16."""
    params = list(params)
    for param in params:
        param.data = param.data.bfloat16()
    return momentum(params)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def with_frozen(make=momentum) -> AtHome:
    """A Small whose last layer is trained later."""
    model = Small()
    model.layers[5].weight.requires_grad_(False)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", None))
    return AtHome(model, optimizer, parts_of(model).engine)


def weight(job: AtHome, index: int = 0) -> torch.Tensor:
    return job.model.state_dict()[f"layers.{index}.weight"].clone()


def in_state(job: AtHome, state: State) -> None:
    parts_of(job).uses.define({state: lambda: True})


# --- what it shares with the optimizer that was wrapped ---


def test_it_has_the_groups_and_attributes_of_the_one_it_replaces():
    """Twins: what nobody set is no attribute, and its own names are its own."""
    given = []
    job = small_at_home(make=lambda params: given.append(momentum(params)) or given[0])
    optimizer, plain = job.optimizer, given[0]
    assert optimizer.wrapped is plain and optimizer.param_groups is plain.param_groups
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.rule_name == "SGD"
    plain.note = "kept"
    assert optimizer.note == "kept" and optimizer.own_attributes == {}
    with pytest.raises(AttributeError, match="'SGD' object, wrapped by Infinity.*'other'"):
        optimizer.other
    with pytest.raises(AttributeError, match="given"):
        InfinityOptimizer.__new__(InfinityOptimizer).given
    optimizer.mine = 3
    optimizer._hidden = 4
    optimizer.step = optimizer.step
    assert optimizer.own_attributes == {"mine": 3}
    assert optimizer._optimizer_step_pre_hooks is plain._optimizer_step_pre_hooks


def test_groups_that_are_assigned_are_read_at_the_next_step():
    """To either of the two. Twin: a parameter that left them is not stepped."""
    job = small_at_home()
    first, second, *_ = job.handles
    job.backward(RAMP, RAMP)
    job.optimizer.param_groups = [{**job.optimizer.param_groups[0], "params": [first.param]}]
    job.optimizer.step()
    assert job.optimizer.wrapped.param_groups is job.optimizer.param_groups
    assert torch.equal(weight(job)[0], 1 - RAMP) and torch.equal(weight(job, 1), torch.ones(2, 4))
    job.optimizer.zero_grad()
    job.backward(RAMP, RAMP)
    job.optimizer.wrapped.param_groups = [
        {**job.optimizer.param_groups[0], "params": [second.param]}
    ]
    first.param.grad = None
    job.optimizer.step()
    assert torch.equal(weight(job, 1)[0], 1 - 2 * RAMP)


def test_the_settings_are_compared_over_ranks_as_values():
    job = small_at_home(make=momentum)
    (settings,) = job.optimizer.settings
    assert settings["lr"] == 1.0 and settings["momentum"] == 0.5
    job.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    assert job.optimizer.settings[0]["lr"] == 0.25


def test_it_is_gone_as_soon_as_nobody_holds_it():
    """Without the garbage collector. Twin: its state says so, then."""
    job = small_at_home(make=momentum)
    state, gone = job.optimizer.state, weakref.ref(job.optimizer)
    param = job.handles[0].param
    gc.collect()
    gc.disable()
    try:
        job.optimizer = None
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(UsageError):
        state[param]
    job.backward(GIVEN, GIVEN)


def test_a_landed_unit_is_told_to_the_optimizer_while_there_is_one():
    """Method: what the job calls. Twin: later it does nothing."""
    job = small_at_home(make=momentum)
    heard: list = []
    context = replace(parts_of(job).make_step_context(), events=Events(unit_landed=heard))
    optimizer = InfinityOptimizer(context, job.optimizer.wrapped, job.optimizer._known)
    job.backward(RAMP)
    (landed,) = heard
    with optimizer.step_in_backward():
        landed(parts_of(job).units[0])
    assert job.handles[0].grad.state is GradState.CONSUMED
    del optimizer
    landed(parts_of(job).units[1])


# --- state ---


def test_state_that_is_assigned_replaces_what_is_at_home():
    job = small_at_home(make=momentum)
    first, second, *_ = job.handles
    job.backward(RAMP, RAMP)
    job.optimizer.step()
    buffer = torch.full((2, 4), 7.0)
    job.optimizer.state = {first.param: {"momentum_buffer": buffer}}
    assert torch.equal(job.optimizer.state[first.param]["momentum_buffer"] + 0, buffer)
    assert second.param not in job.optimizer.state


@pytest.mark.parametrize("make", [momentum, adam])
def test_a_state_dict_has_what_a_plain_optimizers_has(make):
    """Bits compared. Twin: with nothing stepped it has none."""
    job, plain = small_at_home(make=make), Small()
    optimizer = make(plain.parameters())
    assert job.optimizer.state_dict()["state"] == {}
    for model, each in ((job.model, job.optimizer), (plain, optimizer)):
        model(RAMP, 2 * RAMP).backward()
        each.step()
    found, expected = job.optimizer.state_dict(), optimizer.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert values.keys() == found["state"][index].keys()
        assert all(torch.equal(values[key], found["state"][index][key]) for key in values)
    assert found["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    optimizer.load_state_dict(job.optimizer.plain_state_dict())


def test_masters_are_in_the_state_dict_and_not_in_the_plain_one():
    job = small_at_home(make=in_half)
    job.backward(RAMP.bfloat16())
    job.optimizer.step()
    assert "master" in job.optimizer.state_dict()["state"][0]
    assert "master" not in job.optimizer.plain_state_dict()["state"][0]


def test_hooks_of_state_dicts_run_in_torchs_order_and_may_replace_them():
    """One that returns None replaces nothing. Registered on either optimizer."""
    job, calls = small_at_home(make=momentum), []
    optimizer = job.optimizer
    optimizer.register_state_dict_pre_hook(lambda each: calls.append(("before", each)))
    optimizer.register_state_dict_post_hook(lambda each, found: {**found, "more": 1})
    optimizer.wrapped.register_state_dict_post_hook(lambda each, found: calls.append("after"))
    saved = optimizer.state_dict()
    assert calls == [("before", optimizer), "after"] and saved["more"] == 1
    calls.clear()
    optimizer.register_load_state_dict_pre_hook(
        lambda each, given: {k: v for k, v in given.items() if k != "more"} if calls else None
    )
    optimizer.register_load_state_dict_pre_hook(lambda each, given: calls.append("more" in given))
    optimizer.register_load_state_dict_post_hook(lambda each: calls.append(each))
    saved["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(saved)
    optimizer.load_state_dict(saved)
    assert calls == [True, optimizer, False, optimizer]
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_loaded_state_is_at_home_and_its_settings_hold():
    """Twin: settings that no kernel has are refused, and change nothing."""
    job, other = small_at_home(make=momentum), small_at_home(make=momentum)
    job.backward(RAMP)
    job.optimizer.step()
    saved = job.optimizer.state_dict()
    wrong = {**saved, "param_groups": [{**saved["param_groups"][0], "differentiable": True}]}
    with pytest.raises(UsageError, match=r"load_state_dict\(\)"):
        other.optimizer.load_state_dict(wrong)
    assert other.optimizer.state_dict()["state"] == {}
    assert not other.optimizer.param_groups[0]["differentiable"]
    other.optimizer.load_state_dict(saved)
    found = other.optimizer.state[other.handles[0].param]["momentum_buffer"]
    assert torch.equal(found + 0, torch.stack([RAMP, RAMP]))


def test_state_of_parameters_that_left_the_groups_is_in_no_state_dict():
    """A save says so; it is found apart. Twin: while all are in groups there is none."""
    job = small_at_home(make=momentum)
    first, second, *_ = job.handles
    job.backward(RAMP, RAMP)
    job.optimizer.step()
    assert job.optimizer.state_outside_groups() == {}
    del job.optimizer.param_groups[0]["params"][1]
    outside = job.optimizer.state_outside_groups()
    assert len(outside) == 1 and second.param in outside
    assert torch.equal(outside[second.param]["momentum_buffer"][0], RAMP)
    with pytest.raises(UsageError, match=r"layers\.1\.weight"):
        job.optimizer.state_dict()


def test_a_state_dict_is_made_outside_of_the_modes_of_inference():
    """Its tensors can be written to, and need no gradients."""
    job = small_at_home(make=momentum)
    job.backward(RAMP)
    job.optimizer.step()
    with torch.inference_mode():
        found = job.optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert not found.is_inference() and not found.requires_grad


# --- groups that are added later ---


@needs("ext/class_step")
def test_an_added_group_is_completed_and_stepped():
    """With the defaults that it does not set."""
    job = with_frozen()
    frozen = job.handles[5]
    frozen.param.requires_grad_(True)
    job.optimizer.add_param_group({"params": [frozen.param], "lr": 0.5})
    assert len(job.optimizer.param_groups) == 2
    group = job.optimizer.param_groups[1]
    assert (group["lr"], group["momentum"], group["params"]) == (0.5, 0.5, [frozen.param])
    assert job.optimizer.wrapped.param_groups is job.optimizer.param_groups
    frozen.param.grad = torch.ones(2, 4)
    job.optimizer.step()
    assert weight(job, 5).tolist() == [[0.5] * 4] * 2


@needs("ext/class_step")
@pytest.mark.parametrize(
    "group, message",
    [
        (lambda job: {"params": [small_at_home().handles[0].param]}, "wrap_model"),
        (lambda job: {"params": [job.handles[5].param], "differentiable": True}, "add_param_group"),
        (lambda job: {"params": [job.handles[0].param]}, "more than one parameter group"),
    ],
)
def test_a_group_that_cannot_be_stepped_is_refused_and_not_added(group, message):
    """Twin: a good one is taken after it."""
    job = with_frozen()
    before = list(job.optimizer.param_groups)
    with pytest.raises((UsageError, ValueError), match=message):
        job.optimizer.add_param_group(group(job))
    assert job.optimizer.param_groups == before and job.handles[5].grad is None
    job.optimizer.add_param_group({"params": [job.handles[5].param]})
    assert len(job.optimizer.param_groups) == len(before) + 1


def test_an_added_group_stands_once_however_often_its_change_is_made():
    """After an interrupt it is carried out again. Method: an admission that calls twice."""
    job = with_frozen()
    asked = []

    def admit(params, *, moments_of, needs, then) -> None:
        asked.append((list(params), len(moments_of(None))))
        then()
        then()

    context = replace(parts_of(job).make_step_context(), admit=admit)
    optimizer = InfinityOptimizer(context, job.optimizer.wrapped, job.optimizer._known)
    optimizer.add_param_group({"params": [job.handles[5].param]})
    assert asked == [([job.handles[5].param], 1)] and len(optimizer.param_groups) == 2


# --- the step ---


def test_a_step_takes_the_gradients_off_and_returns_the_loss_of_its_closure():
    """Which runs with gradients, as in torch. Twin: without one there is no loss."""
    job, enabled = small_at_home(), []

    def closure() -> torch.Tensor:
        enabled.append(torch.is_grad_enabled())
        job.optimizer.zero_grad()
        loss = job.model(RAMP)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = job.optimizer.step(closure)
    assert loss.item() == 20 and enabled == [True]
    assert torch.equal(weight(job)[0], 1 - RAMP)
    assert job.optimizer.wrapped._opt_called  # a scheduler made for it asks
    job.optimizer.zero_grad()
    job.backward(RAMP)
    assert job.optimizer.step() is None
    assert torch.equal(weight(job)[0], 1 - 2 * RAMP)


@pytest.mark.parametrize("most", [None, 1.0, 1e6])
def test_gradients_are_clipped_to_the_norm_that_the_config_gives(most):
    """With torch's bits. Twins: a larger norm, and none."""
    job, plain = small_at_home(max_grad_norm=most), Small()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    for model, each in ((job.model, job.optimizer), (plain, optimizer)):
        model(RAMP, 2 * RAMP).backward()
        if most is not None and model is plain:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), most)
        each.step()
    for index in range(3):
        assert torch.equal(weight(job, index), plain.layers[index].weight)


LAST = 40  # lines of the package before a step has returned


def test_a_step_that_is_cut_short_as_it_returns_is_made_once():
    """Method: an exception at each of the last lines; the user steps again. Twin: a step after one
    that has returned is a step of its own."""
    striker = Striker(KeyboardInterrupt, "line")

    def made(n: int) -> tuple[bool, torch.Tensor]:
        job = small_at_home()
        job.backward(RAMP)
        error, _ = striker.run(n, job.optimizer.step)
        job.optimizer.step()
        return error is not None, weight(job)[0]

    assert torch.equal(made(0)[1], 1 - 2 * RAMP)
    lines = striker.counted
    for n in range(lines - LAST, lines + 1):
        struck, found = made(n)
        assert struck and torch.equal(found, 1 - RAMP), (n - lines, striker.place)


def test_a_step_that_was_completed_after_an_interrupt_is_not_made_twice():
    """Twin: once it is told the next one is a step of its own, with the same gradients."""
    job = small_at_home()
    job.backward(RAMP)
    job.optimizer.step()
    expected, steps = weight(job), parts_of(job).steps
    steps.untold = steps.index
    job.optimizer.step()
    assert steps.untold != steps.index and torch.equal(weight(job), expected)
    job.optimizer.step()
    assert torch.equal(weight(job)[0], 1 - 2 * RAMP)
    job.optimizer.zero_grad()
    steps.untold = steps.index
    job.backward(RAMP)
    job.optimizer.step()
    assert torch.equal(weight(job)[0], 1 - 3 * RAMP)


def test_settings_that_no_kernel_has_are_refused_by_the_step():
    """And by the block around a backward, which names itself. Twin: nothing has changed."""
    job = small_at_home(make=momentum)
    job.backward(RAMP)
    job.optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(UsageError, match=r"^step\(\): "):
        job.optimizer.step()
    with pytest.raises(UsageError, match=r"^step_in_backward\(\): "):
        with job.optimizer.step_in_backward():
            pytest.fail("begun")
    job.optimizer.param_groups[0]["differentiable"] = False
    job.optimizer.step()
    assert torch.equal(weight(job)[0], 1 - RAMP)


def test_state_that_was_written_is_home_before_the_step():
    job = small_at_home(make=momentum)
    job.backward(RAMP)
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.optimizer.state[job.handles[0].param]["momentum_buffer"].fill_(4.0)
    job.backward(RAMP)
    job.optimizer.step()
    assert torch.equal(weight(job)[0], 1 - RAMP - (RAMP + 2))


CALLS = {
    State.ACCUMULATING: ("step", "zero_grad", "step_in_backward", "load_state_dict"),
    State.STEPPED: ("zero_grad", "state_dict", "add_param_group", "step_in_backward"),
    State.BACKWARD: ("step", "step_in_backward"),
}


@pytest.mark.parametrize("state", CALLS, ids=lambda state: state.name)
def test_calls_are_refused_where_the_state_is_not_whole(state):
    """Twin: the others are allowed."""
    job = small_at_home(make=momentum)
    job.backward(RAMP)
    saved = job.optimizer.state_dict()
    arguments = {
        "load_state_dict": (saved,),
        "add_param_group": ({"params": [job.handles[5].param]},),
    }
    in_state(job, state)
    for name in CALLS[state]:
        with pytest.raises(UsageError):
            called = getattr(job.optimizer, name)(*arguments.get(name, ()))
            if name == "step_in_backward":
                called.__enter__()
    if state is State.BACKWARD:
        job.optimizer.state_dict()
        job.optimizer.zero_grad()


# --- norms ---


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_the_total_norm_is_torchs(order):
    """Of the gradients that are there. Twin: where ranks are cut it is the same here."""
    job, plain = small_at_home(), Small()
    for model in (job.model, plain):
        model(RAMP, 2 * RAMP).backward()
    grads = [param.grad for param in plain.parameters() if param.grad is not None]
    expected = torch.nn.utils.get_total_norm(grads, order)
    assert torch.equal(job.optimizer.total_norm(order), expected)
    cut(job)
    torch.testing.assert_close(job.optimizer.total_norm(order), expected)


def cut(job: AtHome) -> None:
    """Lets the optimizer believe that other ranks have other elements."""
    collectives = SimpleNamespace(ranks=SimpleNamespace(is_cut=True))
    job.optimizer.context = replace(job.optimizer.context, collectives=collectives)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_norm_that_is_not_finite_raises_if_so_asked(is_cut):
    """Twins: without the question, and of finite gradients."""
    job = small_at_home()
    job.backward(RAMP)
    if is_cut:
        cut(job)
    assert job.optimizer.total_norm(error_if_nonfinite=True).isfinite()
    job.handles[0].param.grad.mul_(math.inf)
    assert not job.optimizer.total_norm().isfinite()
    with pytest.raises(RuntimeError, match="gradients"):
        job.optimizer.total_norm(error_if_nonfinite=True)


def test_where_ranks_are_cut_gradients_are_averaged_before_they_are_measured():
    """Of the parameters that are in groups by then."""
    job, averages = small_at_home(), []
    job.backward(RAMP, 2 * RAMP)
    cut(job)
    running = lambda **_: averages.append(parts_of(job).scopes.running_here)
    parts_of(job).gradients.reduce_with(None, running)
    job.optimizer.param_groups[0]["params"] = [job.handles[0].param]
    assert job.optimizer.total_norm(1.0) == 20 and averages == [True]


# --- stepping in the backward ---


def test_units_are_stepped_in_the_backward_and_the_step_does_the_rest():
    job, seen = small_at_home(), []
    with job.optimizer.step_in_backward():
        job.backward(GIVEN, GIVEN)
        seen = [handle.grad.state for handle in job.handles[:2]]
    assert seen == [GradState.CONSUMED] * 2
    job.optimizer.step()
    assert torch.equal(weight(job)[0], 1 - RAMP) and torch.equal(weight(job, 1)[0], 1 - RAMP)
    assert parts_of(job).steps.index == 1


def test_a_norm_of_all_gradients_and_units_stepped_before_it_exclude_each_other():
    job = small_at_home(max_grad_norm=1.0)
    with pytest.raises(UsageError, match="max_grad_norm"):
        with job.optimizer.step_in_backward():
            pytest.fail("begun")


def test_what_begins_in_the_backward_must_end_before_a_step_is_read():
    """Method: the block is a use of the job, and ends as one. Twin: after step() all is read."""
    job = small_at_home(make=momentum)
    with job.optimizer.step_in_backward():
        assert parts_of(job).scopes.running_here and parts_of(job).steps.streaming
        job.backward(GIVEN)
    assert not parts_of(job).steps.streaming
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) first"):
        job.optimizer.state_dict()
    job.optimizer.step()
    assert list(job.optimizer.state_dict()["state"]) == [0]


# --- zeroing ---


def test_gradients_become_none_or_zeros_that_the_next_step_applies():
    """Twin: a gradient that is absent stays so."""
    job = small_at_home(make=momentum)
    job.backward(RAMP)
    parts_of(job).gradients.clips.append(0.5)
    first, second, *_ = job.handles
    assert parts_of(job).steps.backwards == 1
    job.optimizer.zero_grad(set_to_none=False)
    assert first.param.grad.count_nonzero() == 0 and second.grad.state is GradState.ABSENT
    assert parts_of(job).gradients.clips == [] and parts_of(job).steps.backwards == 0
    job.optimizer.step()
    assert list(job.optimizer.state_dict()["state"]) == [0]
    job.optimizer.zero_grad()
    assert all(handle.grad.state is GradState.ABSENT for handle in job.handles)
    assert first.param.grad is None


def test_a_gradient_of_a_parameter_that_is_not_stepped_is_zeroed_too():
    """One that was put into a group without a home for its state. Twin: without a gradient
    nothing is done."""
    job, plain = small_at_home(), torch.nn.Parameter(torch.ones(3))
    job.optimizer.param_groups[0]["params"].append(plain)
    job.optimizer.zero_grad(set_to_none=False)
    assert plain.grad is None
    plain.grad = grad = torch.ones(3)
    job.optimizer.zero_grad(set_to_none=False)
    assert plain.grad is grad and grad.tolist() == [0.0] * 3
    job.optimizer.zero_grad()
    assert plain.grad is None
