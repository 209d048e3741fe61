"""OuterStep: the arithmetic of one group, whose line is a stand-in: what the other groups send is
given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inside import parts_of
from models import at_home, seeded
from torch import nn

import infinity
from infinity.core.machine.tiers import Tier
from infinity.core.units.pieces import pieces_of, read_value
from infinity.errors import CapacityError, UsageError
from infinity.ext.local_steps.outer_step import OuterSettings, OuterStep, Position

NESTEROV = OuterSettings(lr=0.7, momentum=0.9, alpha=0.0)
PLAIN = OuterSettings(lr=1, momentum=0, alpha=0.0)


class Line:
    """A slow axis of two groups, of which the other one has moved by ``others``."""

    size, group_index, compresses = 2, 0, False

    def __init__(self, others: float = 0.0):
        self.others, self.first, self.log = others, None, []

    def nbytes_of(self, numel: int) -> int:
        return 4 * numel

    def broadcast(self, values: torch.Tensor, what: str) -> None:
        if self.first is not None:
            values.fill_(self.first)

    def start(self, values: torch.Tensor, tag: tuple[int, int], what: str) -> Line:
        self.sent, self.tag = values, tag
        return self

    def begin(self) -> None:
        self.log.append("begin")

    def mean(self) -> torch.Tensor:
        self.log.append("mean")
        return (self.sent + self.others) / 2

    def drop(self) -> None:
        self.log.append("drop")

    def close(self) -> None:
        self.log.append("close")


class Made:
    def __init__(self, home, swap, settings=NESTEROV, dtype=torch.float32, line=None, **config):
        model = seeded(3, lambda: nn.Linear(4, 4)).to(dtype)
        self.model, self.optimizer = infinity.wrap_model(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            at_home(home, home, swap) | config,
        )
        self.engine, self.line = parts_of(self.model).engine, line or Line()
        job = parts_of(self).job
        outer = OuterStep(
            job.kept,
            job.units,
            self.line,
            settings,
            most=1,
            release=job.prefetcher.release_all,
            position=Position(0, 0, 7),
        )
        self.outer = job.add(outer)
        (self.unit,) = self.outer.units

    def set(self, value: float) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(torch.full((4, 4) if param.dim() == 2 else (4,), value))

    def weights(self) -> set[float]:
        return {float(x) for value in self.model.state_dict().values() for x in value.flatten()}

    def average(self, others: float = 0.0) -> None:
        self.line.others = others
        self.outer.start(self.unit, 1, (1, 7))
        self.outer.finish(self.unit)

    def kept(self, kind: str) -> set[float]:
        (flat_param,) = self.outer.units[self.unit]
        array = flat_param.homes.kept[f"outer_{kind}"]
        return {float(x) for x in parts_of(self).store.read(array, 0, 16)}


def held(made: Made) -> list[str]:
    """The names of the arrays that are kept beside the weights."""
    return [name for flat_param in made.unit.flat_params for name in flat_param.homes.kept]


@pytest.mark.parametrize("home", ["device", "hostile"])
def test_the_outer_step_is_torchs_nesterov(home, swap):
    """Method: what has moved is the gradient of torch's SGD. Twin: without momentum it ends
    elsewhere."""
    made, anchor = Made(home, swap), nn.Parameter(torch.tensor(1.0))
    made.set(1.0)
    made.outer.take_first()
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    plain = torch.optim.SGD([other := nn.Parameter(torch.tensor(1.0))], lr=0.7)
    for value, others in ((0.5, 0.25), (-3.0, 0.125), (2.0, 0.0)):
        made.set(value)
        mean = (anchor.detach() - value + others) / 2
        made.average(others)
        anchor.grad, other.grad = mean, mean
        outer.step()
        plain.step()
        assert made.weights() == made.kept("anchor") == {anchor.item()}
        assert made.kept("momentum") == {outer.state[anchor]["momentum_buffer"].item()}
    assert anchor.item() != other.item()


def test_a_plain_mean_keeps_nothing_at_home(swap):
    made = Made("host", swap, PLAIN)
    made.outer.take_first()
    made.set(3.0)
    made.average(others=1.0)
    assert made.weights() == {2.0} and not held(made)


def test_the_link_is_waited_for_once_a_delayed_average_is_due(swap):
    """Claim: an exchange begins, and its mean is not asked for before the delay is over. The twin:
    without a delay it is asked for at once."""
    made = Made("host", swap)
    made.outer.take_first()
    made.outer.start(made.unit, 4, (1, 7))
    for step in (1, 2, 3):
        assert made.outer.due(step) == [] and made.line.log == ["begin"]
    assert made.outer.due(4) == [made.unit] and made.line.log == ["begin"]
    made.outer.finish(made.unit)
    assert made.line.log == ["begin", "mean"] and made.outer.is_whole
    made.outer.start(made.unit, 4, (4, 7))
    assert made.outer.due(4) == [made.unit]


def test_alpha_is_the_share_of_the_own_value(swap):
    made = Made("host", swap, OuterSettings(lr=1, momentum=0, alpha=0.25))
    made.set(4.0)
    made.average(others=0.0)
    assert made.weights() == {0.25 * 4.0 + 0.75 * 2.0}


def test_masters_are_averaged_and_not_the_weights_alone(swap):
    """Method: moves towards a value that bf16 rounds to where they began."""
    made, expected = Made("host", swap, PLAIN, torch.bfloat16), 1.0
    made.set(1.0)
    for _ in range(4):
        made.average(others=1 + 2**-10)
        expected = (expected + 1 + 2**-10) / 2
    assert made.weights() == {1.0} and expected > 1
    values = [read_value(parts_of(made).store, each) for each in pieces_of(made.unit.flat_params)]
    assert set(torch.cat(values).tolist()) == {expected}


@pytest.mark.parametrize("group", [0, 1])
def test_all_groups_begin_with_the_values_of_the_first(group, swap):
    made = Made("host", swap)
    made.set(5.0)
    made.line.group_index, made.line.first = group, 5.0 if group == 0 else 2.0
    made.outer.take_first()
    assert made.weights() == made.kept("anchor") == {made.line.first}


def test_repeated_calls_change_nothing(swap):
    """As recovery makes them: a start sends once, a finish applies once."""
    made = Made("host", swap)
    made.set(1.0)
    made.outer.take_first()
    made.set(0.0)
    for _ in range(2):
        made.outer.start(made.unit, 3, (1, 7))
    assert made.outer.due(2) == [] and made.outer.due(3) == [made.unit]
    assert not made.outer.is_whole
    made.outer.finish(made.unit)
    after = made.weights()
    made.outer.finish(made.unit)
    assert made.outer.is_whole and made.weights() == after
    assert made.line.log == ["begin", "begin", "mean"]


def test_what_a_checkpoint_holds_comes_back(swap):
    """Method: with an exchange on its way. Twin: of other settings it is refused."""
    made, again = Made("host", swap), Made("host", swap)
    made.set(1.0)
    made.outer.take_first()
    made.set(0.0)
    made.outer.start(made.unit, 3, (1, 7))
    told = made.outer.describe()
    saved = {kept.name: kept for kept in parts_of(made).kept.saved()["outer"]}
    assert told["due"] == {made.unit.name: 3} and told["kinds"] == ["anchor", "momentum"]
    expected = again.outer.expect(told)
    assert list(expected) == list(saved) == ["outer_anchor", "outer_momentum", "outer_mean"]
    again.outer.resume(told)
    taking = {kept.name: kept for kept in parts_of(again).kept.saved()["outer"]}
    for name, flat_params in expected.items():
        for handle in (handle for flat_param in flat_params for handle in flat_param.handles):
            array = saved[name].array_of(made.unit.flat_params[0])
            begin, end = handle.flat_param.layout.part_at_home("weight", handle.index)
            taking[name].write_own(handle, array.flat[begin:end])
    again.set(0.0)
    for each in (made, again):
        each.outer.finish(each.unit)
    assert made.weights() == again.weights() and made.kept("anchor") == again.kept("anchor")
    plain = Made("host", swap, PLAIN)
    with pytest.raises(UsageError, match="same lr, momentum"):
        plain.outer.expect(told)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": -1},
        {"steps": 1.0},
        {"at": 7},
        {"period": 0},
        {"climber": [3, []]},
        {"climber": [4, [[1]]]},
    ],
)
def test_a_position_that_is_none_is_refused(wrong):
    assert Position(**{"steps": 3, "at": 3, "period": 7})
    with pytest.raises((ValueError, TypeError)):
        Position(**{"steps": 3, "at": 3, "period": 7} | wrong)


def test_a_restart_begins_at_the_present_values(swap):
    made = Made("host", swap)
    made.outer.take_first()
    made.set(8.0)
    made.average()
    made.set(3.0)
    made.outer.restart(Position(0, 0, 7))
    assert made.kept("anchor") == {3.0} and made.kept("momentum") == {0.0}


def test_freed_anchors_hold_no_memory(swap):
    made = Made("host", swap)
    account = parts_of(made).ledger.accounts[Tier.HOST]
    planned = account.planned_nbytes
    for _ in range(2):
        made.outer.free()
    assert account.planned_nbytes < planned and not held(made)


def test_anchors_stay_within_the_budget(swap):
    """Twin: a plain mean without anchors fits."""
    sizes: dict[str, Any] = {"device_memory": "1MiB"}
    with_room = Made("host", swap, **sizes)
    needs = parts_of(with_room).ledger.accounts[Tier.HOST].planned_nbytes
    Made("host", swap, PLAIN, host_memory=needs - 1, **sizes)
    with pytest.raises(CapacityError):
        Made("host", swap, host_memory=needs - 1, **sizes)


def test_parameters_that_come_later_are_refused(swap):
    made = Made("host", swap)
    made.outer.refuse_others(parts_of(made).units)
    made.outer.units.clear()
    with pytest.raises(UsageError, match="after add_param_group"):
        made.outer.refuse_others(parts_of(made).units)
