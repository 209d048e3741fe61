"""PlainOptimizer: whichever name of an optimizer a script uses, over a wrap and an unwrap, does
what torch's one optimizer does.

Words used here: a **script** trains with `wrap` and `unwrap`, which do nothing for plain torch;
what it returns has to be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deleted import needs
from torch import nn

import infinity

HOMES = ("device", "host", "nvme")
SCRIPTS: dict[str, Callable[..., Any]] = {}


def script(run: Callable[..., Any]) -> Callable[..., Any]:
    SCRIPTS[run.__name__] = run
    return run


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@script
def a_scheduler_over_a_wrap_and_an_unwrap(wrap, unwrap):
    """Made before the wrap, between the two, and after: each steers what trains."""
    model, optimizer = made()
    schedulers, seen = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)], []
    for change in (wrap, unwrap, wrap):
        model, optimizer = change(model, optimizer)
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        train(model, optimizer)
        for scheduler in schedulers:
            scheduler.step()
            seen += [optimizer.param_groups[0]["lr"], scheduler.get_last_lr()]
    train(model, optimizer)
    return seen, model.state_dict()


@script
def a_group_that_is_held(wrap, unwrap):
    model, optimizer = made()
    held = [optimizer.param_groups[0]]
    for change in (wrap, unwrap, wrap, unwrap):
        model, optimizer = change(model, optimizer)
        held.append(optimizer.param_groups[0])
        for number, group in enumerate(held):
            group["lr"] = 0.1 / (1 + number)
            train(model, optimizer)
    return [group is held[0] for group in held], model.state_dict()


@script
def a_load_through_the_name_from_before(wrap, unwrap):
    model, optimizer = made()
    before = optimizer
    model, optimizer = wrap(model, optimizer)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2)
    before.load_state_dict(copy.deepcopy(saved))
    seen = [float(value["step"]) for value in optimizer.state_dict()["state"].values()]
    train(model, optimizer)
    model, optimizer = unwrap(model, optimizer)
    before.load_state_dict(copy.deepcopy(saved))
    train(model, before)
    return seen, model.state_dict(), optimizer is before


@script
def a_group_added_through_the_name_from_before(wrap, unwrap):
    model, _ = made()
    optimizer = before = torch.optim.AdamW(model[0].parameters(), lr=0.1, fused=True)
    model, optimizer = wrap(model, optimizer)
    train(model, optimizer)
    model.zero_grad()
    before.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
    train(model, optimizer)
    model, optimizer = unwrap(model, optimizer)
    train(model, optimizer)
    return model.state_dict(), len(optimizer.param_groups)


@script
def hooks_of_state_dicts_and_steps(wrap, unwrap):
    """Registered by either name, before and after the wrap; a wrap and an unwrap call none."""
    model, optimizer = made()
    before, called = optimizer, []
    optimizer.register_state_dict_pre_hook(lambda own: called.append("saving"))
    optimizer.register_state_dict_post_hook(lambda own, state: state.update(extra=1))
    optimizer.register_load_state_dict_pre_hook(
        lambda own, state: called.append("loading") or {**state, "was": 1}
    )
    model, optimizer = wrap(model, optimizer)
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "late": 2})
    before.register_load_state_dict_post_hook(lambda own: called.append("loaded"))
    before.register_step_post_hook(lambda own, args, kwargs: called.append("stepped"))
    train(model, optimizer)
    for change in (lambda *pair: pair, unwrap):
        model, optimizer = change(model, optimizer)
        called.append("-")
        state = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(state))
        train(model, optimizer)
    return called, state["extra"], state["late"]


@script
def attributes_that_users_give_it(wrap, unwrap):
    model, optimizer = made()
    optimizer.count, optimizer.label = 1, "a"
    model, optimizer = wrap(model, optimizer)
    optimizer.count += 1
    optimizer.since = "the wrap"
    seen = [optimizer.count, optimizer.label, optimizer.since, hasattr(optimizer, "nothing")]
    model, optimizer = unwrap(model, optimizer)
    train(model, optimizer)
    return [*seen, optimizer.count, optimizer.label, optimizer.since]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[key], expected[key]) for key in expected)
        )
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


@needs("ext/class_step")
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_with_plain_torch(name, home, swap):
    """Method: the script with and without us. Twin: two scripts return different things."""

    def wrap(model, optimizer):
        return infinity.wrap_model(
            model, optimizer, {"params": home, "optimizer": home, "nvme_paths": [str(swap)]}
        )

    expected = SCRIPTS[name](lambda *pair: pair, lambda *pair: pair)
    assert same(SCRIPTS[name](wrap, infinity.unwrap_model), expected)
    others = (other for other in SCRIPTS if other != name)
    assert not same(SCRIPTS[next(others)](lambda *pair: pair, lambda *pair: pair), expected)


def test_a_wrap_that_is_refused_leaves_the_optimizer_as_it_was():
    """Method: a model on which the wrap fails late; the plain optimizer loads, adds groups and
    steps by itself."""
    model, optimizer = made()
    own = {name for name in vars(optimizer)}
    with pytest.raises(infinity.InfinityError):
        infinity.wrap_model(
            model, optimizer, {"params": "host", "optimizer": "host", "host_memory": "1KiB"}
        )
    assert set(vars(optimizer)) == own
    train(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_an_unwrap_that_is_interrupted_keeps_the_hooks(monkeypatch):
    """Method: the load into the plain optimizer is interrupted, and its caller tries again. Twin:
    the hooks are off during the load."""
    model, optimizer = made()
    called: list[str] = []
    optimizer.register_load_state_dict_post_hook(lambda own: called.append("loaded"))
    plain = optimizer
    model, optimizer = infinity.wrap_model(
        model, optimizer, {"params": "host", "optimizer": "host"}
    )
    train(model, optimizer)
    real, tries = type(plain).load_state_dict, []

    def load(self, state):
        tries.append(len(self._optimizer_load_state_dict_post_hooks))
        if len(tries) == 1:
            raise KeyboardInterrupt
        real(self, state)

    monkeypatch.setattr(type(plain), "load_state_dict", load)
    with pytest.raises(KeyboardInterrupt):
        infinity.unwrap_model(model, optimizer)
    monkeypatch.undo()
    assert tries == [0, 0] and called == []
    plain.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert called == ["loaded"]


class ExpectsItsFirstStep(torch.optim.SGD):
    """Reads a key that its first step adds to the groups, as adv_optm's do."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        assert all("seen" in group for group in self.param_groups), "no first step"


def of_lion_adv(params):
    return pytest.importorskip("adv_optm").Lion_adv(params, lr=0.01)


def of_adamw_adv(params):
    return pytest.importorskip("adv_optm").AdamW_adv(params, lr=0.01)


@needs("ext/class_step")
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    "make", [lambda p: ExpectsItsFirstStep(p, 0.1, momentum=0.9), of_lion_adv, of_adamw_adv]
)
def test_an_unwrap_does_not_need_the_classs_load_state_dict(make, count):
    """Method: a class whose load_state_dict raises is unwrapped before its first step, or after
    two, and goes on as if it had not been wrapped. Twin: its own method does raise."""

    def trained(wraps: bool) -> torch.Tensor:
        model, _ = made()
        optimizer = make(model.parameters())
        if wraps:
            model, optimizer = infinity.wrap_model(model, optimizer, {"params": "host"})
        train(model, optimizer, count)
        if wraps:
            model, optimizer = infinity.unwrap_model(model, optimizer)
        train(model, optimizer, 2)
        return model[0].weight.detach().clone()

    assert torch.equal(trained(True), trained(False))
    optimizer = ExpectsItsFirstStep(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(AssertionError, match="no first step"):
        optimizer.load_state_dict(optimizer.state_dict())
