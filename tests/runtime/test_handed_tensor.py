"""HandedTensor: what a user does with one tensor of a state dict is seen, and nothing else is."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity
from infinity.runtime.handed_tensor import MASTER, VALUE, HandedTensor, Homes
from infinity.runtime.registry import wrapped
from infinity.state.handle import handle_of

HOST = {"params": "host", "optimizer": "host"}


class Given:
    """A tensor that was handed out, of a parameter with a value of ones."""

    def __init__(self, numel: int = 16, array: str = VALUE):
        self.model = nn.Module()
        self.model.weight = nn.Parameter(torch.ones(numel))
        self.model.forward = lambda: self.model.weight.sum()
        self.model, self.optimizer = infinity.wrap_model(
            self.model, torch.optim.AdamW(self.model.parameters(), lr=0.1), HOST
        )
        job = wrapped(self.model).engine.job
        self.steps, self.deaths = SimpleNamespace(index=0), []
        self.homes = Homes(job.store, self.steps, job.ranks)
        self.tensor = torch.ones(numel)
        self.hand_out(array)

    def hand_out(self, array: str) -> None:
        self.entry = HandedTensor(
            handle_of(self.model.weight), array, self.tensor, self.deaths.append
        )
        self.entry.note("a stamp", self.steps.index)

    def is_written(self, *, is_stale: bool = False) -> bool:
        return self.entry.is_written(self.homes, is_stale=is_stale)


def test_what_nobody_wrote_to_is_not_written():
    given = Given()
    assert not given.entry.is_counted and not given.is_written() and not given.entry.is_exported
    assert given.entry.stamp == "a stamp" and given.entry.index == 0


@pytest.mark.parametrize("write", ["counted", "by a view", "through data"])
def test_a_write_is_seen_until_it_is_noted(write):
    given = Given()
    target = {"counted": given.tensor, "by a view": given.tensor[3:], "through data": None}[write]
    if target is None:
        given.tensor.data[15] = 3
    else:
        target.mul_(2)
    assert given.entry.is_counted and given.is_written()
    given.entry.note("another", 1)
    assert not given.entry.is_counted and not given.is_written() and given.entry.index == 1


def test_what_was_written_after_a_look_is_not_noted_with_it():
    """Twin: what was written before it is."""
    given = Given()
    given.tensor.add_(1)
    looked = given.entry.look()
    given.entry.note("stamp", 0, looked)
    assert not given.is_written()
    given.tensor.add_(1)
    given.entry.note("stamp", 0, looked)
    assert given.is_written()


@pytest.mark.parametrize(("numel", "element", "seen"), [(1024, 1, True), (16384, 1, False)])
def test_of_a_large_tensor_some_bytes_are_probed(numel, element, seen):
    """Claim: up to 4096 bytes all are. Of 65536 each 513th is: byte 1539 has the sign of element
    384, and none is in element 1."""
    given = Given(numel)
    given.tensor.data[element] = 3.14159265
    assert given.entry.is_counted == seen and given.is_written() == seen
    if not seen:
        given.tensor.data[384] = -1
        assert given.entry.is_counted and given.is_written()


def test_what_numpy_has_is_compared_with_home():
    """Method: element 1, which is not probed. Twin: as long as it has home's value it is not
    written."""
    given = Given(16384)
    array = given.tensor.numpy()
    assert given.entry.is_exported and not given.is_written()
    array[1] = 2
    assert given.is_written() and given.entry.is_seen_here_alone
    fresh = Given(16384)
    seen = fresh.tensor.numpy()
    seen[1] = 2
    seen[1] = 1
    assert not fresh.is_written() and not fresh.entry.is_seen_here_alone


def test_the_first_comparison_is_with_home_and_later_ones_with_the_last():
    """Method: NumPy writes before the first comparison; the tensor is noted then. Later bytes are
    held against those noted, though they differ from home."""
    given = Given(16384)
    array = given.tensor.numpy()
    array[1] = 2
    assert given.is_written()
    given.entry.note("stamp", 0)
    assert not given.is_written()
    array[1] = 1
    assert given.is_written()


@pytest.mark.parametrize("array", [MASTER, "exp_avg"])
def test_only_values_and_moments_are_compared_with_home(array):
    """Method: NumPy has a tensor that differs from home in element 1. A master is held against
    its own bytes from then on; a moment against home at once."""
    given = Given(16384)
    given.model().backward()
    given.optimizer.step()
    state = given.optimizer.state_dict()["state"][0]
    given.tensor = state["exp_avg"].clone() if array == "exp_avg" else torch.ones(16384)
    given.hand_out(array)
    numbers = given.tensor.numpy()
    assert not given.is_written()
    other = given.tensor = given.tensor.clone()
    given.hand_out(array)
    other.numpy()[1] = 7
    assert given.is_written() == (array == "exp_avg")
    other.numpy()[2] = 7
    assert given.is_written()
    assert numbers[1] != 7


def test_a_snapshots_bytes_are_compared_once_in_a_step():
    """Twins: a write that torch counts is seen at once, and the bytes again after a step; those of
    a current tensor are compared each time."""
    given = Given()
    assert not given.is_written(is_stale=True)
    given.tensor.data[0] = 2
    assert not given.is_written(is_stale=True) and given.is_written()
    given.steps.index = 1
    assert given.is_written(is_stale=True)
    assert not given.is_written(is_stale=True)
    given.tensor.add_(1)
    assert given.is_written(is_stale=True)


def test_a_snapshot_is_not_compared_with_home():
    """Method: home is ones, and the snapshot of an earlier value is in NumPy's hands."""
    given = Given()
    given.tensor = torch.zeros(16)
    given.hand_out(VALUE)
    array = given.tensor.numpy()
    assert not given.is_written(is_stale=True)
    given.steps.index = 1
    array[1] = 5
    assert given.is_written(is_stale=True)


def test_freed_memory_is_not_looked_at():
    """Claim: not even if it was written to before."""
    for writes in (0, 1):
        given = Given()
        for _ in range(writes):
            given.tensor.add_(1)
        given.tensor.untyped_storage().resize_(0)
        assert given.entry.was_freed and not given.entry.is_exported
        assert not given.entry.is_counted and not given.is_written()


def test_memory_is_held_as_long_as_a_view_is():
    """Claim: the tensor's own end is told once; while torch frees it, it still counts."""
    given = Given()
    assert given.entry.is_held() and not given.entry.was_freed
    view = torch.empty(0).set_(given.tensor.untyped_storage())
    assert given.entry.is_held(dying=True)
    del given.tensor
    gc.collect()
    assert given.deaths == [given.entry.tensor] and given.entry.is_held()
    del view
    assert not given.entry.is_held()
    assert not Given().entry.is_held(dying=True)
