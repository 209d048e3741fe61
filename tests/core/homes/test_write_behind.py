"""Values on their way home: writes that are joined and not waited for, pages that come meanwhile,
zeros nobody writes.

Words used here:

**home**, **leftovers** as in `models.py`. **block**: `native.CHECKSUM_NBYTES` bytes of an array on
disk, with one checksum. **plain model**: name -> the bytes that the writes so far give, kept in
memory. **slow disk**: an engine that moves bytes only when somebody waits for them, and of several
transfers in any order it likes. **under way**: submitted, and neither over nor failed. **twin**:
the same check on something that is wrong, or on something that is known to be right.
"""

from __future__ import annotations

import ctypes
import random
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from behind_cases import (  # noqa: F401
    ARRAYS,
    BLOCK,
    LR,
    PAGE,
    SEED,
    SlowDisk,
    folder,
    home_in,
    kind,
    threads,
)
from doubles import fault_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import parts_of
from marks import few
from meta_cases import awkward_file, on_meta, optimizer_state
from models import (
    at_home,
    differing,
    environment,
    gradients,
    in_child,
    leftovers,
    loss_of,
    prescribed,
    seeded,
    tokens,
    transformer,
)
from native_arrays import MIB, same_bits
from runs import adamw
from torch import nn

import infinity
from infinity import native
from infinity.core.homes.allocator import ArrayAllocator
from infinity.core.homes.arrays import StateArray
from infinity.core.homes.write_behind import PARTS, UNDER_WAY, OpenPart, WriteBehind, writing_behind
from infinity.errors import CorruptionError, InfinityError, StorageError, UsageError

TYPED = (StorageError, CorruptionError)

pytestmark = pytest.mark.timeout(120)  # a hang is a failure, too


def random_moves(rng: random.Random, count: int = 25) -> list[tuple]:
    """Mostly one array after the other and onwards, as a file's tensors come; also back, over, and
    ragged."""
    moves, index = [], 0
    for _ in range(count):
        index = index if rng.random() < 0.6 else rng.randrange(len(ARRAYS) + 1)
        verb = rng.choice(["on", "on", "lend on", "lend on", "at", "lend at", "read"])
        share = rng.choice([0.0, 0.0, rng.random(), rng.randrange(7) / 7])
        numel = rng.choice([0, 1, 63, BLOCK // 4, BLOCK // 2, rng.randrange(4 * BLOCK), 8 * BLOCK])
        moves.append((index, verb, share, numel, rng.randrange(2**30)))
    return moves


MOVES = st.lists(
    st.tuples(
        st.integers(0, len(ARRAYS)),
        st.sampled_from(["on", "at", "lend on", "lend at", "read"]),
        st.sampled_from([0.0, 0.3, 0.5, 6 / 7, 0.9999]),
        st.sampled_from(
            [1, 63, 64, 1024, BLOCK // 8, BLOCK // 4, BLOCK // 2, BLOCK, 3 * BLOCK + 1, 8 * BLOCK]
        ),
        st.integers(0, 9),
    ),
    max_size=30,
)


# --- the bytes ---


@settings(derandomize=True, deadline=None, max_examples=60)
@given(moves=MOVES, blocks=st.sampled_from([1, 2, 3, 4, 5, 9, 64]))
def test_every_read_gives_what_was_written(moves, blocks, folder):
    """Method: writes and reads of seven arrays, against a plain model; again by the store at the
    end."""
    with home_in(folder, service_nbytes=blocks * BLOCK) as home:
        with writing_behind(home.store) as writer:
            home.do(writer, moves)
        assert home.engine.under_way() == 0
        home.check_all()


def wrong_on_a_slow_disk(folder: Path, *, blocks: int = 5, seeds: int = 15) -> list[int]:
    """Seeds whose random moves end in other bytes, or in a checksum that says so, on a slow
    disk."""
    wrong = []
    for seed in range(seeds):
        with home_in(folder, service_nbytes=blocks * BLOCK) as home:
            home.store.io = SlowDisk(home.engine._engine, seed)
            try:
                with writing_behind(home.store) as writer:
                    home.do(writer, random_moves(random.Random(seed)))
                assert home.store.io.under_way() == 0
                home.check_all()
            except (AssertionError, CorruptionError):
                wrong.append(seed)
            home.store.io = home.store.io._engine
    return wrong


@pytest.mark.parametrize("blocks", [1, 4, 9])
def test_a_slow_disk_gives_the_same_bytes(blocks, folder):
    """Method: random moves on a disk that takes what is in a part when it is waited for, in any
    order."""
    assert wrong_on_a_slow_disk(folder, blocks=blocks) == []


own_take = WriteBehind._take


def takes_one_under_way(self: WriteBehind) -> OpenPart:
    return self._under_way.pop() if self._under_way and not self._free else own_take(self)


def forgets_places(self: WriteBehind, array: StateArray, start: int, end: int) -> None:
    pass


def zeros_around(self: WriteBehind, part: OpenPart, begin: int, end: int) -> None:
    part.memory[begin - part.start : end - part.start] = 0


def lends_at_once(self: WriteBehind, array: StateArray, start: int, raw: torch.Tensor) -> None:
    self._store.lend(array, start, raw)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("_take", takes_one_under_way),
        ("_finish_those_with", forgets_places),
        ("_fill", zeros_around),
        ("_lend", lends_at_once),
    ],
)
def test_the_slow_disk_sees_what_is_wrong(name, wrong, folder, monkeypatch):
    """Method: the twin: a part that is filled while it is written, overlapping writes in any order,
    zeros around a write, memory that is borrowed where a part is open."""
    monkeypatch.setattr(WriteBehind, name, wrong)
    assert wrong_on_a_slow_disk(folder) != []


def test_writes_that_follow_each_other_become_large_ones(folder):
    """Counts the writes of 7 blocks that come 64 elements at a time: as many as there are parts to
    fill."""
    with (
        home_in(folder, service_nbytes=(2 * PARTS + 1) * BLOCK) as home,
        writing_behind(home.store) as writer,
    ):
        for begin in range(0, home.arrays[4].numel, 64):
            home.write(writer, 4, begin, 64, begin)
        writer.flush()
        assert len(home.engine.tickets) == 4  # of two blocks, the last of one
        home.check_read(writer, 4, 0, home.arrays[4].numel)


@pytest.mark.parametrize("wrong", [False, True])
def test_parts_that_stay_open_leave_room_for_those_under_way(wrong, folder, monkeypatch):
    """Method: the ends of seven arrays, which nothing follows, and then a long one, with six parts
    and a disk that moves bytes only when it is waited for: two transfers are under way. The twin:
    where any part may stay open, there come to be fewer.
    """
    made = WriteBehind.__init__

    def any_may_stay_open(self: WriteBehind, *args: Any) -> None:
        made(self, *args)
        self._most_open = self._count

    if wrong:
        monkeypatch.setattr(WriteBehind, "__init__", any_may_stay_open)
    with home_in(folder, service_nbytes=(PARTS + 1) * BLOCK) as home:
        home.store.io = SlowDisk(home.engine._engine, 1)
        with writing_behind(home.store) as writer:
            for index in range(len(home.arrays)):
                home.write(writer, index, 0, 64, index)
            most = []
            for begin in range(0, home.arrays[4].numel, 64):
                home.write(writer, 4, begin, 64, begin)
                most.append(home.store.io.under_way())
        home.store.io = home.store.io._engine
        assert (max(most) < UNDER_WAY) if wrong else (max(most) >= UNDER_WAY), most
        home.check_all()


@pytest.mark.parametrize("blocks", [PARTS + 1, 17, 33, 65])
def test_four_arrays_in_turns_are_joined_whatever_the_buffer(blocks, folder):
    """Counts the transfers of small values to four arrays in turns, as a model's parameters come:
    as many as there are parts to fill, and none that reads."""
    with home_in(folder, service_nbytes=blocks * BLOCK) as home:
        home.engine.tickets.clear()
        with writing_behind(home.store) as writer:
            for begin in range(0, 1000, 8):
                for index in (1, 2, 3, 4):
                    home.write(writer, index, begin, 8, begin)
        assert len(home.engine.tickets) <= 3 * 4


def test_two_arrays_in_turns_and_padding_between_values_are_joined_too(folder):
    """Counts transfers: values with a rest that is padding, to two arrays in turns, are written
    once per part; what lies in the padding is read, once for each, and kept."""
    with home_in(folder, service_nbytes=(4 * PARTS + 1) * BLOCK) as home:
        for index in (1, 4):
            home.plain[index].fill_(5.0)
            home.store.write(home.arrays[index], 0, home.plain[index], version=1)
        home.engine.tickets.clear()
        with writing_behind(home.store) as writer:
            for begin in range(0, 1000, 100):
                for index in (1, 4):
                    home.write(writer, index, begin, 93, begin)
        assert (
            len(home.engine.tickets) == 2 * 10 + 2
        )  # nine gaps and the rest behind the last value, each, and two writes
        home.check_all()


@pytest.mark.parametrize("past", [1, PAGE, BLOCK])
def test_a_write_past_the_end_is_refused(past, folder):
    """Writes elements behind the end of an array: an error, as by the store itself, and not a part
    of them."""
    with home_in(folder, service_nbytes=16 * BLOCK) as home:
        array = home.arrays[2]
        with (
            pytest.raises((InfinityError, ValueError, RuntimeError)),
            writing_behind(home.store) as writer,
        ):
            writer.write(
                array, array.numel - 10, torch.ones(10 + past, dtype=array.dtype), version=1
            )


@pytest.mark.parametrize("verb", ["read", "write"])
def test_the_store_itself_may_be_used_meanwhile(verb, folder):
    """Method: a value waits in a part of the service buffer; the store, asked directly, uses the
    same buffer for another array. The value is right in the end, or the store refuses: other bytes
    would get a checksum of their own.
    """
    with home_in(folder) as home:
        with writing_behind(home.store) as writer:
            home.write(writer, 4, 0, 100, 1)
            array = home.arrays[1]
            try:
                if verb == "read":
                    home.store.read(array, 0, array.numel)
                else:
                    home.plain[1].fill_(3.0)
                    home.store.write(array, 0, home.plain[1], version=1)
            except InfinityError:
                return
        home.check_all()


def test_one_writer_at_a_time(folder):
    """A second one would have the same buffer. After the first, another may come."""
    with home_in(folder) as home:
        with writing_behind(home.store):
            with pytest.raises(UsageError), writing_behind(home.store):
                pass
        with writing_behind(home.store) as writer:
            home.write(writer, 4, 0, 100, 1)
        home.check_all()


# --- faults ---


@pytest.mark.parametrize("seed", range(4))
def test_harmless_faults_change_no_byte(seed, kind, folder):
    """Method: transfers that are short, late or answered in another order."""
    faults = fault_plan(seed, reorder=0.5, short_transfer=0.5, delay=0.2, delay_seconds=0.001)
    with home_in(folder, faults=faults) as home:
        with writing_behind(home.store) as writer:
            home.do(writer, random_moves(random.Random(seed), 60))
        assert home.engine.under_way() == 0
        home.check_all()


def outcome(folder: Path, seed: int, **faults: float) -> str:
    """Of random moves and a read of everything: "right", or the error's type. Raises where bytes
    are wrong."""
    with home_in(folder, faults=fault_plan(seed, **faults)) as home:
        try:
            with writing_behind(home.store) as writer:
                home.do(writer, random_moves(random.Random(seed)))
        except TYPED as error:
            for action in (
                writer.flush,
                lambda: home.check_read(home.store, 0, 0, 1),
                lambda: home.write(writer, 0, 0, 1, 0),
            ):
                with pytest.raises(type(error)):  # nothing goes on behind it
                    action()
            return type(error).__name__
        finally:
            assert home.engine.under_way() == 0
        try:
            home.check_all()
        except TYPED as error:
            return type(error).__name__
        return "right"


@pytest.mark.parametrize(
    "fault, name",
    [
        ("eio", "StorageError"),
        ("enospc", "StorageError"),
        ("lost_write", "CorruptionError"),
        ("bit_flip", "CorruptionError"),
    ],
)
def test_a_fault_is_a_typed_error_or_does_no_harm(fault, name, kind, folder):
    """Method: one transfer in 30 fails, at seeded places, in 20 runs of random moves; what is read
    is right until then, and nothing is under way behind the block. Both outcomes are met."""
    assert {outcome(folder, seed, **{fault: 1 / 30}) for seed in range(20)} == {"right", name}


def test_a_read_that_fails_leaves_no_read_ahead_under_way(kind, folder):
    """Method: every transfer brings wrong bytes, late; what was read ahead of the first is over
    when its error comes."""
    with home_in(folder, faults=fault_plan(bit_flip=1.0, delay=1.0, delay_seconds=0.05)) as home:
        with pytest.raises(CorruptionError):
            home.store.read(home.arrays[4], 0, home.arrays[4].numel)
        assert len(home.engine.tickets) > 1 and home.engine.under_way() == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["ValueError", "Ctrl-C"])
def test_an_exception_inside_leaves_nothing_under_way(error, kind, folder):
    """Method: writes that take their time, then an exception in the caller; it comes out as it is,
    and the arrays can be written anew."""
    with home_in(folder, faults=fault_plan(delay=1.0, delay_seconds=0.02)) as home:
        with pytest.raises(error), writing_behind(home.store) as writer:
            home.write(writer, 4, 0, home.arrays[4].numel, 1)
            assert home.engine.under_way()
            raise error
        assert home.engine.under_way() == 0
        with writing_behind(home.store) as writer:
            for index, array in enumerate(home.arrays):
                home.write(writer, index, 0, array.numel, 2)
        home.check_all()


@pytest.mark.parametrize("transfer", range(8))
def test_ctrl_c_in_a_wait_leaves_nothing_under_way(transfer, folder):
    """Method: a slow disk; the wait for a part's turn, for all parts, or for a block that is
    changed in part is interrupted. The service buffer goes with the store: nothing may still be
    read from it or into it then."""
    with home_in(folder) as home:
        home.store.io = disk = SlowDisk(home.engine._engine, 0, transfer)
        with pytest.raises(KeyboardInterrupt), writing_behind(home.store) as writer:
            home.write(writer, 4, 0, home.arrays[4].numel, 1)  # more than there are parts
            home.write(writer, 1, 5, 50_000, 1)  # ragged: a read
        assert disk.under_way() == 0
        home.store.io = disk._engine


# --- what a wrap makes of it ---


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(300, 301), nn.Linear(300, 301)
        self.other.weight = self.one.weight


def test_a_tied_weight_under_two_names_in_one_file(tmp_path):
    """Method: the file has the weight twice, between others, so that it is written again over parts
    under way. Twin: two values are refused."""
    values = {name: value.clone() for name, value in seeded(SEED, Tied).state_dict().items()}
    path = awkward_file(tmp_path / "m.safetensors", values)
    model, _ = infinity.wrap_model(
        on_meta(Tied), None, at_home("nvme", "auto", tmp_path, weights=path)
    )
    assert differing(model.state_dict(), values) == []
    assert model.one.weight is model.other.weight
    path = awkward_file(
        tmp_path / "n.safetensors", values | {"other.weight": values["one.weight"] + 1}
    )
    with pytest.raises(infinity.ConfigError, match="untie them"):
        infinity.wrap_model(on_meta(Tied), None, at_home("nvme", "auto", tmp_path, weights=path))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for at in range(count):
        torch.manual_seed(at)
        loss_of(model, tokens(at)).backward()
        optimizer.step()
        optimizer.zero_grad()


def some_state(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Moments as after seven steps, for a parameter on meta as for one in memory."""
    generator = torch.Generator().manual_seed(seed)
    for param in optimizer.param_groups[0]["params"]:
        first, second = (torch.randn(param.shape, generator=generator) for _ in range(2))
        state = {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second.square()}
        optimizer.state[param] = {
            name: value.to(param.dtype) if value.dim() else value for name, value in state.items()
        }


FORMS = [
    (own, {"param_dtype": param_dtype, "master": master})
    for own, param_dtype in [
        (torch.float32, None),
        (torch.float32, "bf16"),
        (torch.bfloat16, None),
        (torch.float16, None),
    ]
    for master in ("split", "fp32", "none")
]


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped before"])
@pytest.mark.parametrize(
    "own, more",
    FORMS,
    ids=lambda v: "-".join(map(str, v.values())) if isinstance(v, dict) else str(v),
)
@pytest.mark.parametrize(
    "homes", few([("nvme", "nvme"), ("host", "nvme"), ("host", "host")], 1), ids="-".join
)
def test_a_model_from_a_file_is_the_model_wrapped_from_memory(homes, own, more, stepped, tmp_path):
    """Method: on meta with weights=, in memory at these homes, and in memory at home in memory;
    state dicts and optimizer states have the same bits before and after three steps. Twin: the
    steps change them."""
    plain = transformer(SEED, blocks=2).to(own)
    path = awkward_file(
        tmp_path / "m.safetensors", {name: p.clone() for name, p in plain.named_parameters()}
    )
    there = transformer(SEED, blocks=2).to(own)
    empty = on_meta(lambda: transformer(SEED, blocks=2).to(own))
    pairs = []
    for model, place in ((plain, ("host", "host")), (there, homes), (empty, homes)):
        optimizer = adamw(model, LR)
        if stepped:
            some_state(optimizer, SEED)
        weights = {"weights": path} if model is empty else {}
        pairs.append(
            infinity.wrap_model(model, optimizer, at_home(*place, tmp_path, **more, **weights))
        )
    first = dict(pairs[0][0].state_dict())
    for done in (0, 3):
        for model, optimizer in pairs[1:]:
            assert differing(model.state_dict(), pairs[0][0].state_dict()) == [], (
                f"after {done} steps"
            )
            assert differing(optimizer_state(optimizer), optimizer_state(pairs[0][1])) == [], (
                f"after {done} steps"
            )
        for model, optimizer in pairs if not done else ():
            steps(model, optimizer)
    assert differing(first, pairs[0][0].state_dict()) != []


@pytest.mark.parametrize("source", ["file", "drawn"])
def test_values_in_another_order_of_elements_and_pieces(source, tmp_path, monkeypatch):
    """Method: transposed and channels-last bf16 parameters, which are read back and written again
    piece by piece while other parts are under way, on disk with a split master, against the host;
    also after a step that the low bits show in.
    """
    monkeypatch.setattr(infinity.files.weight_files, "READ_NBYTES", BLOCK)
    plain = prescribed(SEED).bfloat16()
    path = awkward_file(tmp_path / "m.safetensors", dict(plain.state_dict()))
    states = []
    for home in ("nvme", "host"):
        torch.manual_seed(SEED)
        model = (
            on_meta(lambda: prescribed(SEED).bfloat16())
            if source == "file"
            else prescribed(SEED).bfloat16()
        )
        weights = {"weights": path} if source == "file" else {}
        model, optimizer = infinity.wrap_model(
            model, adamw(model, LR), at_home(home, home, tmp_path, master="split", **weights)
        )
        states.append([dict(model.state_dict())])
        for at in range(2):
            model({name: grad.bfloat16() for name, grad in gradients(plain, at).items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
            states[-1].append({**model.state_dict(), **optimizer_state(optimizer)})
    for on_disk, on_host in zip(*states):
        assert differing(on_disk, on_host) == []
    assert differing(states[0][0], dict(plain.state_dict())) == []


def test_zeros_that_nobody_writes_are_there(tmp_path, monkeypatch):
    """Method: the master of bf16 values, split, that a wrap does not write is zero on disk and in
    memory. Twin: over bytes that are not zero the same wrap is a checksum's error or another
    master."""
    for home in ("nvme", "host"):
        model = transformer(SEED, blocks=1).bfloat16()
        model, _ = infinity.wrap_model(
            model, adamw(model, LR), at_home(home, home, tmp_path, master="split")
        )
        engine = parts_of(model).engine
        masters = [
            flat.arrays["master"] for unit in parts_of(engine).units for flat in unit.flat_params
        ]
        assert all(
            not parts_of(engine).store.read(array, 0, array.numel).any() for array in masters
        )
    allocate = ArrayAllocator.allocate

    def dirty(self: ArrayAllocator, *given: Any, **more: Any) -> StateArray:
        array = allocate(self, *given, **more)
        if array.flat is not None:
            array.flat.view(torch.uint8).fill_(1)
        return array

    monkeypatch.setattr(ArrayAllocator, "allocate", dirty)
    model = transformer(SEED, blocks=1).bfloat16()
    model, _ = infinity.wrap_model(
        model, adamw(model, LR), at_home("host", "host", tmp_path, master="split")
    )
    engine = parts_of(model).engine
    assert all(
        flat.arrays["master"].flat.any()
        for unit in parts_of(engine).units
        for flat in unit.flat_params
    )


# --- pages ---


def absent_pages(region: native.Region) -> int:
    present = (ctypes.c_ubyte * (region.nbytes // PAGE))()
    assert (
        ctypes.CDLL(None).mincore(
            ctypes.c_void_p(region.address), ctypes.c_size_t(region.nbytes), present
        )
        == 0
    )
    return sum(not byte & 1 for byte in present)


@pytest.fixture
def made(monkeypatch) -> list[native.Region]:
    """The regions that stores make from here on."""
    regions, make_region = [], ArrayAllocator.make_region

    def noting(self: ArrayAllocator, *given: Any, **more: Any) -> native.Region:
        regions.append(make_region(self, *given, **more))
        return regions[-1]

    monkeypatch.setattr(ArrayAllocator, "make_region", noting)
    return regions


@pytest.mark.parametrize(
    "homes",
    [("host", "host"), ("device", "host"), ("nvme", "nvme"), ("host", "nvme")],
    ids="-".join,
)
def test_every_page_is_present_after_a_wrap(homes, made, tmp_path, monkeypatch):
    """Asks the kernel (mincore) about every region of the store. Twin: without the thread some
    pages are absent."""

    def wrap() -> int:
        made.clear()
        model = transformer(SEED, blocks=8)
        model, optimizer = infinity.wrap_model(model, adamw(model, LR), at_home(*homes, tmp_path))
        assert threads() == [] and made
        return sum(map(absent_pages, made))

    assert wrap() == 0
    monkeypatch.setattr(
        native,
        "Pages",
        lambda regions, threads: SimpleNamespace(wait=lambda: None, stop=lambda: None),
    )
    assert wrap() > 0


def write_while_populating() -> str:
    for huge_pages in (True, False):
        for seed in range(12):
            region = native.Region(16 * MIB, huge_pages=huge_pages, touch_threads=0)
            bytes_ = native.tensor_at(region, region.address, region.nbytes, torch.uint8)
            places = (
                torch.randperm(region.nbytes // PAGE, generator=torch.Generator().manual_seed(seed))
                * PAGE
            )
            populating = threading.Thread(target=region.populate, args=(2,))
            populating.start()
            for part in places.split(64):  # the first byte of each page: the one that faults it in
                bytes_[part] = (part // PAGE % 255 + 1).to(torch.uint8)
            populating.join()
            expected = torch.zeros(region.nbytes, dtype=torch.uint8)
            expected[places] = (places // PAGE % 255 + 1).to(torch.uint8)
            assert torch.equal(bytes_, expected), f"run {seed} lost a byte"
            assert absent_pages(region) == 0
            region.populate(2)  # and of pages that are there
            assert torch.equal(bytes_, expected)
    return "right"


def forbid_populating() -> None:
    """Makes this process's kernel one before 5.14: madvise(..., 23) is EINVAL, by a seccomp
    filter."""
    program = b"".join(
        struct.pack("HBBI", *line)
        for line in [
            (0x20, 0, 0, 0),
            (0x15, 0, 3, 28),
            (0x20, 0, 0, 32),
            (0x15, 0, 1, 23),  # number, madvise?, third argument, 23?
            (0x06, 0, 0, 0x00050000 | 22),
            (0x06, 0, 0, 0x7FFF0000),
        ]
    )
    lines = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(lines))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter_) == 0, ctypes.get_errno()
    assert libc.madvise(None, ctypes.c_size_t(0), 23) == -1 and ctypes.get_errno() == 22


@pytest.mark.parametrize("kernel", ["this one", "before 5.14"])
def test_populating_loses_no_byte_that_is_written_meanwhile(kernel):
    """Method: one thread populates a region while another sets a byte of every page; where the
    kernel has no call for it, too."""

    def work() -> str:
        if kernel != "this one":
            forbid_populating()
        return write_while_populating()

    assert in_child(work) == "right"


# --- wraps that fail ---


def fails(*given: Any, **more: Any) -> None:
    raise MemoryError("stop")


FAILURES = {
    "the first write": (StorageError, "eio=1.0", None),
    "a later write": (StorageError, "enospc=1.0,first_piece=5", None),
    "a block that is changed in part": (CorruptionError, "bit_flip=1.0", None),
    "a value": (MemoryError, "", ("infinity.core.wrap.send_home._of_first_rank", fails)),
    "the device's window": (
        MemoryError,
        "",
        ("infinity.core.units.unit.ParamUnit.allocate", fails),
    ),
    "the pages": (MemoryError, "", ("infinity.core.machine.processors.for_pages", fails)),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("what", FAILURES)
def test_a_wrap_that_fails_leaves_nothing(what, swap, monkeypatch):
    """Method: something fails on the way home; its error comes out, no thread and no file stays,
    the model has its bits. Twin: the same model is then wrapped."""
    error, faults, patched = FAILURES[what]
    model = transformer(SEED, blocks=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        monkeypatch.context() as patch,
        environment(**({"INFINITY_FAULTS": faults} if faults else {})),
    ):
        if patched:
            patch.setattr(*patched)
        with pytest.raises(error) as raised:
            infinity.wrap_model(model, adamw(model, LR), at_home("nvme", "nvme", swap))
    del raised
    assert threads() == [] and leftovers(swap) == []
    assert differing(model.state_dict(), before) == []
    model, _ = infinity.wrap_model(model, adamw(model, LR), at_home("nvme", "nvme", swap))
    assert threads() == [] and differing(model.state_dict(), before) == []


# --- copies ---


@pytest.mark.parametrize("count", [0, 1, 7, 100_001])
def test_a_flat_copy_has_every_bit_and_touches_nothing_else(count):
    """Method: random bytes as floats, NaN among them, into the middle of a tensor, also from one
    that overlaps it."""
    target = torch.zeros(count + 8)
    source = torch.randint(256, (4 * count,), dtype=torch.uint8).view(torch.float32)
    native.copy_flat(target[4 : 4 + count], source)
    assert (
        same_bits(target[4 : 4 + count], source)
        and not target[:4].any()
        and not target[4 + count :].any()
    )
    kept = target.clone()
    native.copy_flat(target[3 : 3 + count], target[4 : 4 + count])
    assert same_bits(target[3 : 3 + count], kept[4 : 4 + count])


@pytest.mark.parametrize(
    "source",
    [torch.ones(3), torch.ones(4).half(), torch.ones(8)[::2], torch.ones(4, device="meta")],
    ids=["shorter", "fp16", "strided", "meta"],
)
def test_a_flat_copy_of_what_is_not_flat_memory_is_refused(source):
    """Nothing is copied."""
    target = torch.zeros(4)
    for pair in ((target, source), (source, target)):
        with pytest.raises(InfinityError):
            native.copy_flat(*pair)
    assert not target.any()
