"""Models on meta are wrapped, and their values are the initialisation's."""

from __future__ import annotations

import pytest
import torch
from contract_cases import LR, SEED, step
from models import (
    TinyTransformer,
    at_home,
    differing,
    environment,
    tokens,
    transformer,
)
from runs import adamw
from torch import nn

import infinity


def meta_transformer() -> nn.Module:
    with torch.device("meta"):
        return TinyTransformer(dropout=0.0)


@pytest.mark.parametrize("tied_name", ["tokens.weight", "head.weight", "both"])
def test_model_on_meta_takes_its_weights_from_safetensors(tied_name, tmp_path):
    """Method: save a model's tensors (a tied one under either name, or both), build it on meta
    and wrap it with weights=; its state dict has the saved bits, and it trains as the saved
    model does."""
    from safetensors.torch import save_file

    plain = transformer(SEED, dropout=0.0)
    tensors = {name: value.clone() for name, value in plain.state_dict().items()}
    if tied_name != "both":
        del tensors[{"tokens.weight": "head.weight", "head.weight": "tokens.weight"}[tied_name]]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "swap").mkdir()
    model = meta_transformer()
    identities = [id(p) for p in model.parameters()]
    config = at_home(
        "hostile", "hostile", tmp_path / "swap", weights=tmp_path / "model.safetensors"
    )
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), config)
    assert [id(p) for p in model.parameters()] == identities
    assert differing(model.state_dict(), plain.state_dict()) == []
    other, other_optimizer = infinity.wrap_model(
        plain, adamw(plain, LR), at_home("hostile", "hostile", tmp_path / "swap")
    )
    for one, its in ((model, optimizer), (other, other_optimizer)):
        step(one, its)
    assert differing(model.state_dict(), other.state_dict()) == []


def test_a_file_that_lacks_a_weight_is_no_silent_mixture(tmp_path):
    """Method: weights= lacks one bias (its layer's weight is there), or has none of the model's
    names; the error names what is missing, or at least every tensor that is in the file has its
    value from there."""
    from safetensors.torch import save_file

    tensors = {
        name: value.clone()
        for name, value in transformer(SEED).state_dict().items()
        if name != "head.weight"
    }
    del tensors["blocks.1.feed.0.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    try:
        model, _ = infinity.wrap_model(
            meta_transformer(), None, {"weights": tmp_path / "model.safetensors"}
        )
    except infinity.ConfigError as error:
        assert "blocks.1.feed.0.bias" in str(error)
    else:
        state = model.state_dict()
        assert differing({name: state[name] for name in tensors}, tensors) == []
    save_file(
        {f"wrong.{name}": value for name, value in tensors.items()}, tmp_path / "wrong.safetensors"
    )
    with pytest.raises(infinity.ConfigError):
        infinity.wrap_model(meta_transformer(), None, {"weights": tmp_path / "wrong.safetensors"})


def test_model_on_meta_without_weights_is_initialised_by_its_modules(tmp_path):
    """Method: build on meta modules that have reset_parameters, wrap without weights=; every value
    is drawn (none is left as it was allocated), seeds repeat it, and a module without
    reset_parameters is named."""

    def build():
        with torch.device("meta"):
            return nn.Sequential(
                nn.Embedding(20, 8),
                nn.LayerNorm(8),
                nn.Linear(8, 8),
                nn.Linear(8, 8),
                nn.BatchNorm1d(8),
            )

    states = []
    for _ in range(2):
        torch.manual_seed(SEED)
        model, _ = infinity.wrap_model(build(), None, at_home("nvme", "auto", tmp_path))
        states.append(model.state_dict())
    assert differing(*states) == []
    state = states[0]
    assert torch.equal(state["1.weight"], torch.ones(8)) and torch.equal(
        state["4.running_var"], torch.ones(8)
    )
    assert 0 < state["2.weight"].abs().max() <= 8**-0.5 and 0.5 < state["0.weight"].std() < 1.5
    with pytest.raises(infinity.ConfigError, match="positions"):
        infinity.wrap_model(meta_transformer(), None, {})


def test_transformers_model_on_meta(tmp_path):
    """Method: a Llama (rotary buffers that are in no file) and a GPT-2 built on meta from their
    saved folders; outputs have the bits of from_pretrained's."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 67,
        "max_position_embeddings": 32,
    }
    configs = [
        transformers.LlamaConfig(**sizes),
        transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=67, n_positions=32),
    ]
    for config in configs:
        torch.manual_seed(SEED)
        saved = transformers.AutoModelForCausalLM.from_config(config).eval()
        folder = tmp_path / type(config).__name__
        saved.save_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model, _ = infinity.wrap_model(
            model.eval(), None, at_home("nvme", "auto", tmp_path, weights=folder)
        )
        with torch.no_grad():
            assert torch.equal(model(tokens(SEED)).logits, saved(tokens(SEED)).logits)


def test_failed_wrap_of_a_meta_model_leaves_it_on_meta(tmp_path):
    """Method: let the wrap fail after the weights were read; parameters and buffers are the meta
    ones they were."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    before = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for faults in ("eio=1.0", "eio=1.0,first_piece=3"):
        with environment(INFINITY_FAULTS=faults), pytest.raises(infinity.StorageError):
            infinity.wrap_model(
                model, torch.optim.AdamW(model.parameters()), at_home("nvme", "nvme", tmp_path)
            )
        assert {
            name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]
        } == before
        assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
        assert all(type(p) is nn.Parameter for p in model.parameters())
