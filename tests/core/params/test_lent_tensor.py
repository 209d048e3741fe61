"""Lent: what a user does with one tensor of a state dict is seen, and nothing else is."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from inside import parts_of
from striker import Striker
from torch import nn

import infinity
from infinity.core.params.borrowed_state import StateSource
from infinity.core.params.lent import Lent
from infinity.core.units.handle import handle_of
from infinity.torch_private import STORAGE_COUNTS

HOST = {"params": "host", "optimizer": "host"}
VALUE = "value"


class Given:
    """A tensor that was handed out, of a parameter with a value of ones."""

    def __init__(self, numel: int = 16, array: str = VALUE):
        self.model = nn.Module()
        self.model.weight = nn.Parameter(torch.ones(numel))
        self.model.forward = lambda: self.model.weight.sum()
        self.model, self.optimizer = infinity.wrap_model(
            self.model, torch.optim.AdamW(self.model.parameters(), lr=0.1), HOST
        )
        self.steps, self.deaths = SimpleNamespace(index=0), []
        self.tensor = torch.ones(numel)
        self.hand_out(array)

    def hand_out(self, array: str) -> None:
        parts, handle = parts_of(self.model), handle_of(self.model.weight)
        source = parts.edits if array == VALUE else StateSource(parts.borrowed, array)
        self.entry = Lent(source, handle, self.tensor, on_death=self.deaths.append)
        self.entry.note("a stamp", self.steps.index)

    def is_written(self, *, is_stale: bool = False) -> bool:
        return self.entry.is_written(self.steps.index if is_stale else -1)


def test_what_nobody_wrote_to_is_not_written():
    given = Given()
    assert not given.entry.is_touched and not given.is_written() and given.entry.is_armed
    assert given.entry.stamp == "a stamp" and given.entry.index == 0


@pytest.mark.parametrize("write", ["counted", "by a view", "through data"])
def test_a_write_is_seen_until_it_is_noted(write):
    given = Given()
    target = {"counted": given.tensor, "by a view": given.tensor[3:], "through data": None}[write]
    if target is None:
        given.tensor.data[15] = 3
    else:
        target.mul_(2)
    assert given.entry.is_touched and given.is_written()
    given.entry.note("another", 1)
    assert not given.is_written() and given.entry.index == 1


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


@pytest.mark.parametrize("element", [0, 1, 384, 16383])
def test_every_element_of_a_large_tensor_is_watched(element):
    """Writes one through ``.data``, which torch does not count. Twin: reads, which leave the mark
    that torch would copy the memory on a write."""
    given = Given(16384)
    given.tensor.sum()
    given.tensor[element].item()
    assert not given.entry.is_touched
    given.tensor.data[element] = 3.14159265
    assert given.entry.is_touched and given.is_written()


def test_what_numpy_has_is_compared():
    """Writes element 1 through an array, then writes it back. Twin: as long as its bits are those
    of the note it is not written."""
    given = Given(16384)
    array = given.tensor.numpy()
    assert not given.entry.is_armed and given.entry.is_touched and not given.is_written()
    array[1] = 2
    assert given.is_written() and not given.entry.is_counted
    array[1] = 1
    assert not given.is_written()


def test_bits_are_held_against_the_last_note():
    """NumPy writes, and the tensor is noted then: what counts is what is written later."""
    given = Given(16384)
    array = given.tensor.numpy()
    array[1] = 2
    assert given.is_written()
    given.entry.note("stamp", 0)
    assert not given.is_written()
    array[1] = 1
    assert given.is_written()


def test_an_address_that_is_kept_is_watched():
    """Writes at an address that was taken before a comparison, and before a note. Twin: a tensor
    whose address was only taken, as ``torch.save`` does, is not written."""
    given = Given()
    address = given.tensor.data_ptr()
    assert given.entry.is_touched and not given.is_written()
    ctypes.memset(address, 64, 4)
    assert given.is_written()
    given.entry.note("stamp", 0)
    assert not given.is_written()
    ctypes.memset(address, 65, 4)
    assert given.is_written()


@pytest.mark.parametrize("is_kept", [True, False])
def test_optimizer_state_that_got_other_memory_counts_as_written(is_kept):
    """Assigns ``data``, and keeps the tensor or not. Twins: a parameter's value, of which torch's
    state dict has a tensor of its own; a tensor that only died."""
    for array, writes in (("exp_avg", True), (VALUE, True), ("exp_avg", False)):
        given = Given(array=array)
        if writes:
            given.tensor.data = torch.zeros(16)
        if not is_kept:
            given.entry.tensor = weakref.ref(
                given.tensor, lambda _, entry=given.entry: entry.is_held(dying=True)
            )
            del given.tensor
        assert given.is_written() is given.entry.is_elsewhere is (writes and array != VALUE)


def test_a_snapshot_that_numpy_has_is_compared_once_in_a_step():
    """Twins: a write that torch counts is seen at once; a current tensor is compared each time."""
    given = Given()
    array = given.tensor.numpy()
    assert not given.is_written(is_stale=True)
    array[0] = 2
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
        assert given.entry.was_freed
        assert not given.entry.is_touched and not given.is_written()


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


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "a view": lambda tensor: tensor[3:],
    "an array of a view": lambda tensor: tensor[3:].numpy(),
    "an export": lambda tensor: torch.utils.dlpack.to_dlpack(tensor.detach()),
    "the storage": lambda tensor: tensor.detach().untyped_storage(),
}


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_alone_is_kept_of_a_tensor_holds_its_memory(holder, counts, monkeypatch):
    """Watches two tensors of one memory, and keeps one thing of it, in a torch that counts
    references and in one that does not. Twin: without that thing neither holds the other."""
    if not counts:
        monkeypatch.setitem(STORAGE_COUNTS.__dict__, "found", None)
    given = Given()
    other = given.tensor[2:]
    second = Lent(given.entry.source, given.entry.handle, other)
    kept = HOLDERS[holder](given.tensor)
    del given.tensor, other
    gc.collect()
    assert given.entry.is_held() and second.is_held() and not second.was_freed
    keys = given.entry.key, second.key
    del kept
    gc.collect()
    assert not second.is_held() and not given.entry.is_held()
    assert (given.entry.key, second.key) == keys  # by which they are dropped
    assert given.entry.bytes.tolist() == [1.0] * 16 and second.bytes.numel() == 14


@pytest.mark.parametrize("follows", [False, True])
def test_an_interrupt_as_a_tensor_is_lent_again_leaves_no_wrong_count(follows, monkeypatch):
    """Method: Ctrl-C at each point of a second loan of one tensor, which has no end then; after it
    the tensor is held while its user has it, and not longer. Nothing is raised as it is freed."""
    unraised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    struck = Striker(KeyboardInterrupt, "signal")
    for point in range(1, 1000):
        given = Given()
        entry, tensor = given.entry, given.tensor
        again = partial(Lent, entry.source, entry.handle, tensor, follows=follows)
        is_struck = struck.run(point, again)[0] is not None
        del again
        gc.collect()
        assert entry.is_held()
        del given.tensor, tensor
        assert not entry.is_held(), struck.place
        if not is_struck:
            break
    assert point > 10 and not unraised
