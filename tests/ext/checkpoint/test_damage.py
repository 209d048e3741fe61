"""Damaged checkpoints are refused before anything changes; extra; save_pretrained."""

from __future__ import annotations

import copy
import errno
import functools
import json
import math
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_cases import LR, SEED, Job, check_like, saved, uninterrupted  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    at_home,
    differing,
    loss_of,
    seeded,
    tokens,
    transformer,
)
from runs import adamw
from torch import nn

import infinity
import infinity.ext.checkpoint.pretrained
from infinity.ext.checkpoint import manifest


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)


def data_files(path: Path) -> list[Path]:
    return sorted(
        file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"
    )


DAMAGES: dict[str, Callable[[Path], Path]] = {}


def damage(do: Callable[[Path], Path]) -> Callable:
    DAMAGES[do.__name__] = do
    return do


@damage
def truncated(path):
    file = data_files(path)[1]
    os.truncate(file, file.stat().st_size // 2)
    return file


@damage
def truncated_to_nothing(path):
    file = data_files(path)[-1]
    os.truncate(file, 0)
    return file


@damage
def longer(path):
    file = data_files(path)[0]
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    return file


@damage
def missing(path):
    file = data_files(path)[-1]
    file.unlink()
    return file


@damage
def missing_other(path):
    file = next(file for file in data_files(path) if file.name == "other.safetensors")
    file.unlink()
    return file


@damage
def flipped_at_the_end(path):
    file = data_files(path)[-1]
    flip(file, -1, 3)
    return file


@damage
def flipped_in_the_header(path):
    file = data_files(path)[0]
    flip(file, 20)
    return file


@damage
def swapped_files(path):
    one, other = [file for file in data_files(path) if file.name.startswith("unit")][:2]
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return one


@damage
def manifest_truncated(path):
    file = path / "manifest.json"
    os.truncate(file, file.stat().st_size - 7)
    return file


@damage
def manifest_empty(path):
    (path / "manifest.json").write_text("")
    return path / "manifest.json"


@damage
def manifest_binary(path):
    (path / "manifest.json").write_bytes(bytes(range(256)))
    return path / "manifest.json"


@damage
def manifest_is_a_list(path):
    (path / "manifest.json").write_text("[1, 2]")
    return path / "manifest.json"


@damage
def manifest_nan(path):
    return edit_manifest(path, lambda text: re.sub(r'"step_index": \d+', '"step_index": NaN', text))


@damage
def manifest_infinity(path):
    return edit_manifest(
        path, lambda text: text.replace('"nbytes": ', '"nbytes": Infinity, "was": ', 1)
    )


@damage
def manifest_another_step(path):
    return edit_manifest(path, lambda text: text.replace('"step": 2', '"step": 3', 1))


@damage
def manifest_another_rate(path):
    return edit_manifest(
        path,
        lambda text: re.sub(
            r'\["lr", 0\.(\d)', lambda m: f'["lr", 0.{(int(m[1]) + 1) % 10}', text, count=1
        ),
    )


@damage
def manifest_another_extra(path):
    return edit_manifest(
        path,
        lambda text: text.replace(
            '"extra": {"$dict": [["step", 2]', '"extra": {"$dict": [["step", 6]', 1
        ),
    )


@damage
def manifest_another_random_state(path):
    return edit_manifest(
        path,
        lambda text: re.sub(
            r'("python": \[\d+, \[)(\d)', lambda m: m[1] + str((int(m[2]) + 1) % 10), text
        ),
    )


@damage
def manifest_without_a_key(path):
    return edit_manifest(path, lambda text: text.replace('"random"', '"rndom"', 1))


@damage
def manifest_wrong_type(path):
    return edit_manifest(
        path, lambda text: re.sub(r'"files": \{', '"files": 3, "wrong": {', text, count=1)
    )


@damage
def manifest_entry_without_checksum(path):
    return edit_manifest(path, lambda text: text.replace('"crc32c"', '"crc32d"', 1))


@damage
def manifest_leads_elsewhere(path):
    return edit_manifest(path, lambda text: re.sub(r'"data": "', '"data": "../', text, count=1))


@damage
def data_folder_missing(path):
    folder = next(path.glob("infinity-*"))
    shutil.rmtree(folder)
    return folder


def edit_manifest(path: Path, edit: Callable[[str], str]) -> Path:
    file = path / "manifest.json"
    text = file.read_text()
    assert edit(text) != text, "the damage did nothing"
    file.write_text(edit(text))
    return file


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Job:
    """A job that a failed load must leave alone."""
    torch.set_num_threads(1)
    return Job(("host", "host"), tmp_path_factory.mktemp("none"), seed=SEED + 1).run(1)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_a_corruption_error_and_changes_nothing(
    kind, saved, intact, tmp_path
):
    """Method: truncate, lengthen, remove, swap or flip files, and edit the manifest; loading raises
    CorruptionError naming the file, and model, optimizer and generators have every bit they had."""
    path = tmp_path / "checkpoint"
    shutil.copytree(saved, path)
    file = DAMAGES[kind](path)
    before, groups = intact.state(), copy.deepcopy(intact.optimizer.state_dict()["param_groups"])
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(infinity.CorruptionError, match=re.escape(file.name)):
        infinity.load_checkpoint(path, intact.model, intact.optimizer)
    assert differing(intact.state(), before) == []
    assert intact.optimizer.state_dict()["param_groups"] == groups
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert (np.random.get_state()[1] == generators[2]).all()


def test_an_intact_copy_loads(saved, tmp_path, swap, uninterrupted):
    """Method: the twin; a copy of the checkpoint, elsewhere and unchanged, loads and goes on."""
    shutil.copytree(saved, tmp_path / "moved")
    check_like(Job(("nvme", "nvme"), swap).load(tmp_path / "moved").run(3), uninterrupted, 2)


@pytest.mark.parametrize("at", range(12))
def test_any_flipped_bit_is_found(at, saved, intact, tmp_path):
    """Method: flip one seeded bit of one file of the checkpoint, manifest included; loading raises
    an InfinityError and changes nothing, or (a bit of white space) loads the very values that were
    saved."""
    path = tmp_path / "checkpoint"
    shutil.copytree(saved, path)
    generator = random.Random(SEED + at)
    file = generator.choice([path / "manifest.json", *data_files(path)])
    where, bit = generator.randrange(file.stat().st_size), generator.randrange(8)
    print("flips bit", bit, "of byte", where, "of", file.name)
    flip(file, where, bit)
    before = intact.state()
    with pytest.raises(infinity.InfinityError):
        infinity.load_checkpoint(path, intact.model, intact.optimizer)
    assert differing(intact.state(), before) == []


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**40),
    st.floats(),
    st.text(max_size=3),
    st.just([]),
    st.just({}),
)


def replaced(content: Any, path: list[int], odd: Any) -> Any:
    """``content`` with the part that ``path`` leads to replaced, or dropped."""
    if not path or not isinstance(content, (dict, list)) or not content:
        return odd
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[path[0] % len(keys)]
    changed = dict(content) if isinstance(content, dict) else list(content)
    if odd == {} and len(path) == 1:
        del changed[key]
    else:
        changed[key] = replaced(content[key], path[1:], odd)
    return changed


@settings(max_examples=25, deadline=None)
@given(path=st.lists(st.integers(0, 40), max_size=5), odd=ODD)
def test_no_manifest_gets_through_unchecked(saved, intact, path, odd):
    """Method: replace or drop any part of a good manifest and seal it again, so that its checksum
    is right; loading raises an InfinityError, with every bit as it was, or (where the part does not
    matter) loads."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "checkpoint")
        shutil.copytree(saved, copied, copy_function=os.link)
        content = json.loads((saved / "manifest.json").read_text())
        content.pop("crc32c")
        try:
            sealed = manifest.seal_manifest(replaced(content, path, odd))
        except (TypeError, ValueError, AttributeError):
            return  # no manifest at all: other tests have those
        os.remove(copied / "manifest.json")
        (copied / "manifest.json").write_bytes(sealed)
        before = intact.state()
        try:
            infinity.load_checkpoint(copied, intact.model, intact.optimizer)
        except infinity.InfinityError:
            assert differing(intact.state(), before) == []
        else:
            infinity.load_checkpoint(saved, intact.model, intact.optimizer)


def test_no_checkpoint_there_is_a_typed_error(intact, tmp_path):
    """Method: a folder that is not there, an empty one, and a file."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("none", "empty", "file"):
        with pytest.raises(infinity.InfinityError, match=name):
            infinity.load_checkpoint(tmp_path / name, intact.model, intact.optimizer)


OTHERS: dict[str, Callable[[], tuple[nn.Module, Callable]]] = {
    "more blocks": lambda: (transformer(SEED, blocks=4), adamw),
    "fewer blocks": lambda: (transformer(SEED, blocks=2), adamw),
    "wider": lambda: (transformer(SEED, blocks=3, width=32), adamw),
    "another class": lambda: (nn.Sequential(nn.Linear(4, 4)), adamw),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_model_names_the_parameters(other, saved, tmp_path, swap):
    """Method: load into models with other parameters; UsageError names some, and the model is as it
    was."""
    model, make = OTHERS[other]()
    model, optimizer = infinity.wrap_model(
        model, make(model, LR), at_home("nvme", "nvme", swap, param_dtype="bf16")
    )
    before = dict(model.state_dict())
    with pytest.raises(infinity.UsageError) as raised:
        infinity.load_checkpoint(saved, model, optimizer)
    assert any(name in str(raised.value) for name in ("blocks.", "weight", "positions")), str(
        raised.value
    )
    assert differing(dict(model.state_dict()), before) == []


@pytest.mark.parametrize(
    "change",
    [
        {"param_dtype": None},
        {"param_dtype": "fp16"},
        {"master": "fp32"},
        {"moments": "bf16"},
    ],
    ids=str,
)
def test_a_checkpoint_of_another_precision_is_refused_or_converted(
    change, saved, uninterrupted, tmp_path, swap
):
    """Method: load into the same model with another dtype, master or moments; a UsageError says
    what differs, or the fp32 values of the masters arrive."""
    try:
        job = Job(("nvme", "nvme"), swap, seed=SEED + 1, **change)
        before = job.state()
        job.load(saved)
    except infinity.UsageError as error:
        assert any(word in str(error) for word in ("dtype", "master", "moments")), str(error)
        assert differing(job.state(), before) == []
    else:
        masters = {name: value for name, value in uninterrupted[2][0].items() if " " not in name}
        assert differing({name: job.state()[name] for name in masters}, masters) == []


@pytest.mark.parametrize("make", ["SGD", "groups", "Lion-like", "Adam"])
def test_a_checkpoint_of_another_optimizer_is_refused(make, saved, tmp_path, swap):
    """Method: load AdamW's checkpoint into SGD with momentum, into other groups, into another rule;
    its moments mean nothing there, so a UsageError must say so before anything is changed."""
    model = transformer(SEED + 1, blocks=3)
    optimizer = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        "groups": lambda: torch.optim.AdamW([{"params": [p]} for p in model.parameters()]),
        "Lion-like": lambda: Lion(model.parameters()),
        "Adam": lambda: torch.optim.Adam(model.parameters()),
    }[make]()
    model, optimizer = infinity.wrap_model(
        model, optimizer, at_home("nvme", "nvme", swap, param_dtype="bf16")
    )
    before, keys = dict(model.state_dict()), set(optimizer.param_groups[0])
    with pytest.raises(infinity.UsageError):
        infinity.load_checkpoint(saved, model, optimizer)
    assert (
        differing(dict(model.state_dict()), before) == [] and set(optimizer.param_groups[0]) == keys
    )


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None: ...


def test_buffers_of_another_shape_are_refused_before_anything_changes(tmp_path, swap):
    """Method: a checkpoint whose parameters fit and whose buffer does not; a typed error, and no
    weight was changed."""

    def build(size, seed):
        model = seeded(seed, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model.register_buffer("table", torch.zeros(size))
        return infinity.wrap_model(
            model, torch.optim.AdamW(model.parameters()), at_home("nvme", "nvme", swap)
        )

    infinity.save_checkpoint(tmp_path / "saved", *build(3, 0))
    model, optimizer = build(5, 1)
    before = dict(model.state_dict())
    with pytest.raises(infinity.InfinityError, match="table"):
        infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert differing(dict(model.state_dict()), before) == []


def test_unwrapped_objects_are_refused(tmp_path, swap):
    """Method: save and load with a plain model, and with another model's optimizer."""
    one, other = Job(("host", "host"), swap), Job(("host", "host"), swap)
    plain = transformer(SEED)
    for call in (
        lambda: infinity.save_checkpoint(tmp_path / "x", plain),
        lambda: infinity.load_checkpoint(tmp_path / "x", plain),
        lambda: infinity.save_checkpoint(tmp_path / "x", one.model, other.optimizer),
        lambda: infinity.save_checkpoint(tmp_path / "x", one.model, adamw(plain, LR)),
        lambda: infinity.save_pretrained(plain, tmp_path / "x"),
    ):
        with pytest.raises(infinity.UsageError):
            call()
    assert not (tmp_path / "x").exists()


TENSOR = torch.arange(6, dtype=torch.float32).view(2, 3)
EXTRAS: dict[str, Any] = {
    "none": None,
    "numbers": [0, -1, 2**80, 0.1, -0.0, 1e-300, True, False],
    "special": {"inf": math.inf, "-inf": -math.inf, "best": (math.inf, 1.5)},
    "text": ["", "äöü €", '\x00\n"\\', "$tensor", "NaN"],
    "tuples": ((), (1,), ((2, [3, (4,)]),)),
    "keys": {2: "int", "1": "str", (2, "a"): "tuple", None: "none", True: "bool", 1.5: "float"},
    "keys like marks": {
        "$tensor": "x",
        "$tuple": [1],
        "$dict": 2,
        "$float": "nan",
        "a": {"$dict": []},
    },
    "empty": {"a": {}, "b": [], "c": ()},
    "tensors": {
        "a": TENSOR,
        "b": [TENSOR.t(), (TENSOR[0, 1:], torch.tensor(7))],
        "c": torch.empty(0, 3),
    },
    "dtypes": [
        torch.ones(3, dtype=dtype)
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int8,
            torch.int64,
            torch.bool,
            torch.uint8,
        )
    ],
    "same tensor twice": [TENSOR, TENSOR, TENSOR[1]],
    "grad": {"p": TENSOR.clone().requires_grad_()},
    "colliding names": {
        1: torch.ones(1),
        "1": torch.zeros(1),
        "a.b": torch.ones(2),
        "a": {"b": torch.zeros(2)},
    },
    "colliding lists": [{"0": torch.ones(1)}, [torch.zeros(1)], {"0": {"0": torch.ones(2)}}],
    "numpy": {
        "i": np.int64(3),
        "f": np.float32(0.5),
        "b": np.bool_(True),
        "inf": np.float64(math.inf),
    },
    "deep": functools.reduce(lambda inner, _: {"next": [inner]}, range(60), "end"),
    "scheduler": {
        "base_lrs": [0.1],
        "last_epoch": 3,
        "_schedule_phases": [{"end_step": 2.5, "start_lr": "initial_lr"}],
    },
}


def alike(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and differing({"x": one}, {"x": other}) == []
    if isinstance(other, dict):
        return (
            isinstance(one, dict)
            and list(map(repr, one)) == list(map(repr, other))
            and all(alike(one[k], other[k]) for k in other)
        )
    if isinstance(other, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    if isinstance(other, np.generic):
        return one == other.item() and type(one) in (type(other), type(other.item()))
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = nn.Linear(4, 4)
    return infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"}
    )


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_comes_back_as_it_was(extra, small, tmp_path):
    """Method: save and load values of every kind that a checkpoint takes; types, order and bits are
    the same."""
    infinity.save_checkpoint(tmp_path / "saved", *small, EXTRAS[extra])
    found = infinity.load_checkpoint(tmp_path / "saved", *small)
    assert alike(found, EXTRAS[extra]), f"{found!r} instead of {EXTRAS[extra]!r}"


def test_nan_in_extra_comes_back_and_the_manifest_is_json(small, tmp_path):
    """Method: NaN as a value; the manifest is strict JSON all the same."""
    infinity.save_checkpoint(tmp_path / "saved", *small, {"loss": math.nan})
    assert math.isnan(infinity.load_checkpoint(tmp_path / "saved", *small)["loss"])
    json.loads((tmp_path / "saved" / "manifest.json").read_text(), parse_constant=pytest.fail)


def recursive() -> list:
    value: list = []
    value.append(value)
    return value


UNSAVEABLE: dict[str, Callable[[], Any]] = {
    "function": lambda: {"f": print},
    "object": lambda: [object()],
    "set": lambda: {"s": {1, 2}},
    "bytes": lambda: b"bytes",
    "module": lambda: nn.Linear(2, 2),
    "array": lambda: np.ones(3),
    "sparse": lambda: {"t": torch.eye(3).to_sparse()},
    "complex": lambda: 1j,
    "complex tensor": lambda: torch.ones(2, dtype=torch.complex128),
    "meta tensor": lambda: torch.ones(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "recursive": recursive,
    "path": lambda: Path("x"),
}


@pytest.mark.parametrize("extra", UNSAVEABLE)
def test_extra_that_cannot_be_saved_is_a_usage_error(extra, small, tmp_path):
    """Method: values that no checkpoint holds; UsageError (or the value comes back), and the old
    one is intact."""
    infinity.save_checkpoint(tmp_path / "saved", *small, "old")
    try:
        infinity.save_checkpoint(tmp_path / "saved", *small, UNSAVEABLE[extra]())
    except infinity.UsageError:
        assert infinity.load_checkpoint(tmp_path / "saved", *small) == "old"
        assert len(list((tmp_path / "saved").glob("infinity-*"))) == 1
    else:
        found = infinity.load_checkpoint(tmp_path / "saved", *small)
        assert type(found) is type(UNSAVEABLE[extra]())


@pytest.mark.parametrize(
    "extra",
    [
        lambda m, o: m.weight,
        lambda m, o: {"grad": m.weight.grad},
        lambda m, o: o.state_dict(),
        lambda m, o: m.state_dict(),
    ],
    ids=["parameter", "gradient", "optimizer state", "model state"],
)
def test_extra_with_the_models_own_tensors(extra, small, tmp_path):
    """Method: a parameter at rest, its gradient, both state dicts as extra; values come back, or a
    UsageError."""
    model, optimizer = small
    model(torch.ones(1, 4)).sum().backward()
    value = extra(model, optimizer)
    try:
        infinity.save_checkpoint(tmp_path / "saved", model, optimizer, value)
    except infinity.UsageError:
        optimizer.zero_grad()
        return
    optimizer.zero_grad()
    found = infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert type(found) is not type(None)
    if isinstance(value, dict) and "weight" in value:
        assert differing(dict(found), dict(value)) == []


def languages() -> list[Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 67,
    }
    return [
        transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=67, n_positions=32),
        transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=False),
        transformers.T5Config(
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            vocab_size=67,
            decoder_start_token_id=0,
        ),
        transformers.BertConfig(**sizes),
    ]


@pytest.mark.parametrize("which", [0, 1, 3], ids=["gpt2 tied", "llama", "bert"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("home", ["hostile", "device"])
def test_saved_models_load_in_plain_transformers(home, sharded, which, tmp_path, swap):
    """Method: train a step wrapped, save_pretrained in one file or in many, load by
    from_pretrained; every tensor has the bits of the wrapped model's state dict, ties hold, no key
    is missing, and logits are equal.
    """
    transformers = pytest.importorskip("transformers")
    config = languages()[which]
    kind = {
        0: "AutoModelForCausalLM",
        1: "AutoModelForCausalLM",
        2: "AutoModelForSeq2SeqLM",
        3: "AutoModelForMaskedLM",
    }[which]
    auto = getattr(transformers, kind)
    torch.manual_seed(SEED)
    model = auto.from_config(config)
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), at_home(home, home, swap))
    ids = tokens(SEED)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    folder = tmp_path / "model"
    infinity.save_pretrained(model, folder, max_shard_size=20_000 if sharded else None)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (len(files) > 2) == sharded and (
        folder / "model.safetensors.index.json"
    ).exists() == sharded
    assert not list(folder.glob("*.partial"))
    plain, report = auto.from_pretrained(folder, output_loading_info=True)
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and not report["mismatched_keys"]
    ), report
    assert differing(dict(plain.state_dict()), dict(model.state_dict())) == []
    shared = {name for name, p in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    assert shared == {n for n, _ in plain.named_parameters(remove_duplicate=False)} - {
        n for n, _ in plain.named_parameters()
    }
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if which == 2 else {})
    with torch.no_grad():
        assert torch.equal(plain.eval()(**inputs).logits, model.eval()(**inputs).logits)
    infinity.save_pretrained(model, folder, max_shard_size=20_000)  # again, and the other way round
    infinity.save_pretrained(model, folder)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert (
        differing(dict(auto.from_pretrained(folder).state_dict()), dict(model.state_dict())) == []
    )


def test_saved_models_have_the_dtypes_they_were_wrapped_with(tmp_path, swap):
    """Method: an fp32 model that computes in bf16 is saved in fp32, from its masters; a bf16 one in
    bf16."""
    from safetensors.torch import load_file

    for dtype, more in ((torch.float32, {"param_dtype": "bf16"}), (torch.bfloat16, {})):
        model = transformer(SEED, blocks=1).to(dtype)
        model, optimizer = infinity.wrap_model(
            model, adamw(model, LR), at_home("nvme", "nvme", swap, **more)
        )
        loss_of(model, tokens(1)).backward()
        optimizer.step()
        infinity.save_pretrained(model, tmp_path / "model")
        found = load_file(tmp_path / "model" / "model.safetensors")
        state = dict(model.state_dict())
        assert {tensor.dtype for tensor in found.values()} == {dtype}
        assert differing(found, {name: state[name] for name in found}) == []
        assert set(state) - set(found) in ({"head.weight"}, {"tokens.weight"})


def test_save_pretrained_to_a_place_that_cannot_be_written(tmp_path, swap):
    """Method: under a regular file; StorageError, which is an OSError, and the model goes on."""
    (tmp_path / "file").write_text("")
    job = Job(("nvme", "nvme"), swap)
    with pytest.raises(infinity.StorageError, match="file"):
        infinity.save_pretrained(job.model, tmp_path / "file" / "model")
    job.run(1)


def test_checkpoints_hold_no_pickle(saved):
    """Method: look at every file: JSON and safetensors only."""
    for file in saved.rglob("*"):
        if file.is_file():
            assert file.suffix in (".json", ".safetensors"), file
            head = file.read_bytes()[:16]
            assert not head.startswith(b"\x80") and not head.startswith(b"PK")


def test_a_file_that_cannot_be_written_is_a_storage_error_with_its_number(tmp_path):
    """Method: the folder's place is taken by a file; the twin writes."""
    from infinity.ext.checkpoint.model_files import write_sources
    from infinity.files.source import Source

    sources = {"a": Source.of(torch.ones(4))}
    (tmp_path / "taken").write_text("")
    with pytest.raises(infinity.StorageError) as caught:
        write_sources(tmp_path / "taken" / "out", sources)
    assert caught.value.errno == errno.ENOTDIR and "taken" in str(caught.value)
    write_sources(tmp_path / "out", sources)
    assert (tmp_path / "out" / "model.safetensors").exists()
