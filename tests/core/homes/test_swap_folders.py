"""Arrays lie in stripes over all folders, by rate and by room, and what one folder lacks or loses
is said by its name.

Words used here:

**disk**: a folder of its own that the engine takes for a disk, by the model that
``INFINITY_MODEL_DISKS`` names.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter, namedtuple
from pathlib import Path

import doubles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import parts_of
from lines import is_line
from models import differing, loss_of, swap_files, tokens, transformer
from native_arrays import ENGINES
from runs import adamw

import infinity
from infinity import native
from infinity.core.homes import swap_folders, swap_space
from infinity.core.homes.store import ArrayStore
from infinity.core.homes.swap_folders import SwapFolder, split
from infinity.core.homes.swap_space import SwapSpace
from infinity.core.machine import disk_profile
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic

MIB = 1024 * 1024
STRIPE = 128 * 1024

Usage = namedtuple("Usage", "total used free")


class Disks:
    """Folders that are taken for disks of given rates, with stripes small enough for small
    arrays."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list[float]):
        self.folders = [str(tmp_path / f"disk{index}") for index in range(len(rates))]
        self.rate = dict(zip(self.folders, rates))
        self.room: dict[str, int] = {}
        for folder in self.folders:
            os.mkdir(folder)
        model = tmp_path / "model.json"
        model.write_text(json.dumps(dict.fromkeys(self.folders, 1e12)))
        monkeypatch.setenv("INFINITY_MODEL_DISKS", str(model))
        monkeypatch.setattr(
            disk_profile,
            "disk_profile",
            lambda folder: disk_profile.DiskProfile(*[self.rate[folder]] * 3),
        )
        monkeypatch.setattr(swap_folders, "MAX_STRIPE_NBYTES", STRIPE)
        usage = shutil.disk_usage
        monkeypatch.setattr(
            shutil,
            "disk_usage",
            lambda folder: Usage(0, 0, self.room.get(folder, usage(folder).free)),
        )

    def store(self, **options) -> ArrayStore:
        return ArrayStore(self.folders, Ledger(), Traffic(), service_nbytes=MIB, **options)


@pytest.fixture
def make_disks(tmp_path, monkeypatch):
    stores = []

    def make(rates: list[float]) -> Disks:
        disks = Disks(tmp_path, monkeypatch, rates)
        make_store = disks.store
        disks.store = lambda **options: stores.append(make_store(**options)) or stores[-1]
        return disks

    yield make
    for store in stores:
        store.close()


def held(store: ArrayStore, offset: int, nbytes: int, *, added: bool = False) -> Counter:
    """Counts the bytes of each file in a range of the store's first volume, or of the one that was
    ``added`` first."""
    volume = store.space.added[0].volume if added else store.space.first
    found, at = Counter(), offset
    while at < offset + nbytes:
        file, _, length = volume.place(at, offset + nbytes - at)
        found[file] += length
        at += length
    return found


def number_of_swap_files(disks: Disks, expected: int) -> list[int]:
    """Counts the swap files of each folder, once they are as ``expected``, or after ten seconds:
    those that are dropped are closed by a thread."""
    for _ in range(1000):
        found = [len(swap_files(Path(folder))) for folder in disks.folders]
        if found == [expected] * len(found):
            break
        time.sleep(0.01)
    return found


@pytest.mark.skipif(shutil.which("lsof") is None, reason="lsof is not installed")
def test_the_page_of_disks_names_a_command_that_lists_swap_files(tmp_path):
    """Method: the page's own command, on the folder of a model's swap file. Twin: a folder that has
    none is not in it."""
    page = (Path(__file__).parents[3] / "docs" / "disks.md").read_text()
    command = re.search(r"`(lsof .*?)`", page)[1].replace("\\|", "|")
    assert "<folder>" in command
    (tmp_path / "swap").mkdir()
    config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(tmp_path / "swap")]}
    model = torch.nn.Linear(64, 64)
    wrapped = infinity.wrap_model(model, adamw(model, 1e-3), config)
    for folder, has_some in ((tmp_path / "swap", True), (tmp_path / "other", False)):
        done = subprocess.run(
            command.replace("<folder>", str(folder)), shell=True, capture_output=True, text=True
        )
        assert ("(deleted)" in done.stdout) == has_some, done.stdout + done.stderr
    infinity.unwrap_model(*wrapped)


# --- how many bytes each folder takes ---

DISKS = st.lists(
    st.tuples(st.integers(0, 3), st.floats(1, 100), st.integers(0, 1000)), min_size=1, max_size=6
)


@settings(max_examples=300, deadline=None)
@given(disks=DISKS, nbytes=st.integers(0, 4000))
def test_bytes_are_split_by_rate_as_far_as_there_is_room(disks, nbytes):
    """Method: any places of any devices; all that fits is split, nobody over its room, and no
    device that has room left is behind one that got more for its rate."""
    rates: dict[int, float] = {}
    places = [
        SwapFolder(str(i), str(device), rates.setdefault(device, rate))
        for i, (device, rate, _) in enumerate(disks)
    ]
    rooms = [room for _, _, room in disks]
    parts = split(nbytes, places, rooms)
    assert all(0 <= part <= room for part, room in zip(parts, rooms))
    assert abs(sum(parts) - min(nbytes, sum(rooms))) <= len(places)
    level, full = {}, {}
    for device in {place.device for place in places}:
        mine = [index for index, place in enumerate(places) if place.device == device]
        level[device] = sum(parts[index] for index in mine) / rates[int(device)]
        full[device] = (
            sum(parts[index] for index in mine) >= sum(rooms[index] for index in mine) - 1
        )
    for one, other in itertools.permutations(level, 2):
        assert full[one] or level[one] >= level[other] - 2


def test_every_array_lies_on_all_disks_by_their_rates(make_disks):
    """Method: three disks, one three times as fast; each of some arrays has three fifths there,
    within a stripe or two, and comes back as it was written."""
    disks = make_disks([1e9, 3e9, 1e9])
    store = disks.store()
    arrays = [
        store.allocator.allocate(Tier.NVME, torch.float32, 2 * MIB // 4, "an array")
        for _ in range(5)
    ]
    store.open([])
    assert store.io.device(1) == f"model {disks.folders[1]}"
    values = [torch.randn(array.numel) for array in arrays]
    for array, value in zip(arrays, values):
        store.write(array, 0, value, version=1)
        parts = held(store, array.extent.offset, array.nbytes)
        assert abs(parts[1] - 0.6 * array.nbytes) <= 2 * STRIPE and min(parts[0], parts[2]) > 0
    for array, value in zip(arrays, values):
        assert torch.equal(store.read(array, 0, array.numel), value)


def test_no_elements_are_read_and_written_anywhere(make_disks):
    """Claim: an empty part of an array is none wherever it begins, also behind the array: there a
    rank has its elements of a parameter that is all another rank's."""
    store = make_disks([1e9]).store()
    array = store.allocator.allocate(Tier.NVME, torch.float32, 4096 // 4, "an array")
    store.open([])
    store.write(array, 0, torch.ones(array.numel), version=1)
    for begin in (0, 5, array.numel, array.numel + 5):
        assert store.read(array, begin, begin).numel() == 0
        store.write(array, begin, torch.empty(0), version=1)
    assert store.read(array, 0, array.numel).sum() == array.numel


def test_disks_of_unlike_size_are_used_in_full(make_disks):
    """Method: equal rates, one disk with room for an eighth; what it cannot take is the others',
    and what all of them cannot take is refused with the numbers."""
    disks = make_disks([1e9, 1e9, 1e9])
    disks.room = dict(zip(disks.folders, (MIB, 8 * MIB, 8 * MIB)))
    store = disks.store()
    store.allocator.allocate(Tier.NVME, torch.uint8, 15 * MIB, "an array")
    store.open([])
    parts = held(store, 0, 15 * MIB)
    assert parts == {0: MIB, 1: 7 * MIB, 2: 7 * MIB}
    too_much = disks.store()
    too_much.allocator.allocate(Tier.NVME, torch.uint8, 18 * MIB, "an array")
    with pytest.raises(
        infinity.CapacityError,
        match="needs 18.0 MiB at .*disk0, .*disk2 but 17.0 MiB is free. Free 1.0 MiB",
    ):
        too_much.open([])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_filled_takes_no_stripe_that_it_has_no_room_for(ranks, make_disks):
    """Method: a fast disk whose room ends within a stripe, near its end, and a slow one with room
    for the rest; for two ranks, too."""
    disks = make_disks([9e9, 1e9])
    disks.room = dict(zip(disks.folders, (11 * STRIPE - 4096, 60 * STRIPE)))
    sizes = Counter()
    for rank in range(ranks):
        store = disks.store(rank=rank, ranks=ranks)
        store.allocator.allocate(Tier.NVME, torch.uint8, 30 * STRIPE // ranks, "an array")
        store.open([])
        sizes.update(held(store, 0, 30 * STRIPE // ranks))
    assert (
        sizes[0] <= disks.room[disks.folders[0]] and sizes[0] >= (10 if ranks == 1 else 8) * STRIPE
    )
    assert sum(sizes.values()) == 30 * STRIPE


def test_folders_on_one_file_system_are_one(tmp_path, monkeypatch):
    """Method: two folders of this test's disk, without a model; one file, in the first of them.
    What is free there counts once."""
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        os.mkdir(folder)
    monkeypatch.setattr(disk_profile, "disk_profile", lambda folder: disk_profile.GUESS)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 7 * MIB))
    assert disk_profile.free_nbytes(folders) == 7 * MIB
    store = ArrayStore(folders, Ledger(), Traffic(), service_nbytes=MIB)
    store.allocator.allocate(Tier.NVME, torch.uint8, 5 * MIB, "an array")
    store.open([])
    assert held(store, 0, 5 * MIB) == {0: 5 * MIB}
    store.close()


def test_ranks_of_one_machine_start_at_different_disks(make_disks):
    """Method: four ranks with four disks; the same array of each begins on another one, and each
    takes its part of what is free."""
    disks = make_disks([1e9] * 4)
    disks.room = dict.fromkeys(disks.folders, 64 * MIB)
    first = set()
    for rank in range(4):
        store = disks.store(rank=rank, ranks=4)
        array = store.allocator.allocate(Tier.NVME, torch.uint8, MIB, "an array")
        store.open([])
        first.add(store.space.first.place(array.extent.offset, 1)[0])
    assert first == {0, 1, 2, 3}


def test_a_swap_file_ends_where_the_file_system_would_not_have_it_longer(make_disks):
    """Method: the process may write files of 1 MiB; 6 MiB over two disks become files of less, and
    every byte comes back. With room for none at all the error names the folder."""
    disks = make_disks([1e9, 1e9])
    store = disks.store()
    array = store.allocator.allocate(Tier.NVME, torch.uint8, 6 * MIB, "an array")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
        store.open([])
        assert len(held(store, 0, 6 * MIB)) > 6 and max(held(store, 0, 6 * MIB).values()) <= MIB
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, limits[1]))
        other = disks.store()
        other.allocator.allocate(Tier.NVME, torch.uint8, 6 * MIB, "an array")
        with pytest.raises(infinity.StorageError, match="disk0") as raised:
            other.open([])
        assert raised.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    value = torch.randint(0, 255, (6 * MIB,), dtype=torch.uint8)
    store.write(array, 0, value, version=1)
    assert torch.equal(store.read(array, 0, array.numel), value)


# --- what a disk does in mid-run ---


def test_what_is_added_later_lies_on_all_disks_too(make_disks):
    """Method: arrays taken after the store was opened, given back and taken anew, in one volume;
    each is striped, none overlaps another. Then another volume comes, as large as the first."""
    disks = make_disks([1e9, 1e9])
    store = disks.store()
    store.open([])
    store.allocator.free_more(store.allocator.allocate_more(Tier.NVME, 4 * MIB, "activations"))
    arrays = [store.allocator.allocate_more(Tier.NVME, MIB, "activations") for _ in range(4)]
    for number, array in enumerate(arrays):
        store.write(array, 0, torch.full((array.numel,), number, dtype=torch.uint8), version=1)
    store.allocator.free_more(arrays.pop(1))
    arrays.append(store.allocator.allocate_more(Tier.NVME, MIB, "activations"))
    store.write(arrays[-1], 0, torch.full((MIB,), 9, dtype=torch.uint8), version=1)
    for number, array in zip((0, 2, 3, 9), arrays):
        assert store.read(array, 0, array.numel).unique().tolist() == [number]
        assert (
            min(held(store, array.extent.offset, array.nbytes, added=True).values()) >= 3 * STRIPE
        )
    store.rebuild()
    assert [added.nbytes for added in store.space.added] == [4 * MIB]
    assert not store.space.free_spaces
    arrays.append(store.allocator.allocate_more(Tier.NVME, MIB, "activations"))
    assert [added.nbytes for added in store.space.added] == [4 * MIB] * 2
    assert sum(size for _, _, size in store.space.free_spaces) == 3 * MIB


def test_checksums_of_what_is_added_later_are_charged_to_the_host(make_disks):
    """Method: a volume of 4 MiB comes, then another: the plan has the checksums of the first, those
    of the second are charged and planned beside it. A budget without room for them is named, and no
    swap file stays. Twin: arrays in a volume that is there charge nothing."""
    disks = make_disks([1e9, 1e9])
    store = disks.store()
    store.open([])
    host, sums = store.ledger.accounts[Tier.HOST], native.sums_nbytes(4 * MIB)
    assert sums == 4 * 64
    store.space.covered_nbytes = sums
    before = host.charged_nbytes, host.planned_nbytes
    arrays = [store.allocator.allocate_more(Tier.NVME, MIB, "activations")]
    assert (host.charged_nbytes, host.planned_nbytes) == before
    arrays.append(store.allocator.allocate_more(Tier.NVME, 8 * MIB, "activations"))
    charged = sum(each.nbytes for each in store.space.added) // MIB * 64 - sums
    assert charged > 0
    after = before[0] + charged, before[1] + charged
    assert (host.charged_nbytes, host.planned_nbytes) == after
    store.allocator.free_more(arrays[1])
    store.allocator.allocate_more(Tier.NVME, 8 * MIB, "activations")
    assert (host.charged_nbytes, host.planned_nbytes) == after
    host.budget_nbytes = host.charged_nbytes
    with pytest.raises(infinity.CapacityError, match="checksums of activations needs .* of host"):
        store.allocator.allocate_more(Tier.NVME, 64 * MIB, "activations")
    assert number_of_swap_files(disks, 2) == [2, 2]
    assert (host.charged_nbytes, host.planned_nbytes) == after


class Running:
    """A transfer that ends, with an error, when somebody waits for it."""

    done = False

    def wait(self) -> None:
        self.done = True
        raise infinity.StorageError("a disk failed")


def test_space_that_a_transfer_still_uses_is_waited_for_before_a_budget_is_exceeded(make_disks):
    """Method: a budget for one array, which is freed while a transfer of it runs. Twin: an array
    that is not freed."""
    store = make_disks([1e9]).store()
    store.open([])
    first = store.allocator.allocate_more(Tier.NVME, MIB, "activations")
    store.ledger.accounts[Tier.NVME].budget_nbytes = MIB
    with pytest.raises(infinity.CapacityError):
        store.allocator.allocate_more(Tier.NVME, MIB, "activations")
    store.allocator.free_more(first, after=[Running()])
    store.allocator.allocate_more(Tier.NVME, MIB, "activations")
    with pytest.raises(infinity.CapacityError):
        store.allocator.allocate_more(Tier.NVME, MIB, "activations")


SIZES = [1, 63, 64, 4095, 4096, 4097, 65535, 65537, 2 * MIB + 1]


@pytest.mark.parametrize("when", ["before", "later"])
def test_an_array_of_any_size_lies_on_disk(when, make_disks):
    """Method: arrays of sizes that are no whole blocks, allocated before the store is opened or
    later, filled, changed in part, given back and taken anew; each reads as it was written, and all
    spaces begin and end with a block."""
    store = make_disks([1e9, 1e9]).store()
    if when == "before":
        arrays = [store.allocator.allocate(Tier.NVME, torch.uint8, size, "state") for size in SIZES]
        store.open([])
    else:
        store.open([])
        arrays = [store.allocator.allocate_more(Tier.NVME, size, "state") for size in SIZES]
    values = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in SIZES]
    for array, value in zip(arrays, values):
        store.write(array, 0, value, version=1)
    for array, value in zip(arrays, values):
        value[value.numel() // 2 :] = 7
        store.write(array, value.numel() // 2, value[value.numel() // 2 :], version=2)
    assert all(
        torch.equal(store.read(array, 0, array.numel), value)
        for array, value in zip(arrays, values)
    )
    if when == "later":
        for array in arrays[::2]:
            store.allocator.free_more(array)
        anew = [store.allocator.allocate_more(Tier.NVME, size, "state") for size in reversed(SIZES)]
        for array in anew:
            store.write(array, 0, torch.full((array.numel,), 9, dtype=torch.uint8), version=3)
        assert all(store.read(array, 0, array.numel).unique().tolist() == [9] for array in anew)
        assert all(
            torch.equal(store.read(array, 0, array.numel), value)
            for array, value in list(zip(arrays, values))[1::2]
        )
        assert all(
            at % native.BLOCK_NBYTES == 0 for space in store.space.free_spaces for at in space[1:]
        )


def test_a_space_that_is_no_whole_blocks_is_refused(make_disks, monkeypatch):
    """The twin: sizes that are taken as they come meet the core's check."""
    monkeypatch.setattr(swap_space, "round_up", lambda nbytes, of: nbytes)
    store = make_disks([1e9]).store()
    store.open([])
    with pytest.raises(Exception, match="not a positive multiple of 4096"):
        store.allocator.allocate_more(Tier.NVME, 64, "state")


def test_space_that_not_all_disks_have_is_given_back(make_disks, monkeypatch):
    """Method: the second of two disks refuses a further file, three times; the first has what it
    had, and gives more once both do."""
    disks = make_disks([1e9, 1e9])
    store = disks.store()
    store.allocator.allocate(Tier.NVME, torch.uint8, MIB, "an array")
    store.open([])
    create = swap_folders.create_swap_file

    def refused(io: native.IoEngine, folder: str, nbytes: int) -> int:
        if folder == disks.folders[1]:
            raise infinity.CapacityError("it is full")
        return create(io, folder, nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(swap_folders, "create_swap_file", refused)
        for _ in range(3):
            with pytest.raises(infinity.CapacityError, match="it is full"):
                store.allocator.allocate_more(Tier.NVME, MIB, "activations")
    assert number_of_swap_files(disks, 1) == [1, 1]
    array = store.allocator.allocate_more(Tier.NVME, MIB, "activations")
    assert number_of_swap_files(disks, 2) == [2, 2]
    value = torch.randint(0, 255, (MIB,), dtype=torch.uint8)
    store.write(array, 0, value, version=1)
    assert torch.equal(store.read(array, 0, MIB), value)


def test_a_volume_whose_making_is_interrupted_takes_no_space(make_disks):
    """Method: Ctrl-C at every line in turn of what makes a further volume. The next use closes its
    files and gives its charge back, and takes what it needs."""
    disks = make_disks([1e9, 1e9])
    store = disks.store()
    kept = store.allocator.allocate(Tier.NVME, torch.uint8, MIB, "an array")
    store.open([])
    account, found = store.ledger.accounts[Tier.NVME], set[tuple[str, int]]()
    codes = {
        each.__code__
        for each in (SwapSpace.allocate, SwapSpace._grow, swap_folders.SwapFolders.lay_out)
    }
    while True:
        struck, charged, volumes = [], account.charged_nbytes, len(store.space.added)

        def trace(frame, event, _):
            line = (frame.f_code.co_qualname, frame.f_lineno)
            if frame.f_code in codes and is_line(frame, event) and not struck and line not in found:
                struck.append(line)
                raise KeyboardInterrupt
            return trace if frame.f_code in codes else None

        before = sys.gettrace()
        sys.settrace(trace)
        array = None
        try:
            array = store.allocator.allocate_more(Tier.NVME, swap_folders.MIB, "activations")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if not struck:
            break
        found.update(struck)
        store.rebuild()
        whole = len(store.space.added) - volumes  # it was there before the interrupt came
        assert account.charged_nbytes == charged + sum(
            added.nbytes for added in store.space.added[volumes:]
        )
        assert (
            number_of_swap_files(disks, 1 + len(store.space.added))
            == [1 + len(store.space.added)] * 2
        )
        if whole:
            store.space.added[volumes:], store.space.free_spaces = [], []  # as if it had not been
            store.space.drop_unused()
    assert {name for name, _ in found} == {
        "SwapSpace.allocate",
        "SwapSpace._grow",
        "SwapFolders.lay_out",
    }
    value = torch.randint(0, 255, (MIB,), dtype=torch.uint8)
    for each in (kept, array):
        store.write(each, 0, value, version=1)
        assert torch.equal(store.read(each, 0, MIB), value)


def test_a_folder_that_vanishes_in_mid_run_takes_nothing_with_it(make_disks):
    """Method: the second of two folders is removed under an open store; what is home stays whole,
    and more space is refused with its name."""
    disks = make_disks([1e9, 1e9])
    store = disks.store()
    array = store.allocator.allocate(Tier.NVME, torch.uint8, 2 * MIB, "an array")
    store.open([])
    value = torch.randint(0, 255, (2 * MIB,), dtype=torch.uint8)
    store.write(array, 0, value, version=1)
    os.rmdir(disks.folders[1])
    assert torch.equal(store.read(array, 0, array.numel), value)
    store.write(array, 0, value.flip(0), version=2)
    assert torch.equal(store.read(array, 0, array.numel), value.flip(0))
    with pytest.raises(infinity.InfinityError, match=f"there is no folder {disks.folders[1]}"):
        store.allocator.allocate_more(Tier.NVME, MIB, "activations")


@pytest.mark.parametrize("fault", ["eio", "enospc", "read_only", "hang"])
def test_a_disk_that_fails_in_mid_run_is_named_and_the_others_keep_what_they_have(
    make_disks, monkeypatch, fault
):
    """Method: of three disks the last one's writes and reads fail, or never end, from the third
    piece on; the error names the folder, every use of the store afterwards says the same, and the
    stripes of the other two are as they were."""
    disks = make_disks([1e9] * 3)
    monkeypatch.setenv("INFINITY_IO_TIMEOUT", "0.5")
    faults = doubles.FaultPlan()
    faults.file, faults.first_piece = 2, 40
    setattr(faults, fault, 1.0)
    store = disks.store(layer=doubles.layer(faults))
    array = store.allocator.allocate(Tier.NVME, torch.uint8, 3 * MIB, "an array")
    store.open([])
    store.write(array, 0, torch.ones(3 * MIB, dtype=torch.uint8), version=1)
    with pytest.raises(infinity.StorageError, match=disks.folders[2]) as raised:
        for _ in range(9):
            store.write(array, 0, torch.ones(3 * MIB, dtype=torch.uint8), version=1)
    expected = {
        "eio": errno.EIO,
        "enospc": errno.ENOSPC,
        "read_only": errno.EROFS,
        "hang": errno.ETIMEDOUT,
    }
    assert raised.value.errno == expected[fault]
    with pytest.raises(infinity.StorageError, match=disks.folders[2]):
        store.read(array, 0, 1)
    memory = native.Region(STRIPE, False, 1)
    for at in range(0, 3 * MIB, STRIPE):
        file, offset, _ = store.space.first.place(at, STRIPE)
        if file != 2:
            store.io.read(
                native.Extent.in_file(file, offset, STRIPE),
                0,
                memory.address,
                STRIPE,
                checksum=False,
            ).wait()
            assert native.tensor_at(
                memory, memory.address, STRIPE, torch.uint8
            ).unique().tolist() == [1]


# --- a whole job ---


@pytest.mark.parametrize("kind", ENGINES)
def test_several_disks_change_no_bit(make_disks, monkeypatch, tmp_path, kind):
    """Method: a model trained from three disks of unlike speed, with short, late and reordered
    transfers and a state dict on the way; its losses and final weights are those of the same run
    from host memory, and bytes lay on all three.
    """
    disks = make_disks([3e9, 1e9, 2e9])
    monkeypatch.setenv("INFINITY_IO", kind)
    results = []
    for home in ("host", "nvme"):
        monkeypatch.setenv(
            "INFINITY_FAULTS",
            "seed=3,short_transfer=0.2,reorder=0.2,delay=0.02" if home == "nvme" else "",
        )
        model = transformer(11, blocks=3, dropout=0.0)
        config = {
            "params": home,
            "optimizer": home,
            "activations": "nvme" if home == "nvme" else "auto",
            "nvme_paths": disks.folders,
        }
        model, optimizer = infinity.wrap_model(model, adamw(model, 1e-2), config)
        losses = []
        for step in range(3):
            loss = loss_of(model, tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 1:
                middle = {name: value.clone() for name, value in model.state_dict().items()}
        store = parts_of(model).store
        if home == "nvme":
            assert len(held(store, 0, store.space.planned_nbytes)) == 3
        results.append(
            (losses, middle, {name: value.clone() for name, value in model.state_dict().items()})
        )
        infinity.unwrap_model(model, optimizer)
    assert results[0][0] == results[1][0]
    assert all(differing(results[0][index], results[1][index]) == [] for index in (1, 2))


def test_a_job_whose_disk_fails_goes_on_from_its_checkpoint(make_disks, monkeypatch, tmp_path):
    """Method: one of three disks becomes read-only in a job's second step; the error names it, the
    checkpoint of the first step is whole, and a job on the other two goes on from it with the bits
    of one that never met the fault."""
    disks = make_disks([1e9] * 3)

    def job(folders: list[str]):
        model = transformer(12, blocks=3, dropout=0.0)
        config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": folders}
        return infinity.wrap_model(model, adamw(model, 1e-2), config)

    def step(model, optimizer, number: int) -> None:
        loss_of(model, tokens(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = job(disks.folders)
    for number in range(3):
        step(model, optimizer, number)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    infinity.unwrap_model(model, optimizer)

    monkeypatch.setenv("INFINITY_FAULTS", "read_only=1,file=1,first_piece=1000000")
    model, optimizer = job(disks.folders)
    step(model, optimizer, 0)
    infinity.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    moved = parts_of(model).store.io.nbytes(native.Op.READ) + parts_of(model).store.io.nbytes(
        native.Op.WRITE
    )
    assert moved > 0
    infinity.unwrap_model(model, optimizer)
    monkeypatch.setenv("INFINITY_FAULTS", "read_only=1,file=1,first_piece=60")
    with pytest.raises(infinity.StorageError, match=disks.folders[1]) as raised:
        model, optimizer = job(disks.folders)
        for number in range(9):
            step(model, optimizer, number)
            model.state_dict()
    assert raised.value.errno == errno.EROFS

    monkeypatch.setenv("INFINITY_FAULTS", "")
    model, optimizer = job([disks.folders[0], disks.folders[2]])
    infinity.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    for number in (1, 2):
        step(model, optimizer, number)
    assert differing(expected, model.state_dict()) == []
    infinity.unwrap_model(model, optimizer)
