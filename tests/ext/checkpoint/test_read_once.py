"""Loads that read files once, straight to where their values belong, and put back what was there.

Words used here: **the job**, **uninterrupted** as in `checkpoint_cases.py`. **once**: files that
are read to their homes at once, and are checked meanwhile. **room**: memory for what they replace;
without it a file is checked before anything changes, and read again. **struck**: an exception at
one place of a load; every place has its turn.
"""

from __future__ import annotations

import errno
import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import doubles
import pytest
import torch
from checkpoint_cases import (  # noqa: F401
    SEED,
    Job,
    check_like,
    saved,
    seed_everything,
    uninterrupted,
)
from inside import parts_of
from models import at_home, differing, environment, loss_of, tokens, transformer, with_least
from runs import adamw

import infinity
from infinity import native
from infinity.core.machine.sizes import round_up
from infinity.core.machine.tiers import Tier
from infinity.core.units.home_arrays import HomeArrays
from infinity.ext.checkpoint import file_reader, manifest, parts, read_once
from infinity.ext.checkpoint.file_reader import Destination, WholeFile, read_files
from infinity.ext.checkpoint.read_once import is_zero

PIECE = native.CHECKSUM_NBYTES  # the smallest there are


@pytest.fixture
def in_small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(file_reader, "SLOT_NBYTES", PIECE)


@pytest.fixture
def job(tmp_path) -> Job:
    """A job that has taken one step, on the host."""
    torch.set_num_threads(1)
    return Job(("host", "host"), tmp_path / "none", seed=SEED + 1).run(1)


@contextmanager
def read_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[str]]]:
    """Names the files that are read once, and those that are summed before."""
    found: dict[str, list[str]] = {"once": [], "before": []}
    sum_of_stretch = manifest._sum_of_stretch

    def note(path: Path, begin: int, end: int) -> int:
        found["before"] += [path.name] if begin == 0 else []
        return sum_of_stretch(path, begin, end)

    def note_whole(files: list[WholeFile], running: list, **more: Any) -> None:
        found["once"] += [file.path.name for file in files]
        read_files(files, running, **more)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_sum_of_stretch", note)
        patch.setattr(read_once, "read_files", note_whole)
        yield found


# --- files ---


def a_file(path: Path, nbytes: int) -> tuple[torch.Tensor, int]:
    """Writes random bytes: they, and their checksum."""
    content = torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes)
    )
    path.write_bytes(content.numpy().tobytes())
    return content, native.crc32c(content)


@pytest.mark.parametrize(
    "places",
    [
        [],
        [(0, 12 * PIECE, 0)],
        [(4096, 3 * PIECE, 4096)],
        [(100, 5 * PIECE + 100, 100)],
        [(100, 5 * PIECE, 7)],
        [(0, 1, 0), (1, 2, 0), (5, 9, 1)],
        [
            (0, 300, 3),
            (300, 4096, 300),
            (4096, 7 * PIECE - 4096, 4096),
            (7 * PIECE - 4096, 12 * PIECE, -4096),
        ],
        [(12 * PIECE - 9, 12 * PIECE, 0)],
        [(-5000, -1, 0)],
        [(100, -7, 100), (-7, -2, 1), (-1, 0, 1)],
    ],
)
@pytest.mark.parametrize("behind", [0, 4096, 9, 4096 + 4095])
def test_every_byte_comes_to_where_it_belongs(
    places, behind, in_small_pieces, tmp_path, monkeypatch
):
    """Method: a file of 12 pieces and some bytes is read to ``places`` (begin, end, from the file's
    end where below zero, and how the memory lies to blocks); what is beside them stays. What lies
    as the file's blocks do is not copied. The twin: one bit of another is found, wherever it is.
    """
    nbytes = 12 * PIECE + behind
    places = [(begin % nbytes, end % nbytes or nbytes, shift) for begin, end, shift in places]
    content, checksum = a_file(tmp_path / "file", nbytes)
    memory, destinations, straight, at = native.Region(4 * nbytes, True, 1), [], 0, 4096
    whole = native.tensor_at(memory, memory.address, memory.nbytes, torch.uint8)
    for begin, end, shift in places:
        at = round_up(at, 4096) + shift % 4096
        destinations.append(Destination(begin, whole[at : at + end - begin]))
        blocks = nbytes // 4096 * 4096
        first, last = round_up(begin, PIECE), blocks if end >= blocks else end // PIECE * PIECE
        straight += max(0, last - first) if (shift - begin) % 4096 == 0 else 0
        at += end - begin + 5
    copied, copy, began = [], native.copy_flat, []
    monkeypatch.setattr(
        native,
        "copy_flat",
        lambda target, source: (copied.append(source.numel()), copy(target, source)),
    )
    file, arrived = WholeFile(tmp_path / "file", nbytes, checksum, destinations), []
    read_files([file], [], before=began.append, after=arrived.append)
    assert began == destinations and sum(arrived) == nbytes
    expected = torch.zeros_like(whole)
    for destination in destinations:
        here = destination.memory.data_ptr() - memory.address
        expected[here : here + destination.memory.numel()] = content[
            destination.begin : destination.end
        ]
    assert torch.equal(whole, expected)
    assert sum(copied) == sum(end - begin for begin, end, _ in places) - straight
    for at in (0, PIECE - 1, PIECE, nbytes // 2, nbytes - 1):
        content[at] ^= 4
        (tmp_path / "file").write_bytes(content.numpy().tobytes())
        with pytest.raises(infinity.CorruptionError, match="file was changed"):
            read_files([file], [], before=lambda file: None)
        content[at] ^= 4


def test_more_files_than_are_open_at_once(tmp_path, monkeypatch):
    """Method: seven files, two at a time, each to its own memory. One that is missing is a
    StorageError that names it."""
    monkeypatch.setattr(file_reader, "FILES_AT_ONCE", 2)
    files, contents = [], []
    for number in range(7):
        content, checksum = a_file(tmp_path / str(number), 4096 * (number + 1))
        files.append(
            WholeFile(
                tmp_path / str(number),
                content.numel(),
                checksum,
                [Destination(0, torch.zeros_like(content))],
            )
        )
        contents.append(content)
    read_files(files, [], before=lambda file: None)
    assert all(
        torch.equal(file.destinations[0].memory, content) for file, content in zip(files, contents)
    )
    (tmp_path / "5").unlink()
    with pytest.raises(infinity.StorageError, match=re.escape(str(tmp_path / "5"))):
        read_files(files, [], before=lambda file: None)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 4096, 4097, 100_003])
def test_zeros_are_known(nbytes):
    raw = torch.zeros(nbytes, dtype=torch.uint8)
    assert is_zero(raw)
    for at in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        raw[at] = 1
        assert not is_zero(raw)
        raw[at] = 0


# --- which files ---


@pytest.mark.parametrize(
    ("homes", "more"),
    [
        (("host", "host"), {}),
        (("host", "host"), {"moments": "int8"}),
        (("device", "host"), {}),
        (("device", "device"), {}),
    ],
)
def test_files_for_homes_in_memory_are_read_once(homes, more, tmp_path, monkeypatch):
    """Method: a job's own checkpoint, into another job. All its files but that of the rest are read
    once; without room, all are read before. The values are the same."""
    path = tmp_path / "checkpoint"
    job = Job(homes, tmp_path / "none", **more).run(2)
    job.save(path)
    names = sorted(file.name for file in path.glob("*/*.safetensors"))
    units = [name for name in names if name.startswith("unit-")]
    state = job.state()
    for room in (1 << 30, 0):
        other = Job(homes, tmp_path / "none", seed=SEED + 1, **more).run(1)
        with monkeypatch.context() as patch, read_by(monkeypatch) as found:
            patch.setattr(read_once, "memory_left", lambda room=room: room)
            other.load(path)
        assert found["once"] == (units if room else [])
        assert sorted(found["once"] + found["before"]) == names
        assert differing(other.state(), state) == []
        check_same_steps(job, other, path)


def check_same_steps(job: Job, other: Job, path: Path) -> None:
    """Both go on alike from the checkpoint."""
    ends = []
    for each in (job, other):
        each.load(path).run(4)
        ends.append(each.state())
    assert differing(*ends) == []
    job.load(path)


@pytest.mark.parametrize("homes", [("nvme", "nvme"), ("host", "nvme")])
def test_homes_on_disk_are_checked_before(homes, saved, uninterrupted, swap, monkeypatch):
    """What a disk holds is not kept: that would take as long as reading twice."""
    job = Job(homes, swap)
    with read_by(monkeypatch) as found:
        job.load(saved)
    assert not found["once"] and len(found["before"]) == len(list(saved.glob("*/*.safetensors")))
    check_like(job.run(3), uninterrupted, 2)


def test_room_for_some(saved, uninterrupted, tmp_path, monkeypatch):
    """Method: with room for half of what is replaced, some files are read once and the others
    checked before."""
    job = Job(("host", "host"), tmp_path / "none", seed=SEED + 1).run(1)
    nbytes = sum(file.stat().st_size for file in saved.glob("*/unit-*"))
    monkeypatch.setattr(read_once, "for_the_engine", lambda left: nbytes // 2)
    with read_by(monkeypatch) as found:
        job.load(saved)
    assert found["once"] and len(found["before"]) > 1
    check_like(job.run(3), uninterrupted, 2)


def test_a_budget_is_kept(saved, uninterrupted, tmp_path, monkeypatch):
    """What a load keeps is the host's memory: where ``host_memory`` has no room for it, files are
    checked before."""
    model = transformer(SEED, blocks=3)
    least = with_least(
        model, adamw(model, 1e-2), {"param_dtype": "bf16", **at_home("host", "host", tmp_path)}
    )["host_memory"]
    for budget, once in ((least, False), (4 * least, True)):
        job = Job(("host", "host"), tmp_path / "none", seed=SEED + 1, host_memory=budget).run(1)
        with read_by(monkeypatch) as found:
            job.load(saved)
        assert bool(found["once"]) == once
        check_like(job.run(3), uninterrupted, 2)


# --- struck ---


def strikes(
    monkeypatch: pytest.MonkeyPatch,
    job: Job,
    path: Path,
    place: Callable[[Callable[[], None]], None],
) -> Iterator[int]:
    """Loads ``path`` into ``job``, struck at the first, second, ... time that ``place`` has it
    called, until a load is not."""
    for number in itertools.count():
        calls = itertools.count()

        def strike(number=number, calls=calls) -> None:
            if next(calls) == number:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            place(patch, strike)
            try:
                job.load(path)
            except KeyboardInterrupt:
                # puts right what the exception left: a load would check before, as wherever
                # something is to be put right
                job.state()
                yield number
            else:
                return


def before_a_file(patch, strike):
    original = file_reader._Open

    def opened(*args):
        strike()
        return original(*args)

    patch.setattr(file_reader, "_Open", opened)


def after_a_piece(patch, strike):
    patch.setattr(
        file_reader._Open,
        "arrived",
        lambda self, nbytes, original=file_reader._Open.arrived: (strike(), original(self, nbytes)),
    )


def while_keeping(patch, strike):
    patch.setattr(read_once, "is_zero", lambda raw: (strike(), is_zero(raw))[1])


@pytest.mark.slow
@pytest.mark.parametrize("place", [before_a_file, after_a_piece, while_keeping])
def test_a_load_that_is_struck_while_it_reads_changes_nothing(
    place, saved, uninterrupted, job, in_small_pieces, monkeypatch
):
    """Method: Ctrl-C at every file, piece and home in turn; then every bit is as it was, and the
    job can go on at once: with a step or a load, which is the twin."""
    before, struck = job.state(), 0
    for struck in strikes(monkeypatch, job, saved, place):
        assert differing(job.state(), before) == []
    assert struck >= 3
    check_like(job.run(3), uninterrupted, 2)


def test_what_was_put_back_trains_as_if_nothing_had_been(
    saved, in_small_pieces, tmp_path, monkeypatch
):
    """Method: of two equal jobs one is struck in the middle of a load and goes on; also where
    gradients have landed."""
    ends = []
    for is_struck in (False, True):
        seed_everything()
        job = Job(("host", "host"), tmp_path / "none", seed=SEED + 1).run(1)
        if is_struck:
            next(itertools.islice(strikes(monkeypatch, job, saved, after_a_piece), 2, None))
            torch.manual_seed(3)
        ends.append(job)
    for job in ends:
        torch.manual_seed(3)
        loss_of(job.model, tokens(SEED)).backward()
        if job is ends[1]:
            next(itertools.islice(strikes(monkeypatch, job, saved, after_a_piece), 3, None))
        job.optimizer.step()
    assert differing(ends[0].state(), ends[1].state()) == []


@pytest.mark.parametrize("fault", ["eio", "bit_flip"])
def test_a_disk_that_fails_at_any_piece_changes_nothing(
    fault, saved, uninterrupted, job, in_small_pieces, monkeypatch
):
    """Method: every piece of the reading from the n-th on is refused, or has a bit of another, for
    every n."""
    original, before = native.make_io_engine, job.state()
    for first in itertools.count():
        plan = doubles.FaultPlan()
        plan.first_piece = first
        setattr(plan, fault, 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(
                native,
                "make_io_engine",
                lambda plan=plan, **options: original(layer=doubles.layer(plan), **options),
            )
            try:
                job.load(saved)
            except (infinity.StorageError, infinity.CorruptionError) as error:
                assert str(saved) in str(error)
                assert differing(job.state(), before) == []
            else:
                break
    assert first >= 10
    check_like(job.run(3), uninterrupted, 2)


def test_a_disk_that_hangs_may_still_write_so_nothing_goes_on(saved, job, monkeypatch):
    """Method: reads never end. The error says what to do, and every later use is told it, a load
    too."""
    plan, original = doubles.FaultPlan(), native.make_io_engine
    plan.hang, plan.first_piece = 1.0, 2
    with environment(INFINITY_IO_TIMEOUT="0.5"), monkeypatch.context() as patch:
        patch.setattr(
            native,
            "make_io_engine",
            lambda **options: original(layer=doubles.layer(plan), **options),
        )
        with pytest.raises(infinity.StorageError, match="end this process") as raised:
            job.load(saved)
    assert raised.value.errno == errno.ETIMEDOUT
    for use in (job.state, lambda: job.run(2), lambda: job.load(saved)):
        with pytest.raises(infinity.InfinityError, match="end this process|Load a checkpoint"):
            use()


def damaged_copy(saved: Path, path: Path) -> Path:
    shutil.copytree(saved, path)
    last = sorted(path.glob("*/unit-*"))[-1]
    last.write_bytes(last.read_bytes()[:-1] + bytes([last.read_bytes()[-1] ^ 1]))
    return path


@pytest.mark.parametrize("times", [1, 2, 100])
def test_struck_while_it_puts_back_it_does_so_again(
    times, saved, uninterrupted, job, in_small_pieces, tmp_path, monkeypatch
):
    """Method: a damaged checkpoint, and Ctrl-C when the third home is put back, once, twice, or
    whenever it is tried. Everything is as it was; or, in the end, nothing can be used but a load,
    which makes it whole."""
    damaged, before = damaged_copy(saved, tmp_path / "damaged"), job.state()
    put_back, struck = read_once.ReadOnce._put_back, []

    def cut_short(self, *args):
        if len(struck) < times:
            struck.append(1)
            for home, kept in self._replaced[:3]:
                home.copy_(kept) if kept is not None else home.zero_()
            raise KeyboardInterrupt
        put_back(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(read_once.ReadOnce, "_put_back", cut_short)
        with pytest.raises(KeyboardInterrupt):
            job.load(damaged)
    if times < 4:
        assert differing(job.state(), before) == []
    else:
        with pytest.raises(infinity.UsageError, match="neither the old one nor the new one"):
            job.run(2)
        with read_by(monkeypatch) as found:
            job.load(saved)
        assert not found["once"]  # there is nothing to put back
    check_like(job.load(saved).run(3), uninterrupted, 2)


def test_struck_before_anything_is_read_nothing_is_lost(saved, uninterrupted, job, monkeypatch):
    """Method: Ctrl-C while the homes are waited for."""
    before = job.state()
    with monkeypatch.context() as patch:
        patch.setattr(
            HomeArrays, "wait_idle", lambda self: (_ for _ in ()).throw(KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            job.load(saved)
    assert differing(job.state(), before) == []
    check_like(job.load(saved).run(3), uninterrupted, 2)


def test_a_hung_disk_is_known_however_often_one_presses_ctrl_c(saved, job, monkeypatch):
    """Method: reads never end, and Ctrl-C comes while it waits for one, and again when it stops:
    nothing goes on all the same."""
    plan, original, stop = doubles.FaultPlan(), native.make_io_engine, read_once.stop
    plan.hang, plan.first_piece = 1.0, 1
    struck = []

    def stop_and_strike(running):
        hung = stop(running)
        if not struck:
            struck.append(hung)
            raise KeyboardInterrupt
        return hung

    def strike(self, nbytes):
        raise KeyboardInterrupt

    with environment(INFINITY_IO_TIMEOUT="0.5"), monkeypatch.context() as patch:
        patch.setattr(
            native,
            "make_io_engine",
            lambda **options: original(layer=doubles.layer(plan), **options),
        )
        patch.setattr(read_once, "stop", stop_and_strike)
        patch.setattr(file_reader._Open, "arrived", strike)
        with pytest.raises((KeyboardInterrupt, infinity.StorageError)):
            job.load(saved)
    assert struck != [""]
    for use in (job.state, lambda: job.run(2), lambda: job.load(saved)):
        with pytest.raises(infinity.InfinityError, match="end this process|Load a checkpoint"):
            use()


def test_where_room_is_refused_at_last_files_are_checked_before(
    saved, uninterrupted, job, tmp_path, monkeypatch
):
    """Method: the memory is refused when it is taken, for a whole checkpoint and for a damaged one.
    Nothing stays charged, also while somebody keeps the error."""
    charged = parts_of(job.model).ledger.accounts[Tier.HOST]
    before, nbytes = job.state(), charged.charged_nbytes
    damaged = damaged_copy(saved, tmp_path / "damaged")
    with pytest.raises(infinity.CorruptionError) as kept:
        job.load(damaged)
    assert charged.charged_nbytes == nbytes and kept.value
    original = native.Region
    with monkeypatch.context() as patch, read_by(monkeypatch) as found:
        patch.setattr(
            native,
            "Region",
            lambda nbytes, **more: (
                refuse() if more.get("touch_threads") == 0 else original(nbytes, **more)
            ),
        )
        with pytest.raises(infinity.CorruptionError):
            job.load(damaged)
        assert differing(job.state(), before) == [] and not found["once"]
    assert charged.charged_nbytes == nbytes
    check_like(job.load(saved).run(3), uninterrupted, 2)


def refuse():
    raise MemoryError


def test_a_header_that_is_read_twice_is_the_same(saved, job, monkeypatch):
    """Method: what is read of a header at first has two tensors of one size in each other's place,
    and the rest of the reading is right: values in the wrong homes, which no checksum of the file
    shows."""
    keep, before, names = read_once.keep_header, job.state(), re.compile(rb'"(exp_avg|exp_avg_sq)/')
    other = {b"exp_avg": b"exp_avg_sq", b"exp_avg_sq": b"exp_avg"}

    def misread(path):
        return names.sub(lambda found: b'"' + other[found[1]] + b"/", keep(path))

    with monkeypatch.context() as patch:
        patch.setattr(read_once, "keep_header", misread)
        with pytest.raises(infinity.CorruptionError, match="two headers"):
            job.load(saved)
    assert differing(job.state(), before) == []


def test_a_header_that_cannot_be_read_is_a_storage_error(saved, job, monkeypatch):
    """Its file is named, and nothing has changed."""
    before = job.state()

    def refused(path):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(parts, "keep_header", refused)
        with pytest.raises(infinity.StorageError, match=re.escape(str(saved))):
            job.load(saved)
    assert differing(job.state(), before) == []
