"""Pass: all that runs, dropped at once."""

from __future__ import annotations

import weakref
from dataclasses import fields

import pytest
import torch
from inside import parts_of
from torch import nn

import infinity
from infinity.core.run.pass_state import Frame, Pass


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    return infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )


def content(running: Pass) -> dict:
    return {each.name: getattr(running, each.name) for each in fields(running)}


def test_what_is_dropped_is_as_at_the_beginning():
    """Method: every field is set; after the drop all have their defaults. Twin: before it none
    has."""
    running, owner = Pass(), nn.Linear(1, 1)
    for name, value in content(running).items():
        if isinstance(value, bool):
            setattr(running, name, True)
        elif isinstance(value, str):
            setattr(running, name, "a pass of a pipeline")
        elif isinstance(value, int):
            setattr(running, name, 3)
        elif value is None:
            setattr(running, name, (0, 1.0))
    running.frames.append(Frame(owner, []))
    running.tokens[1] = weakref.ref(owner)
    for name in ("resident", "awaited", "expected", "since"):
        getattr(running, name)[owner] = 1
    running.holds[owner] = running.shows[owner] = 1
    running.reached.add(owner)
    fresh = content(Pass())
    assert all(value != fresh[name] for name, value in content(running).items())
    assert running.is_cut_short
    running.drop()
    assert content(running) == fresh and not running.is_cut_short


def test_a_joined_pass_begins_with_its_first_root_forward():
    """Twin: outside of one each root forward begins a pass."""
    running = Pass()
    assert [running.begin_root() for _ in range(3)] == [True] * 3
    running.is_accumulating, running.has_begun = True, False
    assert [running.begin_root() for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_of_a_pass_is_left_when_the_next_use_begins(where):
    """Method: an error in the middle block's forward, or in its backward; the next use finds an
    empty pass, and so does the end of an ordinary step. Twin: right after the error it is not empty
    in a backward, whose end nobody told.
    """
    model, optimizer = made()
    running, seen = parts_of(model).running, []

    def fail(*_):
        seen.append(len(running.holds))
        raise ValueError("in the middle")

    handle = (
        model[1][0].register_forward_hook(fail)
        if where == "forward"
        else model[1][1].register_full_backward_hook(fail)
    )
    with pytest.raises(ValueError, match="in the middle"):
        model(torch.ones(2, 8)).sum().backward()
    handle.remove()
    assert seen[0] > 0
    assert bool(running.tokens) == (where == "backward")
    optimizer.zero_grad()
    assert content(running) == content(Pass())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert (
        not running.is_cut_short
        and not running.holds
        and not running.awaited
        and not running.reached
    )
