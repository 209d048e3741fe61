"""What autograd's graph holds in place of activations: which bytes are saved, in which order they
come back, and that a change between is told."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from deleted import needs
from lone import lone_group
from torch.distributed.tensor import Shard, distribute_tensor

from infinity.core.homes.arrays import StateArray
from infinity.core.machine.tiers import Tier
from infinity.core.run.saved_tensor import (
    Saved,
    SavedTensor,
    SavingOrder,
    View,
    blocks,
    raw_bytes,
    release_saved,
    storage_span,
)
from infinity.core.run.saved_weights import saving_hooks
from infinity.core.units.weight_storages import WeightStorages


def saved_of(begin: int = 0, nbytes: int = 64) -> Saved:
    return Saved(StateArray(Tier.HOST, torch.uint8, nbytes, None), begin, nbytes)


def test_sizes_are_rounded_up_to_whole_checksum_blocks():
    unit = blocks(1)
    assert unit > 1 and [blocks(n) for n in (0, unit, unit + 1)] == [0, unit, 2 * unit]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda base: base, (0, 4096)),
        (lambda base: base[: 1024 // 4], (0, 4096)),  # four times as large: whole
        (lambda base: base[: 1024 // 4 - 1], (0, 1020)),
        (lambda base: base[20:40], (64, 160 - 64)),  # byte 80, and 64 before it is a boundary
        (lambda base: base[16:17], (64, 4)),
        (lambda base: base[15:17], (0, 68)),
        (lambda base: base.view(32, 32)[4:8, 2].t(), (512, (7 * 32 + 2 + 1) * 4 - 512)),
        (lambda base: base.view(32, 32)[:, 0], (0, 4096)),  # spans nearly all
    ],
)
def test_of_a_large_storage_only_the_views_span_is_saved(view, expected):
    """Claim: from a boundary of 64 bytes before the view, unless the storage is at most four times
    as large as that."""
    assert storage_span(view(torch.zeros(1024)), 4096) == expected


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[40:60],
        lambda base: base.view(32, 32)[4:8, 2:5].t(),
        lambda base: base.view(32, 32)[3:6].view(torch.int32),
        lambda base: torch.view_as_complex(base.view(512, 2))[30:40].conj(),
        lambda base: torch._neg_view(base[40:60]),
    ],
    ids=["part", "transposed", "as integers", "conjugate", "negative"],
)
@pytest.mark.parametrize("part", [True, False])
def test_a_view_comes_back_over_a_copy_of_its_bytes(view, part):
    """Method: the bytes of the storage, all or the saved part of them, are copied elsewhere.
    Twin: with those of another storage it has other values."""
    base = torch.arange(1.0, 1025.0)
    tensor = view(base)
    begin, nbytes = storage_span(tensor, 4096) if part else (0, 4096)
    packed = View(
        saved_of(begin, nbytes),
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
    copied = raw_bytes(base.untyped_storage())[begin : begin + nbytes].clone()
    back = packed.over(copied.untyped_storage())
    assert back.dtype == tensor.dtype and back.stride() == tensor.stride()
    assert (back.is_conj(), back.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert torch.equal(back, tensor)
    assert not torch.equal(packed.over((copied + 1).untyped_storage()), tensor)


def test_a_tensor_that_stays_is_itself_unless_it_was_changed():
    tensor = torch.ones(3, requires_grad=True) * 2
    saved = SavedTensor.of(tensor)
    assert saved.tensor().data_ptr() == tensor.data_ptr() and not saved.tensor().requires_grad
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="at version 1; expected version 0"):
        saved.tensor()


def test_only_a_change_while_the_bytes_are_sent_matters():
    """Method: one tensor is changed while it is sent, another one after it has arrived."""
    early, late = torch.zeros(2), torch.zeros(2)
    first, second = saved_of(), saved_of()
    first.source, second.source = (early.detach(), 0), (late.detach(), 0)
    first.check_source()
    early.add_(1)
    for saved in (first, second):
        release_saved(weakref.ref(saved))
        assert saved.source is None
    late.add_(1)
    assert first.was_changed() and not second.was_changed()
    second.check_source()
    with pytest.raises(RuntimeError, match="while it was sent home"):
        first.check_source()
    gone = weakref.ref(saved_of())
    release_saved(gone)  # freed by autograd meanwhile


def test_a_storage_that_has_the_bytes_again_is_found_while_it_lives():
    saved = saved_of()
    assert saved.bytes_on_device() is None
    tensor = torch.arange(4.0)
    saved.came_back(tensor.untyped_storage())
    found = saved.bytes_on_device()
    assert found.data_ptr() == tensor.data_ptr()
    del tensor, found
    gc.collect()
    assert saved.bytes_on_device() is None


def order_of(*all_saved: Saved) -> SavingOrder:
    order = SavingOrder()
    for saved in all_saved:
        order.append(saved)
    return order


def test_the_two_saved_just_before_come_next_the_last_first():
    all_saved = [saved_of() for _ in range(4)]
    order = order_of(*all_saved)
    assert list(order) == all_saved
    a, b, c, d = all_saved
    assert [list(order.before(each)) for each in all_saved] == [[], [a], [b, a], [c, b]]
    assert list(order.before(saved_of())) == []


@pytest.mark.parametrize("count, found", [(0, 2), (2, 2), (3, 3), (9, 4)])
def test_more_come_next_if_there_is_room_for_their_bytes(count, found):
    """Two in any case."""
    *before, last = [saved_of() for _ in range(5)]
    order = order_of(*before, last)
    assert list(order.before(last, nbytes=count * last.nbytes)) == before[::-1][:found]


def test_freed_storages_are_passed_over_and_forgotten():
    """Twin: those that live stay in their order."""
    all_saved = [saved_of() for _ in range(4)]
    order = order_of(*all_saved)
    del all_saved[2]
    a, b, d = all_saved
    assert list(order) == [a, b, d] and list(order.before(d)) == [b]
    order.forget_freed()
    assert list(order) == [a, b, d] and list(order.before(d)) == [b, a]
    del d, all_saved[2]
    assert list(order.before(b)) == [a] and list(order) == [a, b]


@needs("ext/dtensor")
def test_of_a_dtensor_the_local_part_is_saved():
    """By the hooks around those of weights. Twin: a plain tensor is saved as it is."""
    around = lambda tensor: [tensor], lambda packed: packed[0] * 2
    pack, unpack = saving_hooks(around, WeightStorages(), lambda: None)
    plain = torch.ones(2)
    assert pack(plain)[0] is plain and type(unpack(pack(plain))) is torch.Tensor
    with lone_group():
        mesh = dist.init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        packed = pack(tensor)
        assert type(packed.packed[0]) is torch.Tensor
        back = unpack(packed)
        assert back.placements == (Shard(0),) and back.to_local().tolist() == [2.0] * 4
