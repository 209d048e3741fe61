"""The I/O engine and extents: the right bytes, or a typed error; never wrong numbers, never a crash, never a hang.

Every test of the engine runs on both backends; io_uring is skipped, with the reason, where it cannot be had.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from homes import (
    ENGINES,
    MIB,
    Disk,
    Staging,
    fault_plan,
    from_bits,
    outcome_in_child,
    random_bytes,
    seeded,
)

from infinity import native
from infinity.errors import CorruptionError, StorageError, UsageError

BLOCK = native.BLOCK_NBYTES
CHECKED = native.CHECKSUM_NBYTES  # bytes covered by one checksum; transfers start at multiples of it


@pytest.fixture(params=ENGINES)
def kind(request) -> str:
    return request.param


# --- bytes that are written come back ---


@pytest.mark.parametrize("block_nbytes", [BLOCK, 3 * BLOCK, MIB])
def test_what_is_written_is_read(tmp_path, kind, block_nbytes):
    """Writes extents of many sizes side by side, then reads them whole, in parts, and by the operating system."""
    generator = seeded(1)
    disk = Disk(tmp_path, kind, block_nbytes=block_nbytes)
    sizes = [BLOCK, CHECKED - BLOCK, CHECKED, CHECKED + BLOCK, 3 * CHECKED, 5 * CHECKED + 3 * BLOCK, MIB, MIB + BLOCK]
    written = []
    for nbytes in sizes:
        extent, data = disk.extent(nbytes, gap=BLOCK), random_bytes(nbytes, generator)
        disk.write(extent, data)
        written.append((extent, data))
    for extent, data in written:
        assert torch.equal(disk.read(extent), data)
        assert torch.equal(disk.raw(extent), data)
        for offset in range(0, extent.nbytes, 2 * CHECKED):
            nbytes = min(CHECKED, extent.nbytes - offset)
            assert torch.equal(disk.read(extent, offset, nbytes), data[offset : offset + nbytes])


def test_a_part_written_again_changes_only_itself(tmp_path, kind):
    """Overwrites the second and the last checksum block of an extent, many times, between two neighbours."""
    generator = seeded(2)
    disk = Disk(tmp_path, kind)
    before, extent, behind = (disk.extent(5 * CHECKED + BLOCK) for _ in range(3))
    expected = {part: random_bytes(part.nbytes, generator) for part in (before, extent, behind)}
    for part, data in expected.items():
        disk.write(part, data)
    for _ in range(4):
        for offset, nbytes in ((CHECKED, CHECKED), (4 * CHECKED, CHECKED + BLOCK), (5 * CHECKED, BLOCK)):
            part = random_bytes(nbytes, generator)
            disk.write(extent, part, offset)
            expected[extent][offset : offset + nbytes] = part
    for part, data in expected.items():
        assert torch.equal(disk.read(part), data)


@pytest.mark.parametrize("depth", [1, 3, 64])
def test_many_transfers_in_flight_at_once_do_not_mix(tmp_path, kind, depth):
    """Starts 60 writes and then 60 reads without waiting in between, and waits for each lot in another order."""
    generator = seeded(3)
    disk = Disk(tmp_path, kind, depth=depth, block_nbytes=4 * BLOCK, threads=4)
    extents = [disk.extent(BLOCK * int(n)) for n in torch.randint(1, 17, (60,), generator=generator)]
    data = [random_bytes(extent.nbytes, generator) for extent in extents]
    sources = [Staging(extent.nbytes) for extent in extents]
    targets = [Staging(extent.nbytes) for extent in extents]
    for source, values in zip(sources, data):
        source.bytes[:] = values
    order = list(range(60))
    random.Random(3).shuffle(order)
    for start, staging in ((disk.engine.write, sources), (disk.engine.read, targets)):
        tickets = [start(extents[i], 0, staging[i].address, extents[i].nbytes) for i in range(60)]
        for i in order:
            tickets[i].wait()
        assert all(ticket.done for ticket in tickets)
    assert all(torch.equal(target.bytes, values) for target, values in zip(targets, data))


def test_registered_memory_gives_the_same_bytes(tmp_path, kind):
    """Registers files and staging memory, moves bytes inside and outside of it, and adds a file afterwards."""
    generator = seeded(4)
    disk = Disk(tmp_path, kind)
    inside, outside = Staging(MIB), Staging(MIB)
    disk.engine.register([(inside.address, inside.nbytes)])
    later = disk.engine.create_file(str(tmp_path / "later"), MIB)
    for extent in (disk.extent(MIB), native.Extent.in_file(later, 0, MIB)):
        data = random_bytes(MIB, generator)
        inside.bytes[:] = data
        disk.engine.write(extent, 0, inside.address, MIB).wait()
        inside.bytes.zero_()
        for target in (inside, outside):
            disk.engine.read(extent, 0, target.address, MIB).wait()
            assert torch.equal(target.bytes, data)


def test_bytes_moved_are_counted_once(tmp_path, kind):
    """Writes 3 MiB and reads 1 MiB, with short transfers, and compares the engine's totals."""
    disk = Disk(tmp_path, kind, faults=fault_plan(5, short_transfer=0.5))
    extent = disk.extent(3 * MIB)
    disk.write(extent, torch.ones(3 * MIB, dtype=torch.uint8))
    disk.read(extent, 0, MIB)
    assert disk.engine.nbytes(native.Op.WRITE) == 3 * MIB
    assert disk.engine.nbytes(native.Op.READ) == MIB


@pytest.mark.parametrize("nbytes", [BLOCK, CHECKED - BLOCK, CHECKED, CHECKED + BLOCK, 7 * CHECKED + 5 * BLOCK])
def test_an_extent_that_was_never_written_verifies_as_zeros(tmp_path, kind, nbytes):
    """Reads fresh extents; the twin puts one other byte into the file first."""
    disk = Disk(tmp_path, kind)
    extent = disk.extent(nbytes)
    assert disk.read(extent).count_nonzero() == 0
    disk.change_byte(extent.offset + nbytes - 1)
    with pytest.raises(CorruptionError):
        disk.read(extent)


# --- order ---


def test_a_read_after_a_write_sees_its_bytes(tmp_path, kind):
    """Starts eight writes and, behind each, a chain of two reads, while pieces are late and reordered."""
    generator = seeded(6)
    disk = Disk(tmp_path, kind, block_nbytes=BLOCK, faults=fault_plan(6, delay=0.2, delay_seconds=0.0005, reorder=0.3))
    extents = [disk.extent(4 * BLOCK) for _ in range(8)]
    values = [random_bytes(4 * BLOCK, generator) for _ in extents]
    sources, targets = [Staging(4 * BLOCK) for _ in extents], [Staging(8 * BLOCK) for _ in extents]
    tickets = []
    for extent, value, source, target in zip(extents, values, sources, targets):
        source.bytes[:] = value
        ticket = disk.engine.write(extent, 0, source.address, 4 * BLOCK)
        for offset in (0, 4 * BLOCK):
            ticket = disk.engine.read(extent, 0, target.address + offset, 4 * BLOCK, after=ticket)
        tickets.append(ticket)
    for extent, value, target, ticket in zip(extents, values, targets, tickets):
        ticket.wait()
        assert torch.equal(target.bytes, value.repeat(2))
        disk.engine.verify(extent, 0, target.address, 4 * BLOCK)


def test_after_a_finished_transfer_starts_at_once(tmp_path, kind):
    """Gives a ticket that is done, of another engine, as `after`."""
    disk, other = Disk(tmp_path, kind), Disk(tmp_path, kind)
    staging, extent = Staging(CHECKED), disk.extent(CHECKED)
    done = other.engine.read(other.extent(CHECKED), 0, staging.address, CHECKED)
    done.wait()
    del other
    disk.engine.read(extent, 0, staging.address, CHECKED, after=done).wait()


def test_what_follows_a_failed_transfer_fails_with_its_error_and_moves_nothing(tmp_path, kind):
    """Chains two reads and another engine's read behind one that meets EIO; the target memory must stay."""
    disk = Disk(tmp_path, kind, faults=fault_plan(eio=1.0))
    other = Disk(tmp_path, kind)
    source = other.extent(CHECKED)
    other.write(source, torch.ones(CHECKED, dtype=torch.uint8))
    staging = Staging(CHECKED)
    first = disk.engine.read(disk.extent(CHECKED), 0, staging.address, CHECKED)
    second = other.engine.read(source, 0, staging.address, CHECKED, after=first)
    third = other.engine.read(source, 0, staging.address, CHECKED, after=second)
    for ticket in (third, second, first):
        with pytest.raises(StorageError) as caught:
            ticket.wait()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(disk.path))
        assert ticket.done
    assert staging.bytes.count_nonzero() == 0
    other.engine.read(source, 0, staging.address, CHECKED).wait()  # the twin: on its own it works
    assert staging.bytes.count_nonzero() == CHECKED


# --- injected faults that must not show ---


HARMLESS = [
    {"short_transfer": 1.0},
    {"delay": 0.3, "delay_seconds": 0.0002},
    {"reorder": 0.7},
    {"short_transfer": 0.6, "delay": 0.1, "delay_seconds": 0.0002, "reorder": 0.4},
]


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("faults", HARMLESS, ids=lambda faults: "+".join(faults))
def test_short_late_and_reordered_transfers_give_the_same_bytes(tmp_path, kind, faults, seed):
    """Writes and reads ten extents at once under a seeded fault plan; every result is continued or matched."""
    generator = seeded(seed)
    disk = Disk(tmp_path, kind, block_nbytes=5 * BLOCK, depth=6, faults=fault_plan(seed, **faults))
    extents = [disk.extent(BLOCK * (1 + 7 * i)) for i in range(10)]
    data = [random_bytes(extent.nbytes, generator) for extent in extents]
    staging = [Staging(extent.nbytes) for extent in extents]
    for start in (disk.engine.write, disk.engine.read):
        for area, values in zip(staging, data):
            area.bytes[:] = values if start == disk.engine.write else 0
        tickets = [start(extent, 0, area.address, extent.nbytes) for extent, area in zip(extents, staging)]
        for ticket in tickets:
            ticket.wait()
    for extent, area, values in zip(extents, staging, data):
        disk.engine.verify(extent, 0, area.address, extent.nbytes)
        assert torch.equal(area.bytes, values)


# --- faults of the world that must show ---


@pytest.mark.parametrize("fault, number", [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_a_refused_transfer_is_a_storage_error_and_the_engine_serves_on(tmp_path, kind, fault, number):
    """Makes about half of all pieces fail, seeded, and checks every request: its error, or its bytes."""
    generator = seeded(21)
    disk = Disk(tmp_path, kind, faults=fault_plan(21, **{fault: 0.4}))
    extents = [disk.extent(CHECKED) for _ in range(30)]
    data = [random_bytes(CHECKED, generator) for _ in extents]
    areas = [Staging(CHECKED) for _ in extents]
    for area, values in zip(areas, data):
        area.bytes[:] = values
    tickets = [disk.engine.write(e, 0, area.address, CHECKED) for e, area in zip(extents, areas)]
    written = []
    for extent, values, ticket in zip(extents, data, tickets):
        try:
            ticket.wait()
            written.append((extent, values))
        except StorageError as error:
            assert isinstance(error, OSError)
            assert (error.errno, error.filename) == (number, str(disk.path))
            assert str(CHECKED) in str(error) and str(extent.offset) in str(error)
    assert 0 < len(written) < 30  # the twin: neither all nor none
    reads = 0
    for extent, values in written:
        assert torch.equal(disk.raw(extent), values)
        try:
            assert torch.equal(disk.read(extent), values)
            reads += 1
        except StorageError as error:
            assert fault == "eio" and error.errno == errno.EIO
    assert reads > 0


def test_a_fault_plan_repeats_itself(tmp_path, kind):
    """Runs one seed twice and another once, one transfer at a time, and compares which transfers fail."""

    def failed(folder: Path, seed: int) -> list[int]:
        folder.mkdir()
        disk = Disk(folder, kind, faults=fault_plan(seed, eio=0.5))
        extent, found = disk.extent(CHECKED), []
        for i in range(24):
            try:
                disk.read(extent)
            except StorageError:
                found.append(i)
        return found

    assert failed(tmp_path / "a", 5) == failed(tmp_path / "b", 5)
    assert failed(tmp_path / "c", 5) != failed(tmp_path / "d", 6)


@pytest.mark.parametrize("fault", ["lost_write", "bit_flip"])
def test_bytes_the_disk_changed_or_lost_are_corruption(tmp_path, kind, fault):
    """Lets the disk lie: a write that never happened, a flipped bit in what was read. Its twin tells the truth."""
    generator = seeded(22)
    data = random_bytes(2 * CHECKED + BLOCK, generator)
    for faults, honest in ((fault_plan(22, **{fault: 1.0}), False), (fault_plan(22), True)):
        disk = Disk(tmp_path, kind, faults=faults)
        extent = disk.extent(data.numel(), gap=BLOCK)
        disk.write(extent, data)
        if honest:
            assert torch.equal(disk.read(extent), data)
        else:
            with pytest.raises(CorruptionError, match="checksum mismatch") as caught:
                disk.read(extent)
            assert str(disk.path) in str(caught.value)


@pytest.mark.parametrize("block", [0, 1, 4])
def test_a_bit_flipped_on_disk_by_another_process_is_found_at_its_place(tmp_path, kind, block):
    """Has another process flip one bit; only the block it lies in fails, and the message names path and offset."""
    generator = seeded(23)
    disk = Disk(tmp_path, kind)
    extent = disk.extent(4 * CHECKED + BLOCK, gap=BLOCK)
    data = random_bytes(extent.nbytes, generator)
    disk.write(extent, data)
    at = extent.offset + block * CHECKED + 1234
    flip = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(int(sys.argv[2])); b = f.read(1)[0]; " \
           "f.seek(int(sys.argv[2])); f.write(bytes([b ^ 4]))"  # fmt: skip
    subprocess.run([sys.executable, "-I", "-S", "-c", flip, str(disk.path), str(at)], check=True)
    with pytest.raises(CorruptionError) as caught:
        disk.read(extent)
    assert str(disk.path) in str(caught.value)
    assert f"offset {extent.offset + block * CHECKED} " in str(caught.value)
    for other in range(5):
        offset = other * CHECKED
        nbytes = min(CHECKED, extent.nbytes - offset)
        if other != block:
            assert torch.equal(disk.read(extent, offset, nbytes), data[offset : offset + nbytes])
    disk.write(extent, data)  # written anew it is good again
    assert torch.equal(disk.read(extent), data)


@pytest.mark.parametrize("kept", [0, 1000, CHECKED, CHECKED + 512, 3 * CHECKED - 1])
def test_a_file_truncated_under_the_engine_is_corruption(tmp_path, kind, kept):
    """Cuts the swap file short inside an extent: a read over the end fails typed, one before it still works."""
    generator = seeded(24)
    disk = Disk(tmp_path, kind, nbytes=3 * CHECKED, block_nbytes=4 * BLOCK)
    extent, data = disk.extent(3 * CHECKED), random_bytes(3 * CHECKED, generator)
    disk.write(extent, data)
    assert torch.equal(disk.read(extent), data)
    os.truncate(disk.path, kept)
    with pytest.raises(CorruptionError, match="truncated") as caught:
        disk.read(extent)
    assert str(disk.path) in str(caught.value)
    whole = kept // CHECKED * CHECKED
    if whole:
        assert torch.equal(disk.read(extent, 0, whole), data[:whole])
    disk.write(extent, data)  # the engine serves on
    assert torch.equal(disk.read(extent), data)


# --- calls that cannot be served ---


REFUSED = {
    "address": dict(offset=0, shift=8, nbytes=CHECKED, tells=f"{CHECKED} bytes at offset 4096"),
    "offset": dict(offset=BLOCK, shift=0, nbytes=CHECKED, tells=f"bytes {BLOCK} to {BLOCK + CHECKED} of an extent of"),
    "offset and address": dict(offset=3, shift=3, nbytes=CHECKED, tells="bytes 3 to"),
    "length": dict(offset=0, shift=0, nbytes=CHECKED + 1, tells=f"bytes 0 to {CHECKED + 1} of"),
    "length of a part": dict(offset=0, shift=0, nbytes=BLOCK, tells=f"bytes 0 to {BLOCK} of"),
    "zero length": dict(offset=0, shift=0, nbytes=0, tells="0 bytes at offset 4096"),
    "beyond the extent": dict(offset=2 * CHECKED, shift=0, nbytes=2 * CHECKED, tells=f"of an extent of {3 * CHECKED}"),
    "behind the extent": dict(offset=3 * CHECKED, shift=0, nbytes=CHECKED, tells=f"of an extent of {3 * CHECKED}"),
    "far beyond": dict(offset=CHECKED, shift=0, nbytes=2**64 - CHECKED, tells=f"of an extent of {3 * CHECKED}"),
}


@pytest.mark.parametrize("move", ["read", "write"])
@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_transfer_is_refused_with_its_numbers_and_changes_nothing(tmp_path, kind, move, case):
    """Tries every misaligned, empty and outlying transfer; afterwards the extent still verifies with its old bytes."""
    generator = seeded(31)
    disk = Disk(tmp_path, kind)
    extent, data = disk.extent(3 * CHECKED, gap=BLOCK), random_bytes(3 * CHECKED, generator)
    disk.write(extent, data)
    staging = Staging(4 * CHECKED)
    staging.bytes.copy_(random_bytes(4 * CHECKED, generator))
    before = staging.bytes.clone()
    wrong = REFUSED[case]
    start = getattr(disk.engine, move)
    with pytest.raises(UsageError, match=wrong["tells"]):
        start(extent, wrong["offset"], staging.address + wrong["shift"], wrong["nbytes"])
    assert torch.equal(staging.bytes, before)
    assert torch.equal(disk.raw(extent), data)
    assert torch.equal(disk.read(extent), data)
    start(extent, 0, staging.address, 3 * CHECKED).wait()  # the twin: aligned and inside, it is served


@pytest.mark.parametrize("move", ["read", "write", "verify"])
def test_a_transfer_of_an_extent_in_memory_is_an_error(tmp_path, kind, move):
    """Hands a memory extent to the engine, in a child process since the wrong answer would be a crash."""
    staging = Staging(CHECKED)

    def call() -> None:
        engine = Disk(tmp_path, kind).engine
        getattr(engine, move)(native.Extent.in_memory(staging.address, CHECKED), 0, staging.address, CHECKED)

    outcome = outcome_in_child(call)
    assert outcome.startswith(("UsageError", "RuntimeError", "TypeError")), outcome


@pytest.mark.parametrize("move", ["read", "write"])
def test_a_transfer_of_a_file_the_engine_does_not_have_is_an_error(tmp_path, kind, move):
    """Names file 7 of an engine with one file."""
    disk, staging = Disk(tmp_path, kind), Staging(CHECKED)
    with pytest.raises(UsageError, match="no file 7"):
        getattr(disk.engine, move)(native.Extent.in_file(7, 0, CHECKED), 0, staging.address, CHECKED)
    with pytest.raises(UsageError, match="no file 1"):
        disk.engine.is_direct(1)


def test_an_extent_behind_the_end_of_its_file_is_an_error(tmp_path, kind):
    """Writes to an extent that starts where the reserved file ends: no space was reserved there."""
    disk, staging = Disk(tmp_path, kind, nbytes=MIB), Staging(CHECKED)
    behind = native.Extent.in_file(disk.file, MIB, CHECKED)
    with pytest.raises((UsageError, CorruptionError)):
        disk.engine.read(behind, 0, staging.address, CHECKED).wait()
    with pytest.raises(UsageError):
        disk.engine.write(behind, 0, staging.address, CHECKED).wait()
    assert disk.path.stat().st_size == MIB


@pytest.mark.parametrize("offset, nbytes", [(0, 0), (0, 100), (512, BLOCK), (BLOCK, BLOCK + 1)])
def test_an_extent_that_is_not_whole_blocks_is_refused_with_its_numbers(offset, nbytes):
    """Describes extents whose offset or length the disk cannot address directly."""
    with pytest.raises(UsageError, match=f"{nbytes} bytes at offset {offset}"):
        native.Extent.in_file(0, offset, nbytes)
    assert native.Extent.in_file(0, BLOCK, 2 * BLOCK).nbytes == 2 * BLOCK


@pytest.mark.parametrize(
    "options, tells",
    [
        ({"kind": "floppy"}, "floppy"),
        ({"depth": 0}, "depth 0"),
        ({"depth": 5000}, "5000"),
        ({"block_nbytes": 1000}, "1000"),
        ({"block_nbytes": 0}, "0 bytes"),
        ({"kind": "threads", "threads": 0}, "thread"),
        ({"kind": "threads", "threads": -1}, "thread"),
    ],
    ids=str,
)
def test_engine_options_that_could_never_move_a_byte_are_refused(options, tells):
    """Builds engines that cannot work: with no thread or no depth the first transfer would never end."""
    with pytest.raises(UsageError, match=tells):
        native.IoEngine(**options)


def test_the_environment_chooses_the_engine(monkeypatch):
    """Sets INFINITY_IO to both kinds, to nothing and to nonsense."""
    monkeypatch.setenv("INFINITY_IO", "threads")
    assert native.make_io_engine().backend == "threads"
    monkeypatch.setenv("INFINITY_IO", "")
    automatic = native.make_io_engine()
    assert automatic.backend == ("threads" if native.uring_refusal() else "uring")
    assert bool(automatic.notes) == bool(native.uring_refusal())
    monkeypatch.setenv("INFINITY_IO", "tape")
    with pytest.raises(UsageError, match="tape"):
        native.make_io_engine()


def test_waiting_can_be_interrupted(tmp_path):
    """Interrupts the wait for a delayed read: KeyboardInterrupt comes before its end, and the read still ends well."""
    disk = Disk(tmp_path, faults=fault_plan(delay=1.0, delay_seconds=1.5))
    staging = Staging(CHECKED)
    ticket = disk.engine.read(disk.extent(CHECKED), 0, staging.address, CHECKED)
    previous = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    interrupt = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
        assert not ticket.done
    finally:
        interrupt.join()
        signal.signal(signal.SIGUSR1, previous)
    ticket.wait()
    assert ticket.done


# --- files ---


def test_a_swap_file_is_private_and_reserved_in_full(tmp_path, kind):
    """Looks at mode, length and allocated blocks of a fresh file, under a umask that would allow everybody."""
    umask = os.umask(0)
    try:
        disk = Disk(tmp_path, kind, nbytes=3 * MIB)
    finally:
        os.umask(umask)
    status = disk.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 3 * MIB
    assert status.st_blocks * 512 >= 3 * MIB


@pytest.mark.parametrize("nbytes", [0, 100, BLOCK + 1])
def test_a_swap_file_that_is_not_whole_blocks_is_refused(tmp_path, kind, nbytes):
    """Asks for lengths that no extent could use; no file is left."""
    with pytest.raises(UsageError, match=f"{nbytes} bytes"):
        native.IoEngine(kind=kind).create_file(str(tmp_path / "swap"), nbytes)
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_created_is_a_storage_error_with_it(tmp_path, kind):
    """Names a folder that does not exist, then a folder itself."""
    engine = native.IoEngine(kind=kind)
    for path, number in ((tmp_path / "missing" / "swap", errno.ENOENT), (tmp_path, errno.EISDIR)):
        with pytest.raises(StorageError) as caught:
            engine.create_file(str(path), BLOCK)
        assert caught.value.errno in (number, errno.EEXIST)
        assert caught.value.filename == str(path)


def test_a_file_that_exists_is_refused_and_stays(tmp_path, kind):
    """Asks for a swap file where a user's file lies: opening it would overwrite it, failing to reserve delete it."""
    path = tmp_path / "thesis.txt"
    path.write_bytes(b"years of work\n")
    path.chmod(0o644)
    engine = native.IoEngine(kind=kind)
    for nbytes in (MIB, 2**60):
        with pytest.raises(StorageError) as caught:
            engine.create_file(str(path), nbytes)
        assert path.exists(), "the user's file was deleted"
        assert path.read_bytes() == b"years of work\n"
        assert caught.value.errno == errno.EEXIST


def test_a_file_the_disk_has_no_room_for_is_an_error_with_its_size_and_leaves_nothing(tmp_path, kind):
    """Asks for an exbibyte; the engine still makes a small file afterwards."""
    engine = native.IoEngine(kind=kind)
    with pytest.raises(StorageError, match=str(2**60)) as caught:
        engine.create_file(str(tmp_path / "swap"), 2**60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.filename == str(tmp_path / "swap")
    assert not list(tmp_path.iterdir())
    assert engine.create_file(str(tmp_path / "swap"), BLOCK) == 0


def test_a_file_over_the_process_limit_is_an_error(tmp_path, kind):
    """Lowers RLIMIT_FSIZE in a child process and asks for twice that, then for half."""

    def call() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        engine = native.IoEngine(kind=kind)
        try:
            engine.create_file(str(tmp_path / "swap"), 2 * MIB)
        except StorageError as error:
            left = os.listdir(tmp_path)
            return f"errno {error.errno}, left {left}, then {engine.create_file(str(tmp_path / 's'), MIB // 2)}"
        return "no error"

    assert outcome_in_child(call) == f"errno {errno.EFBIG}, left [], then 0"


SWAP_FILE = """
import os, sys
import torch
from infinity import native
folder, nbytes = sys.argv[1], 1 << 20
engine = native.IoEngine()
file = engine.create_swap_file(folder, nbytes)
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
extent, region = native.Extent.in_file(file, 0, nbytes), native.Region(nbytes, True, 1)
bytes_of = native.tensor_at(region, region.address, nbytes, torch.uint8)
bytes_of.copy_(torch.arange(nbytes) % 251)
engine.write(extent, 0, region.address, nbytes).wait()
bytes_of.zero_()
engine.read(extent, 0, region.address, nbytes).wait()
right = torch.equal(bytes_of, (torch.arange(nbytes) % 251).to(torch.uint8))
print(os.listdir(folder), sum(link.startswith(folder) and link.endswith("(deleted)") for link in links), right, engine.is_direct(file))
"""


@pytest.fixture(scope="module")
def no_tmpfile(tmp_path_factory) -> Path:
    """A library for LD_PRELOAD: file systems without O_TMPFILE."""
    library = tmp_path_factory.mktemp("preload") / "no_tmpfile.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("no_tmpfile.c"), "-ldl"], check=True)
    return library


@pytest.mark.parametrize("lacking", ["nothing", "O_TMPFILE", "O_TMPFILE and O_DIRECT"])
def test_swap_files_have_no_name_on_any_file_system(lacking, tmp_path, no_tmpfile):
    """Method: a process makes a swap file where the file system has all, some, or none of what it asks for; no name is left,
    the bytes come back, and the folder of the process is not touched."""
    variables = dict(os.environ)
    if lacking != "nothing":
        variables |= {"LD_PRELOAD": str(no_tmpfile)} | ({"NO_DIRECT": "1"} if "O_DIRECT" in lacking else {})
    done = subprocess.run(
        [sys.executable, "-c", SWAP_FILE, str(tmp_path)], capture_output=True, text=True, env=variables, timeout=120
    )
    assert done.returncode == 0, done.stderr
    names, nameless, right, direct = done.stdout.split(maxsplit=3)
    assert (names, nameless, right) == ("[]", "1", "True")
    assert direct.strip() == "False" or "O_DIRECT" not in lacking


def test_an_engine_that_was_shut_down_refuses_and_holds_nothing(tmp_path, kind):
    """Method: shut down with a transfer in flight, while somebody still refers to the engine; its files are closed, the transfer is
    over, and what is asked of it then is a UsageError."""
    engine = native.IoEngine(kind=kind)
    before = len(os.listdir("/proc/self/fd"))
    extent, region = native.Extent.in_file(engine.create_swap_file(str(tmp_path), MIB), 0, MIB), native.Region(MIB, True, 1)
    ticket = engine.write(extent, 0, region.address, MIB)
    engine.shut_down()
    engine.shut_down()
    assert ticket.done and len(os.listdir("/proc/self/fd")) <= before
    for call in (lambda: engine.read(extent, 0, region.address, MIB), lambda: engine.register([(region.address, MIB)])):
        with pytest.raises(UsageError, match="was shut down"):
            call()
    assert engine.backend in ("uring", "threads")


@pytest.mark.parametrize("what", ["missing", "not a folder", "too large", "no whole blocks"])
def test_a_swap_file_that_cannot_be_made_is_an_error_and_leaves_nothing(what, tmp_path, kind):
    engine = native.IoEngine(kind=kind)
    (tmp_path / "file").write_text("mine")
    folder = {"missing": tmp_path / "missing", "not a folder": tmp_path / "file"}.get(what, tmp_path)
    nbytes = {"too large": 2**60, "no whole blocks": 100}.get(what, BLOCK)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((StorageError, UsageError)) as caught:
        engine.create_swap_file(str(folder), nbytes)
    if what != "no whole blocks":
        assert caught.value.filename == str(folder) and caught.value.errno
    assert os.listdir(tmp_path) == ["file"] and len(os.listdir("/proc/self/fd")) == before
    assert engine.create_swap_file(str(tmp_path), BLOCK) == 0


def mounted_in_child(folder: Path, file_system: str, options: str, action) -> str:
    """`action` in a child that alone sees ``file_system`` mounted at ``folder``. Skips without the right to mount."""

    def call() -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        clone_newns, ms_rec, ms_private = 0x20000, 0x4000, 1 << 18
        mounted = (
            libc.unshare(clone_newns) == 0
            and libc.mount(b"none", b"/", None, ctypes.c_ulong(ms_rec | ms_private), None) == 0
            and libc.mount(b"none", bytes(folder), file_system.encode(), ctypes.c_ulong(0), options.encode()) == 0
        )
        return action() if mounted else f"not mounted: {os.strerror(ctypes.get_errno())}"

    outcome = outcome_in_child(call)
    if outcome.startswith("not mounted"):
        pytest.skip(f"{file_system}: {outcome}")
    return outcome


def test_a_full_file_system_is_met_when_the_file_is_made(tmp_path, kind):
    """Mounts a tmpfs of 1 MiB in a child, asks for 2 MiB, then for what fits."""

    def call() -> str:
        engine = native.IoEngine(kind=kind)
        try:
            engine.create_file(str(tmp_path / "swap"), 2 * MIB)
        except StorageError as error:
            path = tmp_path / "swap"
            return f"errno {error.errno} of {error.filename == str(path)}, left {os.listdir(tmp_path)}, " \
                   f"then {engine.create_file(str(path), MIB // 2)}"  # fmt: skip
        return "no error"

    outcome = mounted_in_child(tmp_path, "tmpfs", "size=1m", call)
    assert outcome == f"errno {errno.ENOSPC} of True, left [], then 0"


def test_a_file_system_without_o_direct_is_served_and_noted(tmp_path, kind):
    """Mounts a ramfs, which knows neither O_DIRECT nor fallocate, in a child and moves bytes through it."""

    def call() -> str:
        try:
            os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
            return "ramfs has O_DIRECT here"
        except OSError:
            pass
        disk = Disk(tmp_path, kind, nbytes=4 * CHECKED)
        extent = disk.extent(3 * CHECKED)
        data = random_bytes(extent.nbytes, torch.Generator().manual_seed(41))
        disk.write(extent, data)
        private = stat.S_IMODE(disk.path.stat().st_mode) == 0o600
        noted = [note for note in disk.engine.notes if str(disk.path) in note and "O_DIRECT" in note]
        return f"{disk.engine.is_direct(disk.file)} {len(noted)} {private} {torch.equal(disk.read(extent), data)}"

    outcome = mounted_in_child(tmp_path, "ramfs", "", call)
    if outcome == "ramfs has O_DIRECT here":
        pytest.skip(outcome)
    assert outcome == "False 1 True True"


def test_direct_files_are_direct_and_others_are_noted(tmp_path, kind):
    """Compares what `is_direct` says of a file with the flags of its descriptor, and with the engine's notes."""
    disk = Disk(tmp_path, kind)
    number = next(fd for fd in os.listdir("/proc/self/fd") if links_to(fd, disk.path))
    with open(f"/proc/self/fdinfo/{number}") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    assert disk.engine.is_direct(disk.file) == bool(flags & os.O_DIRECT)
    assert disk.engine.is_direct(disk.file) == (not any(str(disk.path) in note for note in disk.engine.notes))
    assert flags & os.O_CLOEXEC


def links_to(descriptor: str, target: Path | str) -> bool:
    try:
        return str(target) in os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False


def test_dropping_the_engine_closes_its_descriptors_and_ends_its_threads(tmp_path, kind):
    """Counts descriptors and threads before and after, with transfers still in flight when the engine is dropped."""
    staging = Staging(MIB)
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    disk = Disk(tmp_path, kind, block_nbytes=BLOCK, faults=fault_plan(51, delay=0.02, reorder=0.2))
    staging.bytes.fill_(7)
    extent = disk.extent(MIB)
    ticket = disk.engine.write(extent, 0, staging.address, MIB)
    behind = disk.engine.read(extent, 0, staging.address, MIB, after=ticket)
    assert len(os.listdir("/proc/self/fd")) > descriptors
    assert len(os.listdir("/proc/self/task")) > threads
    path = disk.path
    del disk
    gc.collect()
    assert ticket.done and behind.done, "the engine went before its transfers"
    assert path.read_bytes()[:MIB] == bytes([7]) * MIB
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert len(os.listdir("/proc/self/task")) == threads


LEAKED: list[Disk] = []  # never closed: closing one whose transfers cannot end would wait for them


def test_a_forked_child_that_drops_the_engine_leaves_the_parents_alone(tmp_path, kind):
    """Forks, as a data loader's worker does; the child drops its copy and ends, then the parent reads. All of it runs
    in a child of its own with a time limit, since what may be wrong is a hang."""

    def call() -> str:
        staging = Staging(CHECKED)
        disk = Disk(tmp_path, kind)
        LEAKED.append(disk)
        extent = disk.extent(CHECKED)
        disk.engine.read(extent, 0, staging.address, CHECKED).wait()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's handler would wait for the interpreter
            signal.alarm(5)
            disk.engine = None
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        ticket = disk.engine.read(extent, 0, staging.address, CHECKED)
        for _ in range(300):
            if ticket.done:
                break
            time.sleep(0.01)
        child = signal.Signals(os.WTERMSIG(status)).name if status else "ended"
        return f"child: {child}, parent: {'served' if ticket.done else 'hangs'}"

    assert outcome_in_child(call, seconds=30) == "child: ended, parent: served"


# --- checksums ---


def table_crc32c(data: bytes, seed: int = 0) -> int:
    """The definition: reflected polynomial 0x82F63B78, one byte at a time."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_knows_the_known_answers():
    """The check value of every CRC catalogue, and RFC 3720's vectors (B.4)."""
    known = {
        b"123456789": 0xE3069283,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(reversed(range(32))): 0x113FDB5C,
    }
    for text, expected in known.items():
        assert native.crc32c(torch.frombuffer(bytearray(text), dtype=torch.uint8)) == expected
        assert table_crc32c(text) == expected
    assert native.crc32c(torch.empty(0, dtype=torch.uint8)) == 0


def test_crc32c_equals_its_definition_at_odd_lengths_and_addresses():
    """Compares with the definition at every length to 80 and some beyond, from shifted starts, whole and continued."""
    generator = seeded(61)
    data = random_bytes(5000, generator)
    for length in [*range(81), 255, 257, 1021, 4099]:
        for start in (0, 1, 3, 7):
            part = data[start : start + length]
            expected = table_crc32c(bytes(part.numpy()))
            assert native.crc32c(part) == expected
            cut = length // 3
            assert native.crc32c(part[cut:], seed=native.crc32c(part[:cut])) == expected
    assert native.crc32c(data[:80]) != native.crc32c(data[1:81])  # the twin


def test_a_long_write_and_its_blocks_one_by_one_have_the_same_checksums(tmp_path):
    """Writes 1 to 7 blocks at once, then verifies each alone: three at a time in lockstep sum as one does."""
    generator = seeded(62)
    disk = Disk(tmp_path)
    for blocks in range(1, 8):
        for rest in (0, BLOCK):
            extent = disk.extent(blocks * CHECKED + rest)
            data = random_bytes(extent.nbytes, generator)
            disk.write(extent, data)
            for offset in range(0, extent.nbytes, CHECKED):
                nbytes = min(CHECKED, extent.nbytes - offset)
                assert torch.equal(disk.read(extent, offset, nbytes), data[offset : offset + nbytes])


def test_a_checksum_of_a_tensor_that_is_not_flat_memory_is_refused():
    """Asks for the checksum of a transposed tensor, whose bytes are not in its order."""
    with pytest.raises(UsageError, match="contiguous"):
        native.crc32c(torch.zeros(3, 4).T)
    words = from_bits([1, 2, 3], torch.float32)
    assert native.crc32c(words) == table_crc32c(bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]))


# ---------------------------------------------------------------------------------------------------------------------
# A device that does not answer, transfers taken back, memory that may not be locked
# ---------------------------------------------------------------------------------------------------------------------


def test_a_device_that_stops_answering_is_an_error_that_names_it(tmp_path, kind):
    """Method: the third transfer never comes back. Its ticket fails within the timeout with ETIMEDOUT, the path and the
    device; what finished before stays right, a later transfer fails at once, and dropping the engine does not wait."""

    def work():
        engine = native.IoEngine(kind=kind, timeout_seconds=0.4, block_nbytes=MIB, faults=fault_plan(hang=1.0, first_piece=2))
        extent = native.Extent.in_file(engine.create_file(str(tmp_path / "swap"), 8 * MIB), 0, 8 * MIB)
        staging = Staging(2 * MIB)
        engine.write(extent, 0, staging.address, MIB).wait()
        engine.read(extent, 0, staging.address, MIB).wait()
        for within in (5.0, 0.2):  # the first waits for the timeout, the second fails at once
            start = time.monotonic()
            with pytest.raises(StorageError, match="device .* has not answered for 0.4 s.*INFINITY_IO_TIMEOUT") as caught:
                engine.read(extent, MIB, staging.address, MIB).wait()
            assert time.monotonic() - start < within
            assert caught.value.errno == errno.ETIMEDOUT and caught.value.filename == str(tmp_path / "swap")
        del engine
        return "ended"

    assert outcome_in_child(work, seconds=20) == "ended"


def test_a_late_device_is_no_hung_one(tmp_path, kind):
    """Method: every transfer comes 0.2 s late under a timeout of 1 s; all of them end well."""
    engine = native.IoEngine(kind=kind, timeout_seconds=1.0, faults=fault_plan(delay=1.0, delay_seconds=0.2))
    extent = native.Extent.in_file(engine.create_file(str(tmp_path / "swap"), MIB), 0, MIB)
    staging = Staging(MIB)
    for _ in range(3):
        engine.read(extent, 0, staging.address, MIB).wait()


def test_what_has_not_started_can_be_taken_back(tmp_path, kind):
    """Method: one slot, held up by a slow transfer; the ones behind it are cancelled and fail with ECANCELED at once,
    the slow one ends well, and the engine serves on."""
    engine = native.IoEngine(kind=kind, depth=1, block_nbytes=MIB, faults=fault_plan(delay=1.0, delay_seconds=0.3))
    extent = native.Extent.in_file(engine.create_file(str(tmp_path / "swap"), 4 * MIB), 0, 4 * MIB)
    staging = Staging(4 * MIB)
    slow, behind = (engine.read(extent, at, staging.address + at, MIB) for at in (0, MIB))
    engine.cancel(behind)
    assert behind.done and not slow.done
    with pytest.raises(StorageError, match="was cancelled") as caught:
        behind.wait()
    assert caught.value.errno == errno.ECANCELED
    slow.wait()
    engine.cancel(slow)  # too late: nothing happens
    slow.wait()
    engine.read(extent, 2 * MIB, staging.address, MIB).wait()


def test_a_hung_device_with_more_waiting_than_fits_is_an_error_too(tmp_path, kind):
    """Method: a queue of two, and ten transfers in one request that all hang, and another request behind it. All of them
    fail in time, and the engine can be dropped."""

    def work():
        plan = fault_plan(hang=1.0, first_piece=1)
        engine = native.IoEngine(kind=kind, depth=2, timeout_seconds=0.4, block_nbytes=CHECKED, faults=plan)
        healthy, hung = (
            native.Extent.in_file(engine.create_file(str(tmp_path / name), MIB), 0, MIB) for name in ("healthy", "hung")
        )
        staging = Staging(MIB)
        engine.read(healthy, 0, staging.address, CHECKED).wait()
        tickets = [engine.read(hung, 0, staging.address, 10 * CHECKED), engine.read(hung, 0, staging.address, CHECKED)]
        for ticket in tickets:
            with pytest.raises(StorageError, match="has not answered"):
                ticket.wait()
        del engine
        return "ended"

    assert outcome_in_child(work, seconds=20) == "ended"


def test_a_cancelled_transfer_that_failed_says_why(tmp_path, kind):
    """Method: of two pieces the first hangs and the second is taken back: the hung device is what is told."""

    def work():
        engine = native.IoEngine(kind=kind, depth=1, timeout_seconds=0.4, block_nbytes=CHECKED, faults=fault_plan(hang=1.0))
        extent = native.Extent.in_file(engine.create_file(str(tmp_path / "swap"), MIB), 0, MIB)
        staging = Staging(MIB)
        ticket = engine.read(extent, 0, staging.address, 2 * CHECKED)
        engine.cancel(ticket)
        with pytest.raises(StorageError, match="has not answered"):
            ticket.wait()
        return "ended"

    assert outcome_in_child(work, seconds=20) == "ended"


def test_what_waits_behind_another_can_be_taken_back(tmp_path, kind):
    """Method: a read after a slow write is cancelled before the write ends: it never moves, the write does."""
    engine = native.IoEngine(kind=kind, faults=fault_plan(delay=1.0, delay_seconds=0.2))
    extent = native.Extent.in_file(engine.create_file(str(tmp_path / "swap"), MIB), 0, MIB)
    staging = Staging(2 * MIB)
    write = engine.write(extent, 0, staging.address, MIB)
    read = engine.read(extent, 0, staging.address + MIB, MIB, after=write)
    engine.cancel(read)
    with pytest.raises(StorageError, match="was cancelled"):
        read.wait()
    write.wait()
    assert engine.nbytes(native.Op.READ) == 0 and engine.nbytes(native.Op.WRITE) == MIB


@pytest.mark.skipif(native.uring_refusal() != "", reason=f"no io_uring: {native.uring_refusal()}")
def test_a_low_memlock_limit_registers_what_fits():
    """Method: an ordinary user with 8 MiB of lockable memory registers 64 MiB: some is, the note says how much and how
    to raise it, and both parts are served."""

    def work():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 * MIB, 8 * MIB))
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        engine = native.IoEngine(kind="uring")
        extent = native.Extent.in_file(engine.create_file(f"{folder}/swap", 64 * MIB), 0, 64 * MIB)
        memory = native.Region(64 * MIB, True, 1)
        engine.register([(memory.address, memory.nbytes)])
        for at in (0, 63 * MIB):
            engine.write(extent, at, memory.address + at, MIB).wait()
            engine.read(extent, at, memory.address + at, MIB).wait()
        return " ".join(engine.notes)

    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o777)
        said = outcome_in_child(work)
    found = re.search(r"(\d+) MiB of 64 MiB were registered.*LimitMEMLOCK", said)
    assert found and 4 <= int(found[1]) <= 8, said


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_timeout_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("INFINITY_IO_TIMEOUT", text)
    with pytest.raises(UsageError, match=f"INFINITY_IO_TIMEOUT={text}"):
        native.make_io_engine()
