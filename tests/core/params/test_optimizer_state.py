"""OptimizerState: the state at home as a state dict of torch's, and back."""

from __future__ import annotations

import logging

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, Small, small_at_home

import infinity
from infinity import UsageError


def adam(params) -> torch.optim.Optimizer:
    """In two groups; the first has the first parameter."""
    first, *others = params
    groups = [{"params": [first], "lr": 0.5}, {"params": others}]
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.5, 0.75))


def stepped(make=adam, dtype: torch.dtype = torch.float32, **config) -> AtHome:
    job = small_at_home(make=make, **config) if dtype == torch.float32 else halved(make)
    job.backward(RAMP.to(dtype), 2 * RAMP.to(dtype))
    job.optimizer.step()
    job.optimizer.zero_grad()
    return job


def halved(make) -> AtHome:
    """In bf16, of which the master has the bits that the weight lacks."""
    model = Small().bfloat16()
    config = {"params": "host", "optimizer": "host"}
    model, optimizer = infinity.wrap_model(model, make(model.parameters()), config)
    return AtHome(model, optimizer, parts_of(model).engine)


def plain() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same step by torch."""
    model = Small()
    optimizer = adam(model.parameters())
    model(RAMP, 2 * RAMP).backward()
    optimizer.step()
    return model, optimizer


def rows(value: float | torch.Tensor) -> list:
    return (torch.zeros(2, 4) + value).tolist()


def test_a_state_dict_has_torchs_numbers_groups_and_values():
    """Twin: parameters without a step have none."""
    found, expected = stepped().optimizer.state_dict(), plain()[1].state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == [0, 1]
    for index in (0, 1):
        mine, theirs = found["state"][index], expected["state"][index]
        assert list(mine) == list(theirs) and mine["step"].equal(theirs["step"])
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[name], theirs[name])


def test_values_have_torchs_names_whatever_their_arrays_are_called():
    job = stepped(lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5))
    ((name, value),) = job.optimizer.state_dict()["state"][1].items()
    assert name == "momentum_buffer" and value.tolist() == rows(2 * RAMP)


def test_what_was_loaded_is_at_home_and_the_rest_begins_anew():
    """A state dict of torch's, in an optimizer with other state. Twin: a parameter of which the
    dict has nothing has no state any more."""
    job, (_, optimizer) = small_at_home(make=adam), plain()
    job.backward(RAMP, RAMP)
    job.optimizer.step()
    given = optimizer.state_dict()
    given["param_groups"][1]["lr"] = 0.75
    given["state"][0]["step"] = torch.tensor(5.0)
    del given["state"][1]
    first, second, *_ = job.handles
    held = job.optimizer.state[first.param]["exp_avg"]
    job.optimizer.load_state_dict(given)
    held.fill_(9.0)  # the user's own
    job.optimizer.state.at_home.settle()
    assert first.step == 5 and not second.has_state
    assert job.optimizer.param_groups[1]["lr"] == 0.75
    assert job.optimizer.param_groups[0]["params"] == [first.param]
    for handle, name, value in (
        (first, "exp_avg", RAMP / 2),
        (first, "exp_avg_sq", RAMP.square() / 4),
        (second, "exp_avg", 0.0),
    ):
        kept = handle.flat_param.read_moment(parts_of(job).store, name, handle.index)
        torch.testing.assert_close(kept.tolist(), rows(value))


def test_moments_without_a_count_are_kept():
    """As torch keeps them. Twin: an entry with neither is a fresh start."""
    job = stepped()
    given = job.optimizer.state_dict()
    moments = {"exp_avg": torch.ones(2, 4), "exp_avg_sq": torch.ones(2, 4)}
    given["state"] = {0: {"step": 0} | moments, 1: {"step": 0}}
    job.optimizer.load_state_dict(given)
    first, second, *_ = job.handles
    assert first.step == 0 and first.keeps_moments and first.has_state
    assert second.step == 0 and not second.has_state


def test_values_of_the_users_own_go_with_the_state():
    job = stepped()
    job.optimizer.state[job.handles[1].param]["mine"] = 5
    job.optimizer.state["note"] = {"a": 1}
    found = job.optimizer.state_dict()
    assert list(found["state"][1]) == ["step", "exp_avg", "exp_avg_sq", "mine"]
    assert found["state"]["note"] == {"a": 1}
    other = small_at_home(make=adam)
    other.optimizer.load_state_dict(found)
    assert other.optimizer.state[other.handles[1].param].own == {"mine": 5}
    assert other.optimizer.state["note"] == {"a": 1} and other.handles[0].step == 1


@pytest.mark.parametrize("fault", ["groups", "moment", "count of parameters"])
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(fault):
    job = stepped()
    given = job.optimizer.state_dict()
    if fault == "groups":
        given["param_groups"].pop()
        message = r"groups of \[1\] parameters, this optimizer of \[1, 5\]"
    elif fault == "moment":
        given["state"][1]["exp_avg"] = torch.ones(4, 2)
        message = r"exp_avg of layers\.1\.weight has shape \(4, 2\), the parameter \(2, 4\)"
    else:
        given["param_groups"][0]["params"].append(given["param_groups"][1]["params"].pop())
        message = r"groups of \[2, 4\] parameters"
    given["state"][0]["step"] = torch.tensor(9.0)
    parts_of(job).borrowed.forget()
    with pytest.raises(UsageError, match=message):
        job.optimizer.load_state_dict(given)
    assert job.handles[0].step == 1 and job.optimizer.param_groups[0]["lr"] == 0.5


def test_state_of_a_parameter_in_no_group_is_in_no_state_dict():
    """Which is refused then. Twin: without the state it is taken."""
    job = stepped()
    param = job.optimizer.param_groups[1]["params"].pop(0)
    with pytest.raises(UsageError, match=r"1 parameters \(layers\.1\.weight, \.\.\.\) have state"):
        job.optimizer.state_dict()
    assert list(job.optimizer.state_outside_groups()) == [param]
    del job.optimizer.state[param]
    assert list(job.optimizer.state_dict()["state"]) == [0]


def test_writes_to_a_state_dict_that_was_handed_out_reach_home():
    """Twin: the one for a plain optimizer is the caller's own."""
    job = stepped()
    handle, found = job.handles[0], job.optimizer.state_dict()["state"][0]
    found["exp_avg"].fill_(3.0)
    found["step"].fill_(4.0)
    job.optimizer.plain_state_dict()["state"][0]["exp_avg_sq"].fill_(3.0)
    job.optimizer.state_dict()
    store = parts_of(job).store
    assert (
        handle.flat_param.read_moment(store, "exp_avg", 0).tolist() == rows(3.0)
        and handle.step == 4
    )
    assert handle.flat_param.read_moment(store, "exp_avg_sq", 0).tolist() != rows(3.0)


def masters(job: AtHome) -> list[torch.Tensor]:
    return [state["master"] for state in job.optimizer.state_dict()["state"].values()]


def test_a_16_bit_parameter_has_a_master_in_the_state_dict_alone():
    """Of which the weight has the upper half. Twin: a plain optimizer gets none."""
    job = stepped(dtype=torch.bfloat16)
    for master, handle in zip(masters(job), job.handles[:2], strict=True):
        assert master.dtype == torch.float32
        torch.testing.assert_close(master.bfloat16(), job.model.state_dict()[handle.name])
    assert all(
        "master" not in state for state in job.optimizer.plain_state_dict()["state"].values()
    )


@pytest.mark.parametrize("fate", ["loaded", "absent", "of others"])
def test_a_master_goes_on_only_with_the_weights_that_it_belongs_to(fate, caplog):
    """Twins: without it, or with other weights, the model's weights count, and that is said."""
    job, other = stepped(dtype=torch.bfloat16), halved(adam)
    given = job.optimizer.state_dict()
    if fate == "absent":
        for state in given["state"].values():
            del state["master"]
    if fate != "of others":
        other.model.load_state_dict(job.model.state_dict())
    with caplog.at_level(logging.WARNING):
        other.optimizer.load_state_dict(given)
    assert [handle.has_loaded_master for handle in other.handles[:2]] == [fate == "loaded"] * 2
    wanted = {"loaded": "", "absent": "has no fp32 masters of 2", "of others": "of other weights"}
    assert wanted[fate] in caplog.text and bool(caplog.text) == (fate != "loaded")
    if fate == "loaded":
        assert all(map(torch.equal, masters(other), masters(job)))
    elif fate == "of others":
        assert all(master.tolist() == rows(1.0) for master in masters(other))
