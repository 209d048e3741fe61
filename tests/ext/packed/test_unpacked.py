"""Packed folders: what bitsandbytes has packed is streamed as it is, and unpacked into files by its
own library.

Words used here: **folder** is one that transformers saved with a BitsAndBytesConfig; **plain** is a
model of dense weights; **told** is the JSON in which bitsandbytes keeps shape and blocks of a
weight.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from lazily import Lazily
from packed_llamas import (
    KINDS,
    LARGE,
    LARGE_NAMES,
    MIDDLE_NAMES,
    SMALL_NAMES,
    adapted,
    bitsandbytes,
    dense_of,
    differing,
    gradients,
    in_form,
    llama,
    logits,
    own_adapted,
    peft,
    save_nf4,
    state,
    transformers,
    unpacked,
    wrap,
)
from safetensors.torch import load_file, save_file
from torch import nn

import infinity
from infinity import integrations
from infinity.errors import CapacityError, ConfigError, CorruptionError, InfinityError, UsageError
from infinity.ext.checkpoint.export import export
from infinity.files import weight_files

adapters = Lazily("infinity.ext.integrations.peft", "peft")
pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16
FILE = "model.safetensors"
WEIGHT = "model.layers.1.mlp.up_proj.weight"
TOLD = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
FORMS = {
    "nested": {},
    "not nested": {"bnb_4bit_use_double_quant": False},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "some dense": {"llm_int8_skip_modules": ["lm_head", "o_proj", "gate_proj"]},
}
NESTED = ["nested", "not nested"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of every form, and the model that transformers packed for it; made once."""
    found: dict[str, tuple[Path, nn.Module]] = {}

    def of(form: str) -> tuple[Path, nn.Module]:
        if form not in found:
            folder = tmp_path_factory.mktemp("packed")
            found[form] = folder, save_nf4(folder, **FORMS[form])
        return found[form]

    return of


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """The folder of an adapter, as PEFT saves it."""
    folder = tmp_path_factory.mktemp("adapter")
    adapted(llama(BF16)).save_pretrained(folder)
    return folder


def on_meta() -> nn.Module:
    return llama(BF16, meta=True)


def streamed(folder: Path, home: str = "host", swap: Path | None = None) -> nn.Module:
    return wrap(on_meta(), home, swap, weights=str(folder))[0]


def loaded(folder: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)


def read_sizes(monkeypatch) -> list[tuple[torch.dtype, int]]:
    """Collects dtype and elements of all that is read from files, whole or in pieces."""
    found: list[tuple[torch.dtype, int]] = []
    read, stream = weight_files.WeightFiles.read, weight_files.WeightFiles.stream

    def reading(self, name):
        value = read(self, name)
        found.append((value.dtype, value.numel()))
        return value

    def streaming(self, names, spans=None):
        names = list(names)
        found.extend((self.tensors[name].dtype, self.tensors[name].shape.numel()) for name in names)
        return stream(self, names, spans)

    monkeypatch.setattr(weight_files.WeightFiles, "read", reading)
    monkeypatch.setattr(weight_files.WeightFiles, "stream", streaming)
    return found


# --- streamed ---


@pytest.mark.parametrize("home", ["device", "hostile"])
@pytest.mark.parametrize("form", FORMS)
def test_a_packed_folder_has_the_bits_of_transformers(form, home, tmp_path, folders):
    """Claim: streamed, it has the logits of transformers' model, and every byte of its state dict.
    Twin: those of another form differ."""
    folder, own = folders(form)
    model = streamed(folder, home, tmp_path)
    assert state(model) == state(own)
    assert torch.equal(logits(model), logits(own))
    other = "fp4" if form != "fp4" else "nested"
    assert not torch.equal(logits(model), logits(folders(other)[1]))


def refuse_packing(monkeypatch) -> None:
    """Lets bitsandbytes pack and unpack nothing but shapes."""
    for name in ("quantize_4bit", "dequantize_4bit"):
        call = getattr(bitsandbytes.functional, name)

        def only_shapes(tensor: torch.Tensor, *args, call: Callable = call, **kwargs):
            assert tensor.is_meta, f"{call.__name__} of values"
            return call(tensor, *args, **kwargs)

        monkeypatch.setattr(bitsandbytes.functional, name, only_shapes)


@pytest.mark.parametrize("form", NESTED)
def test_no_dense_weight_is_read_or_made(form, folders, tmp_path, monkeypatch):
    """Method: of the large tensors only codes are read, and bitsandbytes is not asked to pack or
    unpack. Twin: of a dense folder weights are read, and it is asked."""
    folder, own = folders(form)
    llama(BF16).save_pretrained(tmp_path)
    refuse_packing(monkeypatch)
    sizes = read_sizes(monkeypatch)
    model = streamed(folder)
    assert {size for size in sizes if size[1] > LARGE // 4} == {(torch.uint8, LARGE // 2)}
    sizes.clear()
    with pytest.raises(AssertionError, match="quantize_4bit of values"):
        wrap(on_meta(), "host", weights=str(tmp_path), quantize="nf4")
    streamed(tmp_path)
    assert (BF16, LARGE) in sizes


def test_a_folder_of_several_files_is_streamed(tmp_path, folders):
    folder, own = folders("nested")
    own.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = streamed(tmp_path)
    assert state(model) == state(own)
    assert torch.equal(logits(model), logits(own))


@pytest.mark.parametrize("form", NESTED)
def test_adapters_train_over_a_packed_folder(form, tmp_path, folders):
    """Claim: with the gradients of the same adapters over transformers' layers in memory, PEFT's
    classes being over dense layers in both."""
    folder, own = folders(form)
    model = adapted(on_meta())
    model, _ = wrap(model, "nvme", tmp_path, weights=str(folder))
    expected = adapted(llama(BF16))
    for name in [*LARGE_NAMES, *MIDDLE_NAMES, *SMALL_NAMES]:
        target = expected.get_base_model().get_submodule(name)
        assert type(target.base_layer) is nn.Linear
        target.base_layer = own.get_submodule(name).requires_grad_(False)
    given = {name: value for name, value in expected.state_dict().items() if "lora_" in name}
    assert not model.load_state_dict(given, strict=False).unexpected_keys
    expected.load_state_dict(given, strict=False)
    assert differing(gradients(model), gradients(expected)) == []


@pytest.mark.parametrize("form", NESTED)
def test_an_unwrapped_folder_is_the_librarys_model(form, tmp_path, folders):
    folder, own = folders(form)
    model, _ = infinity.unwrap_model(streamed(folder, "nvme", tmp_path))
    assert state(model) == state(own)
    assert type(model.get_submodule(LARGE_NAMES[0])) is bitsandbytes.nn.Linear4bit
    assert torch.equal(logits(in_form(model)), logits(own))


def test_a_wrap_that_fails_leaves_the_model_on_meta(folders):
    """Claim: it has its linear layers again, and is wrapped with a budget that is enough."""
    folder, own = folders("nested")
    model = on_meta()
    before = {name: (module, dict(module._parameters)) for name, module in model.named_modules()}
    with pytest.raises(CapacityError, match="host_memory"):
        wrap(model, "host", weights=str(folder), host_memory="4KiB")
    for name, module in model.named_modules():
        assert module is before[name][0] and type(module) is not bitsandbytes.nn.Linear4bit
        assert all(each is before[name][1][key] for key, each in module._parameters.items())
    assert all(param.is_meta for param in model.parameters())
    model, _ = wrap(model, "host", weights=str(folder))
    assert state(model) == state(own)


def test_a_model_in_memory_takes_no_packed_folder(folders):
    """Claim: only layers on meta are packed ones then; others are refused with the weight's
    name."""
    model = llama(BF16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"layers\.\d\.\w+\.\w+_proj\.weight"):
        wrap(model, "host", weights=str(folders("nested")[0]))
    assert differing(model.state_dict(), before) == []


def test_a_folder_computes_in_its_own_dtype(tmp_path):
    """Claim: where the configuration beside the weights says fp32, which is the library's default,
    logits are transformers' too."""
    own = save_nf4(tmp_path, bnb_4bit_compute_dtype=torch.float32)
    assert torch.equal(logits(streamed(tmp_path)), logits(own))


@pytest.mark.parametrize("stored_as", [BF16, torch.float16, torch.float32])
def test_codes_may_be_stored_as_floats(stored_as, tmp_path):
    """Claim: a folder with bnb_4bit_quant_storage, as FSDP needs it, is streamed, with a dtype to
    compute in and without. Twin: a part that is too short is refused."""
    own = save_nf4(tmp_path, bnb_4bit_quant_storage=stored_as)
    assert torch.equal(logits(streamed(tmp_path)), logits(own))
    tensors = load_file(tmp_path / FILE)
    name = next(name for name, value in tensors.items() if f"{name}.absmax" in tensors)
    save_file({**tensors, name: tensors[name][:-1].clone()}, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(CorruptionError, match="do not fit each other"):
        streamed(tmp_path)


# --- exported ---


@pytest.mark.parametrize("form", FORMS)
def test_an_exported_folder_has_the_librarys_dense_weights(form, tmp_path, folders):
    """Claim: each weight is as dequantize_4bit returns it, other tensors are as they were, and
    from_pretrained loads the folder as a plain model."""
    folder, own = folders(form)
    export(folder, tmp_path / "out", model=folder)
    tensors = load_file(tmp_path / "out" / FILE)
    assert tensors.keys() == llama().state_dict().keys()
    for name, value in tensors.items():
        expected = own.get_parameter(name)
        if hasattr(expected, "quant_state"):
            expected = bitsandbytes.functional.dequantize_4bit(expected.data, expected.quant_state)
        assert value.dtype == expected.dtype and torch.equal(value, expected), name
    model = loaded(tmp_path / "out")
    assert not hasattr(model.config, "quantization_config")
    assert torch.equal(logits(model), logits(unpacked(own)))
    assert {type(model.get_submodule(name)) for name in LARGE_NAMES} == {nn.Linear}


def test_an_exported_folder_may_have_another_dtype(tmp_path, folders):
    folder, own = folders("nested")
    export(folder, tmp_path / "out", model=folder, dtype=torch.float32)
    tensors = load_file(tmp_path / "out" / FILE)
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    name = LARGE_NAMES[0]
    expected = dense_of(own.get_submodule(name).weight).float()
    assert torch.equal(tensors[f"{name}.weight"], expected)


def test_a_changed_code_shows_in_the_export(tmp_path, folders):
    """The twin."""
    folder, own = folders("nested")
    damaged = damage(folder, tmp_path / "in", lambda tensors: tensors[WEIGHT].view(-1)[:1].add_(1))
    export(damaged, tmp_path / "out", model=folder)
    value = load_file(tmp_path / "out" / FILE)[WEIGHT]
    expected = dense_of(own.get_parameter(WEIGHT))
    assert 1 <= (value != expected).sum() <= 2 and (value != expected).view(-1)[:2].any()


@pytest.mark.parametrize("form", NESTED)
def test_an_adapter_is_merged_into_an_export(form, tmp_path, folders, adapter):
    """Claim: equal to PEFT's merge_and_unload on the exported plain model. Twin: without the
    adapter it is another."""
    folder, _ = folders(form)
    export(folder, tmp_path / "plain", model=folder)
    merge = partial(adapters.merged, twin=adapters.adapted_twin(folder, adapter))
    export(folder, tmp_path / "merged", model=folder, change=merge)
    plain = loaded(tmp_path / "plain")
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = peft.PeftModel.from_pretrained(plain, adapter).merge_and_unload().state_dict()
    found = loaded(tmp_path / "merged").state_dict()
    assert differing(found, expected) == []
    merged_names = [*LARGE_NAMES, *MIDDLE_NAMES, *SMALL_NAMES]
    assert sorted(differing(found, before)) == sorted(f"{name}.weight" for name in merged_names)


# --- merged while wrapped ---


@pytest.mark.parametrize("kind", KINDS)
def test_save_merged_unpacks_what_was_quantized(kind, tmp_path):
    """Claim: from_pretrained loads a plain model, equal to merging the adapters into weights that
    the library unpacked; the model at home computes as before."""
    own = own_adapted(kind, BF16)
    model, _ = wrap(adapted(llama(BF16)), "hostile", tmp_path, quantize=kind)
    before = logits(model)
    integrations.save_merged(model, tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    own.save_pretrained(tmp_path / "adapter")
    expected = peft.PeftModel.from_pretrained(unpacked(own), tmp_path / "adapter")
    expected = expected.merge_and_unload().state_dict()
    found = loaded(tmp_path / "merged")
    assert differing(found.state_dict(), expected) == []
    assert differing(found.state_dict(), llama(BF16).state_dict())
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("stored_as", [torch.uint8, BF16])
def test_save_merged_says_no_more_how_weights_were_packed(stored_as, tmp_path):
    """Claim: of a model that from_pretrained packed, from_pretrained loads a plain one, equal to
    merging into the unpacked weights. Twin: the model itself still says that it is packed."""
    own = save_nf4(tmp_path / "packed", bnb_4bit_quant_storage=stored_as)
    model = adapted(own)
    model.save_pretrained(tmp_path / "adapter")
    expected = peft.PeftModel.from_pretrained(unpacked(own), tmp_path / "adapter")
    expected = expected.merge_and_unload().state_dict()
    model, _ = wrap(model, "host")
    integrations.save_merged(model, tmp_path / "merged")
    assert differing(loaded(tmp_path / "merged").state_dict(), expected) == []
    assert model.config.quantization_config.load_in_4bit


def test_save_merged_unpacks_a_packed_folder(tmp_path, folders, adapter):
    """Claim: the same bits as export's merge of that folder."""
    folder, _ = folders("nested")
    model = peft.PeftModel.from_pretrained(on_meta(), adapter, is_trainable=True)
    model, _ = wrap(model, "nvme", tmp_path, weights=str(folder))
    values = peft.load_peft_weights(str(adapter), device="cpu")
    peft.set_peft_model_state_dict(model, values)
    integrations.save_merged(model, tmp_path / "merged")
    merge = partial(adapters.merged, twin=adapters.adapted_twin(folder, adapter))
    export(folder, tmp_path / "exported", model=folder, change=merge)
    found, expected = (load_file(tmp_path / name / FILE) for name in ("merged", "exported"))
    assert differing(found, expected) == []


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_merged_in_place_into_packed_weights(kind):
    """Claim: both directions are refused, with the call that works, and nothing changes."""
    model, _ = wrap(adapted(llama(BF16)), "host", quantize=kind)
    before = state(model)
    for change in (integrations.merge_adapters, integrations.unmerge_adapters):
        with pytest.raises(UsageError, match=r"packed weight.*save_merged\(model, folder\)"):
            change(model)
        assert state(model) == before
    layers = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    assert layers and not any(layer.merged_adapters for layer in layers)


def test_a_base_that_is_not_packed_is_merged_in_place():
    """The twin: as PEFT merges it, and it comes back."""
    expected = adapted(llama())
    model, _ = wrap(adapted(llama()), "host")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected.merge_adapter(), integrations.merge_adapters(model)
    assert differing(model.state_dict(), expected.state_dict()) == []
    assert differing(model.state_dict(), before)
    integrations.unmerge_adapters(model)
    torch.testing.assert_close(dict(model.state_dict()), before)


@pytest.mark.parametrize("kind", [*KINDS, "folder"])
def test_a_packed_model_without_adapters_is_not_saved(kind, tmp_path, folders):
    """Claim: refused with what to do, and no folder is left. Twin: the same model, not packed, is
    saved."""
    if kind == "folder":
        model = streamed(folders("nested")[0])
    else:
        model, _ = wrap(llama(BF16), "host", quantize=kind)
    with pytest.raises(ConfigError, match="packed.*(unwrap_model|save_checkpoint)"):
        infinity.save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists() or not list((tmp_path / "saved").iterdir())
    model, _ = wrap(llama(BF16), "host")
    infinity.save_pretrained(model, tmp_path / "saved")
    assert differing(loaded(tmp_path / "saved").state_dict(), llama(BF16).state_dict()) == []


def test_adapters_of_a_packed_model_are_saved(tmp_path, folders):
    """Claim: save_pretrained writes the adapters alone, which PEFT loads over the base."""
    model, _ = wrap(adapted(llama(BF16)), "nvme", tmp_path, quantize="nf4")
    infinity.save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved" / FILE).exists()
    found = peft.PeftModel.from_pretrained(llama(BF16), tmp_path / "saved")
    own = peft.get_peft_model_state_dict(own_adapted("nf4", BF16))
    assert differing(peft.get_peft_model_state_dict(found), own) == []


# --- damaged ---


def damage(folder: Path, out: Path, change: Callable[[dict], None]) -> Path:
    """Copies a folder with its tensors changed."""
    out.mkdir()
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, out / FILE, {"format": "pt"})
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


def without(part: str) -> Callable[[dict], None]:
    return lambda tensors: tensors.pop(WEIGHT + part)


def halved(part: str) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        flat = tensors[WEIGHT + part].reshape(-1)
        tensors[WEIGHT + part] = flat[: len(flat) // 2].clone()

    return change


def in_fp16(part: str) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({WEIGHT + part: tensors[WEIGHT + part].half()})


def telling(**changes) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        told = json.loads(bytes(tensors[TOLD].tolist())) | changes
        put(tensors, json.dumps({key: each for key, each in told.items() if each is not ...}))

    return change


def put(tensors: dict, text: str) -> None:
    tensors[TOLD] = torch.tensor(list(text.encode()), dtype=torch.uint8)


DAMAGES: dict[str, Callable[[dict], None]] = {
    "no absmax": without(".absmax"),
    "no quant_map": without(".quant_map"),
    "no nested_absmax": without(".nested_absmax"),
    "no nested_quant_map": without(".nested_quant_map"),
    "no codes": without(""),
    "no state": without(TOLD.removeprefix(WEIGHT)),
    "half of the codes": halved(""),
    "half of absmax": halved(".absmax"),
    "half of nested_absmax": halved(".nested_absmax"),
    "half of quant_map": halved(".quant_map"),
    "half of nested_quant_map": halved(".nested_quant_map"),
    "half of the state": halved(TOLD.removeprefix(WEIGHT)),
    "codes in fp16": in_fp16(""),
    "absmax in fp16": in_fp16(".absmax"),
    "state in fp16": in_fp16(TOLD.removeprefix(WEIGHT)),
    "state is a list": lambda tensors: put(tensors, "[1]"),
    "state is empty": lambda tensors: put(tensors, "{}"),
    "another shape": telling(shape=[2048, 64]),
    "a shape below zero": telling(shape=[-2048, -128]),
    "a shape of words": telling(shape="all"),
    "no shape": telling(shape=...),
    "another block size": telling(blocksize=128),
    "a block size of zero": telling(blocksize=0),
    "a nested block size of zero": telling(nested_blocksize=0),
    "no such dtype": telling(dtype="nothing"),
    "a dtype that is none": telling(dtype="save"),
    "a dtype of integers": telling(dtype="int8"),
    "no such format": telling(quant_type="nf5"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_part_is_refused_by_a_wrap(name, tmp_path, folders):
    """Claim: with a typed error that names the weight, and a model as it was. Twin: the folder
    itself is taken."""
    folder, own = folders("nested")
    damaged = damage(folder, tmp_path / "damaged", DAMAGES[name])
    model = on_meta()
    with pytest.raises(InfinityError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        wrap(model, "host", weights=str(damaged))
    assert all(type(module) is not bitsandbytes.nn.Linear4bit for module in model.modules())
    assert state(wrap(model, "host", weights=str(folder))[0]) == state(own)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_part_is_refused_by_an_export(name, tmp_path, folders):
    """Claim: with a typed error that names the weight, and nothing written."""
    folder, _ = folders("nested")
    damaged = damage(folder, tmp_path / "damaged", DAMAGES[name])
    with pytest.raises(InfinityError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        export(damaged, tmp_path / "out", model=folder)
    assert not (tmp_path / "out" / FILE).exists()


@pytest.mark.parametrize("way", ["export", "wrap"])
def test_a_library_that_is_not_installed_is_named(way, tmp_path, folders, monkeypatch):
    folder, _ = folders("nested")
    for name in ("bitsandbytes", "bitsandbytes.nn", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="bitsandbytes: pip install"):
        if way == "wrap":
            streamed(folder)
        else:
            export(folder, tmp_path / "out", model=folder)
