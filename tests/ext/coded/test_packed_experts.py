"""Packed experts: each has the bits that its library gives a linear layer, wherever it is packed.

Twins: trained experts stay dense; another format gives another loss.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
import torch
from inside import parts_of
from lazily import need
from models import at_home
from torch import nn

import infinity
from infinity.core.units.arrival import Arrival
from infinity.errors import CapacityError, ConfigError
from infinity.ext.coded.coded import Coded
from infinity.ext.coded.packed_experts import LATER

transformers = pytest.importorskip("transformers")
need("bitsandbytes", "torchao")
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
    config = at_home(home, home, folder, **more)
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


@pytest.mark.parametrize("format", FORMATS)
def test_every_way_to_pack_computes_the_same(format, folder, tmp_path, monkeypatch):
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
        given, optimizer = wrapped(model, "hostile", tmp_path, **more)
        assert all(isinstance(given.get_parameter(name), Coded) for name in NAMES), way
        assert losses(given, optimizer) == expected, way
    apart = sum(moved)
    moved.clear()
    monkeypatch.setattr(Arrival, "bring_rows", lambda self, choose: None)
    assert losses(*wrapped(infinity.quantize(build(), format), "hostile", tmp_path)) == expected
    assert len(ways) * sum(moved) > 1.3 * apart


def test_codes_are_a_fraction_of_the_bytes(tmp_path):
    nbytes = {}
    for format in (None, *FORMATS):
        model, _ = wrapped(build(), "host", tmp_path, quantize=format)
        units = parts_of(model.__dict__["_infinity"]).units
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
    twin = copy.deepcopy(model)
    assert losses(*wrapped(model, "host", tmp_path)) == losses(*wrapped(twin, "device", tmp_path))


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


def test_experts_of_another_size_are_refused(folder, tmp_path, monkeypatch):
    """Claim: before anything changes, as if they were not packed."""
    monkeypatch.setitem(MOE, "moe_intermediate_size", 128)
    model = build(meta=True)
    with pytest.raises(ConfigError, match=r"gate_up_proj in .* has shape \(8, 384, 256\), the"):
        wrapped(model, "host", tmp_path, quantize="nf4", weights=folder)
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


def test_an_expert_is_found_by_any_number_of_it(tmp_path):
    """Claim: in and out of a forward, experts that are counted from the end are those; what was
    read before makes no difference to a forward."""
    plain = infinity.quantize(build(), "nf4")
    model, optimizer = wrapped(infinity.quantize(build(), "nf4"), "nvme", tmp_path)
    expected = losses(*wrapped(infinity.quantize(build(), "nf4"), "host", tmp_path))
    weight, dense = model.get_parameter(NAMES[0]), plain.get_parameter(NAMES[0]).dequantize()
    for number in (-1, *range(7), -8):
        assert torch.equal(weight[number], dense[number])
    assert torch.equal(weight.dequantize(), dense)
    for number in (8, -9):
        with pytest.raises(IndexError):
            weight[number]
    read = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda *_: read.extend(weight[n] for n in (-1, 0, 1)))
    assert losses(model, optimizer) == expected
    assert torch.equal(read[0], dense[-1]) and torch.equal(read[2], dense[1])


@pytest.mark.parametrize("format", FORMATS)
def test_transposed_experts_are_packed_by_their_outputs(format, tmp_path):
    """Claim: a scale is of one output, wherever the class has it. Twin: packed as they lie."""
    config = transformers.GptOssConfig(
        **SIZES, intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    plain = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    infinity.quantize(model.requires_grad_(requires_grad=False), format)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    expected = [of_library(format, each.T.contiguous()).T for each in plain]
    assert torch.equal(weight.dequantize(), torch.stack(expected))
    assert torch.equal(weight[-2], expected[-2])
    assert not torch.equal(weight[0], of_library(format, plain[0]))
    torch.manual_seed(0)
    dense = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    dense.requires_grad_(requires_grad=False).save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        on_meta = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    for given, more in ((dense, {}), (on_meta, {"weights": tmp_path / "model"})):
        given.requires_grad_(requires_grad=False)
        model, _ = infinity.wrap_model(given, None, {"params": "host", "quantize": format} | more)
        mine = infinity.unwrap_model(model, None)[0].model.layers[0].mlp.experts.gate_up_proj
        assert torch.equal(mine.codes, weight.codes) and torch.equal(mine.scales, weight.scales)


def test_tied_experts_stay_dense_and_survive_a_wrap_that_fails(tmp_path):
    model = build()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj = first.gate_up_proj
    value = first.gate_up_proj.clone()
    with pytest.raises(CapacityError):
        wrapped(model, "host", tmp_path, quantize="nf4", host_memory="1KiB")
    infinity.quantize(model, "nf4")
    assert isinstance(first.down_proj, Coded)
    assert type(first.gate_up_proj) is nn.Parameter and first.gate_up_proj is second.gate_up_proj
    assert torch.equal(first.gate_up_proj, value)


def test_a_format_is_noted_for_one_wrap(folder, tmp_path):
    noted = infinity.quantize(build(meta=True), "nf4")
    with pytest.raises(ConfigError, match="packed as int8 and nf4"):
        wrapped(noted, "host", tmp_path, weights=folder, quantize="int8")
    model, _ = infinity.unwrap_model(*wrapped(noted, "host", tmp_path, weights=folder))
    again, _ = wrapped(infinity.dequantize(model), "host", tmp_path)
    assert not any(isinstance(each, Coded) for each in again.parameters())
    noted = infinity.quantize(build(meta=True), "nf4")
    noted.model.layers[0].mlp.experts.requires_grad_(requires_grad=True)  # it is not packed then
    model, _ = infinity.unwrap_model(*wrapped(noted, "host", tmp_path, weights=folder))
    assert not any(LATER in each.__dict__ for each in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_other_dtypes_stay_as_they_are(dtype):
    model = build()
    experts = model.model.layers[1].mlp.experts
    for key in ("gate_up_proj", "down_proj"):
        param = nn.Parameter(getattr(experts, key).detach().to(dtype), requires_grad=False)
        experts._parameters[key] = param
    infinity.quantize(model, "int8")
    assert isinstance(model.get_parameter(NAMES[0]), Coded)
    for kept in (experts.gate_up_proj, experts.down_proj):
        assert type(kept) is nn.Parameter and kept.dtype == dtype


def test_a_weight_that_somebody_holds_is_packed_and_keeps_its_attributes():
    """Claim: a view of it elsewhere is no hindrance."""
    model = build()
    weight = model.get_parameter(NAMES[0])
    weight.note, view = "mine", weight[0]
    before = view.clone()
    infinity.quantize(model, "nf4")
    packed = model.get_parameter(NAMES[0])
    assert isinstance(packed, Coded) and packed.note == "mine" and torch.equal(view, before)
