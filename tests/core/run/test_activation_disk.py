"""ActivationsOnDisk: bytes go to disk in parts that fit the staging memory, and come back ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models import swap_files

from infinity import native
from infinity.core.homes.arrays import StateArray, bytes_of
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.run.activation_disk import ActivationsOnDisk
from infinity.core.run.saved_tensor import Saved, SavingOrder
from infinity.errors import CorruptionError

BLOCK = native.CHECKSUM_NBYTES


class Disk:
    """Storages on disk, through staging memory of so many blocks."""

    def __init__(self, folder: str, parts: int):
        self.store = ArrayStore([folder], Ledger(), Traffic(), service_nbytes=native.BLOCK_NBYTES)
        region = native.Region(parts * BLOCK, huge_pages=False, touch_threads=0)
        self.store.open([region])
        self.pool, self.order = native.PinnedPool(region), SavingOrder()
        self.disk = ActivationsOnDisk(self.store, self.pool, self.order)
        self.writes: list[tuple[int, int]] = []  # offset and bytes of each
        start = self.store.start_write

        def start_write(array: StateArray, offset: int, lease: object, nbytes: int) -> object:
            self.writes.append((offset, nbytes))
            return start(array, offset, lease, nbytes)

        self.store.start_write = start_write
        self.reads: list[StateArray] = []
        read = self.store.start_read
        self.store.start_read = lambda array, *args: (self.reads.append(array), read(array, *args))[
            1
        ]

    def take(self, nbytes: int) -> StateArray:
        return self.store.allocator.allocate_more(
            Tier.NVME, -(-nbytes // BLOCK) * BLOCK, "activations"
        )

    def send(self, source: torch.Tensor) -> Saved:
        saved = Saved(self.take(source.numel()), 0, source.numel())
        self.disk.send(saved, source)
        self.order.append(saved)
        for ticket in saved.writes:  # until then it has staging memory
            ticket.wait()
        return saved

    def read(self, saved: Saved) -> torch.Tensor:
        target = torch.zeros(saved.nbytes, dtype=torch.uint8)
        self.disk.read(saved, target)
        return target


@pytest.fixture
def made(request, swap) -> Iterator[Disk]:
    found = Disk(str(swap), getattr(request, "param", 16))
    yield found
    found.store.close()


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    "nbytes", [1, BLOCK - 1, BLOCK, 4 * BLOCK, 4 * BLOCK + 1, 13 * BLOCK + 5, 40 * BLOCK]
)
def test_the_bytes_come_back_by_parts_of_a_quarter_of_the_memory(made, nbytes):
    """Claim: staging memory of 16 blocks passes four at once, the last part rounded up."""
    source = numbers(nbytes)
    saved = made.send(source)
    whole = 4 * BLOCK
    expected = [
        (begin, min(whole, -(-(nbytes - begin) // BLOCK) * BLOCK))
        for begin in range(0, nbytes, whole)
    ]
    assert made.writes == expected
    assert torch.equal(made.read(saved), source)
    assert made.pool.leased_nbytes == 0 and len(made.reads) == len(expected)


@pytest.mark.parametrize(("made", "largest"), [(7, 1), (9, 2), (2, 1)], indirect=["made"])
def test_a_part_is_of_whole_blocks_however_small_the_memory_is(made, largest):
    source = numbers(5 * BLOCK)
    saved = made.send(source)
    assert made.writes[0] == (0, largest * BLOCK)
    assert torch.equal(made.read(saved), source)


def crc32c(raw: bytes) -> int:
    """By its definition: the reflected Castagnoli polynomial, bit after bit."""
    sum_ = 0xFFFFFFFF
    for byte in raw:
        sum_ ^= byte
        for _ in range(8):
            sum_ = sum_ >> 1 ^ (0x82F63B78 if sum_ & 1 else 0)
    return sum_ ^ 0xFFFFFFFF


@pytest.mark.parametrize("made", [4], indirect=True)
def test_the_checksum_is_of_all_bytes_and_none_more(made):
    """Claim: over all parts, without what fills the last block. Twin: sent again it begins
    anew."""
    source = numbers(BLOCK + 100)
    saved = made.send(source)
    assert saved.checksum == crc32c(bytes(source.tolist()))
    made.disk.send(saved, source)
    assert saved.checksum == crc32c(bytes(source.tolist()))


@pytest.mark.parametrize(
    ("sizes", "ahead"),
    [
        ([1, 1, 1, 1], [False, True, True, False]),
        ([1, 1, 5, 1], [False, True, False, False]),  # more than a quarter of the memory
        ([1, 4, 4, 1], [False, True, True, False]),
    ],
)
def test_what_was_saved_before_is_read_ahead(made, sizes, ahead):
    sources = [numbers(size * BLOCK, seed) for seed, size in enumerate(sizes)]
    all_saved = [made.send(source) for source in sources]
    assert torch.equal(made.read(all_saved[3]), sources[3])
    assert [saved.read is not None for saved in all_saved] == ahead
    for index in (2, 1, 0):
        assert torch.equal(made.read(all_saved[index]), sources[index])
        assert all_saved[index].read is None
    assert made.pool.leased_nbytes == 0
    places = [id(array) for array in made.reads]
    parts = [-(-size // 4) for size in sizes]
    assert [places.count(id(saved.array)) for saved in all_saved] == parts


def test_a_smaller_one_is_not_read_ahead_of_a_nearer_one(made):
    """Without room for the one that is needed next, that of others is left. Twins: what is read
    already, or too large to be read at once, hides none behind it."""
    all_saved = [made.send(numbers(size * BLOCK, size)) for size in (1, 3, 1)]
    lease = made.pool.try_lease(13 * BLOCK)  # for the read itself and two more
    made.read(all_saved[2])
    assert [saved.read for saved in all_saved] == [None] * 3
    lease.release()
    made.read(all_saved[2])
    all_saved[0].read = None
    made.read(all_saved[2])
    assert [saved.read is not None for saved in all_saved] == [True, True, False]


@pytest.mark.parametrize("nbytes", [1, BLOCK - 1, 4 * BLOCK + 1])
def test_what_fills_the_last_block_is_zeros(made, nbytes):
    """However the staging memory was left: bytes of other storages do not get onto the disk."""
    with_ones = made.send(torch.full((16 * BLOCK,), 255, dtype=torch.uint8))
    del with_ones
    saved = made.send(numbers(nbytes))
    begin, whole = (nbytes - 1) // BLOCK * BLOCK, -(-nbytes // BLOCK) * BLOCK
    lease = made.pool.try_lease(BLOCK)
    made.store.start_read(saved.array, begin, lease, BLOCK).wait()
    last = bytes_of(made.pool, lease, BLOCK)
    assert torch.equal(last[: nbytes - begin], numbers(nbytes)[begin:])
    assert last[nbytes - begin :].count_nonzero() == 0 and whole - begin == BLOCK
    lease.release()


def test_without_room_nothing_is_read_ahead(made):
    """Method: another holds all but a part of the memory. Twin: when that is free again, it is."""
    all_saved = [made.send(numbers(BLOCK, seed)) for seed in range(3)]
    lease = made.pool.try_lease(15 * BLOCK)
    assert torch.equal(made.read(all_saved[2]), numbers(BLOCK, 2))
    assert [saved.read for saved in all_saved] == [None] * 3
    lease.release()
    made.read(all_saved[2])
    assert [saved.read is not None for saved in all_saved] == [True, True, False]


def test_what_was_read_ahead_gives_way_to_what_is_sent(made):
    """Claim: as much as is needed, the first saved first; it is read again when its time comes."""
    sources = [numbers(4 * BLOCK, seed) for seed in range(4)]
    all_saved = [made.send(source) for source in sources[:3]]
    made.read(all_saved[2])
    assert [saved.read is not None for saved in all_saved] == [True, True, False]
    leases = [made.pool.try_lease(4 * BLOCK) for _ in range(2)]
    all_saved.append(made.send(sources[3]))
    assert [saved.read is not None for saved in all_saved] == [False, True, False, False]
    for lease in leases:
        lease.release()
    for saved, source in zip(all_saved, sources):
        assert torch.equal(made.read(saved), source)


def test_a_read_keeps_its_place_from_being_given_again(made):
    """Claim: the tickets of a storage are of its writes and of a read ahead."""
    first, second = made.send(numbers(BLOCK)), made.send(numbers(BLOCK))
    assert len(first.writes) == len(second.writes) == 1
    made.read(second)
    assert [len(first.writes), len(second.writes)] == [2, 2]


def test_damage_on_the_disk_is_told(made, swap):
    """Twin: what is sent after that comes back."""
    saved = made.send(numbers(BLOCK))
    for path in swap_files(swap):
        with path.open("r+b") as file:
            file.write(bytes(4 * BLOCK))
    with pytest.raises(CorruptionError):
        made.read(saved)
    assert torch.equal(made.read(made.send(numbers(BLOCK))), numbers(BLOCK))


def test_after_an_exception_all_memory_is_free(made):
    all_saved = [made.send(numbers(BLOCK, seed)) for seed in range(3)]
    made.read(all_saved[2])
    assert made.pool.leased_nbytes > 0
    for saved in all_saved:
        saved.read = None
    lease = made.pool.try_lease(BLOCK)
    made.disk.drain()
    assert made.pool.leased_nbytes == 0 and lease is not None
