"""Models of transformers and adapters of peft on meta: their own initialisation, and their
folders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from meta_cases import LR, SEED, drawn_and_plain, on_meta, unlike
from models import (
    at_home,
    differing,
    seeded,
)
from runs import adamw
from torch import nn

import infinity


def tiny(name: str) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    text = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    configs = {
        "GPT2": lambda: transformers.GPT2Config(
            n_layer=8, n_embd=64, n_head=2, vocab_size=97, n_positions=32, **ends
        ),
        "Llama": lambda: transformers.LlamaConfig(
            **text, num_key_value_heads=1, initializer_range=0.1, **ends
        ),
        "Llama untied": lambda: transformers.LlamaConfig(**text, tie_word_embeddings=False, **ends),
        "OPT": lambda: transformers.OPTConfig(
            vocab_size=97,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=128,
            word_embed_proj_dim=64,
            max_position_embeddings=32,
            **ends,
        ),
        "T5": lambda: transformers.T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=97
        ),
        "Mamba": lambda: transformers.MambaConfig(
            vocab_size=97, hidden_size=64, state_size=8, num_hidden_layers=2, **ends
        ),
    }
    if name == "BERT":
        config = transformers.BertConfig(
            **text, max_position_embeddings=32, initializer_range=0.3, pad_token_id=0
        )
        return lambda: transformers.BertForMaskedLM(config)
    if name == "ResNet":
        sizes = {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
        }
        return lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))
    config = configs[name]()
    auto = transformers.AutoModelForSeq2SeqLM if name == "T5" else transformers.AutoModelForCausalLM
    return lambda: auto.from_config(config)


@pytest.mark.parametrize(
    "name", ["GPT2", "Llama", "Llama untied", "OPT", "BERT", "ResNet", "Mamba", "T5"]
)
def test_transformers_models_are_initialised_as_from_config_does(name):
    """Method: build from a config in memory, and on meta and wrap without weights; every parameter
    and buffer has the same constants or the same spread."""
    assert unlike(*drawn_and_plain(tiny(name))) == []


def test_scaled_initialisation_of_gpt2():
    """Method: GPT-2 scales what is added to the residual stream by 1/sqrt(2 layers); measured over
    all layers, on meta. Twin: the other matrices are not scaled, so the comparison can tell them
    apart."""
    drawn, plain = drawn_and_plain(tiny("GPT2"))
    scaled = (
        torch.stack([v for n, v in drawn.items() if n.endswith("attn.c_proj.weight")]).std().item()
    )
    others = (
        torch.stack([v for n, v in drawn.items() if n.endswith("attn.c_attn.weight")]).std().item()
    )
    assert abs(scaled - 0.02 / 16**0.5) < 0.0002 and abs(others - 0.02) < 0.0005
    swapped = {n: v * 4 if n.endswith("attn.c_proj.weight") else v for n, v in drawn.items()}
    assert len(unlike(swapped, plain)) == 8


def test_a_transformers_model_inside_a_module_of_ones_own():
    """Method: a model with a value head around an OPT; the OPT's own ``_init_weights`` counts for
    what is inside it, or a ConfigError says that weights are needed: embeddings 50 times as large
    are neither."""
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
    """Method: LoRA on a Llama, on meta without weights; B is zero, as in memory, so the adapter
    changes nothing at first, or a ConfigError says that this cannot be had."""
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
    """Method: save a model in several files, build it on meta, and wrap from the folder with an
    optimizer in bf16; every parameter and buffer has the bits of the saved model, tied ones and
    non-persistent buffers included.
    """
    build = tiny(name)
    saved = seeded(SEED, build)
    saved.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > (1 if name != "ResNet" else 0)
    model = on_meta(build)
    config = at_home("nvme", "nvme", tmp_path, weights=str(tmp_path / "model"), param_dtype="bf16")
    model, _ = infinity.wrap_model(model, adamw(model, LR), config)
    assert differing(model.state_dict(), saved.state_dict()) == []
    assert differing(dict(model.named_buffers()), dict(saved.named_buffers())) == []


def constructing() -> Callable[[], nn.Module]:
    """A transformers model whose buffers only its constructor computes, as those of version 4."""
    transformers = pytest.importorskip("transformers")

    class Constructing(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def __init__(self, config) -> None:
            super().__init__(config)
            self.proj = nn.Linear(config.hidden_size, 3)
            rates = torch.arange(config.hidden_size).float().mul(-0.3).exp()
            self.register_buffer("rates", rates, persistent=False)
            self.register_buffer("place", torch.arange(5)[None], persistent=False)
            self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=True)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)

    return lambda: Constructing(transformers.LlamaConfig(hidden_size=16, num_attention_heads=2))


@pytest.mark.parametrize("inside", ["alone", "in a list", "below another model"])
def test_buffers_of_constructors_are_those_of_from_pretrained(inside, monkeypatch):
    """Method: buffers of floats, integers and booleans that no initialisation sets, on meta, equal
    those of the model in memory. Twin: transformers 5 does not make them either, and they are
    refused by name."""
    made, accelerate = constructing(), pytest.importorskip("accelerate")

    def build() -> nn.Module:
        if inside == "alone":
            return made()
        if inside == "in a list":
            return nn.Sequential(nn.ModuleDict({"one": made()}), nn.Linear(2, 2))
        outer = made()
        outer.inner = made()
        return outer

    from transformers import modeling_utils

    monkeypatch.delattr(modeling_utils, "init_empty_weights", raising=False)
    with pytest.raises(infinity.ConfigError, match="mask, .*place, .*rates is on meta"):
        infinity.wrap_model(on_meta(build), None, {"params": "host"})
    monkeypatch.setattr(
        modeling_utils, "init_empty_weights", accelerate.init_empty_weights, raising=False
    )
    model, _ = infinity.wrap_model(on_meta(build), None, {"params": "host"})
    assert differing(dict(model.named_buffers()), dict(build().named_buffers())) == []
