"""Parking: memory is given up only for bytes that are on disk, and comes back bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from inside import parts_of
from models import at_home
from torch import nn

import infinity
from infinity import native
from infinity.core.homes.arrays import StateArray
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.errors import CapacityError
from infinity.ext.park import parking
from infinity.ext.park.parking import Parking, arrays_in_memory

BLOCK = native.CHECKSUM_NBYTES
SIZES = (BLOCK, 2 * BLOCK + 24, 40)  # bytes


class Store(ArrayStore):
    """One that is interrupted at its read or write of the number told, counted from one, or after
    it freed so many arrays' memory."""

    reads_left = writes_left = empties_left = -1

    def read(self, *args: object) -> torch.Tensor:
        self.reads_left -= 1
        if not self.reads_left:
            raise KeyboardInterrupt
        return super().read(*args)

    def write(self, *args: object, **more: object) -> None:
        self.writes_left -= 1
        if not self.writes_left:
            raise KeyboardInterrupt
        super().write(*args, **more)

    def empty(self, array: StateArray) -> None:
        """In place of the arrays' own."""
        type(self.allocator).empty(self.allocator, array)
        self.empties_left -= 1
        if not self.empties_left:
            raise KeyboardInterrupt


@pytest.fixture
def store(swap, monkeypatch) -> Iterator[Store]:
    """One whose arrays are parked in pieces of a block."""
    monkeypatch.setattr(parking, "PIECE_NBYTES", BLOCK)
    made = Store([], Ledger(), Traffic(), service_nbytes=native.BLOCK_NBYTES)
    made.open([])
    monkeypatch.setattr(made.allocator, "empty", made.empty)
    yield made
    made.close()


def arrays_of(store: Store) -> tuple[list[StateArray], list[torch.Tensor]]:
    """Arrays of random bytes, and copies of those."""
    arrays = [store.allocator.allocate_more(Tier.HOST, nbytes, "an array") for nbytes in SIZES]
    store.allocator.await_pages()
    for number, array in enumerate(arrays):
        generator = torch.Generator().manual_seed(number)
        array.flat.copy_(torch.randint(1, 256, (array.numel,), generator=generator))
    return arrays, [array.flat.clone() for array in arrays]


def is_there(arrays: list[StateArray], values: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(array.flat, value) for array, value in zip(arrays, values)]


def test_parked_arrays_have_no_bytes_until_they_are_resumed(store, swap):
    """Claim: their addresses stay, and the disk's space, which is less than twice what they need,
    is used again."""
    arrays, values = arrays_of(store)
    store.ledger.limit(Tier.NVME, budget_nbytes=6 * BLOCK, planned_nbytes=0)
    parked, addresses = Parking(store), [array.flat.data_ptr() for array in arrays]
    for _ in range(3):
        assert parked.nbytes == 0
        parked.park(arrays, str(swap))
        assert parked.nbytes == sum(SIZES)
        assert is_there(arrays, values) == [False] * 3
        parked.resume()
        assert is_there(arrays, values) == [True] * 3
        assert [array.flat.data_ptr() for array in arrays] == addresses


def test_without_arrays_no_buffer_is_taken(store, swap):
    """Twin: with arrays one is, for transfers."""
    before = store.ledger.accounts[Tier.HOST].charged_nbytes
    Parking(store).park([], str(swap))
    Parking(store).resume()
    assert store.ledger.accounts[Tier.HOST].charged_nbytes == before
    arrays, _ = arrays_of(store)
    before = store.ledger.accounts[Tier.HOST].charged_nbytes
    Parking(store).park(arrays, str(swap))
    assert store.ledger.accounts[Tier.HOST].charged_nbytes > before


@pytest.mark.parametrize(("write", "parked"), [(1, 0), (2, 1), (3, 1), (4, 1), (5, 2)])
def test_an_array_is_written_whole_before_its_memory_goes(store, swap, write, parked):
    """Method: an interrupt at one of the writes, which are one, three and one by the arrays'
    sizes."""
    arrays, values = arrays_of(store)
    parking_, store.writes_left = Parking(store), write
    with pytest.raises(KeyboardInterrupt):
        parking_.park(arrays, str(swap))
    assert parking_.nbytes == sum(SIZES[:parked])
    assert is_there(arrays, values) == [False] * parked + [True] * (3 - parked)
    parking_.resume()
    assert is_there(arrays, values) == [True] * 3 and parking_.nbytes == 0


@pytest.mark.parametrize("emptied", [1, 2, 3])
def test_memory_that_an_interrupt_just_freed_comes_back(store, swap, emptied):
    arrays, values = arrays_of(store)
    parking_, store.empties_left = Parking(store), emptied
    with pytest.raises(KeyboardInterrupt):
        parking_.park(arrays, str(swap))
    assert is_there(arrays, values) == [False] * emptied + [True] * (3 - emptied)
    parking_.resume()
    assert is_there(arrays, values) == [True] * 3


@pytest.mark.parametrize("read", range(1, 6))
def test_a_resume_that_was_interrupted_goes_on(store, swap, read):
    """Claim: an array is parked until all of its bytes are back."""
    arrays, values = arrays_of(store)
    parking_ = Parking(store)
    parking_.park(arrays, str(swap))
    store.reads_left = read
    with pytest.raises(KeyboardInterrupt):
        parking_.resume()
    left = {1: 3, 2: 2, 3: 2, 4: 2, 5: 1}[read]  # the last array first
    assert parking_.nbytes == sum(SIZES[:left])
    parking_.resume()
    assert is_there(arrays, values) == [True] * 3 and parking_.nbytes == 0


def test_a_disk_without_room_leaves_the_rest_in_memory(store, swap):
    arrays, values = arrays_of(store)
    parking_ = Parking(store)
    store.ledger.limit(Tier.NVME, budget_nbytes=BLOCK, planned_nbytes=0)
    with pytest.raises(CapacityError, match="parked state"):
        parking_.park(arrays, str(swap))
    assert parking_.nbytes == SIZES[0] and is_there(arrays, values) == [False, True, True]
    parking_.resume()
    assert is_there(arrays, values) == [True] * 3


@pytest.mark.parametrize(("home", "weights"), [("host", 1), ("nvme", 0)])
def test_of_a_model_the_arrays_in_memory_are_parked(home, weights, swap):
    """Claim: weights and two moments, without those on a disk; the gradients while there are some.
    Else their memory is blank."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home(home, "host", swap))

    def counted(**parts: bool) -> tuple[int, int]:
        arrays, blank = arrays_in_memory(parts_of(model).units, **parts)
        assert all(array.flat is not None for array in (*arrays, *blank))
        return len(arrays), len(blank)

    assert counted() == (weights + 2, 1)
    assert counted(optimizer=False) == (weights, 0) and counted(weights=False) == (2, 1)
    model(torch.ones(1, 4)).sum().backward()
    assert counted() == (weights + 3, 0)
    optimizer.zero_grad()
    assert counted() == (weights + 2, 1)


def test_blank_memory_is_given_up_and_comes_back_as_zeros(store, swap):
    """Twin: what holds something comes back as it was."""
    (blank, *arrays), (_, *values) = arrays_of(store)
    parking_ = Parking(store)
    parking_.park(arrays, str(swap))
    parking_.park_blank([blank, *arrays])  # those are parked already
    assert parking_.nbytes == sum(SIZES) and not blank.flat.any()
    parking_.resume()
    assert is_there(arrays, values) == [True] * 2 and not blank.flat.any()
