"""Coded folders: frozen weights keep the bytes of their FP8 or MXFP4 file at every home, and
compute with the bits of dense ones.

Method: small models are saved and scaled as the published folders are, with a thin adapter that
trains; transformers makes them dense for the comparison. Twins: a trained weight is dense; a
changed scale shows.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from lazily import Lazily
from models import at_home
from safetensors.torch import load_file, save_file
from scaled import FILE
from test_scaled_folders import CONFIGS, FOLDERS, bits, build, loaded
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

import infinity
from infinity.core.seams import Extension
from infinity.errors import ConfigError, UsageError
from infinity.ext.checkpoint.export import export
from infinity.ext.coded.coded import Coded
from infinity.ext.packed.packed_forward import PackedForwards

transformers = pytest.importorskip("transformers")
peft = Lazily("peft")
adapters = Lazily("infinity.ext.integrations.peft", "peft")
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ("llama", "qwen3_moe", "gpt_oss")


def adapted(model: nn.Module) -> nn.Module:
    """Adds adapters with values that do not depend on where the model is."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model.requires_grad_(False), config)
    draws = torch.Generator().manual_seed(1)
    for name, param in sorted(model.named_parameters()):
        if "lora_" in name:
            value = 0.05 * torch.randn(param.shape, generator=draws)
            owner, _, key = name.rpartition(".")
            made = nn.Parameter(value.to(param.dtype))
            model.get_submodule(owner)._parameters[key] = made
    return model.train()


def streamed(kind: str, folder: Path, home: str, tmp_path: Path, **more):
    """The model on meta, with the values of its folder."""
    model = adapted(build(kind, meta=True))
    trained = [param for param in model.parameters() if param.requires_grad]
    given = at_home(home, home, tmp_path, weights=folder)
    return infinity.wrap_model(model, torch.optim.AdamW(trained, lr=1e-2), given | more)


def losses(
    model: nn.Module, optimizer, begin: int = 0, steps: int = 3, shape: tuple[int, int] = (2, 8)
) -> list[float]:
    found = []
    for step in range(begin, begin + steps):
        ids = torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(step))
        ids = ids.to(model.device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def coded(model: nn.Module) -> dict[str, Coded]:
    return {name: each for name, each in model.named_parameters() if isinstance(each, Coded)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every folder, made once, and the losses of its dense model on the device."""
    found = {}

    def of(kind: str) -> tuple[Path, list[float]]:
        if kind not in found:
            folder = FOLDERS[kind](tmp_path_factory.mktemp(kind) / "model")
            model = build(kind)
            model.load_state_dict(loaded(folder).state_dict())
            model = adapted(model)
            trained = [param for param in model.parameters() if param.requires_grad]
            given = model, torch.optim.AdamW(trained, lr=1e-2), {"params": "device"}
            found[kind] = folder, losses(*infinity.wrap_model(*given))
        return found[kind]

    return of


@pytest.mark.parametrize("home", ["device", "hostile"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_base_keeps_its_codes_and_trains_as_the_dense_one(kind, home, folders, tmp_path):
    folder, expected = folders(kind)
    model, optimizer = streamed(kind, folder, home, tmp_path)
    assert len(coded(model)) >= 4
    assert losses(model, optimizer) == expected


def frozen(kind: str, folder: Path, *, trained: bool = False) -> nn.Module:
    """The model without an adapter or optimizer, at home on the host."""
    model = build(kind, meta=True).requires_grad_(trained)
    return infinity.wrap_model(model, None, {"params": "host", "weights": folder})[0]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_at_home_are_those_of_the_file(kind, folders):
    """Claim: a frozen weight takes the bytes of its codes and scales. Twin: a trained one is
    dense."""
    folder, _ = folders(kind)
    model, whole = frozen(kind, folder), frozen(kind, folder, trained=True)
    held, dense = (infinity.stats(each).tiers["host"].planned_nbytes for each in (model, whole))
    weights = coded(model).values()
    saved = sum(2 * each.numel() - each.codes.nbytes - each.scales.nbytes for each in weights)
    assert dense - held >= saved > 0.3 * dense
    assert not coded(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_given_back_with_its_codes(kind, folders, tmp_path):
    """Claim: unwrapped, it computes as before, and has the file's codes. Twin: a changed scale
    shows."""
    folder, expected = folders(kind)
    model, optimizer = infinity.unwrap_model(*streamed(kind, folder, "nvme", tmp_path))
    assert losses(*infinity.wrap_model(model, optimizer, {"params": "host"})) == expected
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / FILE)
    name = next(each for each in tensors if each.endswith(("_scale_inv", "_scales")))
    tensors[name] = tensors[name] + 1
    save_file(tensors, other / FILE, metadata={"format": "pt"})
    assert losses(*streamed(kind, other, "host", tmp_path), steps=1) != expected[:1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_resumes_with_the_same_bits(kind, folders, tmp_path):
    folder, expected = folders(kind)
    model, optimizer = streamed(kind, folder, "host", tmp_path)
    losses(model, optimizer, steps=2)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    infinity.unwrap_model(model, optimizer)
    model, optimizer = streamed(kind, folder, "nvme", tmp_path)
    infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert losses(model, optimizer, begin=2, steps=1) == expected[2:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_dense(kind, folders, tmp_path):
    folder, _ = folders(kind)
    infinity.save_pretrained(frozen(kind, folder), tmp_path / "saved")
    assert bits(loaded(tmp_path / "saved")) == bits(loaded(folder))


def test_a_wrap_that_fails_leaves_the_model_on_meta(folders):
    folder, _ = folders("gpt_oss")
    model = build("gpt_oss", meta=True).requires_grad_(False)
    before = {name: type(each) for name, each in model.named_parameters()}
    with pytest.raises(infinity.InfinityError):
        infinity.wrap_model(
            model, None, {"params": "host", "weights": folder, "host_memory": "1KiB"}
        )
    assert {name: type(each) for name, each in model.named_parameters()} == before
    assert all(each.is_meta for each in model.parameters())


def test_layers_that_are_packed_again_are_not_coded(folders):
    pytest.importorskip("bitsandbytes")
    folder, _ = folders("llama")
    model = build("llama", meta=True).requires_grad_(False)
    config = {"params": "host", "weights": folder, "quantize": "nf4"}
    assert not coded(infinity.wrap_model(model, None, config)[0])


def kept(call, least: int) -> int:
    """Counts the plain tensors of ``least`` elements that a forward keeps for its backward."""
    found = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found += tensor.numel() >= least and not isinstance(tensor, Coded)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return found


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_experts_keep_no_dense_weight_for_the_backward(
    kind, implementation, folders, tmp_path, monkeypatch
):
    """Claim: gradients are those of the dense model. Twin: without it, dense weights are kept."""
    folder, _ = folders(kind)

    def run(*, again: bool) -> tuple[int, dict]:
        if not again:
            monkeypatch.setattr(PackedForwards, "replace_forwards", Extension.replace_forwards)
        model, _ = streamed(kind, folder, "host", tmp_path)
        model.config._experts_implementation = implementation
        experts = model.get_submodule("base_model.model.model.layers.1.mlp.experts")
        ids = torch.randint(0, 128, (1, 4), generator=torch.Generator().manual_seed(0))
        inputs = []
        held = experts.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True
        )
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        held.remove()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        hidden, *others = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, inputs[0][0])
        args, kwargs = (hidden.requires_grad_(), *others), inputs[0][1]
        return kept(lambda: experts(*args, **kwargs).sum().backward(), 64 * 64), grads

    (none, grads), (some, plain) = run(again=True), run(again=False)
    assert none == 0 < some
    assert all(torch.equal(grads[name], plain[name]) for name in plain)


def test_a_checkpoint_of_dense_weights_is_not_loaded_into_codes(folders, tmp_path):
    """Twin: the same weights frozen are loaded."""
    folder, _ = folders("llama")
    infinity.save_checkpoint(tmp_path / "saved", frozen("llama", folder, trained=True))
    with pytest.raises(UsageError, match="on the other dense: freeze the same"):
        infinity.load_checkpoint(tmp_path / "saved", frozen("llama", folder))
    infinity.load_checkpoint(tmp_path / "saved", frozen("llama", folder, trained=True))


def test_a_checkpoint_of_codes_is_not_exported(folders, tmp_path):
    """Claim: a folder without the weights is not written. Twin: one of dense weights is."""
    folder, _ = folders("llama")
    for trained in (False, True):
        model = frozen("llama", folder, trained=trained)
        infinity.save_checkpoint(tmp_path / "saved", model, overwrite=True)
        if trained:
            export(tmp_path / "saved", tmp_path / "out")
        else:
            with pytest.raises(ConfigError, match="packed weights.*save_pretrained"):
                export(tmp_path / "saved", tmp_path / "out")
        assert (tmp_path / "out").exists() == trained


def test_an_optimizer_of_all_parameters_has_those_of_the_model(folders, tmp_path):
    folder, _ = folders("llama")
    model = adapted(build("llama", meta=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = infinity.wrap_model(model, optimizer, {"params": "host", "weights": folder})
    given = {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert given == {id(each) for each in model.parameters()}
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)


def test_a_model_made_dense_merges_and_trains(folders, tmp_path):
    """Claim: an unwrapped model is refused what codes cannot have, and takes it when it is dense.
    Twin: it computes the same."""
    folder, expected = folders("llama")
    model, optimizer = streamed("llama", folder, "host", tmp_path)
    with pytest.raises(UsageError, match="the model is wrapped"):
        infinity.dequantize(model)
    model, _ = infinity.unwrap_model(model, optimizer)
    with pytest.raises(UsageError, match="infinity.dequantize"):
        model.requires_grad_(True)
    ids = torch.arange(8)[None]
    before = model(input_ids=ids).logits
    assert infinity.dequantize(model) is model and not coded(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    merged = model.merge_and_unload().requires_grad_(True)
    loss = merged(input_ids=ids, labels=ids).loss
    loss.backward()
    assert (merged(input_ids=ids).logits - before).abs().max() < 0.05
    assert all(each.grad is not None for each in merged.parameters())
    merged.save_pretrained(tmp_path / "merged")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_forward_of_experts_leaves_no_dense_weight(kind, folders, tmp_path, monkeypatch):
    """Claim: what is unpacked is gone when the forward ends. Twin: a tensor that is kept."""
    made, held = [], []
    unpacked = Coded.unpacked

    def noting(self, *some):
        dense = unpacked(self, *some)
        made.append(StorageWeakRef(dense.untyped_storage()))
        held.extend([dense][: len(made) == 1])
        return dense

    model, _ = streamed(kind, folders(kind)[0], "host", tmp_path)
    ids = torch.randint(0, 128, (1, 4), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, use_cache=False).logits.sum().backward()  # learns
    monkeypatch.setattr(Coded, "unpacked", noting)
    out = model(input_ids=ids, use_cache=False).logits.sum()
    alive = [each for each in made if not each.expired()]
    assert len(made) > 1 and len(alive) == 1
    out.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_has_the_gradients_of_the_dense_model(dtype, folders, tmp_path):
    """Twin: without autocast, gradients are others."""
    folder, _ = folders("llama")

    def run(*, trained: bool) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
        model = adapted(model.to(dtype))
        for name, param in model.named_parameters():
            param.requires_grad_("lora_" in name or (trained and "lm_head" not in name))
        model, _ = infinity.wrap_model(model, None, {"params": "host", "weights": folder})
        ids = torch.arange(8)[None]
        found = {}
        for casting in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=casting):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            for name, each in model.named_parameters():
                if "lora_B" in name:
                    found[f"{name} {casting}"] = each.grad.clone()
            model.zero_grad()
        return found

    expected, found = run(trained=True), run(trained=False)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert any(
        not torch.equal(found[name], found[name.replace("True", "False")])
        for name in found
        if "True" in name
    )


def test_compiled_layers_compute_the_same(folders, tmp_path):
    folder, expected = folders("llama")
    model, optimizer = streamed("llama", folder, "host", tmp_path)
    for layer in model.base_model.model.model.layers:
        layer.compile(backend="eager")
    assert losses(model, optimizer) == expected


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_experts_with_one_scale_each_are_joined(shape, folders, tmp_path):
    """Claim: the bits of the dense weights, in codes. Twin: another scale of one expert."""
    folder, _ = folders("qwen3_moe")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / FILE)
    for number, name in enumerate(sorted(tensors)):
        if name.endswith("_scale_inv"):
            tensors[name] = torch.full(shape, 0.001 * (1 + number % 7))
    save_file(tensors, other / FILE, metadata={"format": "pt"})
    told = json.loads((other / "config.json").read_text())
    del told["quantization_config"]["weight_block_size"]
    (other / "config.json").write_text(json.dumps(told))
    model, whole = frozen("qwen3_moe", other), frozen("qwen3_moe", other, trained=True)
    assert any("experts" in name for name in coded(model))
    dense = {name: value.clone() for name, value in whole.state_dict().items()}
    for name, value in model.state_dict().items():
        value = value.dequantize() if isinstance(value, Coded) else value
        assert torch.equal(value, dense[name]), name


def test_adapters_of_experts_are_not_merged_into_codes(folders, tmp_path):
    """Claim: refused before anything changed. Twin: save_merged writes dense weights with them."""
    folder, _ = folders("qwen3_moe")
    model = build("qwen3_moe", meta=True).requires_grad_(False)
    config = peft.LoraConfig(r=4, target_parameters=["experts.gate_up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    trained = [param for param in model.parameters() if param.requires_grad]
    given = model, torch.optim.AdamW(trained, lr=1e-2), {"params": "host", "weights": folder}
    model, optimizer = infinity.wrap_model(*given)
    losses(model, optimizer, steps=1)
    ids = torch.arange(8)[None]
    before = model(input_ids=ids, use_cache=False).logits
    with pytest.raises(UsageError, match="nothing is merged.*save_merged"):
        adapters.merge_adapters(model)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    infinity.integrations.save_merged(model, tmp_path / "merged")
    merged = loaded(tmp_path / "merged")
    assert (merged(input_ids=ids, use_cache=False).logits - before).abs().max() < 0.05
