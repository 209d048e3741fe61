"""Values that modules draw themselves; what cannot be done is said; memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from meta_cases import (  # noqa: F401
    LR,
    MIB,
    SEED,
    OwnWeight,
    State,
    awkward_file,
    drawn_and_plain,
    every_home,
    faulty_files,
    held_by_a_view,
    held_weakly,
    init_without_argument,
    on_meta,
    small_blocks,
    stepped_on_meta,
    unlike,
    write_file,
)
from models import (
    at_home,
    bits,
    differing,
    environment,
    leftovers,
    seeded,
)
from runs import adamw
from torch import nn

import infinity

TYPED = (infinity.ConfigError, infinity.CorruptionError, infinity.StorageError)


def look(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> Any:
    """All that a failed wrap may not change."""
    tensors = {
        name: (
            id(t),
            type(t),
            t.device,
            t.dtype,
            t.stride(),
            t.requires_grad,
            None if t.is_meta else bytes(bits(t).numpy()),
        )
        for name, t in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }
    hooks = [
        (
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
            len(m._state_dict_hooks),
            m.forward.__func__,
        )
        for m in model.modules()
        if hasattr(m.forward, "__func__")
    ]
    groups, state = None, None
    if optimizer is not None:
        groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        state = {
            id(p): {
                key: bytes(bits(torch.as_tensor(value)).numpy()) for key, value in of_one.items()
            }
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


BROKEN: dict[
    str, tuple[Callable[[Path], Path], str]
] = {  # how it is made, and what the message must name
    "no such file": (lambda path: path, "m.safetensors"),
    "empty folder": (folder_of(), "m.safetensors"),
    "dangling link": (lambda path: (path.symlink_to("nowhere"), path)[1], "m.safetensors"),
    "folder with a dangling link": (
        folder_of(a=lambda p: write_file(p, good()), b=lambda p: p.symlink_to("nowhere")),
        "b.safetensors",
    ),
    "folder named like a file": (folder_of(a=lambda p: p.mkdir()), "a.safetensors"),
    "no bytes": (lambda path: edited(path, lambda data: b""), "m.safetensors"),
    "seven bytes": (lambda path: edited(path, lambda data: data[:7]), "m.safetensors"),
    "half a header": (lambda path: edited(path, lambda data: data[:100]), "m.safetensors"),
    "a byte short": (lambda path: edited(path, lambda data: data[:-1]), "m.safetensors"),
    "cut in the middle": (
        lambda path: edited(path, lambda data: data[: len(data) // 2]),
        "m.safetensors",
    ),
    "a byte more": (lambda path: edited(path, lambda data: data + b"x"), "m.safetensors"),
    "endless header": (
        lambda path: edited(path, lambda data: b"\xff" * 8 + data[8:]),
        "m.safetensors",
    ),
    "header that is no JSON": (
        lambda path: edited(path, lambda data: data[:8] + b"]" + data[9:]),
        "m.safetensors",
    ),
    "header that is no text": (
        lambda path: edited(path, lambda data: data[:9] + b"\xff" + data[10:]),
        "m.safetensors",
    ),
    "overlapping tensors": (replaced(b"[0, 2304]", b"[8, 2304]"), "m.safetensors"),
    "shape and bytes that disagree": (replaced(b"[24, 24]", b"[24, 25]"), "m.safetensors"),
    "a pickle": (lambda path: (torch.save(good(), path), path)[1], "m.safetensors"),
    "second file broken": (
        folder_of(a=lambda p: write_file(p, good()), b=lambda p: edited(p, lambda data: data[:-1])),
        "b.safetensors",
    ),
    "unknown dtype": (replaced(b'"I64"', b'"U64"'), "num_batches_tracked"),
    "a parameter missing": (
        lambda path: write_file(path, {n: t for n, t in good().items() if n != "1.bias"}),
        "1.bias",
    ),
    "no name of the model": (
        lambda path: write_file(path, {f"x.{n}": t for n, t in good().items()}),
        "0.weight",
    ),
    "one dimension more": (
        lambda path: write_file(path, good() | {"0.bias": torch.ones(24, 1)}),
        "0.bias",
    ),
    "another length": (
        lambda path: write_file(path, good() | {"0.weight": torch.ones(24, 25)}),
        "0.weight",
    ),
    "buffer of another length": (
        lambda path: write_file(path, good() | {"1.running_var": torch.ones(25)}),
        "running_var",
    ),
    "no elements": (
        lambda path: write_file(path, good() | {"1.weight": torch.ones(0)}),
        "1.weight",
    ),
}


@pytest.mark.parametrize("built", ["on meta", "in memory"])
@pytest.mark.parametrize("case", BROKEN)
def test_files_that_cannot_be_used(case, built, swap, tmp_path):
    """Method: 25 ways in which a file is missing, broken or another model's; the error is typed,
    names what is wrong, and leaves model, optimizer and disk as they were. Twin: the same objects
    are then wrapped from a right file.
    """
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
@pytest.mark.parametrize(
    "build",
    [with_buffers, without_buffers, half_on_meta, lambda: on_meta(with_buffers)],
    ids=["buffers", "no buffers", "half on meta", "on meta"],
)
def test_a_wrap_that_fails_halfway_has_changed_no_value(
    build, faults, swap, small_blocks, tmp_path
):
    """Method: wrap a model (in memory, on meta, or in between) with weights= and a stepped
    optimizer, with a home that fails at its first write, a later one, or the first block it reads
    back; every value, buffer and moment has its bits. Twin: the same objects, without faults, then
    have the file's values."""
    torch.manual_seed(SEED)
    model = build()
    optimizer = adamw(model, LR)
    if build in (with_buffers, without_buffers):
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    values = {
        name: torch.full_like(value, 7, device="cpu") for name, value in model.state_dict().items()
    }
    first = dict(model.named_buffers())  # in the file: they are set before the first write fails
    path = awkward_file(
        tmp_path / "m.safetensors", {name: values[name] for name in (*first, *values)}
    )
    config = at_home("nvme", "nvme", swap, weights=path)
    before = look(model, optimizer, swap)
    with (
        environment(INFINITY_FAULTS=faults),
        pytest.raises((infinity.StorageError, infinity.CorruptionError)),
    ):
        infinity.wrap_model(model, optimizer, config)
    after = look(model, optimizer, swap)
    changed = [name for name in before[0] if after[0][name] != before[0][name]]
    assert changed == [] and after == before
    model, _ = infinity.wrap_model(model, optimizer, config)
    assert differing(model.state_dict(), values) == []


def test_a_file_that_cannot_be_read_to_its_end(swap, small_blocks, monkeypatch, tmp_path):
    """Method: the disk fails at the fourth block of the weights; a StorageError, and the model is
    on meta as it was."""
    values = {
        name: torch.full_like(value, 7) for name, value in with_buffers().state_dict().items()
    }
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
    """Method: modules of which one tensor is on meta and the others have values, without weights=;
    the values stay."""

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
        given = {
            name: t.detach().clone() for name, t in model.state_dict().items() if not t.is_meta
        }
        model, _ = infinity.wrap_model(model, None, {"params": "host"})
        state = model.state_dict()
        assert differing({name: state[name] for name in given}, given) == [], build.__name__


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
    """Method: transposed, channels-last, permuted, 0-d and empty parameters, in pieces of a few
    hundred elements; every element is where it is counted, and the strides are those the model was
    built with."""
    plain = Counted()
    config = at_home(home, home, tmp_path, param_dtype="bf16")
    if source == "file":
        config["weights"] = awkward_file(tmp_path / "m.safetensors", plain.state_dict())
    model = on_meta(Counted)
    model, _ = infinity.wrap_model(model, adamw(model, LR), config)
    state = model.state_dict()
    assert differing(state, plain.state_dict()) == []
    assert {n: p.stride() for n, p in model.named_parameters()} == {
        n: p.stride() for n, p in plain.named_parameters()
    }
    wrong = (
        state["image"].clone(memory_format=torch.contiguous_format).view(-1)[: 80 * 6].view(80, 6)
    )
    assert not torch.equal(wrong, plain.image[:, :, 0, 0]), (
        "the twin: in memory order it would be another tensor"
    )


@pytest.mark.parametrize("home", ["device", "hostile"])
def test_drawn_values_do_not_depend_on_the_home_or_the_optimizer(home, tmp_path):
    """Method: one seed at every home, with and without an optimizer; the same bits, which another
    seed does not give."""

    def drawn(seed: int, config: dict[str, Any], trained: bool) -> State:
        model = on_meta(
            lambda: nn.Sequential(
                nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 30), nn.Embedding(9, 4)
            )
        )
        torch.manual_seed(seed)
        return infinity.wrap_model(model, adamw(model, LR) if trained else None, config)[
            0
        ].state_dict()

    expected = drawn(SEED, {"params": "host"}, False)
    for trained in (True, False):
        assert differing(drawn(SEED, at_home(home, home, tmp_path), trained), expected) == []
        assert differing(
            drawn(SEED + 1, at_home(home, home, tmp_path), trained), expected
        ) == sorted(expected)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(64, 4),
    "MultiheadAttention with kdim": lambda: nn.MultiheadAttention(
        64, 4, kdim=48, vdim=40, add_bias_kv=True
    ),
    "LSTM": lambda: nn.LSTM(48, 40, 2, bidirectional=True, proj_size=20),
    "GRU": lambda: nn.GRU(48, 40),
    "LSTMCell": lambda: nn.LSTMCell(48, 40),
    "Embedding with padding": lambda: nn.Embedding(60, 40, padding_idx=3),
    "Bilinear": lambda: nn.Bilinear(20, 20, 9),
    "ConvTranspose": lambda: nn.ConvTranspose2d(20, 30, 3),
    "norms": lambda: nn.Sequential(
        nn.GroupNorm(2, 8),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.RMSNorm(8),
    ),
    "PReLU": lambda: nn.Sequential(nn.PReLU(7, init=0.25)),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(64, 4, 128),
    "Transformer": lambda: nn.Transformer(64, 4, 1, 1, 128),
}


@pytest.mark.parametrize("kind", MODULES)
def test_modules_of_torch_are_as_they_are_built(kind):
    """Method: torch's modules that have initialisation of their own, nested ones included, on
    meta; constants are the same and what is drawn has the same spread as in one that was built
    in memory."""
    assert unlike(*drawn_and_plain(MODULES[kind])) == []


def test_recurrent_modules_on_meta_from_a_file(tmp_path):
    """Method: an LSTM, which keeps weak references to its parameters, from a file; the output has a
    plain one's bits."""
    plain = seeded(SEED, lambda: nn.LSTM(12, 10, 2))
    path = awkward_file(tmp_path / "m.safetensors", plain.state_dict())
    model, _ = infinity.wrap_model(
        on_meta(lambda: nn.LSTM(12, 10, 2)), None, at_home("nvme", "auto", tmp_path, weights=path)
    )
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
    """Method: ``reset_parameters`` of a block zeroes its child's weight, after the child drew it;
    so it must be on meta, whether or not the block has a parameter of its own."""
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
    """Method: a table made in ``__init__`` only, so nowhere for a model on meta, for several
    dtypes, with and without a file that has the parameters; a ConfigError names it, and the model
    is on meta still. Twin: a module that sets it, if only to zeros, is wrapped."""
    values = {f"0.line.{name}": value for name, value in nn.Linear(4, 4).state_dict().items()}
    path = awkward_file(tmp_path / "m.safetensors", values)
    dirt = [
        torch.full((64, 64), 1, dtype=torch.uint8) for _ in range(50)
    ]  # what the allocator will hand out
    del dirt
    for more in ({}, {"weights": path}):
        model = on_meta(lambda: nn.Sequential(Table(dtype, persistent, sets=False)))
        with pytest.raises(infinity.ConfigError, match=r"0\.table"):
            infinity.wrap_model(model, None, {"params": "host"} | more)
        assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_buffer_that_is_set_to_zeros_is_set(dtype):
    """Method: the twin of the test above."""
    model, _ = infinity.wrap_model(
        on_meta(lambda: Table(dtype, False, sets=True)), None, {"params": "host"}
    )
    assert not model.table.any()


def test_a_parameter_that_nobody_sets_is_named():
    """Method: the same for a parameter, deep inside, in a module of one's own."""
    model = on_meta(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), OwnWeight()))
    )
    with pytest.raises(infinity.ConfigError, match=r"1\.1\.weight"):
        infinity.wrap_model(model, None, {"params": "host"})
    assert all(p.is_meta for p in model.parameters())


def test_a_parameter_that_is_set_in_part():
    """Method: ``__init__`` makes zeros and ``reset_parameters`` draws all rows but the first, which
    a model in memory keeps at zero; on meta, the row is zero too or a ConfigError names the
    parameter: NaN is neither.
    """

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


# The high-water mark of the memory map, not ru_maxrss: that one starts at what the process was
# before its exec, pytest with all its models, and would hide any growth below it. It is set back
# before each case.
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
"""  # noqa: E501
WIDTH, BLOCKS = 1024, 96  # 384 MiB


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> dict[str, int]:
    """By how many bytes a process grew beyond what the plan counts, at the highest, in each
    case."""
    folder, swap, tied = (tmp_path_factory.mktemp(name) for name in ("model", "swap", "tied"))
    matrix = torch.randn(WIDTH, WIDTH)
    for part in range(4):
        names = [f"{i}.weight" for i in range(BLOCKS) if i % 4 == part]
        write_file(folder / f"m{part}.safetensors", dict.fromkeys(names, matrix))
    write_file(tied / "m.safetensors", {"tokens.weight": matrix.repeat(32, 1)})
    script = PEAK.format(
        root=str(Path(infinity.__file__).parents[1]),
        width=WIDTH,
        blocks=BLOCKS,
        folder=str(folder),
        tied=str(tied),
        config=at_home("nvme", "auto", swap),
    )
    done = prepared.run("-c", prepared.GIVES_BACK + script)
    for path in (folder, tied):
        shutil.rmtree(path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("file", marks=pytest.mark.slow),
        "blocks draw",
        "siblings draw",
        "tied, in a file",
    ],
)
def test_peak_memory_of_the_wrap_is_far_below_the_model(case, grown):
    """Method: in a process of its own, wrap on meta with the home on disk 384 MiB from a folder,
    192 MiB whose modules draw (in blocks, or all in one Sequential), and a tied tensor of 128 MiB
    whose file has one of its names. The highest resident memory is above what the plan counts by
    less than 80 MiB: four blocks of the file, one module, torch's own. The twin, a plain load, is
    above the model's size."""
    print({name: f"{nbytes / MIB:.1f} MiB" for name, nbytes in grown.items()})
    assert grown["plain"] >= 4 * WIDTH * WIDTH * BLOCKS
    assert grown[case] < 80 * MIB, f"{grown[case] / MIB:.0f} MiB above the plan"


@pytest.mark.parametrize(
    "build", [held_weakly, held_by_a_view, init_without_argument, stepped_on_meta]
)
def test_no_error_of_torch_s_own(build, swap):
    """Method: a Parameter that something else refers to, an ``_init_weights`` that takes no module,
    and an optimizer that made its state on meta. Either it works, with a state dict that is real,
    or the error is typed and nothing changed.
    """
    model, held = build()
    optimizer = held if isinstance(held, torch.optim.Optimizer) else adamw(model, LR)
    ids = {name: (id(p), p.is_meta) for name, p in model.named_parameters()}
    try:
        model, _ = infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", swap))
    except infinity.InfinityError:
        assert {name: (id(p), p.is_meta) for name, p in model.named_parameters()} == ids
    else:
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())


class _Deep(nn.Module):
    """A buffer two modules down, which the model's own ``_init_weights`` sets when it is given the
    model itself, or nobody does."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3), persistent=False)

    def __init__(self, *, sets: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), self.Inner())])
        self.sets = sets

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        if module is self and self.sets:
            with torch.no_grad():
                self.layers[0][1].scale.fill_(2.0)


@pytest.mark.parametrize("sets", [True, False])
def test_a_model_may_set_the_buffers_of_modules_deep_inside_it(sets):
    """Method: as Falcon-H1 does; twin: where nobody sets it, it is refused by its name, and the
    model stays on meta."""
    model = on_meta(lambda: _Deep(sets=sets))
    if sets:
        model, _ = infinity.wrap_model(model, None, {"params": "host"})
        assert torch.equal(model.layers[0][1].scale, torch.full((3,), 2.0))
    else:
        with pytest.raises(
            infinity.ConfigError, match=r"layers\.0\.1\.scale is on meta, and Inner does not set it"
        ):
            infinity.wrap_model(model, None, {"params": "host"})
        assert model.layers[0][1].scale.is_meta
