"""infinity.auto: the optimizer that a script holds, whatever happens to it and to its model before
and after they are wrapped.

Words used here:

**story**: a function of a model that trains it and returns what a user would look at. It is told
twice, by itself and under `infinity.auto`.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.run.registry import is_wrapped, wrapped
from infinity.errors import ConfigError, InfinityError

Story = Callable[[nn.Module], Any]


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, steps: int = 3, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def values(model: nn.Module) -> list[list[float]]:
    return [value.flatten().tolist() for value in model.state_dict().values()]


def scheduled_before(model: nn.Module) -> Any:
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    found = []
    for step in range(3):
        found += train(model, optimizer, 1, step)
        scheduler.step()
    return found, scheduler.get_last_lr(), scheduler.state_dict()["last_epoch"], values(model)


def scheduled_after(model: nn.Module) -> Any:
    optimizer = sgd(model)
    found = train(model, optimizer, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(1, 3):
        found += train(model, optimizer, 1, step)
        scheduler.step()
    return found, optimizer.param_groups[0]["lr"]


def averaged(model: nn.Module) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)
    mean, optimizer = copy.deepcopy(model), sgd(model)
    for step in range(3):
        train(model, optimizer, 1, step)
        average.update_parameters(model)
        with torch.no_grad():
            for kept, param in zip(mean.parameters(), model.parameters()):
                kept.lerp_(param, 0.1)
    return values(average), values(mean)


def scaled(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler, found = torch.amp.GradScaler("cpu", init_scale=4.0), []
    for step in range(4):
        loss = model(batch(step)).square().mean() * (float("inf") if step == 2 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((loss.item(), scaler.get_scale()))
    return str(found), values(model)


def by_closure(model: nn.Module) -> Any:
    optimizer, found = sgd(model), []

    def closure():
        optimizer.zero_grad()
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        found.append(optimizer.step(closure).item())
    return found, values(model)


def never_called(model: nn.Module) -> Any:
    optimizer, found = sgd(model), []
    for step in range(3):
        loss = nn.functional.linear(batch(step), model[0].weight, model[0].bias).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, values(model)


def in_two_phases(model: nn.Module) -> Any:
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model[0].requires_grad_(False)
    found = train(model, head)
    model[0].requires_grad_(True)
    return found + train(model, sgd(model), first=3), values(model)


def by_two_optimizers(model: nn.Module) -> Any:
    first, second = sgd(model[0]), torch.optim.SGD(model[2].parameters(), lr=0.05)
    found = []
    for step in range(3):
        loss = model(batch(step)).square().mean()
        for each in (first, second):
            each.zero_grad()
        loss.backward()
        first.step()
        second.step()
        found.append(loss.item())
    return found, values(model)


def saved_and_loaded(model: nn.Module) -> Any:
    optimizer = sgd(model)
    found = train(model, optimizer, 2)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    momentum = states[1]["state"][0]["momentum_buffer"].tolist()
    found += train(model, optimizer, 2, 2)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    again = train(model, optimizer, 2, 2)
    assert again == found[2:]
    return found, momentum


def resumed_before(model: nn.Module) -> Any:
    other = made()
    optimizer = sgd(other)
    train(other, optimizer, 2)
    mine = sgd(model)
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    mine.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return train(model, mine, 2, 2), values(model)


def hooked(model: nn.Module) -> Any:
    optimizer, seen = sgd(model), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    return train(model, optimizer), seen, repr(optimizer), type(optimizer).__name__


def clipped(model: nn.Module) -> Any:
    optimizer, found = sgd(model), []
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(batch(step)).square().mean().backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return found, values(model)


def remade(model: nn.Module) -> Any:
    """As a notebook whose cell is run again, or folds of a cross-validation."""
    found = []
    for _ in range(3):
        model = made()
        optimizer = sgd(model)
        found.append(train(model, optimizer))
    return found


def probed(model: nn.Module) -> Any:
    """A learning rate that is looked for with an optimizer of its own, which is dropped."""
    before = copy.deepcopy(model.state_dict())
    train(model, torch.optim.SGD(model.parameters(), lr=1.0), 1)
    model.load_state_dict(before)
    return train(model, sgd(model)), values(model)


def compiled(model: nn.Module) -> Any:
    faster = torch.compile(model, backend="eager")
    optimizer = sgd(faster)
    return train(faster, optimizer), values(model), sorted(faster.state_dict())


def in_bf16(model: nn.Module) -> Any:
    model.to(torch.bfloat16)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), []
    for step in range(4):
        loss = model(batch(step).bfloat16()).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, values(model)


STORIES: list[Story] = [
    scheduled_before,
    scheduled_after,
    averaged,
    scaled,
    by_closure,
    never_called,
    in_two_phases,
    by_two_optimizers,
    saved_and_loaded,
    resumed_before,
    hooked,
    in_bf16,
    clipped,
    remade,
    probed,
    pytest.param(compiled, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("story", STORIES)
def test_a_story_ends_the_same(story):
    """Method: all values with their bits, and no warning that the plain run has not."""
    expected = story(made())
    model = made()
    with infinity.auto("host") as auto, warnings.catch_warnings():
        if story is not compiled:  # the compiler reads gradients of what is no leaf
            warnings.simplefilter("error", UserWarning)
        found = story(model)
    assert found == expected and auto.wrapped
    if story is not remade:
        assert any(is_wrapped(each) for each in model.modules())


def test_it_ends_with_its_block_and_a_second_one_ends_the_first():
    methods = torch.optim.Optimizer.__init__, nn.Module.__call__, nn.Module.to
    first = infinity.auto("host")
    with infinity.auto({"params": "device", "optimizer": "device"}) as second:
        model = made()
        train(model, sgd(model))
        assert not first.wrapped and second.wrapped == ["Sequential (280 parameters) and SGD"]
        assert wrapped(model).engine.job.config.params == "device"
    assert (torch.optim.Optimizer.__init__, nn.Module.__call__, nn.Module.to) == methods
    other = made()
    train(other, sgd(other))
    assert not is_wrapped(other) and is_wrapped(model)


@pytest.mark.parametrize("master", ["split", None])
def test_a_precision_that_was_chosen_is_kept(master):
    """Twin: without one, weights in bf16 have torch's own."""
    home = {"params": "host", "optimizer": "host"} | ({"master": master} if master else {})
    with infinity.auto(home):
        model = made()
        in_bf16(model)
    assert wrapped(model).engine.job.config.master == (master or "none")


def test_calls_are_watched_only_while_an_optimizer_waits():
    """Method: the method that every module's call runs, which a compiler would break at."""
    own = nn.Module.__call__
    with infinity.auto("host"):
        assert nn.Module.__call__ is own
        model = made()
        optimizer = sgd(model)
        assert nn.Module.__call__ is not own
        train(model, optimizer)
        assert nn.Module.__call__ is own
        sgd(made())  # is dropped
        gc.collect()
        model(batch(0))
        assert nn.Module.__call__ is own


def test_an_unwrapped_model_trains_with_the_same_optimizer():
    model, alone = made(), made()
    expected = train(alone, sgd(alone), 4)
    with infinity.auto("host"):
        optimizer = sgd(model)
        found = train(model, optimizer, 2)
        infinity.unwrap_model(model)
        assert not is_wrapped(model)
        found += train(model, optimizer, 2, 2)
        assert type(optimizer.state[model[0].weight]["momentum_buffer"]) is torch.Tensor
        optimizer.zero_grad()
        optimizer.state_dict()
    assert found == expected and not any("infinity" in name for name in vars(optimizer))


def test_what_cannot_be_wrapped_changes_nothing():
    """Method: a setting that is refused, corrected in the notebook's next cell."""
    model = made()
    with infinity.auto("host"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, differentiable=True)
        for _ in range(2):
            with pytest.raises(ConfigError, match="differentiable"):
                model(batch(0))
        optimizer.param_groups[0]["differentiable"] = False
        optimizer.defaults["differentiable"] = False
        found = train(model, optimizer)
    alone = made()
    assert found == train(alone, sgd(alone))


def test_a_script_that_wraps_its_model_itself_goes_on():
    """Method: wrap_model by hand, the integration's class, and a plain model beside them."""
    expected = train(alone := made(), sgd(alone))
    with infinity.auto("device") as auto:
        model = made()
        model, optimizer = infinity.wrap_model(model, sgd(model), {"params": "host"})
        assert train(model, optimizer) == expected and not auto.wrapped
        other = made()
        assert train(other, sgd(other)) == expected and len(auto.wrapped) == 1
    assert wrapped(model).engine.job.config.params == "host"


def test_a_model_that_the_collector_does_not_list_is_wrapped(monkeypatch):
    """Method: `gc.get_objects` lists nothing, as after `gc.freeze`."""
    monkeypatch.setattr(gc, "get_objects", lambda: [])
    with infinity.auto("host") as auto:
        model = made()
        train(model, sgd(model))
    assert auto.wrapped == ["Sequential (280 parameters) and SGD"]


def test_a_move_that_is_not_to_a_device_is_made():
    with infinity.auto("host"):
        model = made()
        assert model.to(torch.float64)[0].weight.dtype == torch.float64
        assert model.to("cpu", torch.float32)[0].weight.dtype == torch.float32
        assert model.cpu() is model and model.to(model[0].weight) is model
        train(model, sgd(model))
        assert model.to("cpu") is model and is_wrapped(model)
        assert all(param.is_meta for param in made().to("meta").parameters())
        assert all(param.is_meta for param in made().to(device="meta").parameters())


@pytest.mark.parametrize("config", ["tape", {"params": "tape"}, 3])
def test_a_wrong_configuration_is_refused_at_once(config):
    with pytest.raises((InfinityError, OSError)):
        infinity.auto(config)
