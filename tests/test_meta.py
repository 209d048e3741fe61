"""Models on ``meta``: what is read from safetensors files, what modules draw for themselves, and what a failure leaves.

Words used here: **home**, **child** as in `models.py`. **piece**, **block** as in `infinity/checkpoint/weight_files.py`.
**small blocks**: blocks of 64 KiB, the least that can be asked for, instead of 4 MiB, so that small files have several.
**awkward file**: one whose tensors start at odd offsets, behind a header and one-byte tensors of odd length.
**twin**: the same check on something that is wrong, or on something that is known to be right.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    TIERS,
    Prescribed,
    at_home,
    bits,
    differing,
    environment,
    gradients,
    in_child,
    leftovers,
    prescribed,
    seeded,
)
from runs import adamw
from torch import nn

import infinity
from infinity import native
from infinity.api import initialiser
from infinity.checkpoint import weight_files
from infinity.checkpoint.weight_files import WeightFiles

SEED = 61
LR = 1e-2
MIB = 2**20
BLOCK = 4 * MIB
SMALL = native.CHECKSUM_NBYTES
CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TYPED = (infinity.ConfigError, infinity.CorruptionError, infinity.StorageError)

every_home = pytest.mark.parametrize("home", TIERS)
State = dict[str, torch.Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_file(path: Path, tensors: State, *, start: int | None = None) -> Path:
    """A safetensors file with the tensors in this order; the first one's bytes begin at ``start``."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": CODES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    if start is not None:
        assert len(text) + 8 <= start
        text = text.ljust(start - 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(raw(tensor))
    return path


def awkward_file(path: Path, tensors: State) -> Path:
    """The tensors, each behind a one-byte tensor of odd length that no model has."""
    between = {f"odd.{i}": torch.ones(2 * i % 7 + 1, dtype=torch.int8) for i in range(len(tensors))}
    mixed = [pair for pairs in zip(between.items(), tensors.items()) for pair in pairs]
    return write_file(path, dict(mixed), start=16385)


def random_bytes(nbytes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A flat tensor of any bits that ``dtype`` can have, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype)


def streamed(path: Path, names: set[str] | None = None) -> State:
    """What the stream gives, put together; fails where its pieces are not the tensors' elements once each, in order."""
    files = WeightFiles(path)
    names = set(files.tensors) if names is None else names
    flat = {name: torch.empty(files.tensors[name].shape.numel(), dtype=files.tensors[name].dtype) for name in names}
    reached = dict.fromkeys(names, 0)
    for piece in files.stream(names):
        assert piece.begin == reached[piece.name] and piece.values.dim() == 1 and piece.values.numel()
        assert piece.values.dtype == flat[piece.name].dtype
        reached[piece.name] += piece.values.numel()
        flat[piece.name][piece.begin : reached[piece.name]] = piece.values
    assert reached == {name: tensor.numel() for name, tensor in flat.items()}
    return {name: tensor.view(files.tensors[name].shape) for name, tensor in flat.items()}


@pytest.fixture(params=["uring", "threads"])
def io_engine(request, monkeypatch) -> str:
    if request.param == "uring" and native.uring_refusal():
        pytest.skip(native.uring_refusal())
    monkeypatch.setenv("INFINITY_IO", request.param)
    return request.param


@pytest.fixture
def small_blocks(monkeypatch) -> Callable[..., None]:
    """Sets how much of a file is read, and how much of an initialised parameter is sent, at once."""

    def set_to(nbytes: int = SMALL) -> None:
        monkeypatch.setattr(weight_files, "READ_NBYTES", nbytes)
        monkeypatch.setattr(initialiser, "PIECE_ELEMENTS", 777)

    set_to()
    return set_to


def faulty_files(monkeypatch, **faults: float) -> None:
    """Injects faults into what reads the weights, and into nothing else."""
    plan = native.FaultPlan()
    for name, value in faults.items():
        setattr(plan, name, value)
    mine = types.SimpleNamespace(**vars(native))
    mine.make_io_engine = lambda *args, **kwargs: native.make_io_engine(plan, **kwargs)
    monkeypatch.setattr(weight_files, "native", mine)


def random_file(path: Path, seed: int) -> State:
    """Tensors of any dtypes, sizes and order behind a header of any length, and what was written."""
    draw = random.Random(seed)
    tensors = {}
    for i in range(draw.randint(1, 12)):
        dtype = draw.choice([*CODES])
        numel = draw.choice([0, 1, 2, 3, 5, draw.randint(1, 3000), draw.randint(5000, 60000)])
        shape = draw.choice([(numel,), (1, numel), (numel, 1, 1)] + [()] * (numel == 1))
        tensors[f"t{i}"] = random_bytes(numel * dtype.itemsize, dtype, seed * 100 + i).view(shape)
    write_file(path, tensors, start=draw.randint(1500, 9000))
    return tensors


def test_stream_of_random_files(io_engine, small_blocks, tmp_path):
    """Method: 60 seeded files of all dtypes, in blocks of 64 and 128 KiB; every tensor comes with the bits that were
    written, in pieces that follow each other. Twin: of a file with one byte changed, one tensor differs."""
    for seed in range(60):
        small_blocks(SMALL * (1 + seed % 2))
        expected = random_file(tmp_path / "m.safetensors", seed)
        found = streamed(tmp_path / "m.safetensors")
        assert differing(found, expected) == [], f"file {seed}"
    (name,) = [n for n, t in expected.items() if t.nbytes == max(t.nbytes for t in expected.values())][:1]
    expected[name] = expected[name].clone()
    expected[name].reshape(-1).view(torch.uint8)[-1] ^= 1
    assert differing(found, expected) == [name]


@pytest.mark.parametrize("dtype", [torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str)
def test_an_element_across_two_blocks(dtype, small_blocks, tmp_path):
    """Method: a tensor of three elements whose second has its first 1, 2, ... bytes in one block and the rest in the
    next, and one whose first and last are cut; the same bits come back. Also where the next "block" is the file's tail."""
    size = dtype.itemsize
    for before in range(1, size):
        for end, more in ((SMALL, 0), (SMALL, 4 * SMALL), (SMALL + 4096, 0)):  # of a block; of the last whole disk block
            start = 8192 + 5
            filler = end - start - before - size  # the second element then starts `before` bytes ahead of the end
            tensors = {
                "filler": torch.ones(filler, dtype=torch.int8),
                "cut": random_bytes(3 * size, dtype, before),
                "more": torch.ones(more, dtype=torch.uint8),
            }
            path = write_file(tmp_path / "m.safetensors", tensors, start=start)
            stored = WeightFiles(path).tensors["cut"]
            assert stored.begin + size == end - before
            assert differing(streamed(path), tensors) == [], f"{before} of {size} bytes ahead of {end}, {more} behind"
            assert differing(streamed(path, {"cut"}), {"cut": tensors["cut"]}) == []


def test_real_blocks_of_4_mib(tmp_path):
    """Method: nothing is made small. Behind odd bytes, an fp32 tensor of 10 MiB that is cut at two block ends, a bf16 one
    that is cut at the third, and 5 fp64 numbers in the file's last 4096 bytes."""
    assert weight_files.BLOCK_NBYTES == BLOCK
    wide = random_bytes(10 * MIB, torch.float32, 1)
    filler = 3 * BLOCK - 4097 - 7 - wide.nbytes - 2 * 100 - 1  # the bf16 element 100 then starts one byte ahead
    tensors = {
        "odd": torch.ones(7, dtype=torch.int8),
        "wide": wide.view(5, -1, 4),
        "filler": random_bytes(filler, torch.uint8, 2),
        "half": random_bytes(2 * 5001, torch.bfloat16, 3),
        "tail": random_bytes(5 * 8, torch.float64, 4),
    }
    path = write_file(tmp_path / "m.safetensors", tensors, start=4097)
    stored = WeightFiles(path).tensors
    assert stored["wide"].begin % 4 == 0 and stored["half"].begin % 2 == 1 and stored["tail"].begin % 8
    assert stored["half"].begin + 2 * 100 == 3 * BLOCK - 1 and stored["tail"].begin > os.path.getsize(path) // 4096 * 4096
    assert differing(streamed(path), tensors) == []
    tensors["odd"] = torch.ones(8, dtype=torch.int8)  # and the 10 MiB off their alignment, by every offset there is
    for start in (4097, 4098, 4099):
        one = {name: tensors[name] for name in ("odd", "wide")}
        path = write_file(tmp_path / "m.safetensors", one, start=start)
        assert WeightFiles(path).tensors["wide"].begin % 4
        assert differing(streamed(path), one) == []


def test_lengths_of_files_about_whole_blocks(small_blocks, tmp_path):
    """Method: files that end just before, at and just behind disk blocks and read blocks, and ones shorter than any."""
    around = [whole + more for whole in (4096, SMALL, SMALL + 4096, 3 * SMALL) for more in (-2, -1, 0, 1, 4095)]
    for nbytes in (300, *around):
        values = random_bytes((nbytes - 201) // 2 * 2, torch.bfloat16, nbytes)
        rest = random_bytes(nbytes - 201 - values.nbytes, torch.uint8, 5)
        tensors = {"values": values, "rest": rest}
        path = write_file(tmp_path / "m.safetensors", tensors, start=201)
        assert os.path.getsize(path) == nbytes
        assert differing(streamed(path), tensors) == [], nbytes


def test_tensors_without_elements_and_without_dimensions(small_blocks, tmp_path):
    """Method: empty tensors at the begin, between, at a block's end and at the file's; 0-d ones of every dtype; a file
    of empty tensors only; no name asked for."""
    tensors = {"first": torch.empty(0, 3), "byte": torch.ones((), dtype=torch.int8)}
    tensors |= {str(dtype): random_bytes(dtype.itemsize, dtype, 9).view(()) for dtype in CODES}
    used = sum(t.nbytes for t in tensors.values())
    tensors["filler"] = torch.ones(SMALL - used - 2049, dtype=torch.uint8)
    tensors["at the end of a block"] = torch.empty(4, 0, dtype=torch.int64)
    tensors["behind it"] = random_bytes(12, torch.float32, 8)
    tensors["last"] = torch.empty(0, dtype=torch.float16)
    path = write_file(tmp_path / "m.safetensors", tensors, start=2049)
    assert WeightFiles(path).tensors["at the end of a block"].begin == SMALL
    assert differing(streamed(path), tensors) == []
    assert differing(streamed(path, {"first", "last"}), {n: tensors[n] for n in ("first", "last")}) == []
    assert streamed(path, set()) == {}
    nothing = {"a": torch.empty(0), "b": torch.empty(2, 0)}
    assert differing(streamed(write_file(tmp_path / "n.safetensors", nothing)), nothing) == []


def test_only_what_is_asked_for_comes_and_in_the_order_of_the_disk(small_blocks, tmp_path):
    """Method: three files in a folder, names that sort otherwise than they lie; links to files elsewhere, as in the
    cache of the hub; other files in the folder do not matter."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "blobs"
    folder.mkdir(), elsewhere.mkdir()
    expected = {}
    for number in (3, 1, 2):
        names = [f"z{number}", f"a{number}", f"m{number}"]
        tensors = {name: random_bytes(50_001 * 2, torch.bfloat16, ord(name[0]) * number) for name in names}
        expected |= tensors
        write_file(elsewhere / f"blob{number}", tensors, start=301 + number)
        (folder / f"model-{number}.safetensors").symlink_to(elsewhere / f"blob{number}")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "README.md").write_text("not weights")
    assert differing(streamed(folder), expected) == []
    asked = {"m1", "z3", "a2"}
    assert differing(streamed(folder, asked), {name: expected[name] for name in asked}) == []
    order = list(dict.fromkeys(piece.name for piece in WeightFiles(folder).stream(set(expected))))
    assert order == [f"{letter}{number}" for number in (1, 2, 3) for letter in "zam"]


def test_files_without_direct_io(small_blocks):
    """Method: a file in memory (tmpfs), which has no O_DIRECT everywhere."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for seed in range(5):
            expected = random_file(Path(folder, "m.safetensors"), seed)
            assert differing(streamed(Path(folder, "m.safetensors")), expected) == []


def test_disk_that_answers_late_short_and_out_of_order(io_engine, small_blocks, monkeypatch, tmp_path):
    """Method: short transfers, delays and reordering under the reads; the bits stay. Twin: with bits flipped, which no
    checksum of the file could show, the comparison sees it."""
    expected = {"a": random_bytes(500_001 * 4, torch.float32, 1), "b": random_bytes(7, torch.uint8, 2)}
    path = write_file(tmp_path / "m.safetensors", expected, start=201)
    faulty_files(monkeypatch, seed=SEED, short_transfer=0.4, delay=0.2, reorder=0.3)
    assert differing(streamed(path), expected) == []
    faulty_files(monkeypatch, seed=SEED, bit_flip=0.2)
    assert differing(streamed(path), expected) == ["a"]


def test_a_stream_that_ends_early_gives_everything_back(io_engine, small_blocks, monkeypatch, tmp_path):
    """Method: leave a stream after one piece with reads under way, by break and by a disk error; no crash, and no
    descriptor or thread is left."""

    def work():
        small_blocks()
        path = write_file(tmp_path / "m.safetensors", {"a": random_bytes(2 * MIB, torch.float32, 1)}, start=101)
        streamed(path)
        gc.collect()
        before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        faulty_files(monkeypatch, seed=SEED, delay=1.0, delay_seconds=0.02)
        for _ in range(5):
            for piece in WeightFiles(path).stream({"a"}):
                del piece
                break
            gc.collect()
        faulty_files(monkeypatch, seed=SEED, eio=1.0, first_piece=3)
        with pytest.raises(infinity.StorageError) as raised:
            streamed(path)
        assert raised.value.errno == errno.EIO
        del raised
        gc.collect()
        assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before

    in_child(work)


def test_files_that_may_only_be_read(tmp_path):
    """Method: as a user who may not write them, wrap from a file and a folder of mode 444; the bits are right. Of mode
    000, the error is a StorageError with the path. Root may do everything, so a child of root becomes nobody first."""
    infinity.wrap_model(on_meta(lambda: nn.Linear(4, 4)), None, {})  # imports what nobody may not read

    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        expected = {"weight": torch.randn(90, 90), "bias": torch.randn(90)}
        awkward_file(folder / "model.safetensors", expected).chmod(0o444)
        write_file(folder / "other.bin", expected).chmod(0o000)

        def work():
            if os.getuid() == 0:
                os.setgid(65534), os.setuid(65534)
            assert not os.access(folder / "model.safetensors", os.W_OK), "this user may write: the test says nothing"
            for path in (folder, folder / "model.safetensors"):
                model, _ = infinity.wrap_model(on_meta(lambda: nn.Linear(90, 90)), None, {"params": "host", "weights": path})
                assert differing(model.state_dict(), expected) == []
            with pytest.raises(infinity.StorageError, match="other.bin") as raised:
                infinity.wrap_model(on_meta(lambda: nn.Linear(90, 90)), None, {"weights": folder / "other.bin"})
            assert str(folder / "other.bin") in str(raised.value.filename)

        in_child(work)
    finally:
        shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Values from files
# ---------------------------------------------------------------------------------------------------------------------


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(gradients(prescribed(0), seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": torch.as_tensor(value) for i, of_one in state.items() for key, value in of_one.items()}


@pytest.mark.parametrize("param_dtype", [None, "bf16"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "not trained"])
@every_home
def test_every_home_gets_the_file_s_values(home, trained, param_dtype, small_blocks, tmp_path):
    """Method: a model with 0-d, empty, transposed and channels-last parameters, on meta, from an awkward file in small
    blocks, against the same values wrapped from memory: state dict, forward, and two steps have the same bits, and the
    unwrapped model is torch's. fp32 values that bf16 does not have are in the master (twin: rounded ones differ)."""
    plain = prescribed(SEED)
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    path = awkward_file(tmp_path / "m.safetensors", values)
    (tmp_path / "swap").mkdir()
    config = at_home(home, home if trained else "auto", tmp_path / "swap", param_dtype=param_dtype)
    pairs = []
    for model, more in ((on_meta(Prescribed), {"weights": path}), (plain, {})):
        strides = {name: p.stride() for name, p in model.named_parameters()}
        optimizer = adamw(model, LR) if trained else None
        model, optimizer = infinity.wrap_model(model, optimizer, config | more)
        assert {name: p.stride() for name, p in model.named_parameters()} == strides
        pairs.append((model, optimizer))
    (model, optimizer), (other, other_optimizer) = pairs
    assert differing(model.state_dict(), other.state_dict()) == []
    if trained or param_dtype is None:
        assert differing(model.state_dict(), values) == []
        rounded = {name: value.bfloat16().float() for name, value in values.items()}
        assert len(differing(model.state_dict(), rounded)) == len(values) - 1, "all but the empty one have more bits"
    if trained:
        for at in range(2):
            step(model, optimizer, at), step(other, other_optimizer, at)
        assert differing(optimizer_state(optimizer), optimizer_state(other_optimizer)) == []
        assert differing(model.state_dict(), other.state_dict()) == []
    given = gradients(prescribed(0), 5)
    with torch.no_grad():
        assert torch.equal(model(given), other(given))
    state = model.state_dict()
    model, _ = infinity.unwrap_model(model, optimizer)
    assert differing(dict(model.named_parameters()), state) == []
    assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    del plain, other, other_optimizer, pairs, optimizer
    assert leftovers(tmp_path / "swap") == []


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_of_the_file_is_not_the_model_s(stored, own, small_blocks, tmp_path):
    """Method: every pair of float dtypes, trained at home on disk; the state dict has the bits that ``load_state_dict``
    gives a plain model, denormals, infinities and NaN included, and so does an optimizer's first step."""
    special = torch.tensor([0.0, -0.0, 1e-40, 6e-5, 1e-7, 65520.0, 3.4e38, float("inf"), float("nan"), 1 + 2**-8, 1 + 2**-9])
    values = {"weight": torch.randn(50, 60, generator=torch.Generator().manual_seed(SEED)), "bias": torch.ones(50)}
    values["weight"].view(-1)[: special.numel()] = special
    values = {name: value.to(stored) for name, value in values.items()}
    path = awkward_file(tmp_path / "m.safetensors", values)
    plain = nn.Linear(60, 50).to(own)
    plain.load_state_dict(values)
    model = on_meta(lambda: nn.Linear(60, 50).to(own))
    config = at_home("nvme", "nvme", tmp_path)
    model, _ = infinity.wrap_model(model, adamw(model, LR), config | {"weights": path})
    assert differing(model.state_dict(), plain.state_dict()) == []
    assert model.weight.dtype == own


def test_param_dtype_and_another_dtype_in_the_file(tmp_path):
    """Method: an fp32 model computed in bf16 from files of fp64, fp32 and bf16, for each kind of master; the master is
    the model's fp32 value, and the weight its nearest bf16."""
    for stored in (torch.float64, torch.float32, torch.bfloat16):
        for master in ("split", "fp32"):
            values = {"weight": torch.randn(9, 70, dtype=torch.float64).to(stored), "bias": torch.randn(9).to(stored)}
            path = awkward_file(tmp_path / "m.safetensors", values)
            model = on_meta(lambda: nn.Linear(70, 9))
            config = at_home("host", "nvme", tmp_path, weights=path, param_dtype="bf16", master=master)
            model, _ = infinity.wrap_model(model, adamw(model, LR), config)
            expected = {name: value.float() for name, value in values.items()}
            assert differing(model.state_dict(), expected) == []
            with infinity.full_params(model) as params:
                for name, value in expected.items():
                    assert ((params[name].float() - value).abs() <= value.abs() * 2**-8).all()


class Buffered(nn.Module):
    """Buffers of all kinds; the non-persistent ones are set by ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.line = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(65, 65, dtype=torch.bool))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("columns", torch.zeros(3, 2).t())
        self.register_buffer("images", torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("angles", torch.zeros(9), persistent=False)
        self.register_buffer("places", torch.zeros(9, dtype=torch.int32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(9) / 7)
        self.places.copy_(torch.arange(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(self.norm(x)) * self.angles[:6] + self.columns[0, 0]


def buffered(seed: int) -> Buffered:
    """One whose every tensor has something to show."""
    model = seeded(seed, Buffered)
    for tensor in [*model.norm.parameters(), *model.state_dict(keep_vars=True).values()]:
        with torch.no_grad():
            drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).abs() * 5
            tensor.copy_(drawn > 2 if tensor.dtype == torch.bool else drawn)
    return model


@pytest.mark.parametrize("home", ["nvme", "device"])
def test_buffers_come_from_the_file_or_are_set(home, small_blocks, tmp_path):
    """Method: persistent buffers of five dtypes and three kinds of strides are in an awkward file, the non-persistent
    ones in none; all have a plain model's bits and strides, and so has the output in training mode."""
    plain = buffered(SEED)
    path = awkward_file(tmp_path / "m.safetensors", plain.state_dict())
    model = on_meta(Buffered)
    model, _ = infinity.wrap_model(model, None, at_home(home, "auto", tmp_path, weights=path))
    assert differing(model.state_dict(), plain.state_dict()) == []
    expected = dict(plain.named_buffers())
    assert differing(dict(model.named_buffers()), expected) == []
    assert {n: b.stride() for n, b in model.named_buffers()} == {n: b.stride() for n, b in expected.items()}
    assert model.nothing is None and model._non_persistent_buffers_set == plain._non_persistent_buffers_set
    assert all(not isinstance(buffer, nn.Parameter) for buffer in model.buffers())
    x = torch.randn(5, 6)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert differing(dict(model.named_buffers()), dict(plain.named_buffers())) == []


class Quantised(nn.Parameter):
    """A Parameter that the engine leaves where it is."""


class WithQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.codes = Quantised(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) @ self.codes.float()


@pytest.mark.parametrize("built", ["on meta", "in memory"])
def test_unmanaged_parameters_come_from_the_file(built, tmp_path):
    """Method: a subclass of Parameter, which is not moved about, has its class and the file's values after the wrap."""
    values = {name: torch.randn(value.shape) for name, value in WithQuantised().state_dict().items()}
    values["codes"] = torch.randint(-9, 9, (8, 8), dtype=torch.int8)
    path = awkward_file(tmp_path / "m.safetensors", values)
    model = on_meta(WithQuantised) if built == "on meta" else WithQuantised()
    model, _ = infinity.wrap_model(model, None, at_home("nvme", "auto", tmp_path, weights=path))
    assert type(model.codes) is Quantised and not model.codes.is_meta
    assert differing(model.state_dict(), values) == []
    assert torch.isfinite(model(torch.ones(2, 8))).all()


class Tied(nn.Module):
    """A head that has no initialisation of its own, since its weight is always another's."""

    class Head(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 8)
        self.head = self.Head(self.tokens.weight)


@pytest.mark.parametrize("name", ["tokens.weight", "head.weight"])
def test_a_tied_parameter_under_one_name_only(name, tmp_path):
    """Method: the file has the tied tensor once, under either name, and the other name's module cannot initialise; the
    value is the file's under both names, and stays one Parameter. No random number is drawn for a value that is there."""
    value = torch.randn(40, 8)
    path = awkward_file(tmp_path / "m.safetensors", {name: value})
    model = on_meta(Tied)
    before = torch.get_rng_state()
    model, _ = infinity.wrap_model(model, None, at_home("nvme", "auto", tmp_path, weights=path))
    assert model.head.weight is model.tokens.weight
    assert differing(model.state_dict(), {"tokens.weight": value, "head.weight": value}) == []
    assert torch.equal(torch.get_rng_state(), before)


class OwnWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7))


class Shared(nn.Module):
    """One block under two names, in different parents."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleDict({"block": OwnWeight()})
        self.other = nn.ModuleDict({"block": self.one["block"]})


@pytest.mark.parametrize("name", ["one.block.weight", "other.block.weight"])
def test_a_module_under_two_names(name, tmp_path):
    """Method: the file has a shared module's weight under either of its names; both have it."""
    path = awkward_file(tmp_path / "m.safetensors", {name: torch.arange(49.0).view(7, 7)})
    model, _ = infinity.wrap_model(on_meta(Shared), None, at_home("nvme", "auto", tmp_path, weights=path))
    assert model.one["block"] is model.other["block"]
    for value in model.state_dict().values():
        assert torch.equal(value, torch.arange(49.0).view(7, 7))


def test_shared_buffers_stay_shared(tmp_path):
    """Method: two modules with one buffer; after the wrap it is still one (twin: it is for a model in memory)."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        model[1].running_mean = model[0].running_mean
        return model

    for model in (build(), on_meta(build)):
        model, _ = infinity.wrap_model(model, None, {"params": "host"})
        assert model[1].running_mean is model[0].running_mean


def test_parameters_that_share_memory_are_refused_on_meta_too(tmp_path):
    """Method: two Parameters over one storage; the twin in memory is a ConfigError with both names, as on meta it must be:
    they would silently become two weights."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(model[0].weight)
        return model

    for model in (build(), on_meta(build)):
        with pytest.raises(infinity.ConfigError, match="share memory"):
            infinity.wrap_model(model, None, {"params": "host"})


def test_what_hangs_on_a_parameter_stays(tmp_path):
    """Method: an attribute, a gradient hook and a post-accumulate hook on a Parameter, in memory (the twin) and on meta;
    after the wrap and one backward the attribute is there, and both hooks ran."""
    for build in (lambda: nn.Linear(4, 4), lambda: on_meta(lambda: nn.Linear(4, 4))):
        model, ran = build(), []
        model.weight.no_weight_decay = True
        model.weight.register_hook(lambda grad: ran.append("hook"))
        model.weight.register_post_accumulate_grad_hook(lambda param: ran.append("post"))
        model, optimizer = infinity.wrap_model(model, adamw(model, LR), {"params": "host", "optimizer": "host"})
        assert model.weight.no_weight_decay is True
        model(torch.ones(2, 4)).sum().backward()
        assert ran == ["hook", "post"]


def test_a_file_that_lacks_a_persistent_buffer_is_no_silent_mixture(tmp_path):
    """Method: as ``load_state_dict`` is strict, a file without a trained ``running_mean`` must be refused by its name;
    with the parameters from the file, statistics of 0 and 1 are another model. Twin: the whole file is taken."""
    plain = buffered(SEED)
    whole = plain.state_dict()
    part = {name: value for name, value in whole.items() if name != "norm.running_mean"}
    with pytest.raises(RuntimeError, match="norm.running_mean"):
        buffered(0).load_state_dict(part)
    config = {"params": "host", "weights": awkward_file(tmp_path / "m.safetensors", whole)}
    assert differing(infinity.wrap_model(on_meta(Buffered), None, config)[0].state_dict(), whole) == []
    awkward_file(tmp_path / "m.safetensors", part)
    with pytest.raises(infinity.ConfigError, match="norm.running_mean"):
        infinity.wrap_model(on_meta(Buffered), None, config)


def test_a_non_persistent_buffer_in_the_file_is_not_taken(tmp_path):
    """Method: a file of an older version has rotary frequencies in bf16, which torch and transformers leave alone, since
    a non-persistent buffer is in no state dict; they come out as the module sets them, and another shape does no harm."""
    plain = buffered(SEED)
    for old in (plain.angles.bfloat16(), torch.ones(3)):
        path = awkward_file(tmp_path / "m.safetensors", plain.state_dict() | {"angles": old})
        model, _ = infinity.wrap_model(on_meta(Buffered), None, {"params": "host", "weights": path})
        assert torch.equal(model.angles, plain.angles)


def test_the_index_says_which_files_count(tmp_path):
    """Method: a folder with an index and a stale file of an earlier, differently split save; the values are those of
    the files in the index, as transformers reads them. Twin: without the stale file they are."""
    new, old = {"weight": torch.ones(4, 4)}, {"weight": torch.zeros(4, 4)}
    write_file(tmp_path / "model-00001-of-00002.safetensors", new)
    write_file(tmp_path / "model-00002-of-00002.safetensors", {"bias": torch.ones(4)})
    index = {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for _ in range(2):
        model, _ = infinity.wrap_model(on_meta(lambda: nn.Linear(4, 4)), None, {"params": "host", "weights": tmp_path})
        assert torch.equal(model.state_dict()["weight"], new["weight"])
        write_file(tmp_path / "model-00001-of-00003.safetensors", old)


def test_a_tensor_of_an_unknown_dtype_that_nobody_wants(tmp_path):
    """Method: a uint16 tensor that is not the model's does not stand in the way; one that is, is a ConfigError."""
    path = tmp_path / "m.safetensors"
    write_file(path, {"weight": torch.ones(4, 4), "bias": torch.ones(4), "other": torch.ones(4, dtype=torch.int16)})
    path.write_bytes(path.read_bytes().replace(b'"I16"', b'"U16"'))
    model, _ = infinity.wrap_model(on_meta(lambda: nn.Linear(4, 4)), None, {"params": "host", "weights": path})
    assert torch.equal(model.state_dict()["weight"], torch.ones(4, 4))


@pytest.mark.parametrize("source", ["file", "modules"])
def test_wrapping_under_a_default_device(source, small_blocks, tmp_path):
    """Method: call wrap_model inside ``torch.device("meta")``, where a user may well have built the model; the values are
    those of a call outside, channels-last parameters and buffers included."""
    states = []
    for inside in (False, True):
        if source == "file":
            build, plain = Prescribed, prescribed(SEED)
            config = {"params": "host", "weights": awkward_file(tmp_path / "m.safetensors", plain.state_dict())}
        else:
            config = {"params": "host"}

            def build() -> nn.Module:
                return nn.Sequential(nn.Conv2d(4, 40, 3), nn.BatchNorm2d(40)).to(memory_format=torch.channels_last)

        torch.manual_seed(SEED)
        model = on_meta(build)
        if inside:
            with torch.device("meta"):
                model, _ = infinity.wrap_model(model, None, config)
        else:
            model, _ = infinity.wrap_model(model, None, config)
        states.append(model.state_dict())
    assert differing(*states) == []


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be done is said, and nothing has changed
# ---------------------------------------------------------------------------------------------------------------------


def look(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> Any:
    """All that a failed wrap may not change."""
    tensors = {
        name: (id(t), type(t), t.device, t.dtype, t.stride(), t.requires_grad, None if t.is_meta else bytes(bits(t).numpy()))
        for name, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    }
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_hooks), m.forward.__func__)
        for m in model.modules()
        if hasattr(m.forward, "__func__")
    ]
    groups, state = None, None
    if optimizer is not None:
        groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        state = {
            id(p): {key: bytes(bits(torch.as_tensor(value)).numpy()) for key, value in of_one.items()}
            for p, of_one in optimizer.state.items()
        }
    return tensors, hooks, groups, state, leftovers(folder)


def checked() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24))


def good() -> State:
    return {name: torch.full_like(value, 3) for name, value in checked().state_dict().items()}


def edited(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> Path:
    data = bytearray(write_file(path, good()).read_bytes())
    path.write_bytes(change(data))
    return path


def replaced(old: bytes, new: bytes) -> Callable[[Path], Path]:
    assert len(old) == len(new)

    def make(path: Path) -> Path:
        before = write_file(path, good()).read_bytes()
        assert old in before
        return edited(path, lambda data: before.replace(old, new))

    return make


def folder_of(**files: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        path.mkdir()
        for name, write in files.items():
            write(path / f"{name}.safetensors")
        return path

    return make


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {  # how it is made, and what the message must name
    "no such file": (lambda path: path, "m.safetensors"),
    "empty folder": (folder_of(), "m.safetensors"),
    "dangling link": (lambda path: (path.symlink_to("nowhere"), path)[1], "m.safetensors"),
    "folder with a dangling link": (
        folder_of(a=lambda p: write_file(p, good()), b=lambda p: p.symlink_to("nowhere")), "b.safetensors"),
    "folder named like a file": (folder_of(a=lambda p: p.mkdir()), "a.safetensors"),
    "no bytes": (lambda path: edited(path, lambda data: b""), "m.safetensors"),
    "seven bytes": (lambda path: edited(path, lambda data: data[:7]), "m.safetensors"),
    "half a header": (lambda path: edited(path, lambda data: data[:100]), "m.safetensors"),
    "a byte short": (lambda path: edited(path, lambda data: data[:-1]), "m.safetensors"),
    "cut in the middle": (lambda path: edited(path, lambda data: data[: len(data) // 2]), "m.safetensors"),
    "a byte more": (lambda path: edited(path, lambda data: data + b"x"), "m.safetensors"),
    "endless header": (lambda path: edited(path, lambda data: b"\xff" * 8 + data[8:]), "m.safetensors"),
    "header that is no JSON": (lambda path: edited(path, lambda data: data[:8] + b"]" + data[9:]), "m.safetensors"),
    "header that is no text": (lambda path: edited(path, lambda data: data[:9] + b"\xff" + data[10:]), "m.safetensors"),
    "overlapping tensors": (replaced(b"[0, 2304]", b"[8, 2304]"), "m.safetensors"),
    "shape and bytes that disagree": (replaced(b"[24, 24]", b"[24, 25]"), "m.safetensors"),
    "a pickle": (lambda path: (torch.save(good(), path), path)[1], "m.safetensors"),
    "second file broken": (
        folder_of(a=lambda p: write_file(p, good()), b=lambda p: edited(p, lambda data: data[:-1])), "b.safetensors"),
    "unknown dtype": (replaced(b'"I64"', b'"C64"'), "num_batches_tracked"),
    "a parameter missing": (
        lambda path: write_file(path, {n: t for n, t in good().items() if n != "1.bias"}), "1.bias"),
    "no name of the model": (lambda path: write_file(path, {f"x.{n}": t for n, t in good().items()}), "0.weight"),
    "one dimension more": (lambda path: write_file(path, good() | {"0.bias": torch.ones(24, 1)}), "0.bias"),
    "another length": (lambda path: write_file(path, good() | {"0.weight": torch.ones(24, 25)}), "0.weight"),
    "buffer of another length": (lambda path: write_file(path, good() | {"1.running_var": torch.ones(25)}), "running_var"),
    "no elements": (lambda path: write_file(path, good() | {"1.weight": torch.ones(0)}), "1.weight"),
}  # fmt: skip


@pytest.mark.parametrize("built", ["on meta", "in memory"])
@pytest.mark.parametrize("case", BROKEN)
def test_files_that_cannot_be_used(case, built, swap, tmp_path):
    """Method: 25 ways in which a file is missing, broken or another model's; the error is typed, names what is wrong, and
    leaves model, optimizer and disk as they were. Twin: the same objects are then wrapped from a right file."""
    make, named = BROKEN[case]
    model = on_meta(checked) if built == "on meta" else checked()
    optimizer = adamw(model, LR)
    config = at_home("nvme", "nvme", swap)
    before = look(model, optimizer, swap)
    path = make(tmp_path / "m.safetensors")
    with pytest.raises(TYPED) as raised:
        infinity.wrap_model(model, optimizer, config | {"weights": path})
    assert named in str(raised.value)
    del raised
    assert look(model, optimizer, swap) == before
    path = write_file(tmp_path / "right.safetensors", good())
    model, optimizer = infinity.wrap_model(model, optimizer, config | {"weights": path})
    assert differing(model.state_dict(), good()) == []


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 640), nn.BatchNorm1d(640), nn.Linear(640, 64))


def without_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 640), nn.LayerNorm(640), nn.Linear(640, 64))


def half_on_meta() -> nn.Module:
    model = with_buffers()
    model[0] = on_meta(lambda: nn.Linear(64, 640))
    model[2].bias = nn.Parameter(torch.empty(64, device="meta"))
    return model


@pytest.mark.parametrize("faults", ["eio=1.0", "eio=1.0,first_piece=4", "bit_flip=1.0"])
@pytest.mark.parametrize("build", [with_buffers, without_buffers, half_on_meta, lambda: on_meta(with_buffers)],
                         ids=["buffers", "no buffers", "half on meta", "on meta"])  # fmt: skip
def test_a_wrap_that_fails_halfway_has_changed_no_value(build, faults, swap, small_blocks, tmp_path):
    """Method: wrap a model (in memory, on meta, or in between) with weights= and a stepped optimizer, with a home that
    fails at its first write, a later one, or the first block it reads back; every value, buffer and moment has its bits.
    Twin: the same objects, without faults, then have the file's values."""
    torch.manual_seed(SEED)
    model = build()
    optimizer = adamw(model, LR)
    if build in (with_buffers, without_buffers):
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    values = {name: torch.full_like(value, 7, device="cpu") for name, value in model.state_dict().items()}
    first = dict(model.named_buffers())  # in the file: they are set before the first write fails
    path = awkward_file(tmp_path / "m.safetensors", {name: values[name] for name in (*first, *values)})
    config = at_home("nvme", "nvme", swap, weights=path)
    before = look(model, optimizer, swap)
    with environment(INFINITY_FAULTS=faults), pytest.raises((infinity.StorageError, infinity.CorruptionError)):
        infinity.wrap_model(model, optimizer, config)
    after = look(model, optimizer, swap)
    changed = [name for name in before[0] if after[0][name] != before[0][name]]
    assert changed == [] and after == before
    model, _ = infinity.wrap_model(model, optimizer, config)
    assert differing(model.state_dict(), values) == []


def test_a_file_that_cannot_be_read_to_its_end(swap, small_blocks, monkeypatch, tmp_path):
    """Method: the disk fails at the fourth block of the weights; a StorageError, and the model is on meta as it was."""
    values = {name: torch.full_like(value, 7) for name, value in with_buffers().state_dict().items()}
    path = awkward_file(tmp_path / "m.safetensors", values)
    model = on_meta(with_buffers)
    optimizer = adamw(model, LR)
    before = look(model, optimizer, swap)
    with monkeypatch.context() as patch:
        faulty_files(patch, eio=1.0, first_piece=3)
        with pytest.raises(infinity.StorageError):
            infinity.wrap_model(model, optimizer, at_home("host", "nvme", swap, weights=path))
    assert look(model, optimizer, swap) == before
    model, _ = infinity.wrap_model(model, optimizer, at_home("host", "nvme", swap, weights=path))
    assert differing(model.state_dict(), values) == []


def test_what_is_real_already_is_not_drawn_anew():
    """Method: modules of which one tensor is on meta and the others have values, without weights=; the values stay."""

    def weight_given() -> nn.Module:
        model = nn.Linear(8, 8)
        model.bias = nn.Parameter(torch.empty(8, device="meta"))
        return model

    def statistics_missing() -> nn.Module:
        model = nn.BatchNorm1d(8)
        nn.init.normal_(model.weight)
        model.running_mean = torch.empty(8, device="meta")
        return model

    for build in (weight_given, statistics_missing):
        model = build()
        given = {name: t.detach().clone() for name, t in model.state_dict().items() if not t.is_meta}
        model, _ = infinity.wrap_model(model, None, {"params": "host"})
        state = model.state_dict()
        assert differing({name: state[name] for name in given}, given) == [], build.__name__


def held_weakly() -> tuple[nn.Module, Any]:
    model = on_meta(lambda: nn.Linear(4, 4))
    return model, weakref.ref(model.weight)


def held_by_a_view() -> tuple[nn.Module, Any]:
    model = on_meta(lambda: nn.Linear(4, 4))
    return model, model.weight[0]


def init_without_argument() -> tuple[nn.Module, Any]:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)
            self._init_weights()

        def _init_weights(self) -> None:
            nn.init.zeros_(self.line.weight)

    return on_meta(Own), None


def stepped_on_meta() -> tuple[nn.Module, Any]:
    model = on_meta(lambda: nn.Linear(4, 4))
    optimizer = adamw(model, LR)
    model(torch.ones(2, 4, device="meta")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("build", [held_weakly, held_by_a_view, init_without_argument, stepped_on_meta])
def test_no_error_of_torch_s_own(build, swap):
    """Method: a Parameter that something else refers to, an ``_init_weights`` that takes no module, and an optimizer that
    made its state on meta. Either it works, with a state dict that is real, or the error is typed and nothing changed."""
    model, held = build()
    optimizer = held if isinstance(held, torch.optim.Optimizer) else adamw(model, LR)
    ids = {name: (id(p), p.is_meta) for name, p in model.named_parameters()}
    try:
        model, _ = infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", swap))
    except infinity.InfinityError:
        assert {name: (id(p), p.is_meta) for name, p in model.named_parameters()} == ids
    else:
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())


# ---------------------------------------------------------------------------------------------------------------------
# Values that modules draw
# ---------------------------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """Its values are known: those of each tensor count its elements row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(70, 33).t())
        self.image = nn.Parameter(torch.empty(80, 6, 17, 15).to(memory_format=torch.channels_last))
        self.volume = nn.Parameter(torch.empty(3, 4, 5, 6).permute(2, 0, 3, 1))
        self.scalar = nn.Parameter(torch.empty(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.empty(5, 4).t())
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.copy_(torch.arange(1.0, tensor.numel() + 1).view(tensor.shape))


@pytest.mark.parametrize("source", ["file", "modules"])
@every_home
def test_strides_other_than_row_major(home, source, small_blocks, tmp_path):
    """Method: transposed, channels-last, permuted, 0-d and empty parameters, in pieces of a few hundred elements; every
    element is where it is counted, and the strides are those the model was built with."""
    plain = Counted()
    config = at_home(home, home, tmp_path, param_dtype="bf16")
    if source == "file":
        config["weights"] = awkward_file(tmp_path / "m.safetensors", plain.state_dict())
    model = on_meta(Counted)
    model, _ = infinity.wrap_model(model, adamw(model, LR), config)
    state = model.state_dict()
    assert differing(state, plain.state_dict()) == []
    assert {n: p.stride() for n, p in model.named_parameters()} == {n: p.stride() for n, p in plain.named_parameters()}
    wrong = state["image"].clone(memory_format=torch.contiguous_format).view(-1)[: 80 * 6].view(80, 6)
    assert not torch.equal(wrong, plain.image[:, :, 0, 0]), "the twin: in memory order it would be another tensor"


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_drawn_values_do_not_depend_on_the_home_or_the_optimizer(home, tmp_path):
    """Method: one seed at every home, with and without an optimizer; the same bits, which another seed does not give."""

    def drawn(seed: int, config: dict[str, Any], trained: bool) -> State:
        model = on_meta(lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 30), nn.Embedding(9, 4)))
        torch.manual_seed(seed)
        return infinity.wrap_model(model, adamw(model, LR) if trained else None, config)[0].state_dict()

    expected = drawn(SEED, {"params": "host"}, False)
    for trained in (True, False):
        assert differing(drawn(SEED, at_home(home, home, tmp_path), trained), expected) == []
        assert differing(drawn(SEED + 1, at_home(home, home, tmp_path), trained), expected) == sorted(expected)


def unlike(drawn: State, plain: State) -> list[str]:
    """Names whose values are not distributed alike: constants are the same, and standard deviation and mean agree."""
    found = []
    for name, expected in plain.items():
        values, expected = drawn[name].float(), expected.float()
        spread = expected.std() if expected.numel() > 1 else torch.zeros(())
        if spread == 0 or not expected.numel():
            same = torch.equal(values, expected)
        else:
            near = 8 * spread / expected.numel() ** 0.5
            same = (values.std() - spread).abs() <= near and (values.mean() - expected.mean()).abs() <= near
        if not same:
            found.append(name)
    return found


def drawn_and_plain(build: Callable[[], nn.Module]) -> tuple[State, State]:
    """Parameters and buffers as a wrap of a meta model draws them, and as the model is when it is built."""
    torch.manual_seed(SEED)
    plain = build()
    model, _ = infinity.wrap_model(on_meta(build), None, {"params": "host"})
    return model.state_dict() | dict(model.named_buffers()), plain.state_dict() | dict(plain.named_buffers())


MODULES: dict[str, Callable[[], nn.Module]] = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(64, 4),
    "MultiheadAttention with kdim": lambda: nn.MultiheadAttention(64, 4, kdim=48, vdim=40, add_bias_kv=True),
    "LSTM": lambda: nn.LSTM(48, 40, 2, bidirectional=True, proj_size=20),
    "GRU": lambda: nn.GRU(48, 40),
    "LSTMCell": lambda: nn.LSTMCell(48, 40),
    "Embedding with padding": lambda: nn.Embedding(60, 40, padding_idx=3),
    "Bilinear": lambda: nn.Bilinear(20, 20, 9),
    "ConvTranspose": lambda: nn.ConvTranspose2d(20, 30, 3),
    "norms": lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.RMSNorm(8)),
    "PReLU": lambda: nn.Sequential(nn.PReLU(7, init=0.25)),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(64, 4, 128),
    "Transformer": lambda: nn.Transformer(64, 4, 1, 1, 128),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODULES)
def test_modules_of_torch_are_as_they_are_built(kind):
    """Method: torch's modules that have initialisation of their own, nested ones included, on meta; constants are the same
    and what is drawn has the same spread as in one that was built in memory."""
    assert unlike(*drawn_and_plain(MODULES[kind])) == []


def test_recurrent_modules_on_meta_from_a_file(tmp_path):
    """Method: an LSTM, which keeps weak references to its parameters, from a file; the output has a plain one's bits."""
    plain = seeded(SEED, lambda: nn.LSTM(12, 10, 2))
    path = awkward_file(tmp_path / "m.safetensors", plain.state_dict())
    model, _ = infinity.wrap_model(on_meta(lambda: nn.LSTM(12, 10, 2)), None, at_home("nvme", "auto", tmp_path, weights=path))
    x = torch.randn(3, 2, 12)
    with torch.no_grad():
        assert torch.equal(model(x)[0], plain(x)[0])


class ZeroOut(nn.Module):
    """A block that sets its child's weight anew, as residual branches do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(20, 20), nn.Linear(20, 20)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.out.weight)


class ZeroOutAndGain(ZeroOut):
    """The same, with a parameter of its own."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.empty(3))
        nn.init.ones_(self.gain)


@pytest.mark.parametrize("block", [ZeroOut, ZeroOutAndGain])
def test_a_module_sets_its_children_anew(block):
    """Method: ``reset_parameters`` of a block zeroes its child's weight, after the child drew it; so it must be on meta,
    whether or not the block has a parameter of its own."""
    assert unlike(*drawn_and_plain(lambda: nn.Sequential(block(), block()))) == []


TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


class Table(nn.Module):
    """``sets``: whether ``reset_parameters`` sets the buffer, to zeros."""

    def __init__(self, dtype: torch.dtype, persistent: bool, sets: bool) -> None:
        super().__init__()
        self.line, self.sets = nn.Linear(4, 4), sets
        self.register_buffer("table", torch.ones(64, 64).tril().to(dtype), persistent=persistent)

    def reset_parameters(self) -> None:
        if self.sets:
            self.table.zero_()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not persistent"])
def test_a_buffer_that_nobody_sets_is_named(dtype, persistent, tmp_path):
    """Method: a table made in ``__init__`` only, so nowhere for a model on meta, for several dtypes, with and without a
    file that has the parameters; a ConfigError names it, and the model is on meta still. Twin: a module that sets it, if
    only to zeros, is wrapped."""
    values = {f"0.line.{name}": value for name, value in nn.Linear(4, 4).state_dict().items()}
    path = awkward_file(tmp_path / "m.safetensors", values)
    dirt = [torch.full((64, 64), 1, dtype=torch.uint8) for _ in range(50)]  # what the allocator will hand out
    del dirt
    for more in ({}, {"weights": path}):
        model = on_meta(lambda: nn.Sequential(Table(dtype, persistent, sets=False)))
        with pytest.raises(infinity.ConfigError, match=r"0\.table"):
            infinity.wrap_model(model, None, {"params": "host"} | more)
        assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_buffer_that_is_set_to_zeros_is_set(dtype):
    """Method: the twin of the test above."""
    model, _ = infinity.wrap_model(on_meta(lambda: Table(dtype, False, sets=True)), None, {"params": "host"})
    assert not model.table.any()


def test_a_parameter_that_nobody_sets_is_named():
    """Method: the same for a parameter, deep inside, in a module of one's own."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), OwnWeight())))
    with pytest.raises(infinity.ConfigError, match=r"1\.1\.weight"):
        infinity.wrap_model(model, None, {"params": "host"})
    assert all(p.is_meta for p in model.parameters())


def test_a_parameter_that_is_set_in_part():
    """Method: ``__init__`` makes zeros and ``reset_parameters`` draws all rows but the first, which a model in memory
    keeps at zero; on meta, the row is zero too or a ConfigError names the parameter: NaN is neither."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.zeros(4, 4))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.normal_(self.rows[1:])

    assert not Padded().rows[0].any()
    try:
        model, _ = infinity.wrap_model(on_meta(Padded), None, {"params": "host"})
    except infinity.ConfigError as error:
        assert "rows" in str(error)
    else:
        assert torch.equal(model.state_dict()["rows"][0], torch.zeros(4))


# --- transformers ---


def tiny(name: str) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    text = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    configs = {
        "GPT2": lambda: transformers.GPT2Config(n_layer=8, n_embd=64, n_head=2, vocab_size=97, n_positions=32, **ends),
        "Llama": lambda: transformers.LlamaConfig(**text, num_key_value_heads=1, initializer_range=0.1, **ends),
        "Llama untied": lambda: transformers.LlamaConfig(**text, tie_word_embeddings=False, **ends),
        "OPT": lambda: transformers.OPTConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                                              ffn_dim=128, word_embed_proj_dim=64, max_position_embeddings=32, **ends),
        "T5": lambda: transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=97),
        "Mamba": lambda: transformers.MambaConfig(vocab_size=97, hidden_size=64, state_size=8, num_hidden_layers=2, **ends),
    }  # fmt: skip
    if name == "BERT":
        config = transformers.BertConfig(**text, max_position_embeddings=32, initializer_range=0.3, pad_token_id=0)
        return lambda: transformers.BertForMaskedLM(config)
    if name == "ResNet":
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        return lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))
    config = configs[name]()
    auto = transformers.AutoModelForSeq2SeqLM if name == "T5" else transformers.AutoModelForCausalLM
    return lambda: auto.from_config(config)


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Llama untied", "OPT", "BERT", "ResNet", "Mamba", "T5"])
def test_transformers_models_are_initialised_as_from_config_does(name):
    """Method: build from a config in memory, and on meta and wrap without weights; every parameter and buffer has the same
    constants or the same spread."""
    assert unlike(*drawn_and_plain(tiny(name))) == []


def test_scaled_initialisation_of_gpt2():
    """Method: GPT-2 scales what is added to the residual stream by 1/sqrt(2 layers); measured over all layers, on meta.
    Twin: the other matrices are not scaled, so the comparison can tell them apart."""
    drawn, plain = drawn_and_plain(tiny("GPT2"))
    scaled = torch.stack([v for n, v in drawn.items() if n.endswith("attn.c_proj.weight")]).std().item()
    others = torch.stack([v for n, v in drawn.items() if n.endswith("attn.c_attn.weight")]).std().item()
    assert abs(scaled - 0.02 / 16**0.5) < 0.0002 and abs(others - 0.02) < 0.0005
    swapped = {n: v * 4 if n.endswith("attn.c_proj.weight") else v for n, v in drawn.items()}
    assert len(unlike(swapped, plain)) == 8


def test_a_transformers_model_inside_a_module_of_ones_own():
    """Method: a model with a value head around an OPT; the OPT's own ``_init_weights`` counts for what is inside it, or a
    ConfigError says that weights are needed: embeddings 50 times as large are neither."""
    language_model = tiny("OPT")

    class WithValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = language_model()
            self.value = nn.Linear(64, 1, bias=False)  # one random element has no spread

    try:
        drawn, plain = drawn_and_plain(WithValue)
    except infinity.ConfigError:
        return
    assert unlike(drawn, plain) == []


def test_adapters_on_meta_start_as_peft_makes_them():
    """Method: LoRA on a Llama, on meta without weights; B is zero, as in memory, so the adapter changes nothing at first,
    or a ConfigError says that this cannot be had."""
    peft = pytest.importorskip("peft")
    build = tiny("Llama")
    adapted = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    try:
        drawn, plain = drawn_and_plain(lambda: peft.get_peft_model(build(), adapted))
    except infinity.ConfigError:
        return
    assert all(not plain[name].any() for name in plain if "lora_B" in name)
    assert unlike(drawn, plain) == []


@pytest.mark.parametrize("name", ["Llama", "BERT", "ResNet", "T5"])
def test_transformers_models_from_their_folder(name, tmp_path):
    """Method: save a model in several files, build it on meta, and wrap from the folder with an optimizer in bf16; every
    parameter and buffer has the bits of the saved model, tied ones and non-persistent buffers included."""
    build = tiny(name)
    saved = seeded(SEED, build)
    saved.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > (1 if name != "ResNet" else 0)
    model = on_meta(build)
    config = at_home("nvme", "nvme", tmp_path, weights=str(tmp_path / "model"), param_dtype="bf16")
    model, _ = infinity.wrap_model(model, adamw(model, LR), config)
    assert differing(model.state_dict(), saved.state_dict()) == []
    assert differing(dict(model.named_buffers()), dict(saved.named_buffers())) == []


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------

# The high-water mark of the memory map, not ru_maxrss: that one starts at what the process was before its exec, pytest
# with all its models, and would hide any growth below it. It is set back before each case.
PEAK = """
import gc, json, os, sys
sys.path[:0] = [{root!r}]
import torch
from torch import nn
import infinity
torch.set_num_threads(1)
width, blocks = {width}, {blocks}

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(32 * width, width), nn.Linear(width, 32 * width, bias=False)
        self.head.weight = self.tokens.weight

def matrices(count):
    return [nn.Linear(width, width, bias=False) for _ in range(count)]

def meta(build):
    with torch.device("meta"):
        return build()

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def growth(work):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    planned = work()
    return status("VmHWM") - before - planned

def wrap(build, **more):
    model, _ = infinity.wrap_model(meta(build), None, dict({config!r}, **more))
    return infinity.stats(model).tiers["host"].peak_nbytes

def plain():
    from safetensors.torch import load_file
    model = nn.Sequential(*matrices(blocks))
    for name in sorted(os.listdir({folder!r})):
        model.load_state_dict(load_file(os.path.join({folder!r}, name)), strict=False)
    return 0

wrap(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))  # what torch and the engine load once
cases = {{
    "file": lambda: wrap(lambda: nn.Sequential(*matrices(blocks)), weights={folder!r}),
    "blocks draw": lambda: wrap(lambda: nn.Sequential(*(nn.Sequential(one) for one in matrices(blocks // 2)))),
    "siblings draw": lambda: wrap(lambda: nn.Sequential(*matrices(blocks // 2))),
    "tied, in a file": lambda: wrap(Tied, weights={tied!r}),
    "plain": plain,
}}
print(json.dumps({{name: growth(work) for name, work in cases.items()}}))
"""
WIDTH, BLOCKS = 1024, 96  # 384 MiB


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> dict[str, int]:
    """By how many bytes a process grew beyond what the plan counts, at the highest, in each case."""
    folder, swap, tied = (tmp_path_factory.mktemp(name) for name in ("model", "swap", "tied"))
    matrix = torch.randn(WIDTH, WIDTH)
    for part in range(4):
        names = [f"{i}.weight" for i in range(BLOCKS) if i % 4 == part]
        write_file(folder / f"m{part}.safetensors", dict.fromkeys(names, matrix))
    write_file(tied / "m.safetensors", {"tokens.weight": matrix.repeat(32, 1)})
    script = PEAK.format(
        root=str(Path(infinity.__file__).parents[1]), width=WIDTH, blocks=BLOCKS, folder=str(folder), tied=str(tied),
        config=at_home("nvme", "auto", swap),
    )  # fmt: skip
    # Without this, glibc keeps what torch frees, up to 32 MiB at a time.
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=variables)
    for path in (folder, tied):
        shutil.rmtree(path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["file", "blocks draw", "siblings draw", "tied, in a file"])
def test_peak_memory_of_the_wrap_is_far_below_the_model(case, grown):
    """Method: in a process of its own, wrap on meta with the home on disk 384 MiB from a folder, 192 MiB whose modules
    draw (in blocks, or all in one Sequential), and a tied tensor of 128 MiB whose file has one of its names. The highest
    resident memory is above what the plan counts by less than 80 MiB: four blocks of the file, one module, torch's own.
    The twin, a plain load, is above the model's size."""
    print({name: f"{nbytes / MIB:.1f} MiB" for name, nbytes in grown.items()})
    assert grown["plain"] >= 4 * WIDTH * WIDTH * BLOCKS
    assert grown[case] < 80 * MIB, f"{grown[case] / MIB:.0f} MiB above the plan"
