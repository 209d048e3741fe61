"""Reads past the host's memory: whole and verified in one of two places, whatever the road does on
the way.

Words used here:

**road**: cuFile, ours (`fake_cufile`); "the device" is memory of the host's.
**landing**: one read, with a place on the device and one on the host.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import doubles
import pytest
import torch
from doubles import fault_plan
from fake_cufile import FakeCuFile, cufile, cufile_library  # noqa: F401
from native_arrays import MIB, Disk, Staging, outcome_in_child, random_bytes, seeded

from infinity import native
from infinity.errors import CorruptionError, StorageError, UsageError

BLOCK, CHECKED = native.BLOCK_NBYTES, native.CHECKSUM_NBYTES
NBYTES = 3 * CHECKED + BLOCK
UNTOUCHED = 0xA5


class Job:
    """A disk with one extent full of bytes, a reader, and both places of what it reads."""

    def __init__(
        self,
        folder: Path,
        fake: FakeCuFile,
        *,
        faults: doubles.FaultPlan | None = None,
        written: bool = True,
        pages: int = 0,
        **options,
    ):
        self.disk = Disk(folder, faults=faults, pages=pages)
        self.extent, self.data = self.disk.extent(NBYTES), random_bytes(NBYTES, seeded(7))
        if written:
            self.disk.write(self.extent, self.data)
        else:
            self.data.zero_()
        self.pool = native.PinnedPool(native.Region(4 * MIB, huge_pages=False, touch_threads=0))
        self.host = native.tensor_at(
            self.pool.region, self.pool.region.address, 4 * MIB, torch.uint8
        )
        self.device = Staging(4 * MIB)
        self.road, self.refusal = native.make_cufile_road(self.device.address, self.device.nbytes)
        self.reader = native.DirectReader(
            self.disk.engine, self.road, **{"calls": fake.calls} | options
        )

    def start(
        self, *, after: native.Ticket | None = None, shift: int = 0, offset: int = 0
    ) -> tuple[native.Landing, int]:
        """Starts a read of the extent from ``offset`` on into the same place of both memories;
        ``shift``: bytes beside it on the device."""
        for memory in (self.host, self.device.bytes):
            memory.fill_(UNTOUCHED)
        lease = self.pool.try_lease(NBYTES)
        at = lease.address - self.pool.region.address
        return (
            self.reader.read(
                self.extent,
                offset,
                lease.address,
                self.device.address + at + shift,
                NBYTES - offset,
                after=after,
                lease=lease,
            ),
            at,
        )

    def finish(self, landing: native.Landing, at: int, *, offset: int = 0) -> str:
        """Waits. Where the bytes are, after they were looked at: "device" or "host"."""
        landing.wait()
        place = self.device.bytes if landing.on_device else self.host
        assert torch.equal(place[at : at + NBYTES - offset], self.data[offset:])
        return "device" if landing.on_device else "host"

    def read(self, **how) -> str:
        return self.finish(*self.start(**how), offset=how.get("offset", 0))

    def refused(self) -> dict[str, int]:
        return {word: count for word, (count, _) in self.reader.refused.items()}

    def close(self) -> None:
        self.reader.shut_down()
        self.disk.engine.shut_down()
        self.road = None


@pytest.fixture
def job(tmp_path, cufile) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(**options) -> Job:
        jobs.append(Job(tmp_path, cufile, **options))
        return jobs[-1]

    yield make
    cufile.set(late=-1)
    for each in jobs:
        while each.reader.stuck:
            time.sleep(0.001)
        each.close()
        each.reader = None


def test_what_was_written_lands_on_the_device(job, cufile):
    """Whole extents and a part; nothing passes the host's memory, and the engine's own reads count
    nothing."""
    made = job()
    assert made.refusal == "" and made.road.name == "cuFile"
    assert made.read() == "device" and made.read(offset=2 * CHECKED) == "device"
    assert (made.host == UNTOUCHED).all() and made.refused() == {}
    assert (
        made.reader.nbytes == 2 * NBYTES - 2 * CHECKED
        and made.disk.engine.nbytes(native.Op.READ) == 0
    )
    assert cufile.count("files") == 1 and cufile.count("drivers") == 1


def test_what_has_its_checksums_on_disk_lands_on_the_device_and_is_verified(job, cufile):
    """One block of checksums is in memory, so those of the extent come from the disk. Twins: a road
    that brings other bytes, a bit that is wrong on the disk, one of the table, and an extent that
    was never written, which goes by bounce."""
    made = job(pages=1)
    other = made.disk.extent(CHECKED)

    def read() -> str:
        made.disk.read(other)  # its checksums take the place of the extent's
        return made.read()

    assert [read() for _ in range(2)] == ["device"] * 2 and made.refused() == {}
    assert made.disk.engine.nbytes(native.Op.READ) == 2 * BLOCK + 2 * CHECKED
    made.disk.change_byte(made.extent.offset + made.extent.nbytes + 5)
    with pytest.raises(CorruptionError, match="the checksums in .* are not those"):
        read()
    made.disk.change_byte(made.extent.offset + made.extent.nbytes + 5)
    assert read() == "device"
    cufile.set(changed=1)
    assert read() == "host" and made.refused() == {"changed": 1}
    made.disk.change_byte(made.extent.offset + CHECKED)
    with pytest.raises(CorruptionError, match="checksum mismatch"):
        read()
    made.close()
    fresh = job(pages=1, written=False)
    assert fresh.read() == "host" and fresh.refused() == {"unwritten": 1}


@pytest.mark.parametrize(
    ("fault", "word", "said"),
    [
        ({"short": 1}, "short", "98304 of 200704 bytes came"),
        ({"refused": 1}, "refused", "error 5008"),
        ({"misaligned": 1}, "misaligned", "Invalid argument"),
        ({"changed": 1}, "changed", "checksum mismatch"),
        ({"half": 1}, "changed", "checksum mismatch"),
        ({"limit": 0}, "refused", "5027"),
        ({"device": 700}, "refused", "CUDA error 700"),
        ({"enter": 101}, "refused", "CUDA error 101"),
    ],
)
def test_a_read_that_the_road_spoils_goes_by_bounce_whole(fault, word, said, job, cufile):
    """Claim: nothing of a spoiled read is used: all bytes are in the host's memory, verified, and
    the reason is counted and told. "half" is a road that says all came where half did: only the
    checksums know."""
    cufile.set(**fault)
    made = job()
    assert made.read() == "host"
    count, first = made.reader.refused[word]
    assert count == 1 and said in first and str(made.disk.path) in first, first


@pytest.mark.parametrize("fault", ["short", "refused", "misaligned"])
def test_a_spoiled_read_does_not_close_the_road_and_many_in_a_row_do(fault, job, cufile):
    made = job()
    cufile.set(**{fault: 3})
    assert [made.read() for _ in range(5)] == ["host"] * 3 + ["device"] * 2
    cufile.set(**{fault: 8})
    assert [made.read() for _ in range(10)] == ["host"] * 10
    assert made.refused() == {fault: 11, "closed": 2}


@pytest.mark.parametrize("fault", ["changed", "limit"])
def test_a_road_that_brings_other_bytes_or_has_no_room_for_the_file_is_not_taken_again(
    fault, job, cufile
):
    cufile.set(**{fault: 1 if fault == "changed" else 0})
    made = job()
    assert [made.read() for _ in range(3)] == ["host"] * 3
    cufile.set(limit=1000)
    assert made.read() == "host" and made.refused()["closed"] == 3


def test_a_late_read_is_overtaken_and_touches_nothing_that_was_handed_out(job, cufile):
    """Claim: a read that comes too late has gone by bounce, its road is closed, and its memory is
    nobody else's until it has returned. Method: the library holds it; the pool gives its memory to
    nobody, and does when it lets go. Its bytes land on the device then, where nothing of the
    landing is looked at any more."""
    made = job(late_seconds=0.05)
    cufile.set(late=1)
    landing, at = made.start()
    assert made.finish(landing, at) == "host"
    assert made.reader.stuck == 1 and made.refused() == {"late": 1}
    del landing
    assert made.pool.leased_nbytes == NBYTES and (made.device.bytes == UNTOUCHED).all()
    assert made.finish(*made.start()) == "host" and made.refused()["closed"] == 1
    assert made.reader.hung == ""
    cufile.set(late=-1)
    while made.reader.stuck:
        time.sleep(0.001)
    while made.pool.wait_for_transfer():
        pass
    assert made.pool.leased_nbytes == 0


def test_reads_behind_a_late_one_are_served(job, cufile):
    """Claim: one thread that is stuck holds nobody up: what waits for it goes by bounce, too.
    Method: one thread, three reads."""
    made = job(late_seconds=0.05, threads=1)
    cufile.set(late=1)
    started = [made.start() for _ in range(3)]
    assert [made.finish(*each) for each in started] == ["host"] * 3


def test_a_read_that_is_stuck_for_long_names_its_file(job, cufile):
    made = job(late_seconds=0.05, hung_seconds=0.06)
    cufile.set(late=1)
    made.read()
    while not made.reader.hung:
        time.sleep(0.001)
    assert made.reader.hung == str(made.disk.path)


def test_an_engine_ends_beside_a_read_that_is_stuck(job, cufile):
    """The reader's end waits for everything but what will not return, and what that still uses
    stays."""
    made = job(late_seconds=0.05)
    cufile.set(late=1)
    made.read()
    made.reader.shut_down()
    assert made.reader.stuck == 1 and cufile.count("files") == 1
    cufile.set(late=-1)
    while made.reader.stuck:
        time.sleep(0.001)
    made.reader = made.road = None
    while cufile.count("drivers"):  # the last thread takes the road with it
        time.sleep(0.001)
    made.reader = native.DirectReader(made.disk.engine, None, calls=0)


def test_space_that_was_only_reserved_is_read_by_bounce(job, cufile):
    """A file system may give zeros for it without a disk; the road is not asked, nor for a block of
    zeros that was written. Failing twin: one block of other bytes, then all."""
    made = job(written=False)
    assert made.read() == "host" and made.refused() == {"unwritten": 1}
    made.data[:CHECKED] = 3
    for data in (made.data[:CHECKED], made.data):
        made.disk.write(made.extent, data)
        assert made.read() == "host" and cufile.count("reads") == 0
    made.data[CHECKED:] = 5
    made.disk.write(made.extent, made.data)
    assert made.read() == "device"


def test_a_place_that_is_not_aligned_is_never_given_to_the_road(job, cufile):
    made = job()
    assert (
        made.read(shift=512) == "host"
        and made.refused() == {"misaligned": 1}
        and cufile.count("reads") == 0
    )


def test_a_read_waits_for_what_it_comes_after(job):
    """A read behind a ticket and behind a write under way; failing twin: a ticket that fails."""
    made = job()
    before = native.Ticket(1)
    landing, at = made.start(after=before)
    assert not landing.done
    before.part_done()
    assert made.finish(landing, at) == "device"
    failed = native.Ticket(1)
    landing, _ = made.start(after=failed)
    failed.part_failed("the step failed")
    with pytest.raises(RuntimeError, match="the step failed"):
        landing.wait()


def test_a_read_that_is_cancelled_before_it_starts_is_not_made(job, cufile):
    made = job()
    before = native.Ticket(1)
    landing, _ = made.start(after=before)
    made.reader.cancel(landing)
    before.part_done()
    with pytest.raises(StorageError) as caught:
        landing.wait()
    assert caught.value.errno == errno.ECANCELED and cufile.count("reads") == 0
    assert made.read() == "device"


def test_what_the_disk_itself_spoils_is_corruption_by_either_way(job):
    """Claim: bytes that are wrong on the disk are read once more by bounce, and then refused with
    their place. Method: one bit changed behind the engine's back."""
    made = job()
    made.disk.change_byte(made.extent.offset + CHECKED + 5)
    landing, _ = made.start()
    with pytest.raises(CorruptionError, match=f"offset {made.extent.offset + CHECKED}"):
        landing.wait()
    assert made.refused() == {"changed": 1}


def test_a_disk_that_fails_the_bounce_is_the_error(job, cufile):
    cufile.set(refused=1)
    made = job(written=False, faults=fault_plan(eio=1.0))
    landing, _ = made.start()
    with pytest.raises(StorageError) as caught:
        landing.wait()
    assert caught.value.errno == errno.EIO


def test_without_a_road_everything_goes_by_bounce(job, cufile):
    """A library that does not open, or does not take the device's memory: why is told, and reading
    goes on."""
    for fault, said in (
        ({"buffer": 5011}, "does not register"),
        ({"driver": 5001}, "does not open (cuFile's error 5001)"),
    ):
        cufile.reset()
        cufile.set(**fault)
        made = job()
        assert made.road is None and said in made.refusal
        assert made.read() == "host" and made.refused() == {"closed": 1}
        made.close()


def test_many_reads_at_once_are_each_whole(job, cufile):
    """Forty reads of different parts, with faults among them, from two threads; each looks at its
    own bytes."""
    made = job(threads=3)
    extents = [made.disk.extent(CHECKED) for _ in range(40)]
    data = [random_bytes(CHECKED, seeded(i)) for i in range(40)]
    for extent, values in zip(extents, data):
        made.disk.write(extent, values)
    cufile.set(short=7, refused=3)  # at once, of which a refusal counts
    started: dict[int, tuple[native.Landing, native.Lease]] = {}

    def start(numbers: range) -> None:
        for i in numbers:
            lease = made.pool.try_lease(CHECKED)
            at = lease.address - made.pool.region.address
            started[i] = (
                made.reader.read(
                    extents[i], 0, lease.address, made.device.address + at, CHECKED, lease=lease
                ),
                lease,
            )

    threads = [threading.Thread(target=start, args=(range(first, 40, 2),)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (landing, lease) in started.items():
        landing.wait()
        place, at = (
            made.device.bytes if landing.on_device else made.host,
            lease.address - made.pool.region.address,
        )
        assert torch.equal(place[at : at + CHECKED], data[i]), i
    assert made.refused() == {"short": 4, "refused": 3}


def test_a_forked_child_may_not_read(job):
    made = job()
    places = made.pool.region.address, made.device.address, NBYTES
    assert "UsageError" in outcome_in_child(lambda: made.reader.read(made.extent, 0, *places))
    assert made.read() == "device"


def test_a_reader_refuses_what_the_engine_would(job):
    made = job()
    with pytest.raises(UsageError):
        made.reader.read(made.extent, BLOCK, made.pool.region.address, made.device.address, BLOCK)
    with pytest.raises(UsageError, match="at least one thread"):
        native.DirectReader(made.disk.engine, made.road, calls=0, threads=0)
    with pytest.raises(UsageError, match="cannot verify"):
        native.DirectReader(made.disk.engine, made.road, calls=0)
    with pytest.raises(UsageError, match="cannot verify"):
        native.DirectReader(made.disk.engine, made.road, calls=0, sampled=4)
    with pytest.raises(UsageError, match="one in -1"):
        native.DirectReader(made.disk.engine, made.road, calls=0, sampled=-1)


TURNS = 3  # of the four checksum blocks of an extent: one, one, two


def test_a_sampled_read_verifies_each_byte_once_in_so_many(job, cufile):
    """Claim: without kernels each read copies out the part whose turn it is, and no byte twice
    in a round. Two pieces begin at different turns. Failing twin: nothing that is not sampled is
    copied."""
    made = job(calls=cufile.driver_calls, sampled=TURNS)
    copied = [0]
    for _ in range(2 * TURNS):
        assert made.read() == "device"
        copied.append(cufile.count("copied"))
    parts = [after - before for before, after in zip(copied, copied[1:])]
    assert (
        sorted(parts[:TURNS]) == [CHECKED, CHECKED, CHECKED + BLOCK]
        and parts[TURNS:] == parts[:TURNS]
    )
    before = cufile.count("copied")
    assert made.read(offset=CHECKED) == "device" and cufile.count("copied") - before in (
        CHECKED,
        CHECKED + BLOCK,
    )
    assert made.refused() == {}
    made.close()
    unverified = job(calls=cufile.driver_calls, checksums=False)
    before = cufile.count("copied")
    assert unverified.read() == "device" and cufile.count("copied") == before


@pytest.mark.parametrize("block", range(4))
def test_a_corrupt_piece_is_found_within_so_many_sampled_reads(block, job, cufile):
    """Claim: a bit that is wrong on the disk is an error once in every round, wherever it is.
    Failing twin: without sums it never is."""
    made = job(sampled=TURNS, calls=cufile.driver_calls)
    made.disk.change_byte(made.extent.offset + block * CHECKED + 5)
    assert found_by(made, TURNS) and made.refused() == {"changed": 1}
    assert found_by(made, 1)  # the road to the file is closed from then on: everything is verified
    made.close()
    blind = job(calls=cufile.driver_calls, checksums=False)
    blind.disk.change_byte(blind.extent.offset + block * CHECKED + 5)
    assert not found_by(blind, 2 * TURNS)


def test_a_road_that_changes_bytes_is_found_out_by_sampling(job, cufile):
    """The sums are those of what arrived, not of what is on the disk: every read is changed on the
    way, and after a round at the latest the file is read through the host, whole. What had come by
    then is wrong: that is what sampling costs.
    """
    made = job(calls=cufile.driver_calls, sampled=TURNS)
    cufile.set(changed=TURNS)
    for _ in range(TURNS):
        landing, at = made.start()
        landing.wait()
        if not landing.on_device:
            break
    assert made.finish(landing, at) == "host" and made.refused()["changed"] == 1


def test_a_device_that_gives_nothing_back_is_refused(job, cufile):
    made = job(calls=cufile.driver_calls, sampled=1)
    cufile.set(device=700)
    assert (
        made.read() == "host"
        and "it cannot be verified (CUDA error 700)" in made.reader.refused["refused"][1]
    )


def found_by(made: Job, reads: int) -> bool:
    """Whether one of so many reads is refused as corrupt."""
    for _ in range(reads):
        landing, _ = made.start()
        try:
            landing.wait()
        except CorruptionError:
            return True
    return False
