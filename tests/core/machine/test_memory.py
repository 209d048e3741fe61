"""Region, PinnedPool and Lease: memory in whole pages and no more, leases that never overlap and
always come back."""

from __future__ import annotations

import ctypes
import gc
import os
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_arrays import MIB, outcome_in_child

from infinity import native
from infinity.errors import StorageError, UsageError

PAGE = native.BLOCK_NBYTES
HUGE = 2 * MIB
SIZES = [
    1,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    3 * PAGE,
    65537,
    MIB,
    HUGE - 1,
    HUGE,
    HUGE + 1,
    2 * HUGE + 3 * PAGE,
    5 * MIB + 1,
]


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def address_space_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        ranges = (line.split(" ", 1)[0].split("-") for line in file)
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping at ``address``."""
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split(" ", 1)[0]
            if "-" in first:
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "VmFlags:":
                return line.split()[1:]
    return []


# --- Region ---


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("nbytes", SIZES)
def test_region_starts_at_a_page_and_is_as_long_as_asked_in_whole_pages(nbytes, huge_pages):
    """Makes regions around every boundary and compares address and length with the nearest multiple
    of 4096."""
    region = native.Region(nbytes, huge_pages=huge_pages)
    assert region.address % PAGE == 0
    assert region.nbytes == pages(nbytes)
    assert len(memoryview(region)) == region.nbytes


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE, HUGE, HUGE + PAGE, 3 * HUGE - PAGE])
def test_region_takes_no_more_address_space_than_its_pages(nbytes, huge_pages):
    """Reads the process's size before and after: the ends reserved for 2 MiB alignment are trimmed
    again."""
    growths = []
    for _ in range(
        3
    ):  # something else in the process may map or unmap memory in between: not three times
        before = address_space_nbytes()
        region = native.Region(nbytes, huge_pages=huge_pages, touch_threads=0)
        growths.append(address_space_nbytes() - before)
        del region
    assert nbytes in growths


@pytest.mark.parametrize("touch_threads", [0, 1, 3])
@pytest.mark.parametrize("nbytes", [1, 65537, HUGE + PAGE])
def test_region_contents_are_zero(nbytes, touch_threads):
    """Counts non-zero bytes of a fresh region, however many threads touched it first."""
    region = native.Region(nbytes, touch_threads=touch_threads)
    assert torch.frombuffer(region, dtype=torch.uint8).count_nonzero() == 0


def test_region_memory_is_there_before_the_first_use():
    """Asks the kernel (mincore) which pages are present: all of a touched region, none of an
    untouched one."""

    def present_pages(touch_threads: int) -> int:
        region = native.Region(16 * MIB, huge_pages=False, touch_threads=touch_threads)
        present = (ctypes.c_ubyte * (region.nbytes // PAGE))()
        assert (
            ctypes.CDLL(None).mincore(
                ctypes.c_void_p(region.address), ctypes.c_size_t(region.nbytes), present
            )
            == 0
        )
        return sum(byte & 1 for byte in present)

    assert present_pages(1) == present_pages(2) == 16 * MIB // PAGE
    assert present_pages(0) == 0


def test_huge_pages_are_asked_for_exactly_where_the_flag_says_so():
    """Compares `Region.huge_pages` with the kernel's own flag of the mapping ("hg"), and its 2 MiB
    alignment."""
    large = native.Region(3 * HUGE, huge_pages=True)
    assert large.huge_pages == ("hg" in flags_at(large.address))
    assert large.address % HUGE == 0
    for region in (
        native.Region(3 * HUGE, huge_pages=False),
        native.Region(HUGE - PAGE, huge_pages=True),
    ):
        assert not region.huge_pages
        assert "hg" not in flags_at(region.address)


def test_region_memory_goes_back_when_the_last_user_goes():
    """Drops the region, then the tensor over it, and looks for the address among the process's
    mappings."""
    region = native.Region(8 * MIB)
    tensor = native.tensor_at(region, region.address, 2 * MIB, torch.float32)
    address = region.address
    del region
    gc.collect()
    assert is_mapped(address), "the tensor's memory went away under it"
    tensor.fill_(1.0)
    del tensor
    gc.collect()
    assert not is_mapped(address)


@pytest.mark.parametrize("count, offset", [(PAGE, PAGE), (2 * PAGE, 0), (1, -4)])
def test_a_tensor_beyond_its_region_is_refused(count, offset):
    """Asks for float32 elements that end behind the region, or start before it."""
    region = native.Region(2 * PAGE)
    with pytest.raises(ValueError):
        native.tensor_at(region, region.address + offset, count, torch.float32)
    native.tensor_at(
        region, region.address + PAGE, PAGE // 4, torch.float32
    )  # the last page itself is fine


def test_an_empty_region_is_refused():
    """Asks for no bytes, then for a negative number of them."""
    with pytest.raises(UsageError, match="at least one byte"):
        native.Region(0)
    with pytest.raises(TypeError):
        native.Region(-PAGE)


def test_a_region_the_kernel_refuses_is_an_error_with_its_size():
    """Asks for 4 EiB, which no machine maps."""
    with pytest.raises(StorageError, match=str(2**62)) as caught:
        native.Region(2**62)
    assert caught.value.errno


# --- PinnedPool and Lease ---


def pool_of(nbytes: int) -> native.PinnedPool:
    return native.PinnedPool(native.Region(nbytes, huge_pages=False, touch_threads=0))


def overlapping(leases: list[native.Lease]) -> bool:
    spans = sorted((lease.address, lease.address + lease.nbytes) for lease in leases)
    return any(end > begin for (_, end), (begin, _) in zip(spans, spans[1:]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    capacity=st.integers(1, 40 * PAGE),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 30 * PAGE)), max_size=60),
    order=st.randoms(use_true_random=False),
)
def test_leases_never_overlap_and_free_neighbours_are_one_again(capacity, moves, order):
    """Leases and releases at random against a page map; at the end everything comes back in any
    order and is whole."""
    pool = pool_of(capacity)
    base, held = pool.region.address, []
    used = [False] * (pages(capacity) // PAGE)
    peak = 0
    for give_back, value in moves:
        if give_back and held:
            lease = held.pop(value % len(held))
            first = (lease.address - base) // PAGE
            used[first : first + lease.nbytes // PAGE] = [False] * (lease.nbytes // PAGE)
            lease.release()
        elif 0 < value <= pool.capacity_nbytes:
            lease, count = pool.try_lease(value), pages(value) // PAGE
            longest = max(
                (len(run) for run in "".join("x" if u else "." for u in used).split("x")), default=0
            )
            assert (lease is not None) == (longest >= count), (
                "refused what fits, or gave what does not"
            )
            if lease is not None:
                assert lease.address % PAGE == 0 and lease.nbytes == pages(value)
                first = (lease.address - base) // PAGE
                assert not any(used[first : first + count]), "two leases of one page"
                used[first : first + count] = [True] * count
                held.append(lease)
        peak = max(peak, sum(used) * PAGE)
        assert pool.leased_nbytes == sum(used) * PAGE
        assert not overlapping(held)
    assert pool.peak_nbytes == peak
    order.shuffle(held)
    for lease in held:
        lease.release()
    assert pool.leased_nbytes == 0
    assert pool.try_lease(pool.capacity_nbytes) is not None, "free neighbours did not merge"


def test_overlap_is_what_the_property_looks_for():
    """The twin of the property: two spans of one page are found to overlap, neighbours are not."""

    class Span:
        def __init__(self, address: int, nbytes: int):
            self.address, self.nbytes = address, nbytes

    assert overlapping([Span(PAGE, 2 * PAGE), Span(2 * PAGE, PAGE)])
    assert not overlapping([Span(2 * PAGE, PAGE), Span(PAGE, PAGE)])


@pytest.mark.parametrize("seed", range(6))
def test_eight_neighbours_merge_whatever_the_order_of_release(seed):
    """Fills a pool with eight leases, releases them in a seeded order, and takes the whole
    again."""
    print(f"seed {seed}")
    pool = pool_of(8 * PAGE)
    leases = [pool.try_lease(PAGE) for _ in range(8)]
    assert pool.try_lease(1) is None
    random.Random(seed).shuffle(leases)
    for lease in leases[:-1]:
        lease.release()
        assert pool.try_lease(8 * PAGE) is None  # the twin: one page is still out
    leases[-1].release()
    assert pool.try_lease(8 * PAGE) is not None


def test_a_lease_that_does_not_fit_now_is_refused_and_changes_nothing():
    """Asks a pool with two free pages for three, and then for two."""
    pool = pool_of(4 * PAGE)
    first = pool.try_lease(2 * PAGE)
    assert pool.try_lease(2 * PAGE + 1) is None
    assert pool.leased_nbytes == pool.peak_nbytes == first.nbytes
    assert pool.try_lease(2 * PAGE) is not None


def test_a_lease_that_can_never_fit_is_an_error_with_both_sizes():
    """Asks for one byte more than the pool has, and for none."""
    pool = pool_of(4 * PAGE)
    with pytest.raises(
        UsageError, match=f"{4 * PAGE + 1} bytes can never fit a pool of {4 * PAGE} bytes"
    ):
        pool.try_lease(4 * PAGE + 1)
    with pytest.raises(UsageError, match="at least one byte"):
        pool.try_lease(0)
    assert pool.leased_nbytes == 0
    assert pool.try_lease(4 * PAGE) is not None


def test_a_lease_is_given_back_when_nobody_holds_it():
    """Drops the only reference, once directly and once through a cycle that the collector has to
    find."""
    pool = pool_of(2 * PAGE)
    lease = pool.try_lease(2 * PAGE)
    assert pool.try_lease(1) is None
    del lease
    gc.collect()
    assert pool.leased_nbytes == 0
    cycle = [pool.try_lease(PAGE)]
    cycle.append(cycle)
    assert pool.leased_nbytes == PAGE
    del cycle
    gc.collect()
    assert pool.leased_nbytes == 0


def test_releasing_twice_gives_back_once():
    """Releases a lease twice around another lease of the same bytes, which must keep them."""
    pool = pool_of(PAGE)
    first = pool.try_lease(PAGE)
    first.release()
    second = pool.try_lease(PAGE)
    first.release()
    assert pool.leased_nbytes == PAGE
    assert pool.try_lease(1) is None
    assert first.nbytes == 0, "a released lease still names memory"
    assert second.nbytes == PAGE


def test_a_lease_keeps_its_pool_and_memory_alive():
    """Drops pool and region while a lease is out; its memory goes with the lease and not before."""
    pool = pool_of(4 * MIB)
    lease, address = pool.try_lease(MIB), pool.region.address
    del pool
    gc.collect()
    assert is_mapped(address)
    del lease
    gc.collect()
    assert not is_mapped(address)


def test_peak_is_the_most_that_was_ever_leased():
    """Leases 3 pages, gives back 2, leases 1: the peak stays 3."""
    pool = pool_of(8 * PAGE)
    leases = [pool.try_lease(PAGE) for _ in range(3)]
    for lease in leases[:2]:
        lease.release()
    keep = pool.try_lease(PAGE)
    assert (pool.leased_nbytes, pool.peak_nbytes) == (2 * PAGE, 3 * PAGE)
    assert keep is not None


def test_a_pool_over_no_region_is_an_error():
    """Gives the pool None in place of a region, in a child process since the wrong answer would be
    a crash."""
    outcome = outcome_in_child(lambda: native.PinnedPool(None))
    assert outcome.startswith(("TypeError", "UsageError")), outcome
