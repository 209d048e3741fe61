"""LocalSteps: what it refuses, and what it does in a job of one group. Several groups are in
`ext/local_steps/test_slow_axis.py`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from inside import parts_of
from lone import lone_group
from models import at_home, differing, loss_of, tokens, transformer
from torch.distributed.device_mesh import init_device_mesh

import infinity
from infinity.core.machine.tiers import Tier
from infinity.errors import CapacityError, ConfigError, UsageError
from infinity.ext.local_steps.outer_step import OuterStep


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with lone_group():
        yield


class Made:
    def __init__(self, home: str = "host", swap: Any = None, *, seed: int = 3, **local: Any):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("slow", "dp"))
        model = transformer(seed, dropout=0.0, blocks=2)
        self.model, self.optimizer = infinity.wrap_model(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            at_home(home, home, swap),
            mesh=mesh["dp"],
        )
        self.axis = mesh["slow"]
        self.local = infinity.LocalSteps(self.model, self.axis, **local)

    def train(self, steps: int, first: int = 0) -> list[bool]:
        ended = []
        for number in range(first, first + steps):
            loss_of(self.model, tokens(number)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            ended.append(self.local.after_step())
        return ended

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def test_a_group_alone_makes_outer_steps_too(swap):
    """Method: a lookahead of lr 0.5: the weights are half way from the anchor. Twin: with lr 1 they
    are where the group went."""
    free, half = Made(every=100), Made("nvme", swap, every=3, lr=0.5, momentum=0, stream=False)
    before = half.weights()
    free.train(3)
    assert half.train(3) == [False, False, True]
    moved = free.weights()
    for name, value in half.weights().items():
        torch.testing.assert_close(value, (before[name] + moved[name]) / 2)
    assert half.local.group == 0 and half.local.steps == 3 and half.local.period == 3
    plain = Made(every=3, lr=1, momentum=0)
    plain.train(3)
    assert not differing(plain.weights(), moved)


def test_the_period_follows_the_learning_rate_of_a_scheduler():
    made = Made(every="quadratic", least=2, coefficient=0.04, stream=False)
    assert made.local.period == 16
    made.optimizer.param_groups[0]["lr"] = 0.02
    made.train(16)
    assert made.local.period == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "skew"}, "a probe goes with 'skew'"),
        ({"probe": lambda group: 1.0}, "a probe goes with 'skew'"),
        ({"every": "skew", "probe": 0.9}, "probe=0.9"),
        ({"probe": 0.9}, "probe=0.9"),
        ({"every": "quadratic"}, "coefficient"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": "0.7"}, "lr='0.7'"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"alpha": 1.0}, "alpha=1.0"),
        ({"delay": 100}, "delay=100"),
        ({"every": 1, "lr": 1, "momentum": 0, "codes": True}, "codes with every=1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, said):
    made = Made()
    made.local.remove()
    with pytest.raises(ConfigError, match=said):
        infinity.LocalSteps(made.model, made.axis, **given)


def test_it_needs_one_axis_of_a_mesh():
    made = Made()
    made.local.remove()
    whole = init_device_mesh("cpu", (1, 1), mesh_dim_names=("slow", "dp"))
    for other in (None, whole, "slow"):
        with pytest.raises(ConfigError, match="the axis of the mesh that joins the groups"):
            infinity.LocalSteps(made.model, other)


def test_a_model_without_an_optimizer_is_refused():
    model, _ = infinity.wrap_model(transformer(3), None, {"params": "host"})
    axis = init_device_mesh("cpu", (1,), mesh_dim_names=("slow",))
    with pytest.raises(UsageError, match="without an optimizer"):
        infinity.LocalSteps(model, axis)


def test_a_model_has_one_at_a_time():
    """Twin: after remove() it takes another one, and the first does nothing any more."""
    made = Made(every=2)
    with pytest.raises(UsageError, match="has LocalSteps already"):
        infinity.LocalSteps(made.model, made.axis)
    first = made.local
    first.remove()
    with pytest.raises(UsageError, match="went with its model"):
        first.after_step()
    made.local = infinity.LocalSteps(made.model, made.axis, every=3)
    made.train(1)


def test_it_does_not_keep_the_model_alive():
    made = Made()
    model, local = weakref.ref(made.model), made.local
    del made
    gc.collect()
    assert model() is None
    with pytest.raises(UsageError, match="went with its model"):
        local.after_step()


def test_an_unwrapped_model_is_told():
    made = Made()
    infinity.unwrap_model(made.model, made.optimizer)
    with pytest.raises(UsageError, match="went with its model"):
        made.local.after_step()


def test_it_does_not_average_in_the_middle_of_something():
    made = Made(every=1)
    seen: list[BaseException] = []

    def hook(*_: Any) -> None:
        try:
            made.local.after_step()
        except UsageError as error:
            seen.append(error)

    handle = made.model.blocks[0].register_forward_hook(hook)
    loss_of(made.model, tokens(0)).backward()
    handle.remove()
    assert len(seen) == 1 and "inside a forward" in str(seen[0])


def test_anchors_that_have_no_room_are_refused_with_numbers():
    """The model stays usable without it."""
    made = Made()
    made.local.remove()
    account = parts_of(made.model).ledger.accounts[Tier.HOST]
    account.budget_nbytes = account.charged_nbytes + 4096
    with pytest.raises(CapacityError, match=r"Raise host_memory by .* Config\(host_memory="):
        infinity.LocalSteps(made.model, made.axis)
    assert parts_of(made.model).find(OuterStep) is None
    loss_of(made.model, tokens(0)).backward()
    made.optimizer.step()


def test_a_parked_model_has_its_anchors_back(tmp_path):
    """Method: parked between two averages; twin: never parked."""
    parked, never = Made(every=2), Made(every=2)
    for made in (parked, never):
        made.train(3)
    assert infinity.park(parked.model, tmp_path) > 0
    for made in (parked, never):
        made.train(3, first=3)
    assert not differing(parked.weights(), never.weights())


def test_a_checkpoint_without_anchors_begins_a_period(tmp_path):
    """Method: the anchor becomes what was loaded, as in a job that begins with it. Twin: the
    momentum of another job would show."""
    source, made, fresh = Made(seed=4), Made(every=4), Made(seed=5, every=4)
    source.local.remove()
    infinity.save_checkpoint(tmp_path, source.model, source.optimizer)
    made.train(6)
    for each in (made, fresh):
        infinity.load_checkpoint(tmp_path, each.model, each.optimizer)
        assert each.local.steps == 0
        each.train(5)
    assert not differing(made.weights(), fresh.weights())


def test_a_checkpoint_of_a_group_loads_without_one(tmp_path, caplog):
    source, plain = Made(every=4), Made(seed=4)
    source.train(3)
    infinity.save_checkpoint(tmp_path, source.model, source.optimizer)
    plain.local.remove()
    infinity.load_checkpoint(tmp_path, plain.model, plain.optimizer)
    assert "make it one with infinity.LocalSteps first" in caplog.text
    assert not differing(source.weights(), plain.weights())


def test_a_checkpoint_of_other_settings_is_refused_before_any_change(tmp_path):
    source, other = Made(every=4), Made(seed=4, every=4, lr=1, momentum=0)
    infinity.save_checkpoint(tmp_path, source.model, source.optimizer)
    before = other.weights()
    with pytest.raises(UsageError, match="same lr, momentum"):
        infinity.load_checkpoint(tmp_path, other.model, other.optimizer)
    assert not differing(other.weights(), before)


def test_an_average_of_weights_goes_beside_it():
    made = Made(every=2)
    average = infinity.ema(made.model, 0.5)
    made.train(2)
    average.update()
    with average.applied(), pytest.raises(UsageError, match="has its average for"):
        made.local.after_step()
    made.train(2, first=2)
