"""StagedReads: reads of a unit are cut, waited for, cancelled and copied with nothing left over."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from memory_arrays import Told

from infinity import native
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.staged_reads import PIECE_NBYTES, StagedReads
from infinity.errors import CorruptionError, StorageError

DTYPES = torch.float32, torch.bfloat16
ERRORS = {
    "EIO": lambda: StorageError(errno.EIO, "read", "/swap"),
    "cancelled": lambda: StorageError(errno.ECANCELED, "read", "/swap"),
    "changed": lambda: CorruptionError("block 3"),
}


class Read:
    """A read from ``begin`` on. Brings the numbers of its elements, and is over once it was waited
    for, or if it is ``done``; it fails if ``error`` says how, each time."""

    def __init__(
        self, begin: int = 0, nbytes: int = 0, error: str | None = None, *, done: bool = False
    ):
        self.begin, self.nbytes, self.error = begin, nbytes, error
        self.done, self.waits = done, 0
        self.times, self.lane = (1.0, 2.0), "nvme->host"

    def wait(self) -> None:
        self.waits, self.done = self.waits + 1, True
        if self.error is not None:
            raise ERRORS[self.error]()

    def cancel(self) -> None:
        """Comes too late for it."""

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.done
        first = self.begin // dtype.itemsize
        return torch.arange(first, first + self.nbytes // dtype.itemsize).to(dtype)


class Store:
    """Starts such reads, and keeps what it was asked for; ``reads``: those to begin with."""

    def __init__(self, *, needs_pieces: bool = False, reads: list[Read] | None = None):
        self.asked, self.stalls, self.marks = [], [], []
        self.staging = SimpleNamespace(needs_pieces=needs_pieces, fetch=self.fetch)
        self.traffic = SimpleNamespace(stalled=self.stalled, tell=self.mark)
        self.reads = iter(reads or [])

    def fetch(self, weight, begin, slot, nbytes, *, at, after):
        self.asked.append((weight, begin, slot, nbytes, at, after))
        read = next(self.reads, None) or Read()
        read.begin, read.nbytes = begin, nbytes
        return read

    @contextmanager
    def stalled(self, edge, name):
        self.stalls.append((edge, name))
        yield

    def mark(self, *args, ready):
        self.marks.append(args)


def weights(*nbytes: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(nbytes=each) for each in nbytes]


def started(
    nbytes: tuple[int, ...] = (8, 4), *reads: Read, pieces: bool = False, **kw
) -> tuple[StagedReads, Store]:
    store = Store(reads=list(reads), **kw)
    staged = StagedReads([f"slot {number}" for number in range(len(nbytes))])
    after = [f"update {number}" for number in range(len(nbytes))]
    staged.start(store, weights(*nbytes), after, in_pieces=pieces)
    return staged, store


# --- the start ---


def test_each_shard_is_read_whole_into_its_slot_after_its_update():
    staged, store = started((PIECE_NBYTES + 8, 4))
    assert [each[1:] for each in store.asked] == [
        (0, "slot 0", PIECE_NBYTES + 8, 0, "update 0"),
        (0, "slot 1", 4, 0, "update 1"),
    ]
    assert [each[0].nbytes for each in store.asked] == [PIECE_NBYTES + 8, 4]
    assert [(piece.flat_param, piece.begin) for piece in staged.pieces] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("pieces, needs", [(True, False), (False, True)])
def test_reads_are_cut_in_pieces_if_they_are_wanted_or_needed(pieces, needs):
    """Twin: a flat param of exactly one piece is not cut."""
    size = PIECE_NBYTES
    staged, store = started((size, 2 * size + 12), pieces=pieces, needs_pieces=needs)
    assert [each[1:] for each in store.asked] == [
        (0, "slot 0", size, 0, "update 0"),
        (0, "slot 1", size, 0, "update 1"),
        (size, "slot 1", size, size, "update 1"),
        (2 * size, "slot 1", 12, 2 * size, "update 1"),
    ]
    assert [(piece.flat_param, piece.begin) for piece in staged.pieces] == [
        (0, 0),
        (1, 0),
        (1, size),
        (1, 2 * size),
    ]
    assert size % native.CHECKSUM_NBYTES == 0


def test_reads_are_done_when_the_last_one_is():
    """Twin: without any there is nothing to wait for."""
    assert StagedReads([]).done
    reads = Read(done=True), Read()
    staged, _ = started((8, 4), *reads)
    assert not staged.done
    reads[1].done = True
    assert staged.done


# --- errors ---


def test_all_reads_are_waited_for_and_the_first_error_is_told():
    """Claim: it is returned, not raised. Twin: without one, None is."""
    reads = Read(), Read(error="EIO"), Read(error="changed"), Read()
    staged, _ = started((8, 8, 8, 8), *reads)
    error = staged.first_error()
    assert isinstance(error, StorageError) and [read.waits for read in reads] == [1] * 4
    assert started()[0].first_error() is None


def test_all_reads_are_cancelled_before_any_is_waited_for():
    order, reads = [], [Read(), Read()]
    for read in reads:
        read.cancel, read.wait = (lambda: order.append("cancel")), (lambda: order.append("wait"))
    staged, _ = started((8, 8), *reads)
    assert staged.cancel() is None
    assert order == ["cancel", "cancel", "wait", "wait"]


@pytest.mark.parametrize(
    "errors, told",
    [
        (("cancelled", "cancelled"), None),
        (("changed", None), None),
        ((None, "EIO"), errno.EIO),
        (("cancelled", "EIO"), errno.EIO),
        (("changed", "EIO"), errno.EIO),
        (("EIO", "cancelled"), errno.EIO),
    ],
)
def test_of_cancelled_reads_only_a_disks_error_is_told(errors, told):
    """Twins: that a read was cancelled, or that unused bytes are wrong, is not."""
    reads = [Read(error=each) for each in errors]
    staged, _ = started((8, 8), *reads)
    error = staged.cancel()
    assert (error is None) if told is None else (error.errno == told)
    assert [read.waits for read in reads] == [1, 1]


def test_the_first_error_of_a_disk_is_told_when_reads_are_cancelled():
    reads = Read(error="EIO"), Read(error="EIO")
    staged, _ = started((8, 8), *reads)
    reads[1].wait = lambda: (_ for _ in ()).throw(StorageError(errno.ENOSPC, "read", "/swap"))
    assert staged.cancel().errno == errno.EIO


def test_an_error_of_another_kind_is_raised_when_reads_are_cancelled():
    staged, _ = started()
    staged.pieces[0].read.wait = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        staged.cancel()


# --- copies ---


def flat_params(rank: int = 0, size: int = 1) -> list[FlatParam]:
    """Two, each with a shard of 4096 elements on each of two ranks."""
    return [
        FlatParam(
            FlatParamSpec(dtype, dtype, native.Master.OWN, dtype, dtype, (), stepped=False),
            [torch.nn.Parameter(torch.zeros(5000))],
            Told(rank, size),
        )
        for dtype in DTYPES
    ]


@pytest.mark.parametrize("rank, size", [(0, 1), (0, 2), (1, 2)])
def test_pieces_are_copied_to_their_place_in_this_ranks_slice(rank, size):
    """Method: reads that bring the numbers of their elements; the second flat param comes in two.
    Twin: the other rank's shard is let be."""
    of, numel = flat_params(rank, size), 8192 // size
    staged, store = started((numel * 4, numel * 2))
    whole = staged.pieces.pop()
    for begin, nbytes in ((256, numel * 2 - 256), (0, 256)):
        piece = type(whole)(1, begin, Read(begin, nbytes))
        staged.pieces.append(piece)
    flats = [torch.full((8192,), -1, dtype=dtype) for dtype in DTYPES]
    staged.copy(store, of, flats, "block")
    for flat in flats:
        expected = torch.full_like(flat, -1)
        expected[rank * numel : (rank + 1) * numel] = torch.arange(numel).to(flat.dtype)
        assert torch.equal(flat, expected)


def copied(*reads: Read) -> tuple[StagedReads, Store, BaseException | None]:
    """After the copy of one flat param in so many pieces, which may have failed."""
    store, staged = Store(), StagedReads([])
    for number, read in enumerate(reads):
        read.begin, read.nbytes = 16 * number, 16
        staged.pieces.append(SimpleNamespace(flat_param=0, begin=read.begin, read=read))
    error = None
    try:
        staged.copy(store, flat_params(), [torch.zeros(8192), None], "block")
    except (StorageError, CorruptionError) as failure:
        error = failure
    return staged, store, error


def test_a_read_that_is_not_done_stalls_the_copy_and_one_that_is_does_not():
    _, store, _ = copied(Read(done=True), Read(), Read(done=True))
    assert store.stalls == [("nvme->host", "block")]


def test_every_read_is_marked_on_its_lane_and_all_span_the_reads_times():
    """Twin: before a copy there are no times."""
    reads = [Read() for _ in range(3)]
    reads[0].times, reads[1].times, reads[2].times = (4.0, 5.0), (2.0, 9.0), (3.0, 6.0)
    reads[1].lane = "nvme->device"
    staged, store, _ = copied(*reads)
    assert store.marks == [
        ("nvme->host", "block", 4.0, 5.0),
        ("nvme->device", "block", 2.0, 9.0),
        ("nvme->host", "block", 3.0, 6.0),
    ]
    assert staged.times == (2.0, 9.0) and StagedReads([]).times is None


@pytest.mark.parametrize("done", [True, False])
def test_after_a_failed_read_the_copy_waits_for_the_others_and_raises_its_error(done):
    """Method: a read that has failed already, or fails when it is waited for. Later errors are not
    told."""
    reads = Read(), Read(error="EIO", done=done), Read(error="changed"), Read()
    _, store, error = copied(*reads)
    assert isinstance(error, StorageError)
    assert all(read.waits for read in reads)
    assert len(store.marks) == 1


def test_an_error_of_the_copy_itself_is_raised_when_no_read_runs():
    reads = [Read(), Read()]
    reads[0].values = lambda dtype: torch.zeros(5)[:, None, None]
    with pytest.raises(RuntimeError):
        copied(*reads)
    assert all(read.done for read in reads)


def test_slots_are_all_released():
    released = []
    slots = [SimpleNamespace(release=lambda n=n: released.append(n)) for n in range(3)]
    StagedReads(slots).release()
    assert released == [0, 1, 2]
