"""ActivationStore: which saved tensors go home, once for all views, and how they come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Elsewhere

from infinity import native
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.device import Device
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.run.activation_store import SMALLEST_NBYTES, ActivationStore
from infinity.core.run.saved_tensor import LARGEST_EXCESS, SavedTensor, View, WithinBudget
from infinity.core.run.schedule import Schedule
from infinity.core.units.weight_storages import WeightStorages
from infinity.errors import CapacityError
from infinity.ext.blocks.activation_choice import ActivationChoice
from infinity.ext.blocks.recompute import ActivationPlanner
from infinity.ext.blocks.unaided import Unaided
from infinity.ranks.parallel_dims import ParallelDims

NUMEL = SMALLEST_NBYTES // 4  # fp32 elements of the smallest storage that is taken
BLOCK = native.CHECKSUM_NBYTES


class Made:
    """A store of activations, what it charges, and its hooks."""

    def __init__(
        self, folder: Path, tier: Tier, spare: int | None, device: Device | None, budget: int | None
    ):
        self.ledger = Ledger()
        for each in Tier:
            limit = budget + native.BLOCK_NBYTES if budget is not None and each is tier else None
            self.ledger.limit(each, budget_nbytes=limit, planned_nbytes=0)
        traffic = device.traffic if device is not None else Traffic()
        more = {"device": device} if device is not None else {}
        self.store = ArrayStore(
            [str(folder)], self.ledger, traffic, service_nbytes=native.BLOCK_NBYTES, **more
        )
        region = native.Region(64 * BLOCK, huge_pages=False, touch_threads=0)
        self.store.open([region])
        pool = native.PinnedPool(region) if tier is Tier.NVME else None
        self.activations = ActivationStore(self.store, tier, pool, spare_nbytes=spare)
        self.pack, self.unpack = self.activations.hooks(None)

        allocate, self.taken = self.store.allocator.allocate_more, []

        def taking(tier: Tier, nbytes: int, what: str) -> Any:
            array = allocate(tier, nbytes, what)
            self.taken.append(nbytes)
            return array

        self.store.allocator.allocate_more = taking

    @property
    def sent(self) -> int:
        """How many bytes have taken a place at home."""
        return sum(self.taken)


@pytest.fixture
def make(swap) -> Iterator[Any]:
    made = []

    def build(
        tier: Tier = Tier.HOST,
        spare: int | None = None,
        device: Device | None = None,
        budget: int | None = None,
    ) -> Made:
        made.append(Made(swap, tier, spare, device, budget))
        return made[-1]

    yield build
    for each in made:
        each.store.device.close()
        each.store.close()


tiers = pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME], ids=str)


def ramp(numel: int = NUMEL) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32)


class Other(torch.Tensor):
    """A subclass."""


# --- what is taken ---


@tiers
def test_a_saved_tensor_comes_back_with_its_bits_and_its_form(make, tier):
    """Of every kind of view. Method: the tensor is lost, and the engine's own bytes changed."""
    made, whole = make(tier), ramp()
    views = [
        whole,
        whole.view(-1, 8).t(),
        whole[NUMEL // 2 :],
        whole.view(torch.bfloat16),
        torch.view_as_complex(whole.view(-1, 2)).conj(),
        torch.view_as_complex(whole.view(-1, 2)).conj().imag,
        torch.nn.Parameter(whole).detach(),
    ]
    packed = [made.pack(view) for view in views]
    expected = [view.clone() for view in views]
    forms = [(v.dtype, v.stride(), v.storage_offset(), v.is_conj(), v.is_neg()) for v in views]
    whole.zero_()
    del views
    for one, right, form in zip(packed, expected, forms, strict=True):
        assert type(one) is View
        found = made.unpack(one)
        assert torch.equal(found, right)
        assert form == (
            found.dtype,
            found.stride(),
            found.storage_offset(),
            found.is_conj(),
            found.is_neg(),
        )


KEPT = {  # what stays where it is
    "a small storage": lambda: ramp(NUMEL - 1),
    "a sparse tensor": lambda: torch.eye(NUMEL // 64).to_sparse(),
    "a nested one": lambda: torch.nested.nested_tensor([ramp(), ramp()]),
    "an empty one": lambda: ramp()[:0],
    "a small part": lambda: ramp()[: NUMEL // LARGEST_EXCESS - 1],
    "a parameter": lambda: torch.nn.Parameter(ramp()),
    "a subclass": lambda: ramp().as_subclass(Other),
    "elsewhere": lambda: ramp().to("meta"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", KEPT)
def test_what_saves_nothing_or_is_no_plain_tensor_stays(make, what):
    """Twins: an outer pair of hooks gets it, and one that is just large enough goes home."""
    made, tensor = make(), KEPT[what]()
    packed = made.pack(tensor)
    found = made.unpack(packed)
    assert type(packed) is SavedTensor and (found.is_nested or found.shape == tensor.shape)
    outer = made.activations.hooks((lambda each: ("packed", each), lambda each: each[1]))
    assert outer[0](tensor)[1] is tensor
    assert outer[1](("packed", tensor)) is tensor
    assert made.sent == 0
    part = ramp(2 * NUMEL)[: NUMEL // LARGEST_EXCESS]
    for each in (ramp(), part):
        assert type(outer[0](each)) is View


def test_storages_that_are_no_activations_stay(make):
    """Buffers, which the forward names. Twin: in the next one, which names others."""
    made, buffer = make(), ramp()
    made.activations.begin({buffer.untyped_storage()._cdata})
    assert type(made.pack(buffer)) is SavedTensor
    made.activations.begin(set())
    packed = made.pack(buffer)
    assert type(packed) is View
    made.activations.begin(set())
    assert made.pack(buffer).saved is packed.saved  # its bytes are at home already


# --- once for all views ---


@tiers
def test_a_storage_goes_home_once_for_all_its_views(make, tier):
    """Twin: another storage has bytes of its own. When it comes back, its views share it."""
    made, whole = make(tier), ramp()
    packed = [made.pack(view) for view in (whole, whole[: NUMEL // 2], whole.view(-1, 8))]
    assert len({one.saved for one in packed}) == 1 and made.sent == SMALLEST_NBYTES
    found = [made.unpack(one) for one in packed]
    assert len({each.untyped_storage()._cdata for each in found}) == 1
    other = ramp()
    assert made.pack(other).saved is not packed[0].saved and made.sent == 2 * SMALLEST_NBYTES


@tiers
@pytest.mark.parametrize("how", ["by torch", "unheard"])
def test_a_storage_that_changed_goes_home_anew(make, tier, how):
    """Torch does not count what NumPy writes. Twin: unchanged it does not."""
    made, whole = make(tier), ramp()
    first = made.pack(whole)
    made.unpack(first)  # it has been sent
    if how == "by torch":
        whole[-1] = -1.0
    else:
        whole.numpy()[-1] = -1.0
    second = made.pack(whole)
    assert second.saved is not first.saved
    assert made.unpack(first)[-1] == NUMEL - 1 and made.unpack(second)[-1] == -1
    assert made.pack(whole).saved is second.saved


def test_from_a_device_elsewhere_torchs_counter_decides(make):
    """To compare the bytes would cost as much as to send them."""
    made, whole = make(device=Elsewhere(torch.device("cpu"), Traffic())), ramp()
    first = made.pack(whole)
    made.unpack(first)
    whole.numpy()[-1] = -1.0
    assert made.pack(whole).saved is first.saved
    whole[-1] = -2.0
    second = made.pack(whole)
    assert second.saved is not first.saved and made.unpack(second)[-1] == -2


def test_a_small_part_of_a_large_storage_goes_home_alone(make):
    """And stands for no other view of it. Twin: as much as is worth it takes all."""
    made, whole = make(), ramp(8 * NUMEL)
    packed = [made.pack(whole[NUMEL : 2 * NUMEL]), made.pack(whole[-NUMEL:])]
    assert packed[0].saved is not packed[1].saved and made.sent == 2 * SMALLEST_NBYTES
    expected = [whole[NUMEL : 2 * NUMEL].clone(), whole[-NUMEL:].clone()]
    whole.zero_()
    assert all(torch.equal(made.unpack(one), each) for one, each in zip(packed, expected))
    made.pack(whole[: 2 * NUMEL])
    assert made.sent == 10 * SMALLEST_NBYTES


def test_bytes_stay_at_home_as_long_as_the_graph_has_them(make):
    """Then the next storage of that size takes their place. Twin: before, another place."""
    made = make()
    first = made.pack(ramp())
    second = made.pack(ramp())
    assert made.sent == 2 * SMALLEST_NBYTES
    first = None
    third = made.pack(ramp())
    assert made.sent == 2 * SMALLEST_NBYTES and third.saved is not second.saved


def test_after_an_exception_nothing_is_known(make):
    """A storage goes home anew. Twin: before."""
    made, whole = make(), ramp()
    first = made.pack(whole)
    assert made.pack(whole).saved is first.saved
    made.activations.rebuild()
    assert made.pack(whole).saved is not first.saved
    assert torch.equal(made.unpack(first), ramp())


# --- the device's budget ---


def test_storages_stay_while_the_devices_budget_has_room(make):
    """Each until its graph lets it go. Twins: without a budget every one goes home."""
    made = make(spare=2 * SMALLEST_NBYTES)
    packed = [made.pack(ramp()) for _ in range(3)]
    assert [type(one) for one in packed] == [WithinBudget, WithinBudget, View]
    assert made.activations.kept_nbytes == 2 * SMALLEST_NBYTES and made.sent == SMALLEST_NBYTES
    assert all(torch.equal(made.unpack(one), ramp()) for one in packed)
    del packed[0]
    assert made.activations.kept_nbytes == SMALLEST_NBYTES
    assert type(made.pack(ramp())) is WithinBudget
    assert type(make(spare=0).pack(ramp())) is View and type(make().pack(ramp())) is View


def test_a_storage_that_stays_is_charged_once_however_many_views_are_saved(make):
    """Until the last of them is gone. Twin: another storage of as many bytes has no room then."""
    made, whole = make(spare=SMALLEST_NBYTES), ramp()
    views = [made.pack(view) for view in (whole, whole.view(2, -1), whole.view(-1, 4))]
    assert [type(one) for one in views] == [WithinBudget] * 3
    assert made.activations.kept_nbytes == SMALLEST_NBYTES and type(made.pack(ramp())) is View
    del views[:2]
    assert made.activations.kept_nbytes == SMALLEST_NBYTES
    views.clear()
    assert made.activations.kept_nbytes == 0 and type(made.pack(ramp())) is WithinBudget


def test_a_storage_at_the_address_of_one_that_is_gone_is_charged_anew(make):
    """Method: hooks around keep nothing of a tensor, whose charge stays. Twin: while the tensor is
    alive, a view of it is charged no more."""
    made, tensor = make(spare=4 * SMALLEST_NBYTES), ramp()
    pack, _ = made.activations.hooks((lambda each: None, lambda each: each))
    packed = [pack(tensor), pack(tensor.view(2, -1))]
    assert made.activations.kept_nbytes == SMALLEST_NBYTES
    made.activations._charges[(other := ramp()).untyped_storage()._cdata] = (
        made.activations._charges.pop(tensor.untyped_storage()._cdata)
    )
    del tensor
    packed.append(pack(other))
    assert made.activations.kept_nbytes == 2 * SMALLEST_NBYTES


def test_what_stays_in_the_budget_goes_through_the_outer_hooks(make):
    """Twin: what goes home does not."""
    made, tensor = make(spare=SMALLEST_NBYTES), ramp()
    pack, unpack = made.activations.hooks((lambda each: [each], lambda each: each[0]))
    packed = pack(tensor)
    assert packed.packed[0] is tensor and unpack(packed) is tensor
    assert type(pack(ramp())) is View


def test_a_storage_that_is_home_already_takes_none_of_the_budget(make):
    made, whole = make(spare=SMALLEST_NBYTES), ramp()
    room = made.pack(ramp())
    first = made.pack(whole)
    del room
    assert made.pack(whole).saved is first.saved and made.activations.kept_nbytes == 0


def test_without_room_at_home_a_storage_stays_if_it_may(make):
    """Twin: if all must go home it is told."""
    made = make(spare=0, budget=SMALLEST_NBYTES)
    packed = [made.pack(ramp()), made.pack(ramp())]
    assert [type(one) for one in packed] == [View, WithinBudget]
    assert made.activations.kept_nbytes == SMALLEST_NBYTES
    made = make(budget=SMALLEST_NBYTES)
    first = made.pack(ramp())
    with pytest.raises(CapacityError, match="activations"):
        made.pack(ramp())
    assert torch.equal(made.unpack(first), ramp())


# --- blocks ---


def planned(made: Any) -> ActivationPlanner:
    """A planner of no blocks, which the store asks from now on."""
    planner = ActivationPlanner(
        lambda: None,
        made.activations._device,
        spare_nbytes=0,
        send_rate=lambda: 1.0,
        recomputes=True,
        unaided=Unaided(Schedule(), ParallelDims(), WeightStorages()),
    )
    made.activations.planner = planner
    return planner


class Block:
    """Counts what is saved in it."""

    def __init__(self, choice: ActivationChoice):
        self.choice, self.saved = choice, []

    def saves(self, storage: torch.UntypedStorage) -> None:
        self.saved.append(storage.nbytes())


def test_storages_are_counted_in_the_block_whose_forward_runs_or_outside(make):
    """Each time one is saved. Twin: what is not taken is not counted."""
    made, block = make(spare=100 * SMALLEST_NBYTES), Block(ActivationChoice.KEEP)
    planner = planned(made)
    with planner.run_block(block):
        assert planner.block is block
        packed = [made.pack(ramp()), made.pack(ramp(2 * NUMEL)), made.pack(ramp(8))]
    assert block.saved == [SMALLEST_NBYTES, 2 * SMALLEST_NBYTES]
    assert planner.outside_nbytes == 0 and planner.block is None
    packed += [made.pack(ramp()), made.pack(ramp())]
    assert planner.outside_nbytes == 2 * SMALLEST_NBYTES and len(block.saved) == 2
    made.activations.begin(set())
    assert planner.outside_nbytes == 0


def test_a_block_whose_forward_fails_runs_no_more(make):
    planner = planned(make())
    with pytest.raises(ValueError, match="stop"):
        with planner.run_block(Block(ActivationChoice.KEEP)):
            raise ValueError("stop")
    assert planner.block is None


def test_a_block_that_is_to_be_sent_leaves_the_room_to_others(make):
    """Twin: one that is kept does not."""
    made = make(spare=100 * SMALLEST_NBYTES)
    planner = planned(made)
    for choice, kind in ((ActivationChoice.SEND, View), (ActivationChoice.KEEP, WithinBudget)):
        with planner.run_block(Block(choice)):
            assert type(made.pack(ramp())) is kind


def test_the_planner_begins_with_each_forward(make):
    """Twin: without one nothing begins."""

    class Planner:
        begun = 0

        def begin(self) -> None:
            self.begun += 1

    made, planner = make(), Planner()
    made.activations.begin(set())
    assert made.activations.planner is None
    made.activations.planner = planner
    made.activations.begin(set())
    assert made.activations.planner is planner and planner.begun == 1
