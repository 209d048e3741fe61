"""Stats: what a loop shows of its steps is what a stopwatch beside it says."""

from __future__ import annotations

import time

import pytest
import torch

import infinity
from infinity.tools.watch.trace import read, summary

MAKERS = [
    lambda params: torch.optim.AdamW(params, lr=1e-3),
    lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    lambda params: torch.optim.Adagrad(params, lr=1e-2),
]


def wrapped(count: int, trace: str | None = None):
    """A model of three layers and its ``count`` optimizers, wrapped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    params = list(model.parameters())
    parts = [params[:4], params[4:]] if count == 2 else [params[:2], params[2:4], params[4:]]
    parts = [params] if count == 1 else parts
    given = [make(part) for make, part in zip(MAKERS, parts)]
    config = {"params": "host", "optimizer": "host", "trace": trace}
    return infinity.wrap_model(model, given, config)


def train(model, optimizers, stepped: str) -> tuple[float, float]:
    """Steps the optimizers of each word of ``stepped``, by number: a word is a round of the loop.
    Returns the least and the most seconds that the last round can have taken."""
    before = after = time.perf_counter()
    for word in stepped.split():
        model(torch.randn(4, 8)).square().mean().backward()
        began = before, after
        for each in word:
            before = time.perf_counter()
            optimizers[int(each)].step()
            after = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return before - began[1], after - began[0]


@pytest.mark.parametrize(
    "count, stepped, steps",
    [
        (1, "0 0 0", 3),
        (2, "01 01 01", 3),
        (2, "10 10 10 10", 4),
        (3, "012 012", 2),
        (2, "01 0 01 0", 4),  # one of them every other time
    ],
)
def test_steps_and_seconds_are_those_of_the_loop(tmp_path, count, stepped, steps):
    """Method: the loop's rounds are counted and timed beside it; the sentence, the timeline and a
    watch are compared with them. Twin: the calls of step() are more than the rounds."""
    trace = str(tmp_path / "trace.json")
    model, optimizers = wrapped(count, trace)
    least, most = train(model, optimizers, stepped)
    stats = infinity.stats(model)
    assert stats.steps == steps == len(stepped.split())
    assert least <= stats.step_seconds <= most
    assert stats.bound_seconds <= stats.step_seconds
    assert len(stepped.replace(" ", "")) > steps or count == 1
    infinity.unwrap_model(model, optimizers)
    assert summary(read(tmp_path / "trace.json"))["steps"] == steps


def test_an_optimizer_that_takes_over_goes_on_with_the_count(tmp_path):
    """The head first, then all of it by another optimizer: two and three steps are five."""
    model, (first,) = wrapped(1, str(tmp_path / "trace.json"))
    train(model, [first], "0 0")
    second = torch.optim.AdamW(model.parameters(), lr=1e-4)
    _, second = infinity.wrap_model(model, second)
    train(model, [second], "0 0 0")
    assert infinity.stats(model).steps == 5
    infinity.unwrap_model(model, [second])  # ends the timeline
    assert summary(read(tmp_path / "trace.json"))["steps"] == 5
