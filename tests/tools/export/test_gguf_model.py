"""`infinity export --gguf`: the file read back by the gguf package and by transformers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lazily import need

transformers = pytest.importorskip("transformers")
need("gguf")

import gguf
from served import LLAMA3, MODELS, SPECIAL, TEMPLATE, save_served
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from infinity.tools.cli import main
from infinity.tools.export import gguf_model

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
EXAMPLES = ("llama", "llama, tied, biases, llama3", "mistral, head_dim", "qwen3, tied, head_dim")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a model, made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_served(tmp_path_factory.mktemp("served"), name)
        return made[name]

    return folder


def export(folder: Path, out: Path, kind: str, *more: str) -> int:
    return main(["export", str(folder), str(out), "--gguf", kind, *more])


def fields_of(path: Path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def model_of(folder: Path, **how) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The matrices as ``dtype`` has them, for computing in fp32."""
    for param in model.parameters():
        if param.dim() > 1:
            param.data = param.data.to(dtype).float()
    return model


def read_back(folder: Path, file: Path) -> torch.nn.Module:
    """The file by transformers, which does not read all of a configuration from it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type == "mistral":  # in the file it is a Llama
        config = transformers.LlamaConfig(
            **{n: v for n, v in config.to_dict().items() if n not in ("model_type", "layer_types")}
        )
    kind = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))
    return kind.from_pretrained(
        file.parent, gguf_file=file.name, config=config, dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_file_are_those_of_the_folder_cast(name, kind, saved, tmp_path):
    """Loads the file by transformers, and the folder with its matrices cast by torch: same bits."""
    out = tmp_path / "out.gguf"
    assert export(saved(name), out, kind) == 0
    whole = cast(model_of(saved(name), dtype=torch.float32), DTYPES[kind])
    ids = torch.arange(40)[None]
    with torch.no_grad():
        got, wanted = read_back(saved(name), out)(ids).logits, whole(ids).logits
        assert torch.equal(got, wanted)
        assert not torch.equal(got, model_of(saved(name), dtype=torch.float32)(ids).logits)


@pytest.mark.parametrize("name", EXAMPLES)
def test_codes_are_those_of_gguf(name, saved, tmp_path):
    """Quantizes each matrix of the folder by gguf, in llama.cpp's order of rows, and compares
    bytes."""
    out = tmp_path / "out.gguf"
    assert export(saved(name), out, "q8_0") == 0
    model = model_of(saved(name), dtype=torch.float32)
    arch = "QWEN3" if model.config.model_type == "qwen3" else "LLAMA"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 2)
    own = {
        names.get_name(name, (".weight", ".bias")): value.detach().numpy()
        for name, value in model.named_parameters()
    }
    undo = LlamaTensorProcessor(config=model.config.to_dict())
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    assert found.keys() - own.keys() <= {"rope_freqs.weight"} and own.keys() <= found.keys()
    for at, value in own.items():
        tensor = found[at]
        data = tensor.data
        if model.config.model_type in ("llama", "mistral"):
            data = undo.process(data, at).weights
        quantized = gguf.GGMLQuantizationType["Q8_0" if value.ndim > 1 else "F32"]
        assert tensor.tensor_type == quantized
        assert np.array_equal(data, gguf.quants.quantize(value, quantized))


def test_rows_of_no_whole_blocks_are_in_f16_and_named(tmp_path, capsys):
    """Writes a model of 48 inner features in q8_0: the tensors with such rows are in f16."""
    folder = save_served(tmp_path / "odd", "qwen2")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.intermediate_size = 48
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    capsys.readouterr()
    assert export(folder, tmp_path / "out.gguf", "q8_0", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(told["out"]).tensors}
    assert {name for name, kind in kinds.items() if kind == "F16"} == {
        "blk.0.ffn_down.weight",
        "blk.1.ffn_down.weight",
    }
    assert any("blk.0.ffn_down.weight" in each for each in told["notes"])
    assert told["nbytes"] == (tmp_path / "out.gguf").stat().st_size


def test_metadata_is_what_llama_cpp_needs(saved, tmp_path):
    """Reads the fields of three files by the gguf package."""
    told = {}
    for name in ("llama, tied, biases, llama3", "mistral, head_dim", "qwen3, tied, head_dim"):
        assert export(saved(name), tmp_path / "out.gguf", "bf16", "--overwrite") == 0
        told[name] = fields_of(tmp_path / "out.gguf")
    llama, mistral, qwen = told.values()
    assert llama["general.architecture"] == mistral["general.architecture"] == "llama"
    assert qwen["general.architecture"] == "qwen3"
    for fields, head in ((llama, 16), (mistral, 32), (qwen, 32)):
        kind = fields["general.architecture"]
        assert {name: fields[f"{kind}.{name}"] for name in ("block_count", "embedding_length")} == {
            "block_count": 2,
            "embedding_length": 64,
        }
        assert fields[f"{kind}.attention.head_count"] == 4
        assert fields[f"{kind}.attention.head_count_kv"] == 2
        assert fields[f"{kind}.attention.key_length"] == head
        assert fields[f"{kind}.rope.dimension_count"] == head
        assert fields[f"{kind}.rope.freq_base"] == 5000.0
        assert fields[f"{kind}.feed_forward_length"] == 96
        assert fields[f"{kind}.attention.layer_norm_rms_epsilon"] == np.float32(1e-5)
        assert fields["tokenizer.chat_template"] == TEMPLATE
    assert (llama["llama.context_length"], mistral["llama.context_length"]) == (128, 64)
    assert llama["tokenizer.ggml.pre"] == "llama-bpe" and llama["tokenizer.ggml.add_bos_token"]
    assert qwen["tokenizer.ggml.pre"] == "qwen2" and not qwen["tokenizer.ggml.add_bos_token"]


def test_frequencies_of_llama3_are_divided_as_transformers_does(saved, tmp_path):
    """Divides the frequencies of plain positions by the file's factors: transformers' own ones."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert export(saved("llama, tied, biases, llama3"), tmp_path / "out.gguf", "f16") == 0
    found = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    config = transformers.AutoConfig.from_pretrained(saved("llama, tied, biases, llama3"))
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / LLAMA3["rope_theta"] ** (torch.arange(0, 16, 2).float() / 16)
    got = plain / torch.from_numpy(np.copy(found["rope_freqs.weight"]))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    assert not torch.allclose(plain, wanted)


CHANGES = {  # settings of a llama -> what is refused
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "dynamic positions": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type 'dynamic'",
    ),
    "half of a head rotated": (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
        "partial_rotary_factor",
    ),
    "gemma": ({"model_type": "gemma3_text"}, "gemma3_text.*llama, mistral, qwen2, qwen3"),
    "a mixture of experts": (
        {"model_type": "qwen3_moe"},
        "qwen3_moe.*llama, mistral, qwen2, qwen3",
    ),
    "another family": ({"model_type": "gpt_neox"}, "gpt_neox.*llama, mistral, qwen2, qwen3"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_llama_cpp_runs_differently_is_refused_with_a_remedy(change, saved, tmp_path, capsys):
    """Changes the configuration of a folder that is written otherwise: exit status 2, the cause and
    llama.cpp's own converter named, no file."""
    settings, cause = CHANGES[change]
    folder = shutil.copytree(saved("llama"), tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    if "model_type" in settings:
        config.pop("architectures")
    (folder / "config.json").write_text(json.dumps(config | settings))
    assert export(folder, tmp_path / "out.gguf", "f16") == 2
    error = capsys.readouterr().err
    assert re.search(cause, error) and "convert_hf_to_gguf.py" in error
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_value_beyond_f16_leaves_the_file_before(saved, tmp_path, capsys):
    """Writes 1e5 to the last layer: f16 is refused with the tensor's name and nothing replaced,
    bf16 has the value."""
    folder = save_served(tmp_path / "folder", "qwen2")
    model = model_of(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = 1e5
    model.save_pretrained(folder)
    out = tmp_path / "out.gguf"
    out.write_bytes(b"the file before")
    assert export(folder, out, "f16", "--overwrite") == 2
    error = capsys.readouterr().err
    assert "blk.1.ffn_down.weight" in error and "--gguf bf16" in error
    assert out.read_bytes() == b"the file before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.gguf"]
    assert export(folder, out, "bf16", "--overwrite") == 0
    found = {each.name: each for each in gguf.GGUFReader(out).tensors}
    data = np.copy(found["blk.1.ffn_down.weight"].data).view(np.int16)
    assert torch.from_numpy(data).view(torch.bfloat16)[3, 5] == torch.tensor(1e5).bfloat16()


@pytest.mark.parametrize("key", ["num_key_value_heads", "intermediate_size", "vocab_size"])
def test_a_configuration_of_other_shapes_is_refused(key, saved, tmp_path, capsys):
    """Twin: the folder as it was saved is written by all other tests."""
    folder = shutil.copytree(saved("llama"), tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 2 * config[key]}))
    assert export(folder, tmp_path / "out.gguf", "f16") == 2
    assert "is of shape" in (error := capsys.readouterr().err) and "config.json says" in error
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("out", ["out.gguf", "out"])
def test_a_head_of_its_own_is_not_lost_though_the_configuration_ties_it(
    out, saved, tmp_path, capsys
):
    """Method: a folder that says tied, with a head of other values, which transformers does not
    tie: as GGUF and as a folder. Twins: a head of the same values, and one that is not tied."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(saved("llama"), tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    whole = load_file(folder / "model.safetensors")
    table = whole["model.embed_tokens.weight"]
    words = ["export", str(folder), str(tmp_path / out), "--overwrite"]
    words += ["--gguf", "bf16"] if out.endswith(".gguf") else []
    for head, tied, status in (
        (table + 1, True, 2),
        (table.clone(), True, 0),
        (table + 1, False, 0),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        save_file(whole | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        assert main(words) == status
    assert "their values differ" in capsys.readouterr().err


def test_factors_of_llama3_are_for_llamas_alone(saved, tmp_path, capsys):
    """Method: a Qwen with them; llama.cpp's code for Qwens has no place. Twin: the Llama above."""
    folder = shutil.copytree(saved("qwen2"), tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": LLAMA3}))
    assert export(folder, tmp_path / "out.gguf", "f16") == 2
    assert "rope_type 'llama3'" in capsys.readouterr().err


@pytest.mark.parametrize("value", [1e9, float("nan")])
def test_a_value_beyond_the_scales_of_q8_0_is_refused(value, saved, tmp_path, capsys):
    """Twin: 1e5, which q8_0 has and f16 has not."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(saved("qwen2"), tmp_path / "folder")
    whole = load_file(folder / "model.safetensors")
    for at, status in ((value, 2), (1e5, 0)):
        whole["model.layers.1.mlp.down_proj.weight"][3, 5] = at
        save_file(whole, folder / "model.safetensors", {"format": "pt"})
        assert export(folder, tmp_path / "out.gguf", "q8_0") == status
    assert "blk.1.ffn_down.weight has values up to" in capsys.readouterr().err


@pytest.mark.parametrize("more, eot, told", [([], None, 0), ([9], 9, 0), ([9, 10], 9, 1)])
def test_a_second_end_token_is_written_and_a_third_is_told(
    more, eot, told, saved, tmp_path, capsys
):
    """Method: what a folder's generation_config.json says, beside the tokenizer's own."""
    folder = shutil.copytree(saved("llama"), tmp_path / "folder")
    own = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    settings = json.dumps({"eos_token_id": [own, *more]})
    (folder / "generation_config.json").write_text(settings)
    assert export(folder, tmp_path / "out.gguf", "f16") == 0
    assert fields_of(tmp_path / "out.gguf").get("tokenizer.ggml.eot_token_id") == eot
    assert capsys.readouterr().out.count("without the end tokens 10") == told


@pytest.mark.parametrize("text", ['{"model_type": "lla', "[]"])
def test_a_broken_configuration_is_named(text, saved, tmp_path, capsys):
    """Method: cut off, and a list. Twin: the whole one of other tests."""
    folder = shutil.copytree(saved("llama"), tmp_path / "folder")
    (folder / "config.json").write_text(text)
    assert export(folder, tmp_path / "out.gguf", "f16") == 2
    assert "config.json is not a model's configuration" in capsys.readouterr().err


def test_a_missing_or_foreign_tensor_is_named(saved, tmp_path, capsys):
    """Takes a tensor from a folder's file, and adds one: both are refused by name."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(saved("llama"), tmp_path / "folder")
    whole = load_file(folder / "model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    extra = {"model.layers.1.self_attn.o_proj.bias": torch.zeros(64)}
    for tensors, named in (
        ({name: value for name, value in whole.items() if name != norm}, norm),
        (whole | extra, next(iter(extra))),
    ):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert export(folder, tmp_path / "out.gguf", "f16") == 2
        assert named in capsys.readouterr().err
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    assert export(folder, tmp_path / "out.gguf", "f16") == 0


def test_one_tensor_is_in_memory_at_a_time(saved, tmp_path, monkeypatch):
    """Records reads and writes: no tensor is read before the one before it is in the file."""
    done: list[str] = []
    write, read = gguf.GGUFWriter.write_tensor_data, gguf_model._codes

    def reads(*given):
        done.append("read")
        return read(*given)

    def writes(self, *given):
        done.append("written")
        return write(self, *given)

    monkeypatch.setattr(gguf_model, "_codes", reads)
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", writes)
    assert export(saved("llama"), tmp_path / "out.gguf", "f16") == 0
    assert done == ["read", "written"] * 21


def test_an_adapter_is_merged_into_the_file(saved, tmp_path):
    """Exports a base with --merge to a folder and to a file: the file has the folder's tensors, and
    others than the base's."""
    peft = pytest.importorskip("peft")
    model = model_of(saved("qwen2"), dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    merge = "--merge", str(tmp_path / "adapter")
    assert main(["export", str(saved("qwen2")), str(tmp_path / "merged"), *merge]) == 0
    files = [tmp_path / f"{name}.gguf" for name in ("merged", "direct", "base")]
    assert export(tmp_path / "merged", files[0], "f16") == 0
    assert export(saved("qwen2"), files[1], "f16", *merge) == 0
    assert export(saved("qwen2"), files[2], "f16") == 0
    merged, direct, base = (
        {each.name: each.data.tobytes() for each in gguf.GGUFReader(file).tensors} for file in files
    )
    assert merged == direct
    assert {name for name in base if base[name] != direct[name]} == {
        f"blk.{at}.attn_{part}.weight" for at in range(2) for part in "qv"
    }


@pytest.mark.parametrize("has", ["template", "template in its configuration", "nothing"])
def test_the_tokenizer_of_an_adapter_goes_with_it(has, saved, tmp_path):
    """Method: an adapter whose folder has a tokenizer with another template and end token, merged
    to a file and to a folder. Twin: one without, whose base's tokenizer is taken."""
    peft = pytest.importorskip("peft")
    base, adapter = saved("qwen2"), tmp_path / "adapter"
    adapted = peft.get_peft_model(model_of(base, dtype=torch.float32), peft.LoraConfig(r=2))
    adapted.save_pretrained(adapter)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    assert (base / "chat_template.jinja").is_file()
    template, end = tokenizer.chat_template, tokenizer.eos_token_id
    if has != "nothing":
        tokenizer.chat_template = template = "{{ messages[0].content }}, as it was learned"
        tokenizer.eos_token = tokenizer.pad_token
        end = tokenizer.eos_token_id
        tokenizer.save_pretrained(adapter, save_jinja_files=has == "template")
    merge = "--merge", str(adapter)
    assert export(base, tmp_path / "out.gguf", "f16", *merge) == 0
    fields = fields_of(tmp_path / "out.gguf")
    assert fields["tokenizer.chat_template"] == template
    assert fields["tokenizer.ggml.eos_token_id"] == end
    assert main(["export", str(base), str(tmp_path / "merged"), *merge]) == 0
    merged = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert (merged.chat_template, merged.eos_token_id) == (template, end)
    assert merged.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("form", ["file", "folder", "file with another name", "to a file"])
def test_a_file_that_export_wrote_is_named_with_what_reads_it(form, saved, tmp_path, capsys):
    """Method: the file, or a folder that has it alone, as CHECKPOINT; transformers loads it as the
    message says. Twin: beside safetensors it is left alone."""
    folder = tmp_path / "made"
    folder.mkdir()
    name = "model" if form == "file with another name" else "model.gguf"
    assert export(saved("qwen2"), tmp_path / "out.gguf", "bf16") == 0
    (tmp_path / "out.gguf").rename(folder / name)
    given = folder if form == "folder" else folder / name
    out = ["out.gguf", "--gguf", "f16"] if form == "to a file" else ["out"]
    words = ["export", str(given), str(tmp_path / out[0]), *out[1:]]
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"{folder / name} is a model in GGUF" in error and "llama.cpp and Ollama run it" in error
    assert f"from_pretrained('{folder}', gguf_file='model.gguf')" in error
    assert ("under that name" in error) == (name == "model")
    (folder / name).rename(folder / "model.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    assert model.num_parameters() > 0
    for file in saved("qwen2").iterdir():
        shutil.copy(file, folder)
    assert main(["export", str(folder), str(tmp_path / out[0]), *out[1:]]) == 0


def test_an_existing_file_is_replaced_only_when_asked_to(saved, tmp_path, capsys):
    """Method: the same command again, onto its own file, and onto another's. Twin: --overwrite."""
    out = tmp_path / "out.gguf"
    for made in (
        lambda: export(saved("qwen2"), out, "bf16"),
        lambda: out.write_text("notes") and 0,
    ):
        assert made() == 0
        before = out.read_bytes()
        capsys.readouterr()
        assert export(saved("qwen2"), out, "f16") == 2
        error = capsys.readouterr().err
        assert "is there already, and a model in GGUF is replaced only when asked" in error
        assert out.read_bytes() == before
        assert export(saved("qwen2"), out, "f16", "--overwrite") == 0 and out.read_bytes() != before
        out.unlink()


def test_special_tokens_are_at_their_ids(saved, tmp_path):
    """Reads the vocabulary back: each of the tokenizer's tokens at its id, and its special ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved("llama"))
    assert export(saved("llama"), tmp_path / "out.gguf", "f16") == 0
    fields = fields_of(tmp_path / "out.gguf")
    tokens = fields["tokenizer.ggml.tokens"]
    assert {token: at for at, token in enumerate(tokens[: len(tokenizer)])} == tokenizer.get_vocab()
    assert tokens[len(tokenizer) :] == [f"[PAD{len(tokenizer) + at}]" for at in range(3)]
    ids = [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")]
    assert [tokens[at] for at in ids] == SPECIAL
    kinds = fields["tokenizer.ggml.token_type"]
    assert [kinds[at] for at in (*ids, tokens.index("[ENTITY]"), tokens.index("a"), -1)] == [
        *(gguf.TokenType.CONTROL,) * 3,
        gguf.TokenType.USER_DEFINED,
        gguf.TokenType.NORMAL,
        gguf.TokenType.UNUSED,
    ]


def test_rows_of_a_llama_are_in_another_order_and_those_of_a_qwen_are_not(
    saved, tmp_path, monkeypatch
):
    """Writes both without the change of order: the Llama reads back as another model, the Qwen as
    before."""
    monkeypatch.setattr(gguf_model, "_in_order", lambda config, own, source: source)
    ids = torch.arange(40)[None]
    for name, is_same in (("llama", False), ("qwen2", True)):
        assert export(saved(name), tmp_path / f"{name}.gguf", "bf16") == 0
        whole = cast(model_of(saved(name), dtype=torch.float32), torch.bfloat16)
        with torch.no_grad():
            got = read_back(saved(name), tmp_path / f"{name}.gguf")(ids).logits
            assert torch.equal(got, whole(ids).logits) == is_same


def test_a_bias_that_llama_cpp_does_not_add_is_refused(tmp_path, capsys):
    """Gives a Qwen3 biases in its attention: the output's has no place. A Llama's has one."""
    folder = save_served(tmp_path / "folder", "qwen3, tied, head_dim")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.attention_bias = True
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    assert export(folder, tmp_path / "out.gguf", "bf16") == 2
    error = capsys.readouterr().err
    assert "2 tensors have no place" in error and "o_proj.bias" in error
    assert "convert_hf_to_gguf.py" in error
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_without_the_library_the_remedy_is_named(saved, tmp_path, capsys, monkeypatch):
    """Hides gguf: exit status 2 and what to install."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert export(saved("llama"), tmp_path / "out.gguf", "bf16") == 2
    assert "pip install 'infinity-engine[gguf]'" in capsys.readouterr().err


def test_a_checkpoint_of_a_job_is_written_with_its_tokenizer(saved, tmp_path, capsys, monkeypatch):
    """Trains a step in bf16 with a checkpoint: its file has the bytes of the folder exported from
    it. A checkpoint of adapters is refused with the way."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("one and two and three\n" * 60)
    words = (
        f"train --model {saved('qwen2')} --data text.txt --steps 1 --batch-size 2 --device cpu"
        " --sequence-length 16 --eval-batches 1 --sample-bytes 0 --dtype bf16 --checkpoint"
    ).split()
    assert main([*words, "whole"]) == main([*words, "adapters", "--lora", "2"]) == 0
    assert main("export whole folder".split()) == 0
    assert export(Path("whole"), Path("direct.gguf"), "bf16") == 0
    assert export(Path("folder"), Path("folder.gguf"), "bf16", "--model", str(saved("qwen2"))) == 0
    assert Path("direct.gguf").read_bytes() == Path("folder.gguf").read_bytes()
    assert export(saved("qwen2"), Path("before.gguf"), "bf16") == 0
    assert Path("direct.gguf").read_bytes() != Path("before.gguf").read_bytes()
    capsys.readouterr()
    assert export(Path("adapters"), Path("adapters.gguf"), "bf16") == 2
    assert "--merge FOLDER" in capsys.readouterr().err
    assert not Path("adapters.gguf").exists()
