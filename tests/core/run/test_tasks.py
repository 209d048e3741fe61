"""AutogradTasks: whoever joins a run of autograd hears of the outermost one, once, whatever becomes
of those inside it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from infinity import native
from infinity.core.run.pass_state import Pass
from infinity.core.run.tasks import AutogradTasks, drop_failed


class Heard:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin_task(self) -> None:
        self.told.append("begin")

    def end_task(self) -> None:
        self.told.append("end")


def made() -> tuple[AutogradTasks, Heard]:
    return AutogradTasks(native.Scopes(lambda pack, unpack: None, lambda: None), Pass()), Heard()


def backward(what: Callable[[], object]) -> None:
    """A run of autograd in which ``what`` is called."""
    with torch.enable_grad():
        y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda _: what() and None)
    y.backward()


def test_outside_of_tasks_nothing_is_joined():
    """Method: a join before any backward, and one between two; the backwards are told of all the
    same."""
    tasks, heard = made()
    for _ in range(2):
        tasks.track(heard.begin_task, heard.end_task)
        assert not tasks
        backward(lambda: tasks.track(heard.begin_task, heard.end_task))
    assert heard.told == ["begin", "end"] * 2


def test_only_the_outermost_task_is_told():
    """Method: a backward that joins before and after another one, which joins twice."""
    tasks, heard = made()

    def inner() -> None:
        tasks.track(heard.begin_task, heard.end_task)
        tasks.track(heard.begin_task, heard.end_task)

    def outer() -> None:
        tasks.track(heard.begin_task, heard.end_task)
        backward(inner)
        assert tasks and heard.told == ["begin"]
        tasks.track(heard.begin_task, heard.end_task)

    backward(outer)
    assert heard.told == ["begin", "end"] and not tasks


def test_a_task_that_failed_inside_another_holds_nothing_up():
    """Method: the outer one catches the error, joins and goes on to its end. Twin: one that fails
    itself is not told to have ended."""
    tasks, heard = made()

    def fails() -> None:
        tasks.track(heard.begin_task, heard.end_task)
        raise ValueError("half-way")

    def outer() -> None:
        tasks.track(heard.begin_task, heard.end_task)
        with pytest.raises(ValueError, match="half-way"):
            backward(fails)

    backward(outer)
    assert heard.told == ["begin", "end"] and not tasks
    with pytest.raises(ValueError, match="half-way"):
        backward(fails)
    assert heard.told == ["begin", "end", "begin"] and tasks


class Kept(torch.autograd.Function):
    """Keeps an object in its node."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def failed() -> weakref.ref:
    """Runs a backward that an error ends, and returns what a node that was ready by then keeps."""
    x, kept = torch.ones(1, requires_grad=True), nn.Identity()
    first, second = Kept.apply(x, kept), x * 2  # the later one runs first
    second.register_hook(lambda _: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        (first + second).backward()
    return weakref.ref(kept)


@pytest.mark.parametrize(
    "block",
    [contextlib.nullcontext, torch.no_grad, torch.inference_mode, FakeTensorMode],
    ids=["plain", "no_grad", "inference_mode", "mode"],
)
def test_graphs_of_failed_tasks_are_freed(block):
    """Method: dropped inside of users' blocks. Twin: torch keeps such a graph, and frees it in the
    thread's next backward."""
    kept = failed()
    gc.collect()
    assert kept() is not None
    torch.ones((), requires_grad=True).backward()
    assert kept() is None
    kept = failed()
    with block():
        drop_failed()
    assert kept() is None


def test_inside_of_a_task_nothing_of_it_is_dropped():
    """Method: a task that drops failed ones in a hook goes on, and gives its gradient."""
    x = torch.ones(1, requires_grad=True)
    first, second = x * 2, x * 3
    second.register_hook(lambda _: drop_failed())
    (first + second).backward()
    assert float(x.grad) == 5
