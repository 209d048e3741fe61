"""Packed experts: each has the bits that its library gives a linear layer, wherever it is packed.

Twins: trained experts stay dense; another format gives another loss.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import CapacityError, ConfigError
from infinity.state.arrival import Arrival
from infinity.state.coded import Coded

transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")
pytestmark = pytest.mark.filterwarnings("ignore")

BF16 = torch.bfloat16
FORMATS = ["nf4", "int8", "fp8"]
SIZES = {
    "vocab_size": 128, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    "intermediate_size": 64, "moe_intermediate_size": 192, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
NAMES = [f"model.layers.{i}.mlp.experts.{w}" for i in (0, 1) for w in ("gate_up_proj", "down_proj")]


def build(*, meta: bool = False) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        config = transformers.Qwen3MoeConfig(**SIZES, **MOE)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    return adapted(model.requires_grad_(requires_grad=False))


def adapted(model: nn.Module) -> nn.Module:
    """Lets the norms train: what is below them is needed in the backward."""
    for name, param in model.named_parameters():
        if "layernorm" in name:
            param.requires_grad_(requires_grad=True)
    return model.train()


def losses(model: nn.Module, optimizer) -> list[float]:
    found = []
    for step in range(3):
        ids = torch.randint(0, 128, (1, 2), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def wrapped(model: nn.Module, home: str, folder: Path, **more):
    config = {"params": home, "optimizer": home, "nvme_paths": [str(folder)], **more}
    return infinity.wrap_model(model, adamw(model), config)


def of_library(format: str, weight: torch.Tensor) -> torch.Tensor:
    """The dense values of one expert that was packed by the library itself."""
    if format == "nf4":
        library = importlib.import_module("bitsandbytes.functional")
        packed, state = library.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        return library.dequantize_4bit(packed, state)
    library = importlib.import_module("torchao.quantization")
    name = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}[format]
    layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    library.quantize_(layer, getattr(library, name)())
    return layer.weight.dequantize()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("packed_experts") / "model"
    build().save_pretrained(path)
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_each_expert_has_the_bits_of_its_library(format):
    plain, model = build(), infinity.quantize(build(), format)
    for name in NAMES:
        weight, dense = model.get_parameter(name), plain.get_parameter(name).detach()
        assert isinstance(weight, Coded) and weight.shape == dense.shape
        expected = torch.stack([of_library(format, each) for each in dense])
        assert torch.equal(weight.dequantize(), expected) and not torch.equal(expected, dense)
        assert torch.equal(weight[3], expected[3])


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_way_to_pack_computes_the_same(format, home, folder, tmp_path, monkeypatch):
    """Claim: packed in memory, on the way home, or while a folder is read, at every home: the
    losses of the packed model, the first one those of plain torch. Codes of experts without tokens
    do not move."""
    plain = infinity.quantize(build(), format)
    first = losses(plain, adamw(plain))[0]
    expected = losses(*wrapped(infinity.quantize(build(), format), "device", tmp_path))
    assert expected[0] == first
    assert losses(*wrapped(build(), "device", tmp_path)) != expected
    moved, seen = [], Arrival._nbytes
    monkeypatch.setattr(Arrival, "_nbytes", lambda *of: moved.append(seen(*of)) or moved[-1])
    ways = {
        "in memory": (infinity.quantize(build(), format), {}),
        "on the way home": (build(), {"quantize": format}),
        "of a folder": (build(meta=True), {"quantize": format, "weights": folder}),
        "noted": (infinity.quantize(build(meta=True), format), {"weights": folder}),
    }
    for way, (model, more) in ways.items():
        given, optimizer = wrapped(model, home, tmp_path, **more)
        assert all(isinstance(given.get_parameter(name), Coded) for name in NAMES), way
        assert losses(given, optimizer) == expected, way
    apart = sum(moved)
    moved.clear()
    monkeypatch.setattr(Arrival, "bring_chosen", lambda self, module: None)
    for _ in ways:
        model = infinity.quantize(build(), format)
        assert losses(*wrapped(model, home, tmp_path)) == expected
    assert sum(moved) > 1.3 * apart


def test_codes_are_a_fraction_of_the_bytes(tmp_path):
    nbytes = {}
    for format in (None, *FORMATS):
        model, _ = wrapped(build(), "host", tmp_path, quantize=format)
        units = model.__dict__["_infinity"].engine.job.units
        nbytes[format] = sum(
            array.nbytes
            for unit in units
            if unit.name.endswith("experts")
            for flat in unit.flat_params
            for array in flat.arrays.values()
        )
    assert 0.25 < nbytes["nf4"] / nbytes[None] < 0.27
    assert 0.5 < nbytes["int8"] / nbytes[None] < 0.52 > nbytes["fp8"] / nbytes[None]


def test_trained_experts_stay_dense(tmp_path):
    model = build()
    for param in model.model.layers[1].mlp.experts.parameters():
        param.requires_grad_(requires_grad=True)
    infinity.quantize(model, "nf4")
    assert [isinstance(model.get_parameter(name), Coded) for name in NAMES] == [True] * 2 + [
        False
    ] * 2
    assert len(losses(*wrapped(model, "host", tmp_path))) == 3


def test_a_wrap_that_fails_leaves_the_dense_experts(tmp_path):
    model = build()
    before = {
        name: (model.get_parameter(name), model.get_parameter(name).clone()) for name in NAMES
    }
    with pytest.raises(CapacityError):
        wrapped(model, "host", tmp_path, quantize="nf4", host_memory="1KiB")
    for name, (param, value) in before.items():
        assert model.get_parameter(name) is param and type(param) is nn.Parameter
        assert torch.equal(param, value)


def test_experts_without_values_are_refused(tmp_path):
    model = build(meta=True)
    with pytest.raises(ConfigError, match=r"is to be packed and has no value: .* names no file"):
        wrapped(model, "host", tmp_path, quantize="nf4")
    assert not any(isinstance(model.get_parameter(name), Coded) for name in NAMES)


def test_a_checkpoint_resumes_with_the_same_bits(folder, tmp_path):
    def start():
        model = build(meta=True)
        return wrapped(model, "nvme", tmp_path, quantize="nf4", weights=folder)

    model, optimizer = start()
    losses(model, optimizer)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    expected = losses(model, optimizer)
    resumed, its_optimizer = start()
    infinity.load_checkpoint(tmp_path / "saved", resumed, its_optimizer)
    assert losses(resumed, its_optimizer) == expected


def test_a_model_that_is_given_back_keeps_its_codes(tmp_path):
    model, optimizer = wrapped(build(), "nvme", tmp_path, quantize="nf4")
    plain = infinity.quantize(build(), "nf4")
    model, _ = infinity.unwrap_model(model, optimizer)
    for name in NAMES:
        mine, its = model.get_parameter(name), plain.get_parameter(name)
        assert torch.equal(mine.codes, its.codes) and torch.equal(mine.scales, its.scales)
    infinity.dequantize(model)
    assert type(model.get_parameter(NAMES[0])) is nn.Parameter
