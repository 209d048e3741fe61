"""OverGroups: gradients are averaged with those of another group, a stand-in, before a step."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from models import at_home, seeded
from torch import nn

import infinity
from infinity.errors import UsageError
from infinity.ext.local_steps.over_groups import OverGroups


class Line:
    """A slow axis of two groups. The other one has gradients of ``value`` for the parameters in
    ``has``: None for all."""

    def __init__(self, value: float, has: list[bool] | None = None):
        self.value, self.has, self.begun = value, has, 0

    def collect(self, mine: list[bool], what: str) -> list[list[bool]]:
        return [mine, mine if self.has is None else self.has]

    def start(self, values: torch.Tensor, tag: tuple[int, int], what: str) -> Line:
        self.sent, self.tag = values, tag
        return self

    def begin(self) -> None:
        self.begun += 1

    def mean(self) -> torch.Tensor:
        return (self.sent + self.value) / 2


class Made:
    def __init__(self, home, swap, line: Line, **config):
        self.model = seeded(3, lambda: nn.Linear(4, 4, bias=True))
        self.model, self.optimizer = infinity.wrap_model(
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=1.0),
            at_home(home, home, swap) | config,
        )
        self.line, self.before = line, self.values()
        self.optimizer.register_step_pre_hook(OverGroups(self.optimizer.context, line))

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def steps(self) -> set[float]:
        """What the last step has subtracted."""
        now = self.values()
        return {
            float(x) for n in now for x in (self.before[n] - now[n]).flatten().round(decimals=5)
        }


@pytest.mark.parametrize("home", ["device", "hostile"])
def test_the_step_is_that_of_the_mean_gradient(home, swap):
    """Twin: the step after the hook is gone is the own gradient's."""
    made = Made(home, swap, Line(3.0))
    made.model(torch.ones(1, 4)).sum().backward()
    made.optimizer.step()
    assert made.steps() == {2.0} and made.line.begun == 1
    made.optimizer._optimizer_step_pre_hooks.clear()
    made.optimizer.zero_grad()
    made.before = made.values()
    made.model(torch.ones(1, 4)).sum().backward()
    made.optimizer.step()
    assert made.steps() == {1.0}


def test_a_gradient_that_only_another_group_has_is_stepped(swap):
    made = Made("host", swap, Line(3.0, has=[True, True]))
    made.model.weight.requires_grad_(False)
    made.model(torch.ones(1, 4)).sum().backward()
    made.optimizer.step()
    assert made.steps() == {1.5, 2.0}


def test_a_step_without_any_gradient_exchanges_nothing(swap):
    made = Made("host", swap, Line(3.0, has=[False, False]))
    made.optimizer.step()
    assert made.line.begun == 0 and made.steps() == {0.0}


def test_a_second_step_of_the_same_gradients_takes_their_mean_again(swap):
    """As torch does without zero_grad: the mean is taken once."""
    made = Made("host", swap, Line(3.0))
    made.model(torch.ones(1, 4)).sum().backward()
    made.optimizer.step()
    made.model(torch.ones(1, 4)).sum().backward()  # adds to the mean
    made.before = made.values()
    made.line.value = 3.0
    made.optimizer.step()
    assert made.steps() == {3.0}


def test_the_mean_is_clipped_and_not_the_own_gradient(swap):
    """Its norm is 2 times the root of 20."""
    made = Made("host", swap, Line(3.0), max_grad_norm=20**0.5)
    made.model(torch.ones(1, 4)).sum().backward()
    made.optimizer.step()
    assert made.steps() == {1.0}


def test_an_unwrapped_model_is_stepped_with_its_own_gradients(swap):
    made = Made("host", swap, Line(3.0))
    made.model, made.optimizer = infinity.unwrap_model(made.model, made.optimizer)
    made.model(torch.ones(1, 4)).sum().backward()
    made.optimizer.step()
    assert made.steps() == {1.0} and made.line.begun == 0


def test_units_are_not_stepped_in_the_backward(swap):
    made = Made("host", swap, Line(3.0))
    with made.optimizer.step_in_backward():
        made.model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(UsageError, match="averaged over the groups"):
        made.optimizer.step()


def test_an_interrupted_average_leaves_no_half_of_it(swap):
    """The gradients are torn: the next step asks for another backward."""
    made = Made("host", swap, Line(3.0))
    made.model(torch.ones(1, 4)).sum().backward()
    values, calls = parts_of(made.model).gradients.values, []
    change = values.change_own

    def interrupted(handle, what):
        calls.append(handle)
        if len(calls) == 4:  # two were packed
            raise KeyboardInterrupt
        change(handle, what)

    values.change_own = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.optimizer.step()
    values.change_own = change
    with pytest.raises(UsageError, match="half done"):
        made.optimizer.step()
    made.optimizer.zero_grad()
    made.model(torch.ones(1, 4)).sum().backward()
    made.optimizer.step()
    assert made.steps() == {2.0}
