"""Weight files, and values that come from them."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from meta_cases import (  # noqa: F401
    CODES,
    LR,
    MIB,
    SEED,
    SMALL,
    OwnWeight,
    State,
    awkward_file,
    every_home,
    faulty_files,
    on_meta,
    optimizer_state,
    small_blocks,
    write_file,
)
from models import (
    Prescribed,
    at_home,
    differing,
    gradients,
    in_child,
    leftovers,
    prescribed,
    seeded,
)
from opened import left_open, opened
from runs import adamw
from torch import nn

import infinity
from infinity import native
from infinity.files import weight_files
from infinity.files.weight_files import WeightFiles

BLOCK = 4 * MIB


def random_bytes(nbytes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A flat tensor of any bits that ``dtype`` can have, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype)


def streamed(path: Path, names: set[str] | None = None) -> State:
    """What the stream gives, put together; fails where its pieces are not the tensors' elements
    once each, in order."""
    files = WeightFiles(path)
    names = set(files.tensors) if names is None else names
    flat = {
        name: torch.empty(files.tensors[name].shape.numel(), dtype=files.tensors[name].dtype)
        for name in names
    }
    reached = dict.fromkeys(names, 0)
    for piece in files.stream(names):
        assert (
            piece.begin == reached[piece.name] and piece.values.dim() == 1 and piece.values.numel()
        )
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


def random_file(path: Path, seed: int) -> State:
    """Tensors of any dtypes, sizes and order behind a header of any length, and what was
    written."""
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
    """Method: 60 seeded files of all dtypes, in blocks of 64 and 128 KiB; every tensor comes with
    the bits that were written, in pieces that follow each other. Twin: of a file with one byte
    changed, one tensor differs.
    """
    for seed in range(60):
        small_blocks(SMALL * (1 + seed % 2))
        expected = random_file(tmp_path / "m.safetensors", seed)
        found = streamed(tmp_path / "m.safetensors")
        assert differing(found, expected) == [], f"file {seed}"
    (name,) = [
        n for n, t in expected.items() if t.nbytes == max(t.nbytes for t in expected.values())
    ][:1]
    expected[name] = expected[name].clone()
    expected[name].reshape(-1).view(torch.uint8)[-1] ^= 1
    assert differing(found, expected) == [name]


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str
)
def test_an_element_across_two_blocks(dtype, small_blocks, tmp_path):
    """Method: a tensor of three elements whose second has its first 1, 2, ... bytes in one block
    and the rest in the next, and one whose first and last are cut; the same bits come back. Also
    where the next "block" is the file's tail.
    """
    size = dtype.itemsize
    for before in range(1, size):
        for end, more in (
            (SMALL, 0),
            (SMALL, 4 * SMALL),
            (SMALL + 4096, 0),
        ):  # of a block; of the last whole disk block
            start = 8192 + 5
            filler = (
                end - start - before - size
            )  # the second element then starts `before` bytes ahead of the end
            tensors = {
                "filler": torch.ones(filler, dtype=torch.int8),
                "cut": random_bytes(3 * size, dtype, before),
                "more": torch.ones(more, dtype=torch.uint8),
            }
            path = write_file(tmp_path / "m.safetensors", tensors, start=start)
            stored = WeightFiles(path).tensors["cut"]
            assert stored.begin + size == end - before
            assert differing(streamed(path), tensors) == [], (
                f"{before} of {size} bytes ahead of {end}, {more} behind"
            )
            assert differing(streamed(path, {"cut"}), {"cut": tensors["cut"]}) == []


def test_real_blocks_of_4_mib(tmp_path):
    """Method: nothing is made small. Behind odd bytes, an fp32 tensor of 10 MiB that is cut at two
    block ends, a bf16 one that is cut at the third, and 5 fp64 numbers in the file's last 4096
    bytes."""
    assert weight_files.READ_NBYTES == BLOCK
    wide = random_bytes(10 * MIB, torch.float32, 1)
    filler = (
        3 * BLOCK - 4097 - 7 - wide.nbytes - 2 * 100 - 1
    )  # the bf16 element 100 then starts one byte ahead
    tensors = {
        "odd": torch.ones(7, dtype=torch.int8),
        "wide": wide.view(5, -1, 4),
        "filler": random_bytes(filler, torch.uint8, 2),
        "half": random_bytes(2 * 5001, torch.bfloat16, 3),
        "tail": random_bytes(5 * 8, torch.float64, 4),
    }
    path = write_file(tmp_path / "m.safetensors", tensors, start=4097)
    stored = WeightFiles(path).tensors
    assert (
        stored["wide"].begin % 4 == 0 and stored["half"].begin % 2 == 1 and stored["tail"].begin % 8
    )
    assert (
        stored["half"].begin + 2 * 100 == 3 * BLOCK - 1
        and stored["tail"].begin > os.path.getsize(path) // 4096 * 4096
    )
    assert differing(streamed(path), tensors) == []
    tensors["odd"] = torch.ones(
        8, dtype=torch.int8
    )  # and the 10 MiB off their alignment, by every offset there is
    for start in (4097, 4098, 4099):
        one = {name: tensors[name] for name in ("odd", "wide")}
        path = write_file(tmp_path / "m.safetensors", one, start=start)
        assert WeightFiles(path).tensors["wide"].begin % 4
        assert differing(streamed(path), one) == []


def test_lengths_of_files_about_whole_blocks(small_blocks, tmp_path):
    """Method: files that end just before, at and just behind disk blocks and read blocks, and ones
    shorter than any."""
    around = [
        whole + more
        for whole in (4096, SMALL, SMALL + 4096, 3 * SMALL)
        for more in (-2, -1, 0, 1, 4095)
    ]
    for nbytes in (300, *around):
        values = random_bytes((nbytes - 201) // 2 * 2, torch.bfloat16, nbytes)
        rest = random_bytes(nbytes - 201 - values.nbytes, torch.uint8, 5)
        tensors = {"values": values, "rest": rest}
        path = write_file(tmp_path / "m.safetensors", tensors, start=201)
        assert os.path.getsize(path) == nbytes
        assert differing(streamed(path), tensors) == [], nbytes


def test_tensors_without_elements_and_without_dimensions(small_blocks, tmp_path):
    """Method: empty tensors at the begin, between, at a block's end and at the file's; 0-d ones of
    every dtype; a file of empty tensors only; no name asked for."""
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
    assert (
        differing(streamed(path, {"first", "last"}), {n: tensors[n] for n in ("first", "last")})
        == []
    )
    assert streamed(path, set()) == {}
    nothing = {"a": torch.empty(0), "b": torch.empty(2, 0)}
    assert differing(streamed(write_file(tmp_path / "n.safetensors", nothing)), nothing) == []


def test_only_what_is_asked_for_comes_and_in_the_order_of_the_disk(small_blocks, tmp_path):
    """Method: three files in a folder, names that sort otherwise than they lie; links to files
    elsewhere, as in the cache of the hub; other files in the folder do not matter."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "blobs"
    folder.mkdir(), elsewhere.mkdir()
    expected = {}
    for number in (3, 1, 2):
        names = [f"z{number}", f"a{number}", f"m{number}"]
        tensors = {
            name: random_bytes(50_001 * 2, torch.bfloat16, ord(name[0]) * number) for name in names
        }
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


def test_disk_that_answers_late_short_and_out_of_order(
    io_engine, small_blocks, monkeypatch, tmp_path
):
    """Method: short transfers, delays and reordering under the reads; the bits stay. Twin: with
    bits flipped, which no checksum of the file could show, the comparison sees it."""
    expected = {
        "a": random_bytes(500_001 * 4, torch.float32, 1),
        "b": random_bytes(7, torch.uint8, 2),
    }
    path = write_file(tmp_path / "m.safetensors", expected, start=201)
    faulty_files(monkeypatch, seed=SEED, short_transfer=0.4, delay=0.2, reorder=0.3)
    assert differing(streamed(path), expected) == []
    faulty_files(monkeypatch, seed=SEED, bit_flip=0.2)
    assert differing(streamed(path), expected) == ["a"]


def test_a_stream_that_ends_early_gives_everything_back(
    io_engine, small_blocks, monkeypatch, tmp_path
):
    """Method: leave a stream after one piece with reads under way, by break and by a disk error; no
    crash, and no descriptor or thread is left."""

    def work():
        small_blocks()
        path = write_file(
            tmp_path / "m.safetensors", {"a": random_bytes(2 * MIB, torch.float32, 1)}, start=101
        )
        streamed(path)
        gc.collect()
        before = opened()
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
        assert left_open(before) == (0, 0)

    in_child(work)


def test_files_that_may_only_be_read(tmp_path):
    """Method: as a user who may not write them, wrap from a file and a folder of mode 444; the bits
    are right. Of mode 000, the error is a StorageError with the path. Root may do everything, so a
    child of root becomes nobody first.
    """
    infinity.wrap_model(
        on_meta(lambda: nn.Linear(4, 4)), None, {}
    )  # imports what nobody may not read

    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        expected = {"weight": torch.randn(90, 90), "bias": torch.randn(90)}
        awkward_file(folder / "model.safetensors", expected).chmod(0o444)
        write_file(folder / "other.bin", expected).chmod(0o000)

        def work():
            if os.getuid() == 0:
                os.setgid(65534), os.setuid(65534)
            assert not os.access(folder / "model.safetensors", os.W_OK), (
                "this user may write: the test says nothing"
            )
            for path in (folder, folder / "model.safetensors"):
                model, _ = infinity.wrap_model(
                    on_meta(lambda: nn.Linear(90, 90)), None, {"params": "host", "weights": path}
                )
                assert differing(model.state_dict(), expected) == []
            with pytest.raises(infinity.StorageError, match="other.bin") as raised:
                infinity.wrap_model(
                    on_meta(lambda: nn.Linear(90, 90)), None, {"weights": folder / "other.bin"}
                )
            assert str(folder / "other.bin") in str(raised.value.filename)

        in_child(work)
    finally:
        shutil.rmtree(folder)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(gradients(prescribed(0), seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("param_dtype", [None, "bf16"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "not trained"])
@every_home
def test_every_home_gets_the_file_s_values(home, trained, param_dtype, small_blocks, tmp_path):
    """Method: a model with 0-d, empty, transposed and channels-last parameters, on meta, from an
    awkward file in small blocks, against the same values wrapped from memory: state dict, forward,
    and two steps have the same bits, and the unwrapped model is torch's. fp32 values that bf16 does
    not have are in the master (twin: rounded ones differ).
    """
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
        assert len(differing(model.state_dict(), rounded)) == len(values) - 1, (
            "all but the empty one have more bits"
        )
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
@pytest.mark.parametrize(
    "stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_dtype_of_the_file_is_not_the_model_s(stored, own, small_blocks, tmp_path):
    """Method: every pair of float dtypes, trained at home on disk; the state dict has the bits that
    ``load_state_dict`` gives a plain model, denormals, infinities and NaN included, and so does an
    optimizer's first step.
    """
    special = torch.tensor(
        [
            0.0,
            -0.0,
            1e-40,
            6e-5,
            1e-7,
            65520.0,
            3.4e38,
            float("inf"),
            float("nan"),
            1 + 2**-8,
            1 + 2**-9,
        ]
    )
    values = {
        "weight": torch.randn(50, 60, generator=torch.Generator().manual_seed(SEED)),
        "bias": torch.ones(50),
    }
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
    """Method: an fp32 model computed in bf16 from files of fp64, fp32 and bf16, for each kind of
    master; the master is the model's fp32 value, and the weight its nearest bf16."""
    for stored in (torch.float64, torch.float32, torch.bfloat16):
        for master in ("split", "fp32"):
            values = {
                "weight": torch.randn(9, 70, dtype=torch.float64).to(stored),
                "bias": torch.randn(9).to(stored),
            }
            path = awkward_file(tmp_path / "m.safetensors", values)
            model = on_meta(lambda: nn.Linear(70, 9))
            config = at_home(
                "host", "nvme", tmp_path, weights=path, param_dtype="bf16", master=master
            )
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
        self.register_buffer(
            "images", torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
        )
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
            drawn = (
                torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).abs() * 5
            )
            tensor.copy_(drawn > 2 if tensor.dtype == torch.bool else drawn)
    return model


@pytest.mark.parametrize("home", ["hostile", "device"])
def test_buffers_come_from_the_file_or_are_set(home, small_blocks, tmp_path):
    """Method: persistent buffers of five dtypes and three kinds of strides are in an awkward file,
    the non-persistent ones in none; all have a plain model's bits and strides, and so has the
    output in training mode.
    """
    plain = buffered(SEED)
    path = awkward_file(tmp_path / "m.safetensors", plain.state_dict())
    model = on_meta(Buffered)
    model, _ = infinity.wrap_model(model, None, at_home(home, "auto", tmp_path, weights=path))
    assert differing(model.state_dict(), plain.state_dict()) == []
    expected = dict(plain.named_buffers())
    assert differing(dict(model.named_buffers()), expected) == []
    assert {n: b.stride() for n, b in model.named_buffers()} == {
        n: b.stride() for n, b in expected.items()
    }
    assert (
        model.nothing is None
        and model._non_persistent_buffers_set == plain._non_persistent_buffers_set
    )
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
    """Method: a subclass of Parameter, which is not moved about, has its class and the file's
    values after the wrap."""
    values = {
        name: torch.randn(value.shape) for name, value in WithQuantised().state_dict().items()
    }
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
    """Method: the file has the tied tensor once, under either name, and the other name's module
    cannot initialise; the value is the file's under both names, and stays one Parameter. No random
    number is drawn for a value that is there.
    """
    value = torch.randn(40, 8)
    path = awkward_file(tmp_path / "m.safetensors", {name: value})
    model = on_meta(Tied)
    before = torch.get_rng_state()
    model, _ = infinity.wrap_model(model, None, at_home("nvme", "auto", tmp_path, weights=path))
    assert model.head.weight is model.tokens.weight
    assert differing(model.state_dict(), {"tokens.weight": value, "head.weight": value}) == []
    assert torch.equal(torch.get_rng_state(), before)


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
    model, _ = infinity.wrap_model(
        on_meta(Shared), None, at_home("nvme", "auto", tmp_path, weights=path)
    )
    assert model.one["block"] is model.other["block"]
    for value in model.state_dict().values():
        assert torch.equal(value, torch.arange(49.0).view(7, 7))


def test_shared_buffers_stay_shared(tmp_path):
    """Method: two modules with one buffer; after the wrap it is still one (twin: it is for a model
    in memory)."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        model[1].running_mean = model[0].running_mean
        return model

    for model in (build(), on_meta(build)):
        model, _ = infinity.wrap_model(model, None, {"params": "host"})
        assert model[1].running_mean is model[0].running_mean


def test_parameters_that_share_memory_are_refused_on_meta_too(tmp_path):
    """Method: two Parameters over one storage; the twin in memory is a ConfigError with both names,
    as on meta it must be: they would silently become two weights."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(model[0].weight)
        return model

    for model in (build(), on_meta(build)):
        with pytest.raises(infinity.ConfigError, match="share memory"):
            infinity.wrap_model(model, None, {"params": "host"})


def test_what_hangs_on_a_parameter_stays(tmp_path):
    """Method: an attribute, a gradient hook and a post-accumulate hook on a Parameter, in memory
    (the twin) and on meta; after the wrap and one backward the attribute is there, and both hooks
    ran."""
    for build in (lambda: nn.Linear(4, 4), lambda: on_meta(lambda: nn.Linear(4, 4))):
        model, ran = build(), []
        model.weight.no_weight_decay = True
        model.weight.register_hook(lambda grad: ran.append("hook"))
        model.weight.register_post_accumulate_grad_hook(lambda param: ran.append("post"))
        model, optimizer = infinity.wrap_model(
            model, adamw(model, LR), {"params": "host", "optimizer": "host"}
        )
        assert model.weight.no_weight_decay is True
        model(torch.ones(2, 4)).sum().backward()
        assert ran == ["hook", "post"]


def test_a_file_that_lacks_a_persistent_buffer_is_no_silent_mixture(tmp_path):
    """Method: as ``load_state_dict`` is strict, a file without a trained ``running_mean`` must be
    refused by its name; with the parameters from the file, statistics of 0 and 1 are another model.
    Twin: the whole file is taken.
    """
    plain = buffered(SEED)
    whole = plain.state_dict()
    part = {name: value for name, value in whole.items() if name != "norm.running_mean"}
    with pytest.raises(RuntimeError, match="norm.running_mean"):
        buffered(0).load_state_dict(part)
    config = {"params": "host", "weights": awkward_file(tmp_path / "m.safetensors", whole)}
    assert (
        differing(infinity.wrap_model(on_meta(Buffered), None, config)[0].state_dict(), whole) == []
    )
    awkward_file(tmp_path / "m.safetensors", part)
    with pytest.raises(infinity.ConfigError, match="norm.running_mean"):
        infinity.wrap_model(on_meta(Buffered), None, config)


def test_a_non_persistent_buffer_in_the_file_is_not_taken(tmp_path):
    """Method: a file of an older version has rotary frequencies in bf16, which torch and
    transformers leave alone, since a non-persistent buffer is in no state dict; they come out as
    the module sets them, and another shape does no harm.
    """
    plain = buffered(SEED)
    for old in (plain.angles.bfloat16(), torch.ones(3)):
        path = awkward_file(tmp_path / "m.safetensors", plain.state_dict() | {"angles": old})
        model, _ = infinity.wrap_model(on_meta(Buffered), None, {"params": "host", "weights": path})
        assert torch.equal(model.angles, plain.angles)


def test_the_index_says_which_files_count(tmp_path):
    """Method: a folder with an index and a stale file of an earlier, differently split save; the
    values are those of the files in the index, as transformers reads them. Twin: without the stale
    file they are."""
    new, old = {"weight": torch.ones(4, 4)}, {"weight": torch.zeros(4, 4)}
    write_file(tmp_path / "model-00001-of-00002.safetensors", new)
    write_file(tmp_path / "model-00002-of-00002.safetensors", {"bias": torch.ones(4)})
    index = {
        "weight": "model-00001-of-00002.safetensors",
        "bias": "model-00002-of-00002.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    for _ in range(2):
        model, _ = infinity.wrap_model(
            on_meta(lambda: nn.Linear(4, 4)), None, {"params": "host", "weights": tmp_path}
        )
        assert torch.equal(model.state_dict()["weight"], new["weight"])
        write_file(tmp_path / "model-00001-of-00003.safetensors", old)


def test_a_tensor_of_an_unknown_dtype_that_nobody_wants(tmp_path):
    """Method: a uint16 tensor that is not the model's does not stand in the way; one that is, is a
    ConfigError."""
    path = tmp_path / "m.safetensors"
    write_file(
        path,
        {
            "weight": torch.ones(4, 4),
            "bias": torch.ones(4),
            "other": torch.ones(4, dtype=torch.int16),
        },
    )
    path.write_bytes(path.read_bytes().replace(b'"I16"', b'"U16"'))
    model, _ = infinity.wrap_model(
        on_meta(lambda: nn.Linear(4, 4)), None, {"params": "host", "weights": path}
    )
    assert torch.equal(model.state_dict()["weight"], torch.ones(4, 4))


@pytest.mark.parametrize("source", ["file", "modules"])
def test_wrapping_under_a_default_device(source, small_blocks, tmp_path):
    """Method: call wrap_model inside ``torch.device("meta")``, where a user may well have built the
    model; the values are those of a call outside, channels-last parameters and buffers included."""
    states = []
    for inside in (False, True):
        if source == "file":
            build, plain = Prescribed, prescribed(SEED)
            config = {
                "params": "host",
                "weights": awkward_file(tmp_path / "m.safetensors", plain.state_dict()),
            }
        else:
            config = {"params": "host"}

            def build() -> nn.Module:
                return nn.Sequential(nn.Conv2d(4, 40, 3), nn.BatchNorm2d(40)).to(
                    memory_format=torch.channels_last
                )

        torch.manual_seed(SEED)
        model = on_meta(build)
        if inside:
            with torch.device("meta"):
                model, _ = infinity.wrap_model(model, None, config)
        else:
            model, _ = infinity.wrap_model(model, None, config)
        states.append(model.state_dict())
    assert differing(*states) == []
