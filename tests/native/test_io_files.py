"""The I/O engines: swap files, checksums, devices that do not answer."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import doubles
import prepared
import pytest
import torch
from doubles import fault_plan
from io_cases import BLOCK, CHECKED, kind  # noqa: F401
from native_arrays import MIB, Disk, Staging, from_bits, outcome_in_child, random_bytes, seeded
from opened import left_open, opened

from infinity import native
from infinity.errors import StorageError, UsageError


def test_a_swap_file_is_private_and_reserved_in_full(tmp_path, kind):
    """Looks at mode, length and allocated blocks of a fresh file, under a umask that would allow
    everybody."""
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
    """Asks for a swap file where a user's file lies: opening it would overwrite it, failing to
    reserve delete it."""
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


def test_a_file_the_disk_has_no_room_for_is_an_error_with_its_size_and_leaves_nothing(
    tmp_path, kind
):
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
            return (
                f"errno {error.errno}, left {left}, then"
                f" {engine.create_file(str(tmp_path / 's'), MIB // 2)}"
            )
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
"""  # noqa: E501


@pytest.fixture(scope="module")
def no_tmpfile(tmp_path_factory) -> Path:
    """A library for LD_PRELOAD: file systems without O_TMPFILE."""
    library = tmp_path_factory.mktemp("preload") / "no_tmpfile.so"
    subprocess.run(
        [
            "cc",
            "-shared",
            "-fPIC",
            "-o",
            library,
            Path(__file__).parents[1] / "support" / "disks" / "no_tmpfile.c",
            "-ldl",
        ],
        check=True,
    )
    return library


@pytest.mark.parametrize("lacking", ["nothing", "O_TMPFILE", "O_TMPFILE and O_DIRECT"])
def test_swap_files_have_no_name_on_any_file_system(lacking, tmp_path, no_tmpfile):
    """Method: a process makes a swap file where the file system has all, some, or none of what it
    asks for; no name is left, the bytes come back, and the folder of the process is not touched."""
    if lacking == "nothing":
        done = prepared.run("-c", SWAP_FILE, tmp_path)
    else:
        variables = (
            os.environ
            | {"LD_PRELOAD": str(no_tmpfile)}
            | ({"NO_DIRECT": "1"} if "O_DIRECT" in lacking else {})
        )
        command = [sys.executable, "-c", SWAP_FILE, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=280)
    assert done.returncode == 0, done.stderr
    names, nameless, right, direct = done.stdout.split(maxsplit=3)
    assert (names, nameless, right) == ("[]", "1", "True")
    assert direct.strip() == "False" or "O_DIRECT" not in lacking


def test_an_engine_that_was_shut_down_refuses_and_holds_nothing(tmp_path, kind):
    """Method: shut down with a transfer in flight, while somebody still refers to the engine; its
    files are closed, the transfer is over, and what is asked of it then is a UsageError."""
    engine = native.IoEngine(kind=kind)
    before = len(os.listdir("/proc/self/fd"))
    extent, region = (
        native.Extent.in_file(engine.create_swap_file(str(tmp_path), MIB), 0, MIB),
        native.Region(MIB, True, 1),
    )
    ticket = engine.write(extent, 0, region.address, MIB)
    engine.shut_down()
    engine.shut_down()
    assert ticket.done and len(os.listdir("/proc/self/fd")) <= before
    for call in (
        lambda: engine.read(extent, 0, region.address, MIB),
        lambda: engine.register([region]),
    ):
        with pytest.raises(UsageError, match="was shut down"):
            call()
    assert engine.backend in ("uring", "threads")


@pytest.mark.parametrize("what", ["missing", "not a folder", "too large", "no whole blocks"])
def test_a_swap_file_that_cannot_be_made_is_an_error_and_leaves_nothing(what, tmp_path, kind):
    engine = native.IoEngine(kind=kind)
    (tmp_path / "file").write_text("mine")
    folder = {"missing": tmp_path / "missing", "not a folder": tmp_path / "file"}.get(
        what, tmp_path
    )
    nbytes = {"too large": 2**60, "no whole blocks": 100}.get(what, BLOCK)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((StorageError, UsageError)) as caught:
        engine.create_swap_file(str(folder), nbytes)
    if what != "no whole blocks":
        assert caught.value.filename == str(folder) and caught.value.errno
    assert os.listdir(tmp_path) == ["file"] and len(os.listdir("/proc/self/fd")) == before
    assert engine.create_swap_file(str(tmp_path), BLOCK) == 0


def mounted_in_child(folder: Path, file_system: str, options: str, action) -> str:
    """`action` in a child that alone sees ``file_system`` mounted at ``folder``. Skips without the
    right to mount."""

    def call() -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        clone_newns, ms_rec, ms_private = 0x20000, 0x4000, 1 << 18
        mounted = (
            libc.unshare(clone_newns) == 0
            and libc.mount(b"none", b"/", None, ctypes.c_ulong(ms_rec | ms_private), None) == 0
            and libc.mount(
                b"none", bytes(folder), file_system.encode(), ctypes.c_ulong(0), options.encode()
            )
            == 0
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
            return (
                f"errno {error.errno} of {error.filename == str(path)}, left"
                f" {os.listdir(tmp_path)}, then {engine.create_file(str(path), MIB // 2)}"
            )
        return "no error"

    outcome = mounted_in_child(tmp_path, "tmpfs", "size=1m", call)
    assert outcome == f"errno {errno.ENOSPC} of True, left [], then 0"


def test_a_file_system_without_o_direct_is_served_and_noted(tmp_path, kind):
    """Mounts a ramfs, which knows neither O_DIRECT nor fallocate, in a child and moves bytes
    through it."""

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
        noted = [
            note for note in disk.engine.notes if str(disk.path) in note and "O_DIRECT" in note
        ]
        return (
            f"{disk.engine.is_direct(disk.file)} {len(noted)} {private}"
            f" {torch.equal(disk.read(extent), data)}"
        )

    outcome = mounted_in_child(tmp_path, "ramfs", "", call)
    if outcome == "ramfs has O_DIRECT here":
        pytest.skip(outcome)
    assert outcome == "False 1 True True"


def test_direct_files_are_direct_and_others_are_noted(tmp_path, kind):
    """Compares what `is_direct` says of a file with the flags of its descriptor, and with the
    engine's notes."""
    disk = Disk(tmp_path, kind)
    number = next(fd for fd in os.listdir("/proc/self/fd") if links_to(fd, disk.path))
    with open(f"/proc/self/fdinfo/{number}") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    assert disk.engine.is_direct(disk.file) == bool(flags & os.O_DIRECT)
    assert disk.engine.is_direct(disk.file) == (
        not any(str(disk.path) in note for note in disk.engine.notes)
    )
    assert flags & os.O_CLOEXEC


def links_to(descriptor: str, target: Path | str) -> bool:
    try:
        return str(target) in os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False


def test_dropping_the_engine_closes_its_descriptors_and_ends_its_threads(tmp_path, kind):
    """Counts descriptors and threads before and after, with transfers still in flight when the
    engine is dropped."""
    staging = Staging(MIB)
    gc.collect()
    before = opened()
    disk = Disk(tmp_path, kind, block_nbytes=BLOCK, faults=fault_plan(51, delay=0.02, reorder=0.2))
    staging.bytes.fill_(7)
    extent = disk.extent(MIB)
    ticket = disk.engine.write(extent, 0, staging.address, MIB)
    behind = disk.engine.read(extent, 0, staging.address, MIB, after=ticket)
    under_way = opened()
    assert under_way.descriptors > before.descriptors and under_way.threads > before.threads
    path = disk.path
    del disk
    gc.collect()
    assert ticket.done and behind.done, "the engine went before its transfers"
    assert path.read_bytes()[:MIB] == bytes([7]) * MIB
    assert left_open(before) == (0, 0)


LEAKED: list[Disk] = []  # never closed: closing one whose transfers cannot end would wait for them


def test_a_forked_child_that_drops_the_engine_leaves_the_parents_alone(tmp_path, kind):
    """Forks, as a data loader's worker does; the child drops its copy and ends, then the parent
    reads. All of it runs in a child of its own with a time limit, since what may be wrong is a
    hang."""

    def call() -> str:
        staging = Staging(CHECKED)
        disk = Disk(tmp_path, kind)
        LEAKED.append(disk)
        extent = disk.extent(CHECKED)
        disk.engine.read(extent, 0, staging.address, CHECKED).wait()
        pid = os.fork()
        if pid == 0:
            signal.signal(
                signal.SIGALRM, signal.SIG_DFL
            )  # pytest-timeout's handler would wait for the interpreter
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
    """Compares with the definition at every length to 80 and some beyond, from shifted starts,
    whole and continued."""
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
    """Writes 1 to 7 blocks at once, then verifies each alone: three at a time in lockstep sum as
    one does."""
    generator = seeded(62)
    disk = Disk(tmp_path)
    for blocks in range(1, 8):
        for rest in (0, BLOCK):
            extent = disk.extent(blocks * CHECKED + rest)
            data = random_bytes(extent.nbytes, generator)
            disk.write(extent, data)
            for offset in range(0, extent.nbytes, CHECKED):
                nbytes = min(CHECKED, extent.nbytes - offset)
                assert torch.equal(
                    disk.read(extent, offset, nbytes), data[offset : offset + nbytes]
                )


def test_a_checksum_of_a_tensor_that_is_not_flat_memory_is_refused():
    """Asks for the checksum of a transposed tensor, whose bytes are not in its order."""
    with pytest.raises(UsageError, match="contiguous"):
        native.crc32c(torch.zeros(3, 4).T)
    words = from_bits([1, 2, 3], torch.float32)
    assert native.crc32c(words) == table_crc32c(bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]))


def test_a_device_that_stops_answering_is_an_error_that_names_it(tmp_path, kind):
    """Method: the third transfer never comes back. Its ticket fails within the timeout with
    ETIMEDOUT, the path and the device; what finished before stays right, a later transfer fails at
    once, and dropping the engine does not wait.
    """

    def work():
        engine = native.IoEngine(
            kind=kind,
            timeout_seconds=0.4,
            block_nbytes=MIB,
            layer=doubles.layer(fault_plan(hang=1.0, first_piece=2)),
        )
        extent = native.Extent.in_file(
            engine.create_file(str(tmp_path / "swap"), 8 * MIB), 0, 8 * MIB
        )
        staging = Staging(2 * MIB)
        engine.write(extent, 0, staging.address, MIB).wait()
        engine.read(extent, 0, staging.address, MIB).wait()
        for within in (5.0, 0.2):  # the first waits for the timeout, the second fails at once
            start = time.monotonic()
            with pytest.raises(
                StorageError, match="device .* has not answered for 0.4 s.*INFINITY_IO_TIMEOUT"
            ) as caught:
                engine.read(extent, MIB, staging.address, MIB).wait()
            assert time.monotonic() - start < within
            assert caught.value.errno == errno.ETIMEDOUT and caught.value.filename == str(
                tmp_path / "swap"
            )
        del engine
        return "ended"

    assert outcome_in_child(work, seconds=20) == "ended"


def test_a_late_device_is_no_hung_one(tmp_path, kind):
    """Method: every transfer comes 0.2 s late under a timeout of 1 s; all of them end well."""
    engine = native.IoEngine(
        kind=kind,
        timeout_seconds=1.0,
        layer=doubles.layer(fault_plan(delay=1.0, delay_seconds=0.2)),
    )
    extent = native.Extent.in_file(engine.create_file(str(tmp_path / "swap"), MIB), 0, MIB)
    staging = Staging(MIB)
    for _ in range(3):
        engine.read(extent, 0, staging.address, MIB).wait()


def test_what_has_not_started_can_be_taken_back(tmp_path, kind):
    """Method: one slot, held up by a slow transfer; the ones behind it are cancelled and fail with
    ECANCELED at once, the slow one ends well, and the engine serves on."""
    engine = native.IoEngine(
        kind=kind,
        depth=1,
        block_nbytes=MIB,
        layer=doubles.layer(fault_plan(delay=1.0, delay_seconds=0.3)),
    )
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
    """Method: a queue of two, and ten transfers in one request that all hang, and another request
    behind it. All of them fail in time, and the engine can be dropped."""

    def work():
        plan = fault_plan(hang=1.0, first_piece=1)
        engine = native.IoEngine(
            kind=kind, depth=2, timeout_seconds=0.4, block_nbytes=CHECKED, layer=doubles.layer(plan)
        )
        healthy, hung = (
            native.Extent.in_file(engine.create_file(str(tmp_path / name), MIB), 0, MIB)
            for name in ("healthy", "hung")
        )
        staging = Staging(MIB)
        engine.read(healthy, 0, staging.address, CHECKED).wait()
        tickets = [
            engine.read(hung, 0, staging.address, 10 * CHECKED),
            engine.read(hung, 0, staging.address, CHECKED),
        ]
        for ticket in tickets:
            with pytest.raises(StorageError, match="has not answered"):
                ticket.wait()
        del engine
        return "ended"

    assert outcome_in_child(work, seconds=20) == "ended"


def test_a_cancelled_transfer_that_failed_says_why(tmp_path, kind):
    """Method: of two pieces the first hangs and the second is taken back: the hung device is what
    is told."""

    def work():
        engine = native.IoEngine(
            kind=kind,
            depth=1,
            timeout_seconds=0.4,
            block_nbytes=CHECKED,
            layer=doubles.layer(fault_plan(hang=1.0)),
        )
        extent = native.Extent.in_file(engine.create_file(str(tmp_path / "swap"), MIB), 0, MIB)
        staging = Staging(MIB)
        ticket = engine.read(extent, 0, staging.address, 2 * CHECKED)
        engine.cancel(ticket)
        with pytest.raises(StorageError, match="has not answered"):
            ticket.wait()
        return "ended"

    assert outcome_in_child(work, seconds=20) == "ended"


def test_what_waits_behind_another_can_be_taken_back(tmp_path, kind):
    """Method: a read after a slow write is cancelled before the write ends: it never moves, the
    write does."""
    engine = native.IoEngine(
        kind=kind, layer=doubles.layer(fault_plan(delay=1.0, delay_seconds=0.2))
    )
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
    """Method: an ordinary user with 8 MiB of lockable memory registers 64 MiB: some is, the note
    says how much and how to raise it, and both parts are served."""

    def work():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 * MIB, 8 * MIB))
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        engine = native.IoEngine(kind="uring")
        extent = native.Extent.in_file(engine.create_file(f"{folder}/swap", 64 * MIB), 0, 64 * MIB)
        memory = native.Region(64 * MIB, True, 1)
        engine.register([memory])
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
