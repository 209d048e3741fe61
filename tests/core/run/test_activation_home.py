"""ActivationHome: buffers at home are reused once their storage is freed, and never before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinity import native
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.run.activation_home import ActivationHome
from infinity.core.run.saved_tensor import Saved
from infinity.errors import CapacityError, UsageError

BLOCK = native.CHECKSUM_NBYTES
TIERS = [Tier.HOST, Tier.NVME]


class Home:
    """A home on ``tier`` and the storages sent to it."""

    def __init__(self, tier: Tier, folder: Path):
        self.tier = tier
        self.store = ArrayStore(
            [str(folder)], Ledger(), Traffic(), service_nbytes=native.BLOCK_NBYTES
        )
        region = native.Region(8 * BLOCK, huge_pages=False, touch_threads=0)
        self.store.open([region])
        self.pool = native.PinnedPool(region)
        self.home = ActivationHome(self.store, tier, self.pool if tier is Tier.NVME else None)

    def send(self, value: int, nbytes: int = BLOCK) -> Saved:
        tensor = torch.full((nbytes,), value, dtype=torch.uint8)
        saved = self.home.save(0, nbytes)
        self.home.send(saved, tensor.untyped_storage(), tensor)
        return saved

    def bring(self, saved: Saved) -> list[int]:
        return torch.empty(0, dtype=torch.uint8).set_(self.home.bring(saved)).unique().tolist()

    @property
    def charged_nbytes(self) -> int:
        return self.store.ledger.accounts[self.tier].charged_nbytes


@pytest.fixture
def made(request, swap) -> Iterator[Home]:
    found = Home(request.param, swap)
    yield found
    found.store.close()


both = pytest.mark.parametrize("made", TIERS, indirect=True, ids=str)
on_host = pytest.mark.parametrize("made", [Tier.HOST], indirect=True, ids=str)


@both
def test_each_storage_comes_back_with_its_own_bytes(made):
    all_saved = [made.send(number, 2 * BLOCK + number) for number in range(1, 4)]
    assert [made.bring(saved) for saved in all_saved] == [[1], [2], [3]]


@both
def test_a_storage_that_is_back_is_not_brought_twice(made):
    """Twin: once nothing holds it, it is."""
    saved = made.send(5)
    first = made.home.bring(saved)
    assert made.home.bring(saved).data_ptr() == first.data_ptr()
    torch.empty(0, dtype=torch.uint8).set_(first).fill_(6)
    assert made.bring(saved) == [6]
    del first
    gc.collect()
    assert made.bring(saved) == [5]


def address_of(saved: Saved) -> int:
    return saved.array.extent.address


@on_host
def test_a_buffer_is_given_again_once_its_storage_is_freed(made):
    """Twin: as long as it lives another one is taken."""
    first = made.send(1)
    second, place = made.send(2), address_of(first)
    assert address_of(second) != place
    charged = made.charged_nbytes
    del first
    third = made.send(3)
    assert address_of(third) == place and made.charged_nbytes == charged
    assert made.bring(second) == [2] and made.bring(third) == [3]


@on_host
@pytest.mark.parametrize(("parts", "fits"), [(18, True), (16, True), (19, False), (15, False)])
def test_a_free_buffer_serves_sizes_near_its_own(made, parts, fits):
    """Method: a buffer of 18 blocks is free. It may be an eighth larger than what it serves: 16
    blocks and not 15."""
    first = made.send(1, 18 * BLOCK)
    place = address_of(first)
    del first
    assert (address_of(made.send(2, parts * BLOCK)) == place) == fits


@on_host
def test_of_several_free_buffers_the_smallest_that_fits_is_given(made):
    sizes = (17, 16, 18)
    all_saved = [made.send(1, size * BLOCK) for size in sizes]
    places = [address_of(saved) for saved in all_saved]
    del all_saved[:]
    assert address_of(made.send(2, 16 * BLOCK)) == places[1]


@on_host
def test_free_buffers_of_other_sizes_make_room(made):
    """Claim: a full budget is freed of them first. Twin: what is in use stays, and is told as too
    much, with what to do."""
    kept, freed = made.send(1, 2 * BLOCK), made.send(2, 4 * BLOCK)
    made.store.ledger.limit(
        Tier.HOST, budget_nbytes=made.charged_nbytes, planned_nbytes=made.charged_nbytes
    )
    with pytest.raises(CapacityError, match=r"activations: .*Config\(activations=\.\.\.\)"):
        made.send(3, BLOCK)
    del freed
    other = made.send(4, BLOCK)
    assert made.bring(kept) == [1] and made.bring(other) == [4]
    with pytest.raises(CapacityError):
        made.send(5, 4 * BLOCK)


@on_host
def test_without_a_budget_no_more_is_taken_than_was_left(made):
    """Twins: the same store without a limit, and buffers that are freed are used again. With a
    budget, its room counts."""
    limited = ActivationHome(made.store, Tier.HOST, None, 3 * BLOCK)
    kept = limited.save(0, 2 * BLOCK)
    with pytest.raises(CapacityError, match="activations: host_memory was not given"):
        limited.save(0, 2 * BLOCK)
    assert limited.room_nbytes() == 3 * BLOCK and made.home.room_nbytes() == float("inf")
    del kept
    assert limited.save(0, 3 * BLOCK).nbytes == 3 * BLOCK and made.send(1, 8 * BLOCK)
    account = made.store.ledger.accounts[Tier.HOST]
    budget = account.planned_nbytes + 5 * BLOCK
    made.store.ledger.limit(Tier.HOST, budget_nbytes=budget, planned_nbytes=account.planned_nbytes)
    assert limited.room_nbytes() == 8 * BLOCK  # with those that it has


@pytest.mark.parametrize("made", [Tier.NVME], indirect=True, ids=str)
def test_space_on_disk_is_used_again(made):
    """Method: a budget for two storages, and one after the other is freed."""
    made.store.ledger.limit(Tier.NVME, budget_nbytes=2 * BLOCK, planned_nbytes=0)
    kept = made.send(1)
    for value in range(2, 9):
        saved = made.send(value)
        assert made.bring(saved) == [value]
        del saved
    assert made.bring(kept) == [1]
    second = made.send(9)
    with pytest.raises(CapacityError, match="activations"):
        made.send(10)
    assert made.bring(second) == [9]


@on_host
def test_after_an_exception_only_what_lives_keeps_its_buffer(made):
    """Method: a buffer was taken and the exception came before it was filed; another storage was
    freed, a third lives. The next two storages get the first two buffers."""
    alive, freed = made.send(1), made.send(2)
    lost = made.home._take(BLOCK)
    places = {lost.extent.address, address_of(freed)}
    alive.coming = "under way"
    del freed, lost
    made.home.rebuild()
    assert alive.coming is None and made.bring(alive) == [1]
    assert {address_of(each) for each in [made.send(3), made.send(4)]} <= places
    assert made.bring(alive) == [1]


@both
def test_after_the_engine_nothing_is_brought(made):
    """Twin: what is back already is given."""
    back, home = made.send(1), made.send(2)
    kept = made.home.bring(back)
    made.store.close()
    assert made.bring(back) == [1] and kept is not None
    with pytest.raises(UsageError, match="before unwrap_model"):
        made.home.bring(home)
