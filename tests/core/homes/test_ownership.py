"""Who owns what in the native core: memory of transfers and updates, threads, forks, descriptors,
space on disk.

Method words: **refused**: the kernel is made to refuse a call of this process, by a seccomp filter,
in a child of its own.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from doubles import fault_plan
from inside import parts_of
from models import leftovers, swap_files, transformer
from native_arrays import ENGINES, MIB, Disk, Staging, outcome_in_child
from runs import adamw

import infinity
from infinity import native
from infinity.core.machine import processors

BLOCK = native.CHECKSUM_NBYTES
CLONE, CLONE3, FALLOCATE = 56, 435, 285  # of x86-64

pytestmark = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="the numbers of system calls are x86-64's"
)


def refuse(calls: list[int], error: int) -> None:
    """From here on this process's system ``calls`` fail with ``error``; it does not get its rights
    back."""
    lines = [(0x20, 0, 0, 0)]  # the call's number
    for position, call in enumerate(calls):
        lines.append((0x15, len(calls) - position, 0, call))
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | error)]
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    held = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(held))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter_) == 0, ctypes.get_errno()


def test_a_wait_that_ctrl_c_ends_frees_no_memory_that_the_disk_still_writes(tmp_path):
    """Method: a late read is forgotten in the middle of its wait, with its lease; who leases next
    gets other memory, or none, and waits for as long as the read takes. Twin: without the lease the
    transfer's memory is given away."""
    late_seconds = 2.0
    disk = Disk(tmp_path, faults=fault_plan(delay=1.0, delay_seconds=late_seconds))
    extent = disk.extent(BLOCK)
    for owned in (True, False):
        pool = native.PinnedPool(native.Region(BLOCK, touch_threads=0))
        lease = pool.try_lease(BLOCK)
        more = {"lease": lease} if owned else {}
        begun = time.monotonic()
        ticket = disk.engine.read(extent, 0, lease.address, BLOCK, **more)
        del lease, more
        assert (pool.try_lease(BLOCK) is None) == owned
        while pool.wait_for_transfer():
            pass
        assert pool.try_lease(BLOCK) is not None and (
            not owned or time.monotonic() >= begun + late_seconds
        )
        ticket.wait()


def test_threads_that_are_refused_end_in_fewer_or_in_an_error():
    """Method: refused threads; a region is made present by the caller alone, an engine says what is
    missing. Nothing hangs."""

    def call() -> str:
        refuse([CLONE, CLONE3], errno.EAGAIN)
        region = native.Region(4 * MIB, touch_threads=4)
        region.populate(3)
        native.Pages([region], 2).wait()
        told = []
        for kind in ("threads", "auto"):
            try:
                native.IoEngine(kind=kind)
            except infinity.StorageError as error:
                told.append(error.errno)
        return f"refused with {told}"

    assert outcome_in_child(call, seconds=30) == f"refused with {[errno.EAGAIN] * 2}"


@pytest.mark.parametrize("kind", ENGINES)
def test_checksums_on_the_disk_need_no_thread_of_their_own(kind, tmp_path):
    """Method: the system refuses every thread but those of the disk; arrays that share one block of
    memory for checksums are written and read all the same. Twin: a bit that is changed on the
    disk is found."""

    def call() -> str:
        disk = Disk(tmp_path, kind=kind, pages=1)
        extents, memory = [disk.extent(MIB // 2) for _ in range(2)], Staging(BLOCK)
        disk.engine.read(extents[0], 0, memory.address, BLOCK, checksum=False).wait()
        refuse([CLONE, CLONE3], errno.EAGAIN)
        for at, extent in enumerate(extents):
            disk.write(extent, torch.full((MIB // 2,), 1 + at, dtype=torch.uint8))
        told = [int(disk.read(extent).max()) for extent in extents]
        disk.change_byte(extents[0].offset)
        try:
            disk.read(extents[0])
        except infinity.CorruptionError:
            told.append("found")
        return f"{told}"

    assert outcome_in_child(call, seconds=30) == "[1, 2, 'found']"


def test_space_is_reserved_where_the_file_system_cannot(tmp_path):
    """Method: refused fallocate; the file has all its blocks, with O_DIRECT too. Twin: on a full
    disk that is ENOSPC."""

    def call() -> str:
        refuse([FALLOCATE], errno.EOPNOTSUPP)
        disk = Disk(tmp_path, nbytes=3 * MIB + BLOCK)
        return (
            f"{os.stat(disk.path).st_blocks * 512 >= 3 * MIB}"
            f" {os.stat(disk.path).st_size == 3 * MIB + BLOCK}"
        )

    assert outcome_in_child(call, seconds=30) == "True True"

    def full() -> str:
        refuse([FALLOCATE], errno.EOPNOTSUPP)
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        try:
            Disk(tmp_path, nbytes=3 * MIB)
        except infinity.StorageError as error:
            return f"{errno.errorcode[error.errno]}, {len(list(tmp_path.glob('swap1*')))} files"
        return "reserved"

    assert outcome_in_child(full, seconds=30) == "EFBIG, 0 files"


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mkfs.btrfs"), reason="needs root and btrfs-progs"
)
def test_reserved_space_serves_overwrites_on_a_copy_on_write_disk(tmp_path):
    """Method: a btrfs of 400 MB in a file; a swap file of 85 % of it is overwritten four times.
    Twin: a file that was reserved without the flag meets ENOSPC."""
    image, place = tmp_path / "image", tmp_path / "mounted"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(400 * 10**6)
    subprocess.run(["mkfs.btrfs", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, place]).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        nbytes = int(shutil.disk_usage(place).free * 0.85) // BLOCK * BLOCK
        engine = native.IoEngine(kind="threads")
        extent = native.Extent.in_file(engine.create_file(str(place / "swap"), nbytes), 0, nbytes)
        staging, rng = Staging(4 * MIB), torch.Generator().manual_seed(6)
        for _ in range(4):
            staging.bytes.random_(generator=rng)
            for at in range(0, nbytes - 4 * MIB, 4 * MIB):
                engine.write(extent, at, staging.address, 4 * MIB).wait()
            os.sync()
        del engine
        (place / "swap").unlink()
        subprocess.run(["btrfs", "filesystem", "sync", place], check=True)
        twin = os.open(place / "twin", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(twin, 0, nbytes)
        with pytest.raises(OSError) as full:
            for _ in range(4):
                for at in range(0, nbytes - 4 * MIB, 4 * MIB):
                    os.pwrite(twin, os.urandom(4 * MIB), at)
                os.sync()
        os.close(twin)
        assert full.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", place])


def test_a_region_is_not_copied_into_children_nor_given_back_there():
    """Method: the kernel's flags of the mapping; then a child drops its Region, and where that was
    maps memory of its own."""
    region = native.Region(2 * MIB, touch_threads=1)
    shown = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [
        flags.split("\n")[0]
        for mapping, flags in zip(shown, shown[1:])
        if f"{region.address:x}-" in mapping
    ]
    assert flags and all(" dc " in f"{each} " for each in flags), flags

    def call() -> str:
        staging = Staging(2 * MIB)
        pid = os.fork()
        if pid == 0:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_long,
            ]
            own = libc.mmap(staging.address, 2 * MIB, 3, 0x22 | 0x10, -1, 0)
            staging.bytes = None
            staging.region = None
            gc.collect()
            ctypes.memset(own, 7, 2 * MIB)  # is still ours
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        staging.bytes[:] = 3
        return f"child {status}, parent {int(staging.bytes.sum()) == 3 * 2 * MIB}"

    assert outcome_in_child(call, seconds=30) == "child 0, parent True"


def test_an_engine_that_waits_for_python_is_dropped_by_python(tmp_path):
    """Method: a read behind a ticket that a thread of Python finishes later; the engine is dropped
    meanwhile. The interpreter goes on, and the transfer is made before the engine is gone."""
    disk = Disk(tmp_path)
    staging, gate = Staging(BLOCK), native.Ticket(1)
    ticket = disk.engine.read(disk.extent(BLOCK), 0, staging.address, BLOCK, after=gate)

    def finish() -> None:
        time.sleep(0.2)
        gate.part_done()

    thread = threading.Thread(target=finish)
    thread.start()
    disk.engine = None
    assert ticket.done
    thread.join()


@pytest.mark.parametrize("checksums", [True, False])
def test_checksums_can_be_switched_off(checksums, tmp_path):
    """Method: a bit of the state on disk is flipped between two steps. With checksums that is
    found, without it is not looked at."""
    swap = tmp_path / "swap"
    swap.mkdir()
    config = {
        "params": "nvme",
        "optimizer": "nvme",
        "nvme_paths": [str(swap)],
        "checksums": checksums,
    }
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    model, optimizer = infinity.wrap_model(model, adamw(model, 1e-2), config)

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.state_dict()

    step()
    (file,) = swap_files(swap)
    descriptor = os.open(file, os.O_RDWR)
    for at in range(0, os.stat(file).st_size, 4096):
        byte = os.pread(descriptor, 1, at)[0]
        os.pwrite(descriptor, bytes([byte ^ 1]), at)
    os.fsync(descriptor)
    os.close(descriptor)
    if checksums:
        with pytest.raises(infinity.CorruptionError):
            step()
    else:
        step()


def test_all_goes_with_the_last_reference_without_the_collector(tmp_path):
    """Method: with the garbage collector off, a wrapped model is trained and dropped; folder and
    descriptors are as before."""
    swap = tmp_path / "swap"
    swap.mkdir()
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        model = transformer(3, blocks=2)
        model, optimizer = infinity.wrap_model(
            model,
            adamw(model, 1e-2),
            {
                "params": "nvme",
                "optimizer": "nvme",
                "nvme_paths": [str(swap)],
                "activations": "host",
            },
        )
        assert leftovers(swap)
        region = next(iter(wrapped_regions(model)))
        del optimizer, model
        assert leftovers(swap) == [] and len(os.listdir("/proc/self/fd")) == before
        assert f"{region:x}-" not in Path("/proc/self/maps").read_text(), (
            "its memory is still there"
        )
    finally:
        gc.enable()


def wrapped_regions(model) -> list[int]:
    """Addresses of the memory of a wrapped model's staging."""
    return [parts_of(model._infinity).store.staging.pool.region.address]


def test_updates_go_in_to_the_core_together_or_not_at_all(tmp_path):
    """Method: three updates, of which the last is refused, then all three right; handing them over
    again changes nothing."""
    updater = native.Updater(native.IoEngine(kind="threads"), 0, 0, 0, 1)
    staging = Staging(3 * 4 * 4096 * 4)

    def update(number: int, count: int = 4096) -> native.UnitUpdate:
        extents = [
            native.Extent.in_memory(
                staging.address + (4 * number + i) * 16384, 16384, staging.region
            )
            for i in range(4)
        ]
        layout = native.Layout(
            rule=native.Rule.ADAMW,
            weight=native.DType.FLOAT32,
            master=native.Master.OWN,
            grad=native.DType.FLOAT32,
            moments=native.DType.FLOAT32,
        )
        hyper = native.Hyperparameters()
        hyper.step, hyper.lr = 1, 0.5
        return native.UnitUpdate(
            layout=layout,
            count=count,
            weight=extents[0],
            master=None,
            exp_avg=extents[1],
            exp_avg_sq=extents[2],
            grad=extents[3],
            runs=[native.Run(0, 4096, hyper)],
            version=1,
        )

    staging.bytes.view(torch.float32).fill_(1.0)
    updates = [update(0), update(1)]
    with pytest.raises(infinity.UsageError):
        updater.submit_all([*updates, update(2, count=100)])
    assert (
        all(each.ticket is None for each in updates)
        and (staging.bytes.view(torch.float32) == 1).all()
    )
    updates.append(update(2))
    for _ in range(3):
        updater.submit_all(updates)
    for each in updates:
        each.ticket.wait()
    after = staging.bytes.view(torch.float32).clone()
    assert updater.elements == 3 * 4096 and not (after == 1).all()


def test_exceptions_of_scopes_and_what_was_pushed_inside():
    """Method: scopes in each other, left in order, by an exception, and with hooks that nobody
    popped."""
    stack: list = []
    scopes = native.Scopes(lambda pack, unpack: stack.append((pack, unpack)), stack.pop)
    with scopes.scope():
        with scopes.scope("a", "b"):
            scopes.push_hooks("c", "d")
            assert scopes.running == 2 and stack == [("a", "b"), ("c", "d")] and scopes.hooks == 2
        assert scopes.running == 1 and stack == [] and not scopes.interrupted
    with pytest.raises(KeyboardInterrupt), scopes.scope():
        scopes.push_hooks("c", "d")
        raise KeyboardInterrupt
    assert scopes.running == 0 and stack == [] and scopes.interrupted


def test_what_must_be_done_is_done_though_it_is_cut_short():
    """Method: work that is struck once, always, or never."""
    calls: list[int] = []

    def work(fails: int):
        def call() -> None:
            calls.append(1)
            if len(calls) <= fails:
                raise KeyboardInterrupt(len(calls))

        calls.clear()
        return call

    native.insist(work(0))
    assert len(calls) == 1
    with pytest.raises(KeyboardInterrupt, match="1"):
        native.insist(work(2))
    assert len(calls) == 3
    with pytest.raises(KeyboardInterrupt, match="1"):
        native.insist(work(100))
    assert len(calls) == 4


def test_processors_are_counted_by_affinity_and_by_every_cgroup_above(tmp_path):
    """Method: cgroup folders as a kernel shows them, of both versions; a quota counts wherever
    above the process it is."""
    own = tmp_path / "own"
    count = len(os.sched_getaffinity(0))
    own.write_text("0::/a/b\n")
    (tmp_path / "a/b").mkdir(parents=True)
    assert processors.available(tmp_path, own) == count
    (tmp_path / "a/b/cpu.max").write_text("max 100000\n")
    assert processors.available(tmp_path, own) == count
    (tmp_path / "a/cpu.max").write_text("50000 100000\n")
    assert processors.available(tmp_path, own) == 1
    own.write_text("5:memory:/x\n4:cpu,cpuacct:/c\n")
    (tmp_path / "cpu/c").mkdir(parents=True)
    (tmp_path / "cpu/c/cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu/c/cpu.cfs_period_us").write_text("100000")
    assert processors.available(tmp_path, own) == count
    (tmp_path / "cpu/c/cpu.cfs_quota_us").write_text("90000")
    assert processors.available(tmp_path, own) == 1
    assert (
        processors.available(tmp_path, tmp_path / "none") == count
        and 1 <= processors.for_pages() <= processors.MOST_FOR_PAGES
    )


ENDS_AT_ONCE = """
import torch, infinity, sys
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = infinity.wrap_model(model, optimizer, {"params": "host", "optimizer": "host"})
from infinity import native
pages = native.Pages([native.Region(256 << 20, touch_threads=0)], 2)
loss = model(torch.ones(2, 512)).sum(); loss.backward(); optimizer.step()
"""


@pytest.mark.slow
def test_processes_end_quietly_whatever_is_under_way():
    """Method: forty processes that end while pages are made and an update runs."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(40):
        done = subprocess.run(
            [sys.executable, "-c", ENDS_AT_ONCE],
            capture_output=True,
            text=True,
            env=environment,
            timeout=280,
        )
        assert done.returncode == 0 and "terminate" not in done.stderr, done.stderr
