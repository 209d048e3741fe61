"""Scaled folders: weights in FP8 with a scale for each block, and in MXFP4, become dense as they
are read, with the bits of transformers.

Method: small models are saved, and their weights scaled as the published folders have them;
`from_pretrained` makes them dense where there is no GPU. Twins: another scale, another model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from inside import parts_of
from models import at_home
from safetensors.torch import load_file, save_file
from scaled import FILE, FP8, describe, in_fp8, scale_fp8
from torch import nn

import infinity
import infinity.tools.cli
from infinity.errors import CorruptionError
from infinity.ext.packed.unpacked import without_scales
from infinity.files.weight_files import WeightFiles

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

BF16 = torch.bfloat16
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, Callable] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=128),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=64, moe_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip


def build(kind: str, *, meta: bool = False) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(BF16)


def save_fp8(folder: Path, kind: str = "llama") -> Path:
    build(kind).save_pretrained(folder)
    return scale_fp8(folder)


def save_mxfp4(folder: Path) -> Path:
    build("gpt_oss").save_pretrained(folder)
    tensors, generator = load_file(folder / FILE), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        form = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*form, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.randint(
            118, 126, form, dtype=torch.uint8, generator=generator
        )
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    describe(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]})
    return folder


FOLDERS = {
    "llama": save_fp8,
    "qwen3_moe": lambda folder: save_fp8(folder, "qwen3_moe"),
    "gpt_oss": save_mxfp4,
}


def loaded(folder: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)


def bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: value.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("home", ["device", "hostile"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_scaled_folder_has_the_bits_of_transformers(kind, home, tmp_path):
    """Claim: on every home, experts that are saved one by one included. Twin: a plain model of the
    same seed has others."""
    folder = FOLDERS[kind](tmp_path / "model")
    model = build(kind, meta=True)
    config = at_home(home, home, tmp_path, weights=folder)
    model, _ = infinity.wrap_model(model, None, config)
    assert bits(model) == bits(loaded(folder))
    assert bits(model) != bits(build(kind))


def test_a_model_that_was_scaled_is_saved_as_a_dense_one(tmp_path):
    """Claim: what is saved is read by transformers, with the same bits and no word of codes. Twin:
    the configuration of a wrap that fails has them still."""
    folder = save_fp8(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config).to(BF16)

    with pytest.raises(infinity.InfinityError):
        infinity.wrap_model(
            on_meta(), None, {"params": "host", "weights": folder, "host_memory": "1KiB"}
        )
    assert config.quantization_config
    model, _ = infinity.wrap_model(on_meta(), None, {"params": "host", "weights": folder})
    infinity.save_pretrained(model, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    assert bits(loaded(tmp_path / "saved")) == bits(model)


def test_a_scaled_folder_is_packed_again_as_it_is_read(tmp_path):
    """Claim: nf4 of the dense weights in the dtype of the model, one at a time."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    folder = save_fp8(tmp_path / "model")
    dense = loaded(folder).requires_grad_(requires_grad=False)
    expected = infinity.quantize(dense, "nf4")
    model = build("llama", meta=True).requires_grad_(requires_grad=False)
    config = {"params": "host", "weights": folder, "quantize": "nf4"}
    model, _ = infinity.wrap_model(model, None, config)
    assert type(model.model.layers[0].mlp.up_proj) is bitsandbytes.nn.Linear4bit
    assert bits(model) == bits(expected)


def test_a_scaled_folder_is_exported_dense(tmp_path, capsys):
    folder = save_mxfp4(tmp_path / "model")
    assert infinity.tools.cli.main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert bits(loaded(tmp_path / "out")) == bits(loaded(folder))


@pytest.mark.parametrize("shape, block", [((48, 72), (32, 32)), ((40, 64), (16, 64))])
def test_blocks_at_the_edges_are_smaller(shape, block, tmp_path):
    """Claim: the configuration's size of a block counts, not an equal share of the weight. Method:
    the scale that each element was divided by."""
    weight = torch.randn(shape)
    codes, scales = in_fp8(weight, *block)
    save_file({"a": codes, "a_scale_inv": scales}, tmp_path / FILE)
    (tmp_path / "config.json").write_text("{}")
    describe(tmp_path, {"quant_method": "fp8", "weight_block_size": list(block)})
    dense = without_scales(WeightFiles(tmp_path).sources(), tmp_path)["a"].read()
    expected = torch.tensor([
        [codes[i, j].float() * scales[i // block[0], j // block[1]] for j in range(shape[1])]
        for i in range(shape[0])
    ])  # fmt: skip
    assert torch.equal(dense, expected)
    assert (dense - weight).abs().max() < 0.1 * weight.abs().max()


def test_a_scale_for_the_whole_weight(tmp_path):
    codes, scale = torch.randn(8, 8).to(FP8), torch.tensor([0.5])
    save_file({"a": codes, "a_scale_inv": scale}, tmp_path / FILE)
    found = without_scales(WeightFiles(tmp_path).sources(), tmp_path)
    assert list(found) == ["a"] and torch.equal(found["a"].read(), codes.float() * 0.5)


DAMAGE: dict[str, tuple[Callable, str]] = {
    "a scale too few": (
        lambda made: made | {"a_scale_inv": made["a_scale_inv"][1:].clone()},
        r"a_scale_inv has shape \(1, 2\).*a weight of \(64, 64\)",
    ),
    "scales of a vector": (
        lambda made: made | {"a_scale_inv": torch.ones(4)},
        r"a_scale_inv has shape \(4,\)",
    ),
    "exponents of another form": (
        lambda made: {
            "b_blocks": torch.zeros(2, 4, 2, 16, dtype=torch.uint8),
            "b_scales": torch.zeros(2, 4, 1, dtype=torch.uint8),
        },
        r"b_scales has shape \(2, 4, 1\).*exponent per block of \(2, 4, 2, 16\)",
    ),
    "exponents of another dtype": (
        lambda made: {
            "b_blocks": torch.zeros(2, 4, 2, 16, dtype=torch.uint8),
            "b_scales": torch.zeros(2, 4, 2),
        },
        r"b_scales has",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_scales_that_do_not_fit_are_refused(what, tmp_path):
    change, said = DAMAGE[what]
    codes, scales = in_fp8(torch.randn(64, 64), 32, 32)
    save_file(change({"a": codes, "a_scale_inv": scales}), tmp_path / FILE)
    (tmp_path / "config.json").write_text("{}")
    describe(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    with pytest.raises(CorruptionError, match=said):
        without_scales(WeightFiles(tmp_path).sources(), tmp_path)


def test_layers_that_compute_in_fp8_keep_their_codes(tmp_path):
    """Claim: a model whose own parameters are codes gets them, byte for byte, at any home. They
    compute on a GPU alone."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    folder = save_fp8(tmp_path / "model")
    stored = load_file(folder / FILE)
    with torch.device("meta"):
        model = build("llama", meta=True)
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, nn.Linear):
                        made = fp8.FP8Linear(
                            linear.in_features, linear.out_features, block_size=(32, 32)
                        )
                        setattr(part, name, made)
    model.requires_grad_(requires_grad=False)
    config = {"params": "nvme", "nvme_paths": [str(tmp_path)], "weights": folder}
    model, _ = infinity.wrap_model(model, None, config)
    for name, value in model.state_dict().items():
        assert torch.equal(
            value.contiguous().view(torch.uint8), stored[name].contiguous().view(torch.uint8)
        ), name
    moved = {handle.name for unit in units_of(model) for handle in unit.handles}
    assert {name for name in stored if "_proj" in name} <= moved


def units_of(model: nn.Module) -> list:
    return parts_of(model.__dict__["_infinity"]).units
