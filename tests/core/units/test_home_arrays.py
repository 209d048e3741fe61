"""HomeArrays: the running update of a flat param's arrays, what may follow it, and what is
swapped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity import native
from infinity.core.machine.device import PAST
from infinity.core.machine.tiers import Tier
from infinity.core.units.flat_layout import FlatLayout
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec
from infinity.core.units.home_arrays import HomeArrays
from infinity.errors import InternalError
from infinity.ext.versions_2bw.versions import add_slot, drop_slot
from infinity.ranks.parallel_dims import ParallelDims

F32 = torch.float32


class Update:
    """Counts its waits, the first ``interrupts`` of which raise; ``done`` before any if so told."""

    def __init__(self, interrupts: int = 0, *, done: bool = False):
        self.waits, self.interrupts, self.done = 0, interrupts, done

    def wait(self) -> None:
        self.waits += 1
        if self.waits <= self.interrupts:
            raise KeyboardInterrupt
        self.done = True


@pytest.fixture
def home() -> HomeArrays:
    """The arrays are names, which are only moved."""
    spec = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, MOMENTS[:1], stepped=True)
    made = HomeArrays(spec, FlatLayout.of([torch.ones(1)]), ["a.weight"])
    made.arrays = {"weight": "W", "exp_avg": "M", "grad": "G"}
    return made


def test_the_same_update_may_be_submitted_again_and_another_may_not(home):
    update = Update()
    for _ in range(2):
        home.submit(update)
    with pytest.raises(InternalError, match="an update of the flat param of a.weight runs"):
        home.submit(Update())
    assert home.update is update
    home.wait()
    home.wait()
    assert update.waits == 1 and home.update is None


def test_an_update_to_a_new_weight_makes_the_old_one_older_once(home):
    """In the slot that had the new one. Twin: before it, the current weight is in every slot."""
    assert home.weight_in(0) == home.weight == "W"
    home.stale = ["other", "new"]
    home.choose(1)
    assert home.beside == "new"
    update = Update()
    for _ in range(2):
        home.advance(update, "new")
        assert (home.weight, home.stale, home.arrays["grad"]) == ("new", ["other", "W"], "G")
        assert home.beside == "W" and home.update is update
        assert [home.weight_in(slot) for slot in (None, 0, 1)] == ["new", "other", "W"]
    with pytest.raises(InternalError):
        home.advance(Update(), "newer")


def test_idle_arrays_have_waited_for_the_update_and_the_last_read(home):
    """Twin: wait() is for the update alone."""
    for idle in (False, True):
        update, read = Update(), Update()
        home.submit(update)
        home.lend(read)
        (home.wait_idle if idle else home.wait)()
        assert (update.waits, read.waits) == (1, int(idle))
        assert home.last_read is (PAST if idle else read)


# --- memory ---

ADAM = FlatParamSpec(
    torch.bfloat16, torch.bfloat16, native.Master.FLOAT32, F32, F32, MOMENTS, stepped=True
)
FROZEN = FlatParamSpec(
    torch.bfloat16, torch.bfloat16, native.Master.OWN, F32, F32, (), stepped=False
)
NAMES = {"weight", "master", "exp_avg", "exp_avg_sq", "grad"}


class Allocator:
    """Notes what is allocated and freed; the array number ``fails`` is refused."""

    def __init__(self, fails: int = -1):
        self.arrays, self.fails = self, fails  # as the store's
        self.made, self.freed = [], []

    def allocate(self, tier, dtype, numel, what, *, make=None) -> SimpleNamespace:
        if len(self.made) == self.fails:
            raise MemoryError(what)
        made = {"tier": tier, "dtype": dtype, "numel": numel, "what": what, "region": make}
        array = SimpleNamespace(**made, extent=f"extent of {what}")
        self.made.append(array)
        return array

    allocate_later = allocate

    def free_more(self, array) -> None:
        self.freed.append(array)


def tiers(**others: Tier) -> dict[str, Tier]:
    return dict.fromkeys(NAMES, Tier.HOST) | others


def empty(spec: FlatParamSpec) -> HomeArrays:
    return HomeArrays(spec, FlatLayout.of([torch.ones(2, 4)]), ["a.weight"])


def test_every_array_of_the_spec_is_allocated_at_its_tier():
    """In its dtype, with a name for messages. Twin: what is frozen has its weight alone. Nothing
    is beside."""
    home, store = empty(ADAM), Allocator()
    home.allocate(store, tiers(exp_avg=Tier.NVME), "unit u")
    assert set(home.arrays) == NAMES and home.beside is None and home.arrays_beside == []
    for name, array in home.arrays.items():
        assert array.what == f"{name} of unit u" and array.numel == home.layout.numel
        assert array.dtype == ADAM.array_dtypes()[name] and array.region is native.Region
        assert array.tier is (Tier.NVME if name == "exp_avg" else Tier.HOST)
    assert home.arrays["weight"].dtype == torch.bfloat16 != home.arrays["master"].dtype
    home = empty(FROZEN)
    home.allocate(store, tiers(), "unit u")
    assert list(home.arrays) == ["weight"]


def test_what_is_cached_on_the_host_keeps_its_place_on_the_disk():
    """Twin: the others are where they are."""
    home, store = empty(ADAM), Allocator()
    home.allocate(store, tiers(weight=Tier.NVME, grad=Tier.NVME), "unit u", kept={"weight"})
    assert home.weight.tier is Tier.HOST and home.arrays["grad"].tier is Tier.NVME
    assert home.weight.what == "weight of unit u, kept from NVMe"
    (reserved,) = home._reserved
    assert (reserved.tier, reserved.what) == (Tier.NVME, "weight of unit u")
    home.beside, read = reserved, Update()
    home.lend(read)
    home.clear()
    assert home.arrays == {} and home.beside is None and home._reserved == []
    assert home.last_read is PAST


def test_weights_that_other_ranks_read_are_in_memory_that_they_share():
    """Twin: what a rank has for itself is not."""
    layout = FlatLayout.of([torch.ones(2, 4)])
    row = SimpleNamespace(homes=SimpleNamespace(make_region="shared"))
    layout = SimpleNamespace(own=layout.own, ranks=SimpleNamespace(shard_group=row))
    home, store = HomeArrays(ADAM, layout, ["a.weight"]), Allocator()
    home.allocate(store, tiers(), "unit u", kept={"weight"})
    for array in home.arrays.values():
        assert (array.region == "shared") == array.what.startswith("weight")
    assert home.weight_regions == ["shared", "shared"]


def test_only_the_arrays_that_are_missing_are_allocated_for_a_larger_spec():
    """And are part of it once it has grown, however often. Twin: before, nothing has changed."""
    home, store = empty(FROZEN), Allocator()
    home.allocate(store, tiers(), "unit u")
    weight = home.weight
    made = home.allocate_missing(store, ADAM, tiers(grad=Tier.NVME), "unit u")
    assert set(made) == NAMES - {"weight"} and made["grad"].tier is Tier.NVME
    assert made["master"].what == "master of unit u" and made["master"].dtype == F32
    assert {array.numel for array in made.values()} == {home.layout.numel}
    assert home.spec is FROZEN and list(home.arrays) == ["weight"]
    for _ in range(2):
        home.grow(ADAM, made)
        assert home.spec is ADAM and home.arrays == {"weight": weight, **made}


def test_of_several_ranks_each_has_its_slice():
    """The second of two. Twin: alone it has all."""
    layout = FlatLayout.of([torch.ones(2, 4096)], ParallelDims(rank=1, size=2))
    home, store = HomeArrays(FROZEN, layout, ["a.weight"]), Allocator()
    home.allocate(store, tiers(), "unit u")
    home.allocate_missing(store, ADAM, tiers(), "unit u")
    assert {array.numel for array in store.made} == {4096} and layout.numel == 8192


def test_a_growth_without_room_leaves_nothing():
    """Twin: the error is the allocator's."""
    home, store = empty(FROZEN), Allocator(fails=3)
    home.allocate(store, tiers(), "unit u")
    with pytest.raises(MemoryError):
        home.allocate_missing(store, ADAM, tiers(), "unit u")
    assert store.freed == store.made[1:] and len(store.freed) == 2


def test_older_weights_have_memory_of_their_own_until_they_are_dropped():
    """Twin: without them the current weights are in every slot."""
    home, store = empty(ADAM), Allocator()
    home.allocate(store, tiers(weight=Tier.NVME), "unit u")
    for slot in range(2):
        add_slot(home, store, "unit u")
        stale = home.weight_in(slot)
        assert stale is not home.weight and stale.what == "stale weight of unit u"
        found = stale.tier, stale.dtype, stale.numel
        assert found == (Tier.NVME, torch.bfloat16, home.weight.numel)
    first, second = home.stale
    assert first is not second and home.arrays_beside == [("weight", first), ("weight", second)]
    for freed in ([second], [second, first], [second, first]):
        drop_slot(home, store)
        assert store.freed == freed
    assert home.weight_in(0) is home.weight and home.arrays_beside == []
    assert home.beside is None


def test_the_kernel_is_told_the_dtypes_of_the_arrays(monkeypatch):
    """Method: what its layout is made of."""
    monkeypatch.setattr(native, "Layout", SimpleNamespace)
    found = empty(ADAM).native_layout(native.Rule.LION)
    assert vars(found) == {
        "rule": native.Rule.LION,
        "weight": native.DTYPES[torch.bfloat16],
        "master": native.Master.FLOAT32,
        "grad": native.DTYPES[F32],
        "moments": native.MOMENT_DTYPES[F32],
    }


def test_a_slice_of_a_whole_gradient_is_this_ranks_bytes():
    """Of the second of two ranks: the second half."""
    ranks = ParallelDims(rank=1, size=2)
    home = HomeArrays(ADAM, FlatLayout.of([torch.ones(2, 4)], ranks), ["a.weight"])
    extent = SimpleNamespace(part=lambda begin, nbytes: (begin, nbytes))
    home.arrays = {"grad": SimpleNamespace(extent=extent)}
    numel = home.layout.shard_numel
    assert home.shard_of_grad() == (4 * numel, 4 * numel)


def test_a_shut_down_waits_and_passes_over_errors():
    """Twin: an interrupt is no error."""

    class Failing(Update):
        def wait(self) -> None:
            super().wait()
            raise OSError("disk")

    home, update = empty(ADAM), Failing()
    home.submit(update)
    home.settle()
    assert home.update is None and update.waits == 1
    home = empty(ADAM)
    home.submit(Update(interrupts=1))
    with pytest.raises(KeyboardInterrupt):
        home.settle()
