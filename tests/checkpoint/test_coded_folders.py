"""Coded folders: frozen weights keep the bytes of their FP8 or MXFP4 file at every home, and
compute with the bits of dense ones.

Method: small models are saved and scaled as the published folders are, with a thin adapter that
trains; transformers makes them dense for the comparison. Twins: a trained weight is dense; a
changed scale shows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scaled import FILE
from test_scaled_folders import FOLDERS, bits, build, loaded
from torch import nn
from torch.utils import _pytree as pytree

import infinity
from infinity.state.coded import Coded

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
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
    given = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path)], "weights": folder}
    return infinity.wrap_model(model, torch.optim.AdamW(trained, lr=1e-2), given | more)


def losses(model: nn.Module, optimizer, begin: int = 0, steps: int = 3) -> list[float]:
    found = []
    for step in range(begin, begin + steps):
        ids = torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(step))
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


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
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
            monkeypatch.setattr("infinity.api.wrap.install_packed_forwards", lambda parts: [])
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
