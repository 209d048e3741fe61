"""UnitBuffers: the device memory of all of a unit's flat params at once. NodeShards: a rank's part
of gathered weights, among the ranks of its machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity import native
from infinity.core.homes.arrays import StateArray
from infinity.core.machine import storage_guard
from infinity.core.machine.device import PAST, Device
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.unit_buffers import USES, UnitBuffers
from infinity.core.units.weight_storages import WeightStorages
from infinity.errors import UsageError

DTYPES = torch.float32, torch.bfloat16
LENGTHS = 5000, 3  # of the flat params' only parameters; padded to 8192 and 4096


class Late(Device):
    """Runs work of a queue once it is waited for, and keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), Traffic())
        self.queues: list[str] = []
        self.freed: list = []

    def put(self, queue, work, *, after=(), transfer=None):
        self.queues.append(queue)
        return SimpleNamespace(wait=work)

    def resize(self, storage, nbytes, *, after=()):
        if not nbytes:
            self.freed.append(after)
        super().resize(storage, nbytes, after=after)


def flat_params() -> list[FlatParam]:
    made = []
    for number, (dtype, length) in enumerate(zip(DTYPES, LENGTHS)):
        spec = FlatParamSpec(dtype, dtype, native.Master.OWN, dtype, dtype, (), stepped=False)
        made.append(FlatParam(spec, [torch.nn.Parameter(torch.zeros(length, dtype=dtype))]))
        made[-1].names[:] = [f"block.{number}"]
    return made


def unit(of: list[FlatParam] | None = None) -> UnitBuffers:
    buffers = UnitBuffers(of or flat_params(), Late())
    buffers.allocate(None)
    return buffers


def params(buffers: UnitBuffers) -> list[torch.Tensor]:
    return [buffer.flat_param.params[0] for buffer in buffers.all]


def are_shown(buffers: UnitBuffers) -> list[bool]:
    """Of every flat param, whether its parameter is a view of the buffer."""
    return [
        storage_guard.identity(param) == storage_guard.identity(flat)
        for param, flat in zip(params(buffers), buffers.flats)
    ]


def test_each_shard_has_a_buffer_of_its_length_and_dtype_made_in_the_queue_to_the_device():
    """Twin: before, there is none."""
    device, of = Late(), flat_params()
    buffers = UnitBuffers(of, device)
    assert buffers.all == buffers.flats == [] and not buffers.is_held
    with torch.device("meta"):
        buffers.allocate(None)
    assert device.queues == ["in"]
    assert [(flat.numel(), flat.dtype) for flat in buffers.flats] == [
        (8192, torch.float32),
        (4096, torch.bfloat16),
    ]
    assert all(flat.is_cpu for flat in buffers.flats)
    assert [buffer.flat_param for buffer in buffers.all] == of


def test_buffers_at_a_home_on_the_device_are_the_homes_arrays():
    device, homes = Late(), [SimpleNamespace(flat=torch.zeros(n)) for n in (8192, 4096)]
    buffers = UnitBuffers(flat_params(), device)
    buffers.allocate(homes)
    assert all(flat is home.flat for flat, home in zip(buffers.flats, homes, strict=True))
    assert device.queues == []


def test_all_parameters_are_shown():
    buffers = unit()
    assert are_shown(buffers) == [False, False]
    buffers.show()
    assert are_shown(buffers) == [True, True]


@pytest.mark.parametrize("shows", [True, False])
def test_aligning_shows_all_parameters_if_asked_to(shows):
    buffers = unit()
    buffers.align(None, shows=shows)
    assert are_shown(buffers) == [shows, shows]


@pytest.mark.parametrize("are_homes", [True, False])
def test_moved_buffers_return_each_to_its_own_home(are_homes):
    """Twin: without homes they stay where they were moved to."""
    regions = [native.Region(8192 * 4), native.Region(4096 * 2)]
    homes = [
        StateArray(
            Tier.HOST,
            dtype,
            numel,
            native.Extent.in_memory(region.address, region.nbytes, region),
            flat=native.tensor_at(region, region.address, numel, dtype),
            region=region,
        )
        for region, dtype, numel in zip(regions, DTYPES, (8192, 4096))
    ]
    buffers = UnitBuffers(flat_params(), Late())
    buffers.allocate(homes)
    buffers.show()
    for flat in buffers.flats:
        flat.share_memory_()
    moved = [flat.data_ptr() for flat in buffers.flats]
    buffers.align(homes if are_homes else None, shows=True)
    there = [flat.data_ptr() for flat in buffers.flats]
    assert there == ([region.address for region in regions] if are_homes else moved)
    assert are_shown(buffers) == [True, True]


def test_all_memory_is_freed_after_every_use_that_was_noted_and_nothing_later():
    """Twins: without a use, and once uses are forgotten, after all compute so far."""
    buffers = unit()
    first, last = SimpleNamespace(done=False), SimpleNamespace(done=False)
    for each in (first, last):
        buffers.note_use(each)
    buffers.empty()
    buffers.empty()
    buffers.note_use(first)
    buffers.forget_uses()
    buffers.empty()
    assert buffers._device.freed == [*[[first, last]] * 2, *[[PAST]] * 4]
    assert [flat.untyped_storage().nbytes() for flat in buffers.flats] == [0, 0]


@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_that_a_view_outlived_a_use_of_is_freed_behind_all_compute(is_kept, monkeypatch):
    """The view may be read between the last use and the end, and be gone by then. Twin: no view."""
    monkeypatch.setattr(Late, "overlaps", True)
    buffers, use = unit(), SimpleNamespace(done=False)
    kept = [buffers.flats[0][:2]] if is_kept else []
    buffers.note_use(use)
    kept.clear()
    buffers.empty()
    assert buffers._device.freed == [[use, PAST] if is_kept else [use]] * 2


def test_a_unit_that_is_never_freed_remembers_no_use_that_is_over():
    buffers, running = unit(), SimpleNamespace(done=False)
    buffers.note_use(running)
    for _ in range(100):
        buffers.note_use(PAST)
    buffers.empty()
    after = buffers._device.freed[0]
    assert after[0] is running and len(after) <= USES


@pytest.mark.parametrize("held", [0, 1])
def test_a_unit_is_held_if_any_of_its_buffers_is(held):
    """Claim: a write to what was left is found in any of them, too. Twin: nothing is held."""
    buffers = unit()
    buffers.show()
    assert not buffers.is_held
    outside = torch.from_dlpack(params(buffers)[held].detach())
    assert buffers.is_held
    outside.zero_()
    buffers.empty()
    buffers.check_left()
    for buffer in buffers.all:
        buffer.fill()
    buffers.empty()
    outside[0] = 1
    with pytest.raises(UsageError, match=f"block.{held}, "):
        buffers.check_left()


def test_all_buffers_are_registered_as_the_units():
    storages, buffers, owner = WeightStorages(), unit(), Late()
    buffers.list_in(storages, owner)
    for flat in buffers.flats:
        assert storages.find(flat[1:]) == (owner, flat)


def test_two_versions_swap_their_memory_with_its_content_and_its_last_use():
    of = flat_params()
    one, other = unit(of), unit(of)
    flats = one.flats, other.flats
    one.note_use("of one")
    other.note_use("of other")
    one.swap(other)
    for buffers, expected in zip((other, one), flats):
        assert all(flat is was for flat, was in zip(buffers.flats, expected, strict=True))
    one.empty()
    other.empty()
    assert other._device.freed == [["of other"]] * 2 and one._device.freed == [["of one"]] * 2
