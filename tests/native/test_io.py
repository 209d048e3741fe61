"""The I/O engines: bytes, order, and faults."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import doubles
import pytest
import torch
from doubles import fault_plan
from io_cases import BLOCK, CHECKED, kind  # noqa: F401
from native_arrays import (
    MIB,
    Disk,
    Staging,
    is_mapped,
    outcome_in_child,
    random_bytes,
    seeded,
)

from infinity import native
from infinity.errors import CorruptionError, StorageError, UsageError


@pytest.mark.parametrize("block_nbytes", [BLOCK, 3 * BLOCK, MIB])
def test_what_is_written_is_read(tmp_path, kind, block_nbytes):
    """Writes extents of many sizes side by side, then reads them whole, in parts, and by the
    operating system."""
    generator = seeded(1)
    disk = Disk(tmp_path, kind, block_nbytes=block_nbytes)
    sizes = [
        BLOCK,
        CHECKED - BLOCK,
        CHECKED,
        CHECKED + BLOCK,
        3 * CHECKED,
        5 * CHECKED + 3 * BLOCK,
        MIB,
        MIB + BLOCK,
    ]
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
    """Overwrites the second and the last checksum block of an extent, many times, between two
    neighbours."""
    generator = seeded(2)
    disk = Disk(tmp_path, kind)
    before, extent, behind = (disk.extent(5 * CHECKED + BLOCK) for _ in range(3))
    expected = {part: random_bytes(part.nbytes, generator) for part in (before, extent, behind)}
    for part, data in expected.items():
        disk.write(part, data)
    for _ in range(4):
        for offset, nbytes in (
            (CHECKED, CHECKED),
            (4 * CHECKED, CHECKED + BLOCK),
            (5 * CHECKED, BLOCK),
        ):
            part = random_bytes(nbytes, generator)
            disk.write(extent, part, offset)
            expected[extent][offset : offset + nbytes] = part
    for part, data in expected.items():
        assert torch.equal(disk.read(part), data)


@pytest.mark.parametrize("depth", [1, 3, 64])
def test_many_transfers_in_flight_at_once_do_not_mix(tmp_path, kind, depth):
    """Starts 60 writes and then 60 reads without waiting in between, and waits for each lot in
    another order."""
    generator = seeded(3)
    disk = Disk(tmp_path, kind, depth=depth, block_nbytes=4 * BLOCK, threads=4)
    extents = [
        disk.extent(BLOCK * int(n)) for n in torch.randint(1, 17, (60,), generator=generator)
    ]
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


def test_registered_memory_is_kept_and_no_other_takes_its_place(tmp_path, kind):
    """The kernel moves the pages that were registered, whatever lies at their addresses later.
    Method: let go of registered memory, map other memory of its size, and move bytes from there.
    Twin: once other memory is registered in its place, the first is gone."""
    disk, data = Disk(tmp_path, kind), random_bytes(MIB, seeded(5))
    extent, later = disk.extent(MIB), []
    disk.engine.register([native.Region(MIB, huge_pages=False, touch_threads=1)])
    for _ in range(8):  # one of them would be mapped where the registered one was
        later.append(Staging(MIB))
        later[-1].bytes[:] = data
        disk.engine.write(extent, 0, later[-1].address, MIB).wait()
        later[-1].bytes.zero_()
        disk.engine.read(extent, 0, later[-1].address, MIB).wait()
        assert torch.equal(later[-1].bytes, data)
    region = native.Region(MIB, huge_pages=False, touch_threads=1)
    disk.engine.register([region])
    address = region.address
    del region
    assert is_mapped(address)
    disk.engine.register([later[0].region])
    assert not is_mapped(address)


def test_what_cannot_be_registered_leaves_the_memory_that_was(tmp_path, kind):
    """Nothing is no region, a child has another engine, and a hung device may still move pages.
    Twin: a working device lets the memory go."""
    disk = Disk(tmp_path, kind)
    with pytest.raises(UsageError, match="registers regions"):
        disk.engine.register([None])

    assert "forked child" in outcome_in_child(lambda: disk.engine.register([]))
    disk.engine.register([Staging(MIB).region])
    layer = doubles.layer(fault_plan(hang=1.0, first_piece=1))
    engine = native.IoEngine(kind=kind, timeout_seconds=0.2, layer=layer)
    extent = native.Extent.in_file(engine.create_file(str(tmp_path / "hung"), MIB), 0, MIB)
    region = native.Region(MIB, huge_pages=False, touch_threads=1)
    engine.register([region])
    address = region.address
    engine.write(extent, 0, address, MIB).wait()
    with pytest.raises(StorageError):
        engine.read(extent, 0, address, MIB).wait()
    del region
    with pytest.raises(StorageError, match="no other memory can be registered"):
        engine.register([])
    assert is_mapped(address)


def test_registered_memory_gives_the_same_bytes(tmp_path, kind):
    """Registers files and staging memory, moves bytes inside and outside of it, and adds a file
    afterwards."""
    generator = seeded(4)
    disk = Disk(tmp_path, kind)
    inside, outside = Staging(MIB), Staging(MIB)
    disk.engine.register([inside.region])
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


@pytest.mark.parametrize(
    "nbytes", [BLOCK, CHECKED - BLOCK, CHECKED, CHECKED + BLOCK, 7 * CHECKED + 5 * BLOCK]
)
def test_an_extent_that_was_never_written_verifies_as_zeros(tmp_path, kind, nbytes):
    """Reads fresh extents; the twin puts one other byte into the file first."""
    disk = Disk(tmp_path, kind)
    extent = disk.extent(nbytes)
    assert disk.read(extent).count_nonzero() == 0
    disk.change_byte(extent.offset + nbytes - 1)
    with pytest.raises(CorruptionError):
        disk.read(extent)


def test_a_read_after_a_write_sees_its_bytes(tmp_path, kind):
    """Starts eight writes and, behind each, a chain of two reads, while pieces are late and
    reordered."""
    generator = seeded(6)
    disk = Disk(
        tmp_path,
        kind,
        block_nbytes=BLOCK,
        faults=fault_plan(6, delay=0.2, delay_seconds=0.0005, reorder=0.3),
    )
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
    """Chains two reads and another engine's read behind one that meets EIO; the target memory must
    stay."""
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


HARMLESS = [
    {"short_transfer": 1.0},
    {"delay": 0.3, "delay_seconds": 0.0002},
    {"reorder": 0.7},
    {"short_transfer": 0.6, "delay": 0.1, "delay_seconds": 0.0002, "reorder": 0.4},
]


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("faults", HARMLESS, ids=lambda faults: "+".join(faults))
def test_short_late_and_reordered_transfers_give_the_same_bytes(tmp_path, kind, faults, seed):
    """Writes and reads ten extents at once under a seeded fault plan; every result is continued or
    matched."""
    generator = seeded(seed)
    disk = Disk(tmp_path, kind, block_nbytes=5 * BLOCK, depth=6, faults=fault_plan(seed, **faults))
    extents = [disk.extent(BLOCK * (1 + 7 * i)) for i in range(10)]
    data = [random_bytes(extent.nbytes, generator) for extent in extents]
    staging = [Staging(extent.nbytes) for extent in extents]
    for start in (disk.engine.write, disk.engine.read):
        for area, values in zip(staging, data):
            area.bytes[:] = values if start == disk.engine.write else 0
        tickets = [
            start(extent, 0, area.address, extent.nbytes) for extent, area in zip(extents, staging)
        ]
        for ticket in tickets:
            ticket.wait()
    for extent, area, values in zip(extents, staging, data):
        disk.engine.verify(extent, 0, area.address, extent.nbytes)
        assert torch.equal(area.bytes, values)


@pytest.mark.parametrize("fault, number", [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_a_refused_transfer_is_a_storage_error_and_the_engine_serves_on(
    tmp_path, kind, fault, number
):
    """Makes about half of all pieces fail, seeded, and checks every request: its error, or its
    bytes."""
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
    """Runs one seed twice and another once, one transfer at a time, and compares which transfers
    fail."""

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


def test_faults_are_turned_off_and_on_and_counted(tmp_path, kind):
    """Of all engines that have one layer."""
    layer = doubles.layer(fault_plan(1, eio=1.0))
    engine = native.IoEngine(kind=kind, layer=layer)
    file = engine.create_file(str(tmp_path / "swap"), 4 * BLOCK)
    extent, staging = native.Extent.in_file(file, 0, BLOCK), Staging(BLOCK)
    layer.on = False
    engine.write(extent, 0, staging.address, BLOCK).wait()
    assert layer.struck()["eio"] == 0
    layer.on = True
    with pytest.raises(StorageError):
        engine.write(extent, 0, staging.address, BLOCK).wait()
    assert layer.struck()["eio"] == 1 and layer.struck()["bit_flip"] == 0


@pytest.mark.parametrize("fault", ["lost_write", "torn_write", "bit_flip"])
def test_bytes_the_disk_changed_or_lost_are_corruption(tmp_path, kind, fault):
    """Lets the disk lie: a write that never happened, or of which the rest never happened, a
    flipped bit in what was read. Its twin tells the truth."""
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
    """Has another process flip one bit; only the block it lies in fails, and the message names path
    and offset."""
    generator = seeded(23)
    disk = Disk(tmp_path, kind)
    extent = disk.extent(4 * CHECKED + BLOCK, gap=BLOCK)
    data = random_bytes(extent.nbytes, generator)
    disk.write(extent, data)
    at = extent.offset + block * CHECKED + 1234
    flip = (
        "import sys; f = open(sys.argv[1], 'r+b'); f.seek(int(sys.argv[2])); b = f.read(1)[0]; "
        "f.seek(int(sys.argv[2])); f.write(bytes([b ^ 4]))"
    )
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
    """Cuts the swap file short inside an extent: a read over the end fails typed, one before it
    still works."""
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


REFUSED = {
    "address": dict(offset=0, shift=8, nbytes=CHECKED, tells=f"{CHECKED} bytes at offset 4096"),
    "offset": dict(
        offset=BLOCK,
        shift=0,
        nbytes=CHECKED,
        tells=f"bytes {BLOCK} to {BLOCK + CHECKED} of an extent of",
    ),
    "offset and address": dict(offset=3, shift=3, nbytes=CHECKED, tells="bytes 3 to"),
    "length": dict(offset=0, shift=0, nbytes=CHECKED + 1, tells=f"bytes 0 to {CHECKED + 1} of"),
    "length of a part": dict(offset=0, shift=0, nbytes=BLOCK, tells=f"bytes 0 to {BLOCK} of"),
    "zero length": dict(offset=0, shift=0, nbytes=0, tells="0 bytes at offset 4096"),
    "beyond the extent": dict(
        offset=2 * CHECKED, shift=0, nbytes=2 * CHECKED, tells=f"of an extent of {3 * CHECKED}"
    ),
    "behind the extent": dict(
        offset=3 * CHECKED, shift=0, nbytes=CHECKED, tells=f"of an extent of {3 * CHECKED}"
    ),
    "far beyond": dict(
        offset=CHECKED, shift=0, nbytes=2**64 - CHECKED, tells=f"of an extent of {3 * CHECKED}"
    ),
}


@pytest.mark.parametrize("move", ["read", "write"])
@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_transfer_is_refused_with_its_numbers_and_changes_nothing(
    tmp_path, kind, move, case
):
    """Tries every misaligned, empty and outlying transfer; afterwards the extent still verifies
    with its old bytes."""
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
    start(
        extent, 0, staging.address, 3 * CHECKED
    ).wait()  # the twin: aligned and inside, it is served


@pytest.mark.parametrize("move", ["read", "write", "verify"])
def test_a_transfer_of_an_extent_in_memory_is_an_error(tmp_path, kind, move):
    """Hands a memory extent to the engine, in a child process since the wrong answer would be a
    crash."""
    staging = Staging(CHECKED)

    def call() -> None:
        engine = Disk(tmp_path, kind).engine
        getattr(engine, move)(
            native.Extent.in_memory(staging.address, CHECKED), 0, staging.address, CHECKED
        )

    outcome = outcome_in_child(call)
    assert outcome.startswith(("UsageError", "RuntimeError", "TypeError")), outcome


@pytest.mark.parametrize("move", ["read", "write"])
def test_a_transfer_of_a_file_the_engine_does_not_have_is_an_error(tmp_path, kind, move):
    """Names file 7 of an engine with one file."""
    disk, staging = Disk(tmp_path, kind), Staging(CHECKED)
    with pytest.raises(UsageError, match="no file 7"):
        getattr(disk.engine, move)(
            native.Extent.in_file(7, 0, CHECKED), 0, staging.address, CHECKED
        )
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
    """Builds engines that cannot work: with no thread or no depth the first transfer would never
    end."""
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
    """Interrupts the wait for a delayed read: KeyboardInterrupt comes before its end, and the read
    still ends well."""
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
