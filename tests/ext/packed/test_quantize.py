"""Quantize: frozen linear layers are packed on their way home, with the bits of their library.

Twins: another format's gradients, a changed weight in the folder, dense weights that are kept.
"""

from __future__ import annotations

import copy
import gc
import sys
from pathlib import Path
from typing import Any

import packed_llamas
import pytest
import torch
from packed_llamas import (
    KINDS,
    LARGE,
    LARGE_NAMES,
    MIDDLE_NAMES,
    PACKED_NAMES,
    SMALL_NAMES,
    adapted,
    bitsandbytes,
    differing,
    gradients,
    in_form,
    llama,
    logits,
    losses,
    own_adapted,
    state,
    wrap,
)
from packed_models import OfRounded
from safetensors.torch import load_file, save_file
from torch import nn

import infinity
from infinity import choices, config
from infinity.errors import CapacityError, ConfigError, InfinityError, UsageError
from infinity.ext.packed import packers
from infinity.ext.packed import quantize as quantize_module

pytestmark = pytest.mark.filterwarnings("ignore")
FILE = "model.safetensors"
CHANGED = "model.layers.1.mlp.up_proj.weight"
HOMES = ("host", "nvme")


@pytest.fixture(scope="module")
def own():
    """The gradients of the adapters over the layers that a library packed, in memory; made once."""
    found: dict[str, dict] = {}

    def of(kind: str) -> dict[str, torch.Tensor]:
        if kind not in found:
            found[kind] = gradients(own_adapted(kind))
        return found[kind]

    return of


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """The folder of the dense model."""
    folder = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(folder)
    return folder


def on_meta() -> nn.Module:
    return adapted(llama(meta=True))


def give_adapters(model: nn.Module, kind: str) -> None:
    """Sets the adapters of a wrapped model to those of every other one here."""
    values = own_adapted(kind).state_dict()
    given = {name: value for name, value in values.items() if "lora_" in name}
    assert given and not model.load_state_dict(given, strict=False).unexpected_keys


def packed_by_library(linear: nn.Linear, kind: str) -> nn.Module:
    """Packs a copy of a layer as the documentation of its library has it."""
    linear = copy.deepcopy(linear)
    if kind != "nf4":
        ao = pytest.importorskip("torchao.quantization")
        make = {"int8": ao.Int8WeightOnlyConfig, "fp8": ao.Float8WeightOnlyConfig}[kind]
        ao.quantize_(linear, make())
        return linear
    layer = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        compute_dtype=linear.weight.dtype,
        compress_statistics=True,
        quant_type="nf4",
    )
    layer.to(linear.weight.dtype).load_state_dict(linear.state_dict())
    return layer.to("cpu")


def packed_names(model: nn.Module) -> list[str]:
    """Names the linear layers whose weights are packed."""
    return sorted(
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (type(module) is not nn.Linear or type(module.weight) is not nn.Parameter)
    )


# --- what is packed, and how ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_have_the_bits_of_their_library(kind, dtype):
    """Claim: each packed layer is that which its library makes of the same weight: class, bytes of
    every part, result. Twin: of another weight it is not."""
    dense, model = llama(dtype), infinity.quantize(llama(dtype), kind)
    x = torch.randn(3, packed_llamas.WIDTH, dtype=dtype)
    for name in PACKED_NAMES:
        mine, expected = (
            model.get_submodule(name),
            packed_by_library(dense.get_submodule(name), kind),
        )
        assert type(mine) is type(expected) and type(mine.weight) is type(expected.weight)
        assert state(mine) == state(expected)
        if mine.in_features == packed_llamas.WIDTH:
            assert torch.equal(mine(x), expected(x))
    up, gate = (dense.get_submodule(f"model.layers.0.mlp.{name}_proj") for name in ("up", "gate"))
    assert state(packed_by_library(up, kind)) != state(packed_by_library(gate, kind))


def test_embeddings_outputs_small_and_trained_weights_stay_dense():
    """Method: the names of the packed layers. Twin: the trained layer is packed when it is
    frozen."""
    model = llama()
    model.get_submodule(LARGE_NAMES[0]).weight.requires_grad_(True)
    before = {name: model.get_submodule(name).weight for name in SMALL_NAMES}
    assert infinity.quantize(model, "nf4") is model
    assert packed_names(model) == sorted({*PACKED_NAMES} - {LARGE_NAMES[0]})
    assert type(model.lm_head) is nn.Linear and type(model.model.embed_tokens) is nn.Embedding
    for name, weight in before.items():
        assert model.get_submodule(name).weight is weight
        assert weight.numel() < quantize_module.LEAST_NUMEL
    assert packed_names(infinity.quantize(llama(), "nf4")) == PACKED_NAMES


def test_tied_weights_stay_dense():
    """Method: the output layer is the embedding, and two blocks share one weight."""
    model = llama(tie_word_embeddings=True)
    first, second = (model.get_submodule(name) for name in (LARGE_NAMES[0], LARGE_NAMES[3]))
    second.weight = first.weight
    infinity.quantize(model, "nf4")
    assert packed_names(model) == sorted({*PACKED_NAMES} - {LARGE_NAMES[0], LARGE_NAMES[3]})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert second.weight is first.weight


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_layer_is_kept(kind):
    """Claim: its bias is the same object, and its mode the same."""
    model = llama()
    model.model.layers[0].eval()
    before = dict(model.named_parameters())
    infinity.quantize(model, kind)
    for name in PACKED_NAMES:
        layer = model.get_submodule(name)
        assert layer.bias is before.get(f"{name}.bias")
        assert layer.training is name.startswith("model.layers.1.")
    assert model.get_submodule(MIDDLE_NAMES[0]).bias is not None


@pytest.mark.parametrize(
    "way",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    ],
)
def test_output_layers_under_adapters_stay_dense(way):
    """Claim: what PEFT has put over an output layer does not make it another layer."""
    model = infinity.quantize(adapted(llama(), **way), "nf4")
    assert [name for name in packed_names(model) if "lm_head" in name] == []


class Shared(nn.Module):
    """Two blocks that have one frozen linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.second = nn.Sequential(self.first[0], nn.ReLU())
        self.own = nn.Linear(64, 64)
        self.trained = nn.Linear(64, 64)
        for part in (self.first, self.own):
            part.requires_grad_(False)

    def forward(self, x):
        return self.trained(self.own(self.second(self.first(x))))


def test_a_layer_in_two_places_stays_one():
    torch.manual_seed(0)
    model = infinity.quantize(Shared(), "nf4")
    assert model.first[0] is model.second[0]
    assert type(model.own) is not nn.Linear


def test_hooks_of_a_layer_are_called_when_it_is_packed():
    called = []
    model = llama()
    model.get_submodule(LARGE_NAMES[0]).register_forward_hook(lambda *given: called.append(1))
    infinity.quantize(model, "nf4")
    logits(in_form(model))
    assert called == [1]


# --- at home ---


@pytest.mark.parametrize("home", ["device", "hostile"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_adapters_are_those_over_the_librarys_layers(kind, home, tmp_path, own):
    """Claim: packed by the wrap, the model gives each adapter the gradient, bit for bit, that it
    has over the library's layers in memory. Twin: those of another format differ."""
    model, _ = wrap(adapted(llama()), home, tmp_path, quantize=kind)
    found = gradients(model)
    assert differing(found, own(kind)) == []
    other = KINDS[KINDS.index(kind) - 1]
    assert len(differing(found, own(other))) > len(found) // 2
    tier = infinity.stats(model).tiers["device"]
    assert tier.peak_nbytes <= tier.planned_nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_on_meta_has_the_bits_of_one_in_memory(kind, tmp_path, own, weights):
    """Claim: of the folder's weights, read one by one, the same parts are made, and the same
    gradients."""
    model, _ = wrap(on_meta(), "hostile", tmp_path, quantize=kind, weights=str(weights))
    give_adapters(model, kind)
    assert differing(state(model), state(own_adapted(kind))) == []
    assert differing(gradients(model), own(kind)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_weight_in_the_folder_shows(kind, tmp_path, own, weights):
    """The twin: one weight of 262,144 is the largest of its block, in one layer."""
    tensors = load_file(weights / FILE)
    tensors[CHANGED][0, 0] = 0.5
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    model, _ = wrap(on_meta(), "host", quantize=kind, weights=str(tmp_path))
    give_adapters(model, kind)
    changed = CHANGED.removesuffix("weight")
    found = differing(state(model), state(own_adapted(kind)))
    assert found and all(changed in name for name in found)
    assert differing(gradients(model), own(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_before_the_wrap_is_packed_by_the_wrap(kind, tmp_path, own, weights):
    """Claim: infinity.quantize of a model on meta leaves its weights to the wrap."""
    model = infinity.quantize(on_meta(), kind)
    assert all(each.is_meta for each in model.parameters() if not each.requires_grad)
    model, _ = wrap(model, "host", weights=str(weights))
    give_adapters(model, kind)
    assert differing(state(model), state(own_adapted(kind))) == []
    assert differing(gradients(model), own(kind)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_resumes_at_another_home(kind, tmp_path):
    """Claim: a checkpoint of a quantized model at home on the host goes on at NVMe with the same
    bits. Twin: without the checkpoint the losses are others."""
    model, optimizer = wrap(adapted(llama()), "host", quantize=kind)
    losses(model, optimizer, range(2))
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    expected, saved = losses(model, optimizer, range(2, 4)), state(model)
    for resumes in (True, False):
        other, optimizer = wrap(adapted(llama()), "nvme", tmp_path, quantize=kind)
        if resumes:
            infinity.load_checkpoint(tmp_path / "saved", other, optimizer)
        assert (losses(other, optimizer, range(2, 4)) == expected) is resumes
        assert (differing(state(other), saved) == []) is resumes


@pytest.mark.parametrize("other", ["int8", None])
def test_a_checkpoint_of_another_format_is_refused(other, tmp_path):
    model, optimizer = wrap(adapted(llama()), "host", quantize="nf4")
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    model, optimizer = wrap(adapted(llama()), "host", quantize=other)
    before = state(model)
    with pytest.raises(UsageError, match="another model"):
        infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert differing(state(model), before) == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_unwrapped_model_has_the_librarys_layers(kind, tmp_path, weights):
    """Claim: in memory and from meta, unwrapped layers are of the library's classes, have its
    bytes, and compute its logits."""
    expected = own_adapted(kind)
    for given, more in ((adapted(llama()), {}), (on_meta(), {"weights": str(weights)})):
        model, optimizer = wrap(given, "nvme", tmp_path, quantize=kind, **more)
        give_adapters(model, kind)
        model, _ = infinity.unwrap_model(model, optimizer)
        assert differing(state(model), state(expected)) == []
        for (name, mine), other in zip(model.named_modules(), expected.modules()):
            assert type(mine) is type(other), name
            of_both = zip(mine._parameters.values(), other._parameters.values(), strict=True)
            assert all(type(one) is type(two) for one, two in of_both), name
        assert torch.equal(logits(in_form(model)), logits(expected))


# --- memory ---


def dense_alive() -> int:
    """Counts the memory regions of dense weights of the large layers."""
    found = (each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter))
    return len(
        {
            each.untyped_storage().data_ptr()
            for each in found
            if each.dtype == torch.float32
            and not each.is_meta
            and each.untyped_storage().nbytes() == 4 * LARGE
        }
    )


def count_when_packing(monkeypatch, kind: str, keep: list | None = None) -> list[int]:
    """Counts the dense weights alive before and after each packing of a large layer.
    ``keep``: takes each one, too."""
    pack, counts = quantize_module.PACKERS[kind], []

    def counted(dtype: torch.dtype, dense: torch.Tensor) -> nn.Module:
        if dense.is_meta or dense.numel() != LARGE:
            return pack(dtype, dense)
        counts.append(dense_alive())
        made = pack(dtype, dense)
        counts.append(dense_alive())
        if keep is not None:
            keep.append(dense)
        return made

    monkeypatch.setitem(quantize_module.PACKERS, kind, counted)
    return counts


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_dense_weight_is_in_memory_at_a_time(kind, home, tmp_path, weights, monkeypatch):
    """Claim: of a model on meta, a dense weight is let go before the next one is read. Method:
    tensors of that size are counted whenever one is packed."""
    gc.collect()
    before = dense_alive()
    counts = count_when_packing(monkeypatch, kind)
    model, _ = wrap(on_meta(), home, tmp_path, quantize=kind, weights=str(weights))
    assert {count - before for count in counts} == {1} and len(counts) == 2 * len(LARGE_NAMES)
    assert dense_alive() == before


def test_dense_weights_that_are_kept_are_seen(weights, monkeypatch):
    """The twin."""
    gc.collect()
    before, kept = dense_alive(), []
    counts = count_when_packing(monkeypatch, "int8", kept)
    model, _ = wrap(on_meta(), "host", quantize="int8", weights=str(weights))
    assert max(counts) - before == len(LARGE_NAMES) == len(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_weights_in_memory_are_let_go(kind, tmp_path, monkeypatch):
    """Claim: once they are at home in packed form, the dense weights of a model in memory are
    freed. Twin: where the wrap does not settle, they are there."""
    gc.collect()
    before = dense_alive()
    model, _ = wrap(adapted(llama()), "host", quantize=kind)
    gc.collect()
    assert dense_alive() == before
    monkeypatch.setattr(quantize_module.Quantized, "settle", lambda self: None)
    other, _ = wrap(adapted(llama()), "host", quantize=kind)
    assert dense_alive() - before == len(LARGE_NAMES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_home_is_charged_for_packed_bytes(kind, weights):
    """Claim: the plan of the host is less by what packing saves, and a budget that the packed model
    has room in is enough. Twin: the dense model is refused there."""

    def planned(model: nn.Module) -> int:
        return infinity.stats(model).tiers["host"].planned_nbytes

    whole, _ = wrap(on_meta(), "host", weights=str(weights))
    model, _ = wrap(on_meta(), "host", quantize=kind, weights=str(weights))
    saved = sum(
        nbytes(llama().get_submodule(name))
        - nbytes(infinity.quantize(llama(), kind).get_submodule(name))
        for name in LARGE_NAMES
    )
    assert planned(whole) - planned(model) > 0.95 * saved
    room = {"host_memory": planned(whole) // 2}
    model, _ = wrap(on_meta(), "host", quantize=kind, weights=str(weights), **room)
    gradients(model)
    with pytest.raises(CapacityError, match="host_memory"):
        wrap(on_meta(), "host", weights=str(weights), **room)


def nbytes(layer: nn.Module) -> int:
    return sum(len(part) for parts in state(layer).values() for part in parts)


# --- undone ---


def look(model: nn.Module) -> dict[str, tuple]:
    """Returns what must be there again: modules, their tensors, and the bits of those in memory."""
    return {
        f"{path}.{name}": (module, value, value if value is None else bits_of(value))
        for path, module in model.named_modules()
        for name, value in (*module._parameters.items(), *module._buffers.items())
    }


def bits_of(value: torch.Tensor) -> torch.Tensor:
    return torch.tensor([]) if value.is_meta else value.detach().clone()


def assert_same_model(model: nn.Module, before: dict[str, tuple]) -> None:
    found = look(model)
    assert found.keys() == before.keys()
    for name, (module, value, bits) in found.items():
        assert module is before[name][0] and value is before[name][1], name
        assert value is None or torch.equal(bits, before[name][2]), name


def fail_when_packing(patch: pytest.MonkeyPatch, kind: str, at: int) -> None:
    pack, count = quantize_module.PACKERS[kind], iter(range(1000))

    def failing(dtype: torch.dtype, dense: torch.Tensor) -> nn.Module:
        if not dense.is_meta and next(count) == at:
            raise MemoryError("no more")
        return pack(dtype, dense)

    patch.setitem(quantize_module.PACKERS, kind, failing)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrap_that_fails_leaves_the_linear_layers(kind, meta, weights, own):
    """Claim: a budget that is too small, or a failure between two layers, leaves the same modules
    with the same tensors and bits, which a later wrap packs as ever."""
    model, more = (on_meta(), {"weights": str(weights)}) if meta else (adapted(llama()), {})
    before = look(model)
    with pytest.raises(CapacityError, match="host_memory"):
        wrap(model, "host", quantize=kind, host_memory="4KiB", **more)
    assert_same_model(model, before)
    for at in (0, 3):
        with pytest.MonkeyPatch.context() as patch:
            fail_when_packing(patch, kind, at)
            with pytest.raises(MemoryError):
                wrap(model, "host", quantize=kind, **more)
        assert_same_model(model, before)
    model, _ = wrap(model, "host", quantize=kind, **more)
    give_adapters(model, kind)
    assert differing(gradients(model), own(kind)) == []


def test_a_wrap_that_fails_and_undoes_nothing_is_seen(monkeypatch):
    """The twin."""
    monkeypatch.setattr(quantize_module.Quantized, "undo", lambda self: None)
    model = adapted(llama())
    before = look(model)
    with pytest.raises(CapacityError):
        wrap(model, "host", quantize="int8", host_memory="4KiB")
    with pytest.raises(AssertionError):
        assert_same_model(model, before)


# --- bad input ---


def test_an_unknown_format_is_refused():
    """Claim: by function and by configuration, with the names of those that there are."""
    for call in (
        lambda: infinity.quantize(llama(), "nf5"),
        lambda: infinity.Config(quantize="nf5"),
    ):
        with pytest.raises(ConfigError, match="'nf5' is not one of .*'nf4', 'int8', 'fp8'"):
            call()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_without_a_layer_to_pack_is_refused(frozen):
    """Method: a model that trains all of it, and one whose linear layers are small."""
    model = llama(frozen=False)
    if frozen:
        model = nn.Sequential(nn.Linear(63, 65), nn.Linear(65, 8)).requires_grad_(False)
    small = r"2 frozen linear layers, the largest of 4,095 elements.*less than 4,096 stay dense"
    said = small if frozen else r"Freeze its base .*peft\.get_peft_model"
    before = look(model)
    calls = [lambda: infinity.quantize(model, "nf4"), lambda: wrap(model, "host", quantize="nf4")]
    for call in calls:
        with pytest.raises(ConfigError, match=said):
            call()
        assert_same_model(model, before)


@pytest.mark.parametrize(("kind", "module"), [("nf4", "bitsandbytes"), ("int8", "torchao")])
@pytest.mark.parametrize("meta", [False, True])
def test_a_library_that_is_not_installed_is_named(kind, module, meta, monkeypatch, weights):
    """Claim: with how to install it, before any weight is read."""
    for name in (module, f"{module}.nn", f"{module}.functional", f"{module}.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    model = llama(meta=meta)
    before = look(model)
    more = {"weights": str(weights)} if meta else {}
    said = rf"{module}: pip install 'infinity-engine\[packed\]'"
    for call in (
        lambda: infinity.quantize(model, kind),
        lambda: wrap(model, "host", quantize=kind, **more),
    ):
        with pytest.raises(ConfigError, match=said):
            call()
        assert_same_model(model, before)


def leave_out(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[CHANGED]


def turn(tensors: dict[str, torch.Tensor]) -> None:
    tensors[CHANGED] = tensors[CHANGED].t().contiguous()


def flatten(tensors: dict[str, torch.Tensor]) -> None:
    tensors[CHANGED] = tensors[CHANGED].reshape(-1)


def make_codes(tensors: dict[str, torch.Tensor]) -> None:
    """fp8 codes, with a scale beside them under a name that is not known."""
    weight = tensors[CHANGED]
    scale = weight.abs().max() / 448
    tensors[CHANGED] = (weight / scale).to(torch.float8_e4m3fn)
    tensors[f"{CHANGED}_scale"] = scale.reshape(1)


SAID = {
    leave_out: "weight is to be packed and has no value.*which lacks it",
    turn: r"has shape \(128, 2048\), the model's \(2048, 128\)",
    flatten: r"has shape \(262144,\), the model's \(2048, 128\)",
    make_codes: "packed already",
}
OF_CODES = make_codes


@pytest.mark.parametrize("change", [leave_out, turn, flatten, OF_CODES])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_folder_without_the_dense_weight_is_refused(kind, change, tmp_path, weights):
    """Claim: the message names the weight, and the model is as it was: from the right folder it is
    wrapped."""
    tensors = load_file(weights / FILE)
    change(tensors)
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    model = llama(meta=True)
    before = look(model)
    with pytest.raises(ConfigError, match=f"up_proj.*{SAID[change]}"):
        wrap(model, "host", quantize=kind, weights=str(tmp_path))
    assert_same_model(model, before)
    wrap(model, "host", quantize=kind, weights=str(weights))


def test_weights_on_meta_without_a_folder_are_refused():
    for given, more in (
        (llama(meta=True), {"quantize": "nf4"}),
        (infinity.quantize(llama(meta=True), "int8"), {}),
    ):
        with pytest.raises(ConfigError, match=r"no value: Config\(weights=\.\.\.\) names no file"):
            wrap(given, "host", **more)


def test_what_is_packed_already_is_not_told_to_be_frozen():
    """Claim: a model whose layers are all packed is refused for what it is."""
    model = infinity.quantize(llama(), "nf4")
    with pytest.raises(ConfigError) as caught:
        infinity.quantize(model, "nf4")
    assert "Freeze its base" not in str(caught.value)


def test_a_truncated_folder_is_refused_and_the_model_stays(tmp_path, weights):
    """Method: the file is cut after its header was read, in the middle of the packing."""
    (tmp_path / FILE).write_bytes((weights / FILE).read_bytes())
    model = llama(meta=True)
    before = look(model)

    def cut(dtype: torch.dtype, dense: torch.Tensor, pack: Any = quantize_module.PACKERS["int8"]):
        if not dense.is_meta:
            with open(tmp_path / FILE, "r+b") as file:
                file.truncate(4096)
        return pack(dtype, dense)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quantize_module.PACKERS, "int8", cut)
        with pytest.raises(InfinityError, match="truncated"):
            wrap(model, "host", quantize="int8", weights=str(tmp_path))
    assert_same_model(model, before)


def test_a_format_of_ones_own_packs_as_the_others(monkeypatch, tmp_path):
    """Compares the gradients of a model whose layers a wrap packs by an added format with one that
    was packed by hand. Twin: without the format its name is refused."""
    with pytest.raises(ConfigError, match="rounded"):
        infinity.Config(quantize="rounded")
    monkeypatch.setattr(packers, "PACKERS", {**packers.PACKERS})
    monkeypatch.setattr(quantize_module, "PACKERS", packers.PACKERS)
    names = [*choices.QUANTIZED]
    monkeypatch.setattr(choices, "QUANTIZED", names)
    monkeypatch.setattr(packers, "QUANTIZED", names)
    monkeypatch.setattr(config, "QUANTIZED", names)

    def pack(dtype: torch.dtype, dense: torch.Tensor) -> nn.Module:
        layer = nn.Linear(*reversed(dense.shape), bias=False, device="meta")
        layer.weight = nn.Parameter(dense.to(dtype), requires_grad=False)
        return OfRounded(layer)

    packers.add_format("rounded", pack)
    found = []
    for wraps in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4))
        model[:2].requires_grad_(False)
        if wraps:
            optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
            homes = {"params": "nvme", "optimizer": "host", "nvme_paths": [str(tmp_path)]}
            infinity.wrap_model(model, optimizer, {**homes, "quantize": "rounded"})
        else:
            model[0], model[1] = OfRounded(model[0]), OfRounded(model[1])
        model(torch.ones(2, 64)).square().mean().backward()
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    assert len(found[0]) == 2 and all(map(torch.equal, *found))
