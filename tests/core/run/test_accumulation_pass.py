"""AccumulationPass: several forwards and backwards are one pass, whose gradients land at its
end."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from models import seeded
from torch import nn

import infinity
from infinity.core.grads.record import GradState
from infinity.core.run.accumulation_pass import AccumulationPass
from infinity.errors import UsageError

HOST = {"params": "host", "optimizer": "host"}


def build() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))


class Made:
    """A wrapped model with its accumulation pass, and the same model in plain torch."""

    def __init__(self) -> None:
        self.plain, model = seeded(1, build), seeded(1, build)
        self.model, self.optimizer = infinity.wrap_model(
            model, torch.optim.SGD(model.parameters(), lr=0.1), HOST
        )
        engine = parts_of(self.model).engine
        self.job, self.accumulation = (
            parts_of(engine).job,
            AccumulationPass(parts_of(engine).job, engine.backward),
        )

    def backward(self, *scales: float) -> None:
        for model in (self.plain, self.model):
            for scale in scales:
                model(torch.full((2, 4), scale)).sum().backward()

    def grads(self) -> list[torch.Tensor | None]:
        found = [param.grad for param in self.model.parameters()]
        return [grad if grad is None else grad.clone() for grad in found]

    def has_the_plain_gradients(self) -> bool:
        return all(
            mine is not None and torch.allclose(mine, param.grad, atol=1e-6)
            for mine, param in zip(self.grads(), self.plain.parameters())
        )


def test_gradients_of_several_backwards_land_together():
    """Claim: inside they are not to be had. ``finish`` comes once, after they have landed."""
    made, seen = Made(), []

    def finish() -> None:
        states = {handle.grad.state for handle in made.job.trained}
        seen.append((made.job.running.is_accumulating, made.job.scopes.interrupted, states))

    with made.accumulation.opened(finish):
        made.backward(1.0, 0.5)
        assert made.job.running.is_accumulating and seen == []
        with pytest.raises(UsageError, match="several micro-batches are incomplete"):
            made.grads()
    assert seen == [(False, True, {GradState.LANDED})]
    assert not made.job.running.is_accumulating and not made.job.scopes.interrupted
    assert made.has_the_plain_gradients()


def test_a_later_pass_adds_to_an_earlier_one():
    made = Made()
    made.backward(1.0)
    with made.accumulation.opened():
        made.backward(0.5, 0.25)
    assert made.has_the_plain_gradients()


def test_one_pass_at_a_time():
    """Twin: one after the other."""
    made = Made()
    with made.accumulation.opened():
        with pytest.raises(UsageError, match="not available here"), made.accumulation.opened():
            raise AssertionError("opened")
        made.backward(1.0)
    with made.accumulation.opened():
        made.backward(0.5)
    assert made.has_the_plain_gradients()


@pytest.mark.parametrize("where", ["inside", "finish"])
def test_gradients_of_a_pass_that_failed_are_not_stepped(where):
    """Method: an error in the block, or in what changes the gradients after they have landed.
    Twin: once they are cleared, the next pass is as any."""
    made = Made()

    def fail() -> None:
        raise ValueError(where)

    with pytest.raises(ValueError, match=where), made.accumulation.opened(fail):
        made.backward(1.0, 0.5)
        if where == "inside":
            fail()
    before = [param.clone() for param in made.model.state_dict().values()]
    with pytest.raises(UsageError):
        made.optimizer.step()
    after = made.model.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after))
    made.optimizer.zero_grad()
    made.plain.zero_grad()
    with made.accumulation.opened():
        made.backward(0.5)
    assert made.has_the_plain_gradients()


def test_a_pass_without_a_backward_changes_nothing():
    made = Made()
    with made.accumulation.opened(), torch.no_grad():
        made.model(torch.ones(2, 4))
    assert made.grads() == [None] * 4
    assert not any(made.job.running.holds.values()) and not made.job.running.resident


def test_a_trial_does_not_begin_the_pass():
    """Method: what the pass recorded is forgotten, and the next root forward begins it. Twin:
    without that it goes on."""
    for anew in (True, False):
        made = Made()
        with made.accumulation.opened():
            with torch.no_grad():
                made.model(torch.ones(2, 4))
            if anew:
                made.accumulation.begin_anew()
            assert made.job.running.begin_root() == anew
    made.accumulation.begin_anew()  # outside of one there is nothing to begin
    assert made.job.running.has_begun
