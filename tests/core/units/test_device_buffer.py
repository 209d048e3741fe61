"""DeviceBuffer: one flat param's memory on the device, what holds it, and what becomes of it then.

Words used here: **held**, **fixed** and **left** as in infinity/core/units/device_buffer.py.
**outside**: what a user has of the memory, an array or a view.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from infinity import native
from infinity.core.homes.arrays import StateArray
from infinity.core.machine import storage_guard
from infinity.core.machine.device import Device
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.units.device_buffer import DeviceBuffer
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.weight_storages import WeightStorages
from infinity.errors import UsageError

F32 = torch.float32
SPEC = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, (), stepped=False)
NBYTES = 4096 * 4  # of the flat param: its length is padded
USED = [SimpleNamespace(name="the last use")]

OUTSIDE = {
    "numpy": lambda param: param.detach().numpy(),
    "a view": lambda param: param.detach()[1:],
    "dlpack": lambda param: torch.from_dlpack(param.detach()),
    "the storage of a tensor": lambda param: torch.empty(0).set_(param.untyped_storage()),
}

needs_guard = pytest.mark.skipif(
    not storage_guard.is_available(), reason="this torch's storages cannot be guarded"
)


class Asked(Device):
    """Keeps what it was asked to do with the memory, and after what."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), Traffic())
        self.asked: list[tuple] = []

    def resize(self, storage, nbytes, *, after=()):
        self.asked.append((nbytes, after))
        super().resize(storage, nbytes, after=after)

    def close_storage(self, storage, *, after=()):
        self.asked.append(("closed", after))
        super().close_storage(storage, after=after)


class Struck(torch.nn.Parameter):
    """Its first assignment of bytes is interrupted, once it is ``armed``."""

    armed = False
    data = property(
        torch.Tensor.data.__get__, lambda param, value: param.interrupt() or param.take(value)
    )

    def interrupt(self) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def take(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)


def made(kind: type = torch.nn.Parameter, flat: torch.Tensor | None = None) -> DeviceBuffer:
    """Of a parameter by columns and of another one, full of 0, 1, 2, ..."""
    params = [kind(torch.zeros(3, 2).t()), kind(torch.zeros(5))]
    flat_param = FlatParam(SPEC, params)
    flat_param.names[:] = ["a.weight", "a.bias"]
    flat = torch.arange(4096.0) if flat is None else flat
    return DeviceBuffer(flat_param, flat, Asked())


def shown(**kw) -> DeviceBuffer:
    buffer = made(**kw)
    buffer.show()
    return buffer


def values(buffer: DeviceBuffer) -> list:
    return [param.detach().tolist() for param in buffer.flat_param.params]


def places(buffer: DeviceBuffer) -> list[int]:
    """Ids of the storages of the whole and of the parameters."""
    return [storage_guard.identity(each) for each in (buffer.flat, *buffer.flat_param.params)]


@pytest.fixture
def said(caplog, monkeypatch) -> pytest.LogCaptureFixture:
    """Has what is said, as in a new process."""
    monkeypatch.setattr(DeviceBuffer, "_has_warned", False)
    caplog.set_level(logging.WARNING)
    return caplog


# --- views ---


def test_parameters_are_views_of_the_buffer_once_it_is_shown():
    """Twin: before, they have their own bytes. Each lies at its place, 64 elements apart."""
    buffer = made()
    before = list(buffer.flat_param.params)
    assert values(buffer) == [[[0] * 3] * 2, [0] * 5]
    buffer.show()
    assert values(buffer) == [[[0, 2, 4], [1, 3, 5]], [64, 65, 66, 67, 68]]
    buffer.flat[2], buffer.flat[65] = -1, -2
    assert values(buffer) == [[[0, -1, 4], [1, 3, 5]], [64, -2, 66, 67, 68]]
    assert all(now is then for now, then in zip(buffer.flat_param.params, before))


@pytest.mark.parametrize("is_shown", [True, False])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_memory_is_held_while_something_outside_refers_to_it(kind, is_shown):
    """Twin: the parameters and the engine's own views do not hold it, and nothing does once it is
    let go."""
    buffer = shown() if is_shown else made()
    assert not buffer.is_held and not buffer.is_exported
    view = buffer.flat[:6].view(2, 3)
    outside = OUTSIDE[kind](view)
    del view
    assert buffer.is_held and buffer.is_exported
    del outside
    assert not buffer.is_held


def test_a_parameter_holds_the_memory_of_a_version_that_is_not_shown():
    """Method: one parameter is a view of the buffer, as its module has kept it, and the first one
    is not."""
    buffer = shown()
    buffer.flat_param.params[0].data = torch.zeros(2, 3)
    assert buffer.is_held
    buffer.flat_param.params[1].data = torch.zeros(5)
    assert not buffer.is_held


def test_memory_that_numpy_has_had_is_fixed_and_exported_when_nothing_holds_it():
    """Twins: a view that is gone leaves nothing behind. Shared memory is fixed, too, and moved."""
    buffer = shown()
    buffer.flat_param.params[0].detach()
    assert not (buffer.is_fixed or buffer.is_exported or buffer.is_moved)
    buffer.flat_param.params[0].detach().numpy()
    assert buffer.is_fixed and buffer.is_exported and not (buffer.is_held or buffer.is_moved)
    moved = shown()
    moved.flat_param.params[1].share_memory_()
    assert moved.is_fixed and moved.is_exported and moved.is_moved


# --- memory ---


@needs_guard
def test_memory_is_freed_and_given_to_the_same_storage_and_its_views():
    """Claim: freed after the use that it is told of. Twin: while it is away, access raises."""
    buffer = shown()
    before = places(buffer)
    buffer.empty(USED)
    assert buffer._device.asked == [(0, USED)]
    assert buffer.flat.untyped_storage().nbytes() == 0
    for tensor in (buffer.flat, *buffer.flat_param.params):
        with pytest.raises(RuntimeError):
            tensor.detach().clone()
    buffer.fill()
    assert buffer._device.asked[1:] == [(NBYTES, ())]
    assert places(buffer) == before and buffer.flat.untyped_storage().nbytes() == NBYTES
    buffer.flat.copy_(torch.arange(4096.0))
    assert values(buffer) == [[[0, 2, 4], [1, 3, 5]], [64, 65, 66, 67, 68]]


def test_memory_may_be_freed_twice():
    buffer = shown()
    buffer.empty(USED)
    buffer.empty(())
    assert buffer._device.asked == [(0, USED), (0, ())]


@needs_guard
@pytest.mark.parametrize("kind", OUTSIDE)
def test_held_memory_stays_for_its_holders_and_is_used_again(kind, said):
    """Twin: torch itself must not reach it meanwhile."""
    buffer = shown()
    outside = OUTSIDE[kind](buffer.flat_param.params[1])
    before, address = places(buffer), buffer.flat.data_ptr()
    buffer.empty(USED)
    assert buffer._device.asked == [("closed", USED)]
    if kind in ("numpy", "dlpack"):
        assert outside.tolist() == [64, 65, 66, 67, 68]
    for tensor in (buffer.flat, *buffer.flat_param.params):
        with pytest.raises(RuntimeError):
            tensor.detach().clone()
    buffer.fill()
    buffer.flat.add_(1)
    assert places(buffer) == before and buffer.flat.data_ptr() == address
    assert values(buffer) == [[[1, 3, 5], [2, 4, 6]], [65, 66, 67, 68, 69]]
    del outside
    assert not buffer.is_held


def test_memory_that_stays_is_told_of_once_in_a_process(said):
    """Twin: what is freed is not."""
    shown().empty(())
    assert said.messages == []
    for _ in range(2):
        buffer = shown()
        outside = buffer.flat_param.params[0].detach()
        buffer.empty(())
        assert outside is not None
    assert len(said.messages) == 1
    assert "16.0 KiB of weights (a.weight, ...)" in said.text


def test_a_view_of_memory_that_is_away_keeps_none(said):
    """Method: a view is made of it then, and it is emptied again."""
    buffer = shown()
    buffer.empty(())
    view = buffer.flat.view(64, 64)
    buffer.empty(())
    buffer.check_left()
    assert said.messages == [] and view.untyped_storage().nbytes() == 0


def test_fixed_memory_that_nothing_holds_is_replaced_under_all_its_views():
    """Twin: memory that is not fixed keeps its storage. The other one is found in its stead."""
    for is_fixed in (True, False):
        buffer, storages, unit = shown(), WeightStorages(), Asked()
        buffer.list_in(storages, unit)
        before, flat = places(buffer), buffer.flat
        if is_fixed:
            buffer.flat_param.params[0].detach().numpy()
        buffer.empty(USED)
        after = places(buffer)
        assert after[0] == after[1] == after[2] and (after != before) == is_fixed
        assert buffer.flat is flat and buffer._device.asked == [(0, USED)]
        assert flat.untyped_storage().nbytes() == 0
        assert storages.find(buffer.flat_param.params[1]) == (unit, flat)
        buffer.fill()
        assert not buffer.is_fixed and not buffer.is_held
        flat.copy_(torch.arange(4096.0))
        assert values(buffer) == [[[0, 2, 4], [1, 3, 5]], [64, 65, 66, 67, 68]]


def test_parameters_that_show_another_version_are_let_be_when_storage_is_replaced():
    buffer = made()
    before = places(buffer)
    buffer.flat.numpy()
    buffer.empty(())
    after = places(buffer)
    assert after[0] != before[0] and after[1:] == before[1:]
    buffer.show()
    buffer.fill()
    assert places(buffer) == [after[0]] * 3


def test_moved_memory_is_replaced_even_if_it_is_held(said):
    """Claim: whoever shares it keeps what it has."""
    buffer = shown()
    buffer.flat.share_memory_()
    outside = buffer.flat_param.params[1].detach()
    buffer.empty(())
    assert buffer._device.asked == [(0, ())] and not said.messages
    assert outside.tolist() == [64, 65, 66, 67, 68]
    buffer.fill()
    assert not (buffer.is_moved or buffer.is_held)


# --- memory that was left ---


def left(said: pytest.LogCaptureFixture) -> tuple[DeviceBuffer, object]:
    """A buffer whose memory an array holds, and the array."""
    buffer = shown()
    array = buffer.flat_param.params[0].detach().numpy()
    buffer.empty(())
    assert said.messages
    return buffer, array


def test_memory_that_an_exception_holds_is_not_told_of(said):
    """Method: the buffer is emptied while an exception is handled. Twin: afterwards it is told."""
    buffer, other = shown(), shown()
    arrays = [each.flat_param.params[0].detach().numpy() for each in (buffer, other)]
    try:
        raise ValueError
    except ValueError:
        buffer.empty(())
    assert not said.messages and len(arrays) == 2
    other.empty(())
    assert len(said.messages) == 1


@pytest.mark.parametrize("is_written", [True, False])
def test_a_write_to_left_memory_raises_once(is_written, said):
    """Twin: memory that is as it was says nothing. Either way it stays out of torch's reach."""
    buffer, array = left(said)
    if is_written:
        array[0, 0] = 7
        with pytest.raises(UsageError, match=r"weights of a\.weight, \.\.\. were written to"):
            buffer.check_left()
    buffer.check_left()
    if storage_guard.is_available():
        with pytest.raises(RuntimeError):
            buffer.flat.clone()


def test_a_write_that_was_told_of_is_not_told_of_again(said):
    """Twin: neither is one after the memory was found as it was."""
    for writes_first in (True, False):
        buffer, array = left(said)
        if writes_first:
            array[0, 0] = 7
            with pytest.raises(UsageError):
                buffer.check_left()
        else:
            buffer.check_left()
        array[0, 0] = 8
        buffer.check_left()


def test_a_write_is_found_although_the_memory_was_left_once_more(said):
    buffer, array = left(said)
    array[0, 0] = 7
    buffer.empty(())
    with pytest.raises(UsageError):
        buffer.check_left()


@pytest.mark.parametrize("way", ["filled", "freed"])
def test_a_write_to_memory_that_is_left_no_more_is_let_be(way, said):
    buffer, array = left(said)
    array[0, 0] = 7
    if way == "filled":
        buffer.fill()
    else:
        del array
        buffer.empty(())
        assert buffer.flat.untyped_storage().nbytes() == 0
    buffer.check_left()
    if way == "filled":
        assert buffer.flat[0] == 7  # within torch's reach


# --- interrupts, and memory that is the home itself ---


@pytest.mark.parametrize("shows", [True, False])
def test_an_interrupted_replacement_is_undone(shows):
    """Method: the second parameter is struck when it gets the other storage."""
    buffer = shown(kind=Struck)
    before = places(buffer)
    buffer.flat.numpy()
    buffer.flat_param.params[1].armed = True
    with pytest.raises(KeyboardInterrupt):
        buffer.empty(())
    assert len(set(places(buffer))) == 2
    buffer.align(shows=shows)
    assert (places(buffer) == before) == shows
    buffer.show()
    assert places(buffer) == before
    assert values(buffer) == [[[0, 2, 4], [1, 3, 5]], [64, 65, 66, 67, 68]]


@pytest.mark.parametrize("shows", [True, False])
def test_aligning_shows_the_buffer_if_it_is_asked_to(shows):
    buffer = made()
    buffer.align(shows=shows)
    assert (len(set(places(buffer))) == 1) == shows


def home(region: native.Region | None) -> StateArray:
    """Of the buffer's size, in ``region`` or of torch."""
    flat = (
        torch.zeros(4096) if region is None else native.tensor_at(region, region.address, 4096, F32)
    )
    extent = native.Extent.in_memory(flat.data_ptr(), NBYTES, region)
    return StateArray(Tier.HOST, F32, 4096, extent, flat=flat, region=region)


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_moved_buffer_returns_to_the_memory_of_its_home(is_moved):
    """Twin: one that was not moved is there."""
    region = native.Region(NBYTES)
    at_home = home(region)
    buffer = shown(flat=at_home.flat)
    before, address = places(buffer), region.address
    if is_moved:
        buffer.flat.share_memory_()
        assert buffer.flat.data_ptr() != address
    buffer.return_to(at_home)
    assert buffer.flat.data_ptr() == address and len(set(places(buffer))) == 1
    assert (places(buffer) == before) == (not is_moved)
    buffer.flat.copy_(torch.arange(4096.0))
    assert values(buffer) == [[[0, 2, 4], [1, 3, 5]], [64, 65, 66, 67, 68]]


def test_a_moved_buffer_of_torchs_own_memory_stays_where_it_is():
    at_home = home(None)
    buffer = shown(flat=at_home.flat)
    buffer.flat.share_memory_()
    before = places(buffer)
    buffer.return_to(at_home)
    assert places(buffer) == before
