"""Folders of transformers models: what infinity writes is what the model's own save_pretrained
writes, and meta models fill from it.

Words used here:

**family**: an architecture of the zoo, or one of `MORE`; **quick** ones have every kind of
conversion between them. **their folder**: what ``model.save_pretrained`` writes of a model that was
never wrapped; **our folder**: ``infinity.save_pretrained``. **equal folders**: the same files;
weights byte for byte, everything else as JSON.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import at_home, differing
from safetensors.torch import load_file, save_file
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.core_model_loading", reason="transformers 5 converts weights")
transformers.logging.disable_progress_bar()

from zoo import ZOO, make_model

import infinity
from infinity.ext.checkpoint.export import export
from infinity.ext.checkpoint.hub_names import hub_sources, names_to_write
from infinity.ext.checkpoint.model_files import write_sources
from infinity.files.groups import Group
from infinity.files.source import Source

SEED = 5
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
QWEN_TOWER = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 8,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}

# Class of the model -> its configuration's parts.
MORE: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": {
        "text_config": {**TEXT, "rope_scaling": ROPE},
        "vision_config": QWEN_TOWER,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": {**TEXT, "rope_scaling": ROPE},
        "vision_config": QWEN_TOWER,
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": {**TEXT, **EXPERTS, "rope_scaling": ROPE},
        "vision_config": QWEN_TOWER,
    },
    "PaliGemmaForConditionalGeneration": {
        "text_config": {**TEXT, "model_type": "gemma"},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "projection_dim": 32},
        "projection_dim": 32,
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": TEXT,
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
    },
    "InternVLForConditionalGeneration": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {
            **TOWER,
            "image_size": [32, 32],
            "patch_size": [8, 8],
            "model_type": "internvl_vision",
        },
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 8},
    },
    "Glm4MoeForCausalLM": {
        **TEXT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "Ernie4_5_MoeForCausalLM": {
        **TEXT,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
    },
    "OlmoeForCausalLM": {**TEXT, "num_experts": 4, "num_experts_per_tok": 2},
    "PhimoeForCausalLM": {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2},
}

# Fused experts; with buffers that routers have; in several groups; names of vision and language;
# encoders' names; ties of biases; an encoder and a decoder; names that no save writes; a whole
# prefix; nothing at all.
QUICK = [
    "mixtral",
    "deepseek_v3",
    "kimi_linear",
    "llava",
    "vit",
    "bert",
    "t5",
    "marian",
    "nemotron_h",
    "llama",
]
OURS = [
    name for name, architecture in ZOO.items() if name not in QUICK and not architecture.missing()
]
EVERY = QUICK + [pytest.param(name, marks=pytest.mark.slow) for name in [*OURS, *MORE]]


def build(name: str) -> nn.Module:
    if name in ZOO:
        model = make_model(ZOO[name], SEED)
        if not hasattr(model, "save_pretrained") or hasattr(model, "peft_config"):
            pytest.skip("no model of transformers, or adapters")
        return model
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(SEED)
    return kind(kind.config_class(**copy.deepcopy(MORE[name]))).train()


def on_meta(model: nn.Module) -> nn.Module:
    """The same model from the same configuration, without values."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return type(model)(copy.deepcopy(model.config)).float()


def folder_of(path: Path) -> dict[str, Any]:
    return {
        file.name: (
            file.read_bytes() if file.suffix == ".safetensors" else json.loads(file.read_text())
        )
        for file in path.iterdir()
    }


def check_equal(ours: Path, theirs: Path) -> None:
    mine, other = folder_of(ours), folder_of(theirs)
    assert mine.keys() == other.keys()
    for name in other:
        if name.endswith(".safetensors") and mine[name] != other[name]:
            a, b = load_file(ours / name), load_file(theirs / name)
            assert sorted(a) == sorted(b) and differing(a, b) == []  # tells which
        assert mine[name] == other[name], name


@pytest.mark.parametrize("size", [None, "20KB"], ids=["whole", "in-parts"])
@pytest.mark.parametrize("name", EVERY)
def test_our_folder_is_their_folder(name, size, tmp_path):
    """Method: a model built from a configuration is saved by itself, then wrapped and saved by
    infinity: equal folders, in one file and in many. In-memory names differ from the folder's in
    half of the families (see the twin below).
    """
    model = build(name)
    copy.deepcopy(model).save_pretrained(
        tmp_path / "theirs", **({} if size is None else {"max_shard_size": size})
    )
    home = "nvme" if size is None else "host"
    model, _ = infinity.wrap_model(model, None, at_home(home, "auto", tmp_path))
    infinity.save_pretrained(model, tmp_path / "ours", max_shard_size=size)
    check_equal(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("name", EVERY)
def test_a_meta_model_fills_from_their_folder(name, tmp_path):
    """Method: a folder that the model saved itself fills one on meta: every tensor has the bits
    that ``from_pretrained`` gives it, and what infinity then saves is the folder again."""
    model = build(name)
    model.save_pretrained(tmp_path / "theirs")
    plain = type(model).from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    filled, _ = infinity.wrap_model(
        on_meta(model), None, at_home("host", "auto", tmp_path, weights=tmp_path / "theirs")
    )
    assert differing(dict(filled.state_dict()), dict(plain.state_dict())) == []
    plain.save_pretrained(tmp_path / "again")
    infinity.save_pretrained(filled, tmp_path / "ours")
    assert (
        folder_of(tmp_path / "ours")["model.safetensors"]
        == folder_of(tmp_path / "again")["model.safetensors"]
    )


# --- the twins ---


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "qwen3_moe"])
def test_without_conversions_a_folder_has_the_names_of_the_modules(name, tmp_path, monkeypatch):
    """Method: the module of conversions is not there, as in transformers 4: what is saved are the
    state dict's tensors, each once. Twin: a mixture's experts have other names with it."""
    model = build(name)
    own = {each: value.clone() for each, value in model.state_dict().items()}
    once = set(names_to_write(model, model.state_dict(keep_vars=True)))
    wrapped, _ = infinity.wrap_model(model, None, {"params": "host"})
    infinity.save_pretrained(wrapped, tmp_path / "converted")
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    infinity.save_pretrained(wrapped, tmp_path / "named")
    named = load_file(tmp_path / "named" / "model.safetensors")
    assert named.keys() == once
    assert differing(named, {each: own[each] for each in named}) == []
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert (converted.keys() == named.keys()) == (name != "qwen3_moe")


IN_VERSION_4 = {
    "^language_model.model": "model.language_model",
    "^vision_tower": "model.vision_tower",
    "^multi_modal_projector": "model.multi_modal_projector",
    "^language_model.lm_head": "lm_head",
}


@pytest.mark.parametrize("name", ["model.vision_tower", "lm_head", "model.language_model"])
def test_names_of_version_4_are_written_and_read(name, tmp_path, monkeypatch):
    """Method: a model of images and text with the names that transformers 4 gives its class; the
    folder has those, and fills a model on meta. Twins: without that list, and of another class, it
    has the names of the modules."""
    model = build("llava")
    own = {each: value.clone() for each, value in model.state_dict().items()}
    kept = {theirs: mine for theirs, mine in IN_VERSION_4.items() if mine == name}
    (theirs,) = kept
    monkeypatch.setattr(type(model), "_checkpoint_conversion_mapping", kept, raising=False)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    wrapped, _ = infinity.wrap_model(model, None, {"params": "host"})
    for kinds in (["another"], ["llava"]):
        monkeypatch.setattr(transformers.modeling_utils, "VLMS", kinds, raising=False)
        infinity.save_pretrained(wrapped, tmp_path / kinds[0])
    plain, renamed = (
        load_file(tmp_path / each / "model.safetensors") for each in ("another", "llava")
    )
    assert plain.keys() <= own.keys() and renamed.keys() != plain.keys()
    assert {each.startswith(theirs[1:]) for each in renamed.keys() - plain.keys()} == {True}
    assert not any(each.startswith(name) for each in renamed)
    filled, _ = infinity.wrap_model(
        on_meta(model), None, {"params": "host", "weights": tmp_path / "llava"}
    )
    assert differing(dict(filled.state_dict()), own) == []


def test_the_families_that_are_quick_are_of_every_kind():
    """Twin of equal folders: of the quick families six have other names in their folder than their
    modules have, one has other shapes, one has none of its buffers' tensors, and one has nothing to
    convert."""
    changed = {}
    for name in QUICK:
        model = build(name)
        own, sources = (
            model.state_dict(),
            {name: Source.of(tensor) for name, tensor in model.state_dict(keep_vars=True).items()},
        )
        written = hub_sources(
            model,
            {
                name: sources[name]
                for name in names_to_write(model, model.state_dict(keep_vars=True))
            },
        )
        changed[name] = len(written.keys() - own.keys()), len(own) - len(written)
    assert {name for name, (new, _) in changed.items() if new} == {
        "mixtral",
        "deepseek_v3",
        "kimi_linear",
        "llava",
        "vit",
        "nemotron_h",
    }
    assert (
        changed["llama"] == (0, 0)
        and changed["marian"][1] == 5
        and changed["t5"][1] == 3
        and changed["bert"][1] == 2
    )


def test_a_folder_with_the_modules_names_fills_a_model_too(tmp_path):
    """Method: fused experts, as infinity wrote them before it knew of conversions, and as
    ``from_pretrained`` takes them."""
    model = build("mixtral")
    write_sources(tmp_path, {name: Source.of(value) for name, value in model.state_dict().items()})
    filled, _ = infinity.wrap_model(on_meta(model), None, {"params": "host", "weights": tmp_path})
    assert differing(dict(filled.state_dict()), dict(model.state_dict())) == []


def test_a_folder_that_lacks_an_expert_is_refused(tmp_path):
    """Method: one tensor of one expert is missing: transformers would stack three for four. The
    model stays on meta, as it was."""
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if ".experts.2.w1." in name)
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != gone},
        tmp_path / "model.safetensors",
    )
    meta = on_meta(model)
    with pytest.raises(infinity.ConfigError, match="experts"):
        infinity.wrap_model(meta, None, {"params": "host", "weights": tmp_path})
    assert (
        all(param.is_meta for param in meta.parameters())
        and "_weight_conversions" not in meta.__dict__
    )


def test_codes_without_their_scales_are_refused(tmp_path):
    """Method: one weight in float8, as a quantised folder has it beside a scale that the model on
    meta has no place for; it would be filled with codes. Twin: in bf16 it is taken."""
    model = build("llama")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.bfloat16):
        save_file(
            tensors | {name: tensors[name].to(dtype)},
            tmp_path / "model.safetensors",
            metadata={"format": "pt"},
        )
        if dtype == torch.bfloat16:
            infinity.wrap_model(on_meta(model), None, {"params": "host", "weights": tmp_path})
        else:
            with pytest.raises(infinity.ConfigError, match="quantised"):
                infinity.wrap_model(on_meta(model), None, {"params": "host", "weights": tmp_path})


def test_two_values_for_tied_weights_are_refused(tmp_path):
    """Method: a folder has the head and the table of a tied model; with equal bits they fill it,
    with others they are refused."""
    model = build("llama_tied")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    for head in (table.clone(), table + 1):
        save_file(
            tensors | {"lm_head.weight": head},
            tmp_path / "model.safetensors",
            metadata={"format": "pt"},
        )
        config = {"params": "host", "weights": tmp_path}
        if torch.equal(head, table):
            filled, _ = infinity.wrap_model(on_meta(model), None, config)
            assert filled.lm_head.weight is filled.model.embed_tokens.weight
        else:
            with pytest.raises(infinity.ConfigError, match="one tensor of the model"):
                infinity.wrap_model(on_meta(model), None, config)


def test_ties_that_transformers_does_not_know_are_written_under_both_names(tmp_path):
    """Method: two layers share a weight by hand, which the model's own save refuses; loaded, both
    have it."""
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(RuntimeError, match="shared tensors"):
        model.save_pretrained(tmp_path / "theirs")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = infinity.wrap_model(model, None, {"params": "host"})
    infinity.save_pretrained(model, tmp_path / "ours")
    loaded, told = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not told["missing_keys"] and differing(dict(loaded.state_dict()), expected) == []


def test_the_configuration_names_the_class_and_dtype_that_were_wrapped(tmp_path):
    """Method: a configuration that names another class, of a model that computes in bf16 and was
    wrapped in fp32: the folder has the class that was wrapped, and fp32, as its tensors."""
    model = build("llama")
    model.config.architectures = ["LlamaForSequenceClassification"]
    model, _ = infinity.wrap_model(model, None, {"params": "host", "param_dtype": "bf16"})
    infinity.save_pretrained(model, tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["architectures"] == ["LlamaForCausalLM"] and told["dtype"] == "float32"
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {
        torch.float32
    }


def test_one_group_is_in_memory_at_a_time():
    """Method: the sources of a mixture are read in their order, by one that counts: an expert's
    tensors come of one reading of all experts of its layer, and no two layers' are there at
    once."""
    model = build("mixtral")
    tensors, read = model.state_dict(keep_vars=True), []

    def counted(name: str) -> Source:
        source = Source.of(tensors[name])
        return Source(source.shape, source.dtype, lambda: (read.append(name), source.read())[1])

    groups = set()
    for source in hub_sources(model, {name: counted(name) for name in tensors}).values():
        source.read()
        groups |= {
            cell.cell_contents
            for cell in source.read.__closure__ or ()
            if isinstance(cell.cell_contents, Group)
        }
    assert sorted(read) == sorted(tensors)  # each once
    assert all(not group._ready for group in groups)


# --- export, and what else reads and writes folders ---


@pytest.mark.parametrize("given", ["configuration", "checkpoint alone", "folder of module names"])
@pytest.mark.parametrize("name", ["mixtral", "llava", "bert"])
def test_an_exported_checkpoint_is_their_folder(name, given, tmp_path):
    """Method: a checkpoint is exported with the model's folder beside it, without, and as a folder
    of the names in memory: equal weights and configuration. Twin: a folder that is the model's own
    already keeps its names."""
    model = build(name)
    plain = copy.deepcopy(model)
    plain.save_pretrained(tmp_path / "theirs")
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"params": "host"}
    )
    infinity.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    if given == "checkpoint alone":
        export(tmp_path / "checkpoint", tmp_path / "ours")
    elif given == "configuration":
        export(tmp_path / "checkpoint", tmp_path / "ours", model=tmp_path / "theirs")
    else:
        torch.save(plain.state_dict(), tmp_path / "model.pt")
        export(tmp_path / "model.pt", tmp_path / "ours", model=tmp_path / "theirs")
    check_equal(tmp_path / "ours", tmp_path / "theirs")
    export(tmp_path / "theirs", tmp_path / "again", model=tmp_path / "theirs")
    check_equal(tmp_path / "again", tmp_path / "theirs")


def test_an_export_leaves_in_fp32_what_transformers_keeps_so(tmp_path):
    """Method: DeepSeek's folder in bf16: the dtypes are those of a model that was loaded in bf16
    and saved by itself."""
    model = build("deepseek_v3")
    model.save_pretrained(tmp_path / "theirs")
    type(model).from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "bf16"
    )
    export(tmp_path / "theirs", tmp_path / "ours", model=tmp_path / "theirs", dtype=torch.bfloat16)
    check_equal(tmp_path / "ours", tmp_path / "bf16")


def test_the_trainers_reader_takes_their_folder(tmp_path):
    """Method: a wrapped mixture of other values reads a folder that transformers saved: its state
    dict has the folder's values."""
    weights = pytest.importorskip("infinity.ext.integrations.weights")
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    other = type(model)(copy.deepcopy(model.config))
    other, _ = infinity.wrap_model(other, None, at_home("nvme", "auto", tmp_path))
    weights.load_weights(other, tmp_path)
    assert differing(dict(other.state_dict()), expected) == []


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_a_merged_adapter_is_saved_as_their_folder(name, tmp_path):
    """Method: LoRA over attention, merged into a folder by infinity and by PEFT's
    ``merge_and_unload().save_pretrained``; and the same by an export of the base's own folder."""
    peft = pytest.importorskip("peft")
    from infinity.integrations import save_merged
    from infinity.tools.cli import main

    base = build(name)
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(SEED)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.save_pretrained(tmp_path / "adapter")
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path / "theirs")
    model, _ = infinity.wrap_model(model, None, {"params": "host"})
    save_merged(model, tmp_path / "ours")
    check_equal(tmp_path / "ours", tmp_path / "theirs")
    assert (
        main(
            [
                "export",
                str(tmp_path / "base"),
                str(tmp_path / "exported"),
                "--merge",
                str(tmp_path / "adapter"),
            ]
        )
        == 0
    )
    check_equal(tmp_path / "exported", tmp_path / "theirs")


def test_adapters_that_transformers_has_added_are_saved_as_it_saves_them(tmp_path, monkeypatch):
    """Method: ``model.add_adapter``: of such a model its own save writes the adapters alone;
    equal folders. transformers asks for a newer PEFT than some machines have, and for nothing of
    it here."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model = build("llama")
    torch.manual_seed(SEED)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    copy.deepcopy(model).save_pretrained(tmp_path / "theirs")
    model, _ = infinity.wrap_model(model, None, {"params": "host"})
    infinity.save_pretrained(model, tmp_path / "ours")
    check_equal(tmp_path / "ours", tmp_path / "theirs")


def test_a_model_with_code_of_its_own_brings_it_along(tmp_path, monkeypatch):
    """Method: a class of a user's module, registered for AutoModel: the module is copied, and the
    configuration names it. It shares no conversions with the family that it is made of, as
    transformers has it."""
    (tmp_path / "own_llama.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass OwnLlama(LlamaForCausalLM):\n   "
        " pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_llama").OwnLlama
    own.register_for_auto_class("AutoModelForCausalLM")
    model = own(build("llama").config)
    copy.deepcopy(model).save_pretrained(tmp_path / "theirs")
    model, _ = infinity.wrap_model(model, None, {"params": "host"})
    infinity.save_pretrained(model, tmp_path / "ours")
    assert (tmp_path / "ours" / "own_llama.py").read_text() == (
        tmp_path / "own_llama.py"
    ).read_text()
    (tmp_path / "ours" / "own_llama.py").unlink()
    (tmp_path / "theirs" / "own_llama.py").unlink()
    check_equal(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize(
    "wrong", ["a quantised model", "a size that is none", "a conversion that fails"]
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(wrong, tmp_path, monkeypatch):
    """Method: each of them, with an old model in the folder, which stays. Twin: without, it is
    replaced."""
    model, _ = infinity.wrap_model(build("mixtral"), None, {"params": "host"})
    (tmp_path / "model.safetensors").write_text("old")
    size = None
    if wrong == "a quantised model":
        model.hf_quantizer = object()
    elif wrong == "a size that is none":
        size = "many"
    else:
        monkeypatch.setattr(
            "transformers.core_model_loading.SplitModulelist.convert", lambda *_, **__: 1 / 0
        )
    with pytest.raises(infinity.ConfigError):
        infinity.save_pretrained(model, tmp_path, max_shard_size=size, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"] and (
        tmp_path / "model.safetensors"
    ).read_text() == "old"
    monkeypatch.undo()
    model.__dict__.pop("hf_quantizer", None)
    infinity.save_pretrained(model, tmp_path, overwrite=True)
    assert len(load_file(tmp_path / "model.safetensors")) > 10
