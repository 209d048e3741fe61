"""HomeArrays: the running update of a flat param's arrays, what may follow it, and what is
swapped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity import native
from infinity.core.machine.tiers import Tier
from infinity.core.units.flat_layout import FlatLayout
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec
from infinity.core.units.home_arrays import COPY, HomeArrays, Reader
from infinity.errors import InternalError
from infinity.ext.class_step.admission import allocate_missing
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
        home.commit(home.draft(), update)
    with pytest.raises(InternalError, match="an update of the flat param of a.weight runs"):
        home.commit(home.draft(), Update())
    assert home.update is update
    home.wait()
    home.wait()
    assert update.waits == 1 and home.update is None


def versions(home: HomeArrays) -> list:
    """The weights that are kept, the newest first."""
    return [home.weight_of(by) for by in (None, 0, 1)]


def test_an_update_to_fresh_bytes_leaves_the_old_weights_to_the_reader_once(home):
    """Twins: before it the reader holds the newest weights; one that holds nothing brings no bytes,
    and one without any has the newest."""
    assert home.weight_of(0) == home.weight == "W"
    home.readers = {0: Reader(array="other"), 1: Reader(array="new")}
    assert home.draft().fresh is None and versions(home) == ["W", "other", "new"]
    for _ in range(2):
        home.hold(1)
        assert versions(home) == ["W", "other", "W"]
    draft, update = home.draft(), Update()
    assert (draft.reader, draft.fresh) == (home.readers[1], "new")
    for _ in range(2):
        home.commit(draft, update)
        assert versions(home) == ["new", "other", "W"] and home.arrays["grad"] == "G"
        assert home.update is update and home.draft().fresh is None
    home.hold(0)
    with pytest.raises(InternalError):
        home.commit(home.draft(), Update())


@pytest.mark.parametrize("is_made", [True, False])
def test_a_draft_that_is_dropped_was_never_there(home, is_made):
    """Method: as after an interrupt, twice. Twin: what was committed stays. A draft that is
    committed although it was dropped, as the journal's, leaves each version in one place."""
    home.readers = {0: Reader(array="new")}
    home.hold(0)
    draft = home.draft()
    if is_made:
        home.commit(draft, None)
    for _ in range(2):
        home.drop_drafts()
    assert versions(home)[:2] == (["new", "W"] if is_made else ["W", "new"])
    home.commit(draft, None)
    assert versions(home)[:2] == ["new", "W"]


def test_an_update_waits_for_what_reads_the_bytes_that_it_changes(home):
    """Method: a copy, which a later one follows, and a save. Twins: what is over is not waited for
    again; weights that a reader holds in bytes of their own are."""
    first, copy, save = Update(), Update(), native.Ticket(1)
    for by, until in (("copy", first), ("copy", copy), ("save", save)):
        home.read_until(by, until)
    home.readers[0] = Reader(array="new")
    home.hold(0)
    draft = home.draft()
    assert (draft.events, draft.tickets, draft.fresh) == ([copy], [save], "new")
    save.part_done()
    home.wait_readers()
    assert (first.waits, copy.waits) == (0, 1)
    draft = home.draft()
    assert (draft.events, draft.tickets, draft.fresh) == ([], [], "new")


def test_idle_arrays_have_waited_for_the_update_and_the_last_read(home):
    """Twin: wait() is for the update alone."""
    for idle in (False, True):
        update, read = Update(), Update()
        home.commit(home.draft(), update)
        home.read_until(COPY, read)
        (home.wait_idle if idle else home.wait)()
        assert (update.waits, read.waits) == (1, int(idle))
        assert home.draft().events == ([] if idle else [read])


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
        self.allocator, self.fails = self, fails  # as the store's
        self.made, self.freed = [], []

    def allocate(self, tier, dtype, numel, purpose, *, make=None, copied=True) -> SimpleNamespace:
        if len(self.made) == self.fails:
            raise MemoryError(purpose)
        made = {"tier": tier, "dtype": dtype, "numel": numel, "what": purpose, "region": make}
        array = SimpleNamespace(**made, copied=copied, extent=f"extent of {purpose}")
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
    assert set(home.arrays) == NAMES and home.extra_arrays == []
    for name, array in home.arrays.items():
        assert array.what == f"{name} of unit u" and array.numel == home.layout.numel
        assert array.dtype == ADAM.array_dtypes()[name] and array.region is native.Region
        assert array.tier is (Tier.NVME if name == "exp_avg" else Tier.HOST)
    assert home.arrays["weight"].dtype == torch.bfloat16 != home.arrays["master"].dtype
    # what crosses the link to the device in every step
    assert {name for name, array in home.arrays.items() if array.copied} == {"weight", "grad"}
    home = empty(FROZEN)
    home.allocate(store, tiers(), "unit u")
    assert list(home.arrays) == ["weight"]


def test_what_is_cached_on_the_host_keeps_its_place_on_the_disk():
    """Twin: the others are where they are."""
    home, store = empty(ADAM), Allocator()
    home.allocate(store, tiers(weight=Tier.NVME, grad=Tier.NVME), "unit u", cached={"weight"})
    assert home.weight.tier is Tier.HOST and home.arrays["grad"].tier is Tier.NVME
    assert home.weight.what == "weight of unit u, kept from NVMe"
    (reserved,) = home._reserved
    assert (reserved.tier, reserved.what) == (Tier.NVME, "weight of unit u")
    home.readers[0], home.kept["mean"] = Reader(array=reserved), reserved
    home.read_until(COPY, Update())
    home.clear()
    assert home.arrays == home.kept == home.readers == {} and home._reserved == []


def test_weights_that_other_ranks_read_are_in_memory_that_they_share():
    """Twin: what a rank has for itself is not."""
    layout = FlatLayout.of([torch.ones(2, 4)])
    row = SimpleNamespace(peer_memory=SimpleNamespace(make_region="shared"))
    layout = SimpleNamespace(home_range=layout.home_range, ranks=SimpleNamespace(shard_group=row))
    home, store = HomeArrays(ADAM, layout, ["a.weight"]), Allocator()
    home.allocate(store, tiers(), "unit u", cached={"weight"})
    for array in home.arrays.values():
        assert (array.region == "shared") == array.what.startswith("weight")
    assert home.weight_regions == ["shared"]
    home.readers[0] = Reader(array=SimpleNamespace(region="its own"))
    for _ in range(2):
        assert home.weight_regions == ["shared", "its own"]
        home.hold(0)


def test_only_the_arrays_that_are_missing_are_allocated_for_a_larger_spec():
    """And are part of it once it has grown, however often. Twin: before, nothing has changed."""
    home, store = empty(FROZEN), Allocator()
    home.allocate(store, tiers(), "unit u")
    weight = home.weight
    made = allocate_missing(store, home, ADAM, tiers(grad=Tier.NVME), "unit u")
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
    allocate_missing(store, home, ADAM, tiers(), "unit u")
    assert {array.numel for array in store.made} == {4096} and layout.numel == 8192


def test_a_growth_without_room_leaves_nothing():
    """Twin: the error is the allocator's."""
    home, store = empty(FROZEN), Allocator(fails=3)
    home.allocate(store, tiers(), "unit u")
    with pytest.raises(MemoryError):
        allocate_missing(store, home, ADAM, tiers(), "unit u")
    assert store.freed == store.made[1:] and len(store.freed) == 2


def test_older_weights_have_memory_of_their_own_until_they_are_dropped():
    """Twin: without them the current weights are in every slot."""
    home, store = empty(ADAM), Allocator()
    home.allocate(store, tiers(weight=Tier.NVME), "unit u")
    for slot in range(2):
        add_slot(home, store, slot, "unit u")
        stale = home.weight_of(slot)
        assert stale is not home.weight and stale.what == "stale weight of unit u"
        found = stale.tier, stale.dtype, stale.numel
        assert found == (Tier.NVME, torch.bfloat16, home.weight.numel)
    first, second = (reader.array for reader in home.readers.values())
    assert first is not second and home.extra_arrays == [("weight", first), ("weight", second)]
    for slot, freed in ((1, [second]), (0, [second, first]), (0, [second, first])):
        drop_slot(home, store, slot)
        assert store.freed == freed
    assert home.weight_of(0) is home.weight and home.extra_arrays == []


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
    home.commit(home.draft(), update)
    home.settle()
    assert home.update is None and update.waits == 1
    home = empty(ADAM)
    home.commit(home.draft(), Update(interrupts=1))
    with pytest.raises(KeyboardInterrupt):
        home.settle()
